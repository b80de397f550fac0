"""A commit's many questions to a store: in order, and at once where answers are slow."""

from __future__ import annotations

import threading

import pytest

from onceflow.sinks.lake.table import AT_ONCE, Requests


def test_slow_answers_are_waited_for_together_and_returned_in_order() -> None:
    requests, together = Requests(), threading.Barrier(AT_ONCE)

    def answer(number: int) -> tuple[int, str]:
        if number == 0:
            threading.Event().wait(0.02)
        else:
            # Passed only by as many questions at once.
            together.wait(timeout=30)
        return number, threading.current_thread().name

    answers = requests.ask(answer, range(AT_ONCE + 1))
    requests.close()
    assert [number for number, _ in answers] == list(range(AT_ONCE + 1))
    assert len({name for _, name in answers}) == AT_ONCE + 1


def test_fast_answers_need_no_thread() -> None:
    requests = Requests()
    threads = threading.active_count()
    assert requests.ask(lambda number: -number, range(3)) == [0, -1, -2]
    assert threading.active_count() == threads
    requests.close()


def test_a_question_that_fails_fails_all_and_the_next_ones_are_answered() -> None:
    requests = Requests()

    def answer(number: int) -> int:
        threading.Event().wait(0.005)
        if number == 3:
            raise OSError("away")
        return number

    with pytest.raises(OSError, match="away"):
        requests.ask(answer, range(5))
    assert requests.ask(answer, range(3)) == [0, 1, 2]
    requests.close()
    # A table that is connected anew asks again.
    assert requests.ask(answer, [1, 2]) == [1, 2]
    requests.close()
