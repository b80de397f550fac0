"""A source that may grow is asked at its interval, one question at a time."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.counting_source import CountingSource

from onceflow.core.errors import OffsetOutOfRange, SourceError, SourceUnavailable
from onceflow.core.plan.graph import Graph, Operator
from onceflow.core.plan.work import ReadFrom
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.loops.attempt_facts import DiscoveryAnswered
from onceflow.core.protocol.messages import OfferSplits
from onceflow.core.runtime.driver.source_splits import SplitDiscovery, genesis_of
from onceflow.core.spi import Split

_ATTEMPT = AttemptId(4)


@dataclass(frozen=True)
class _Growing(CountingSource):
    """Has what `answers` says next, or raises it."""

    endless: bool = True
    interval_s: float | None = 10.0
    answers: list[Sequence[Split] | Exception] = field(
        default_factory=list[Sequence[Split] | Exception]
    )
    asked: list[Sequence[Split]] = field(default_factory=list[Sequence[Split]])

    @property
    def discovery_interval_s(self) -> float | None:
        return self.interval_s

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        self.asked.append(known)
        answer = self.answers.pop(0) if self.answers else known
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Discovery:
    """The discovery of an attempt that begins at 100 s."""

    def __init__(self, **sources: CountingSource) -> None:
        self.graph = Graph(
            tuple(Operator(uid, ReadFrom(one), (), one.schema) for uid, one in sources.items())
        )
        self.restored = genesis_of(self.graph, _ATTEMPT, 2, 128, 0)
        self.answers: queue.SimpleQueue[DiscoveryAnswered] = queue.SimpleQueue()
        context: Any = SimpleNamespace(plan=SimpleNamespace(attempt=_ATTEMPT), graph=self.graph)
        self.discovery = SplitDiscovery(context, self.answers.put, 100.0)

    def ask(self, now_s: float, **others: Any) -> None:
        self.discovery.ask(others.get("completed", self.restored), now_s)

    def take(self) -> DiscoveryAnswered:
        answer = self.answers.get(timeout=30)
        self.discovery.take(answer.uid, {})
        return answer

    def is_asked(self, now_s: float) -> bool:
        self.ask(now_s)
        try:
            self.answers.get(timeout=0.05)
        except queue.Empty:
            return False
        self.discovery.take("a", {})
        return True


_KNOWN = [Split("0", b"0"), Split("1", b"0")]
_NEW = Split("2", b"7")


def test_only_sources_that_may_grow_are_asked_and_each_at_its_interval() -> None:
    sources = {
        "bounded": _Growing(9, endless=False),
        "never": _Growing(9, interval_s=None),
        "late": _Growing(9, interval_s=30.0),
        "a": _Growing(9, answers=[[*_KNOWN, _NEW]]),
    }
    run = _Discovery(**sources)
    offers = run.discovery.build_offers(run.restored, 2)
    assert sorted(offers) == ["a", "late"]
    run.ask(109.9)
    run.ask(110.0)
    assert run.take() == DiscoveryAnswered(_ATTEMPT, "a", (_NEW,))
    assert sources["a"].asked == [tuple(_KNOWN)]
    assert not any(sources[uid].asked for uid in ("bounded", "never", "late"))


def test_the_next_question_follows_an_interval_after_the_last_one_and_its_answer() -> None:
    run = _Discovery(a=_Growing(9))
    run.ask(111.0)
    answer = run.answers.get(timeout=30)
    # No second question before the first is answered, however late.
    assert not run.is_asked(150.0)
    run.discovery.take("a", {0: OfferSplits("a", (_NEW,))})
    assert run.is_asked(150.0)
    assert not run.is_asked(159.9)
    assert run.is_asked(160.0)
    assert answer == DiscoveryAnswered(_ATTEMPT, "a")


@pytest.mark.parametrize("error", [SourceUnavailable("away"), ValueError("a bug"), OSError("no")])
def test_a_source_that_cannot_be_asked_now_is_asked_again(error: Exception) -> None:
    run = _Discovery(a=_Growing(9, answers=[error, [*_KNOWN, _NEW]]))
    run.ask(110.0)
    assert run.take() == DiscoveryAnswered(_ATTEMPT, "a")
    run.ask(120.0)
    assert run.take().splits == (_NEW,)


def test_a_source_that_cannot_be_read_on_ends_the_attempt() -> None:
    error = OffsetOutOfRange("records are gone")
    run = _Discovery(a=_Growing(9, answers=[error]))
    run.ask(110.0)
    answer = run.take()
    assert answer.error is error


@pytest.mark.parametrize("discovered", [[Split("0", b"5"), Split("1", b"0")], [Split("0", b"0")]])
def test_a_known_split_that_has_moved_ends_the_attempt_by_name(discovered: list[Split]) -> None:
    run = _Discovery(a=_Growing(9, answers=[discovered]))
    run.ask(110.0)
    answer = run.take()
    assert isinstance(answer.error, SourceError)
    assert "source a cannot continue from its last positions: split" in str(answer.error)
    assert answer.splits == ()


def test_known_splits_are_dealt_and_a_new_one_goes_to_a_subtask_with_fewer() -> None:
    run = _Discovery(a=_Growing(9, splits_count=3))
    offers = run.discovery.build_offers(run.restored, 2)["a"]
    known = run.graph.sources()[0][1].splits()
    assert offers.offer([*known, Split("3", b"7")]) == {1: (Split("3", b"7"),)}
