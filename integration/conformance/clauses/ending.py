"""The clauses about the end of the input, and about readers that wait or have nothing to read."""

from __future__ import annotations

import time
from functools import partial

from onceflow.core.spi import EndOfInput, SourceReader
from onceflow.integration.conformance.clause import SOURCES, clause
from onceflow.integration.conformance.clauses.reading import (
    every_row_is_returned_once,
    replay_from_each_position,
)
from onceflow.integration.conformance.source_harness import (
    POLL_S,
    PROMPT_S,
    Call,
    Reading,
    SourceHarness,
    measure,
)
from onceflow.integration.conformance.target import NotTestable, expect

_LONG_POLL_S = 8.0
"""The `timeout_s` of a poll that another thread ends."""
_POLLS_AFTER_THE_END = 3
_POLLS_BEFORE_ONE_WAITS = 5
"""The number of polls that may return None early, for a reason of the reader."""


@clause(kit=SOURCES, rests_on=[replay_from_each_position])
def bounded_end(harness: SourceHarness) -> None:
    """A reader with an end returns EndOfInput after its last row, at each later poll and start."""
    splits = harness.fill_bounded()
    reading = harness.open(splits)
    _read_to_the_end(harness, reading)
    harness.expect_rows(reading.keys, harness.rows, "a reader with an end")
    _expect_end_again(reading, "a reader that has ended")
    snapshot = reading.snapshot()
    reading.reader.close()
    again = harness.open(snapshot.splits, attempt=2)
    _read_to_the_end(harness, again)
    when = "a reader from the snapshot at the end"
    expect(not again.keys, f"{when} returned {len(again.keys)} rows")
    _expect_end_again(again, when)


def _read_to_the_end(harness: SourceHarness, reading: Reading) -> None:
    deadline = time.monotonic() + harness.patience_s
    while not reading.has_ended:
        reading.poll()
        expect(
            time.monotonic() < deadline,
            f"a reader with an end returned {len(reading.keys)} rows, and no EndOfInput for"
            f" {harness.patience_s:g} s",
        )


def _expect_end_again(reading: Reading, who: str) -> None:
    for _ in range(_POLLS_AFTER_THE_END):
        result = reading.reader.poll(POLL_S)
        expect(
            isinstance(result, EndOfInput),
            f"{who} returned {result}, and should return EndOfInput at every poll",
        )


@clause(kit=SOURCES, rests_on=[every_row_is_returned_once])
def ended_splits_have_no_more_rows(harness: SourceHarness) -> None:
    """A split is listed as ended only after all of its rows, and all splits are at the end."""
    reading = harness.open(harness.fill_bounded(), by_split=True)
    if type(reading.reader).list_ended_splits is SourceReader.list_ended_splits:
        raise NotTestable("the reader has no list_ended_splits()")
    deadline = time.monotonic() + harness.patience_s
    while not reading.has_ended and time.monotonic() < deadline:
        reading.poll()
        counts = reading.count_returned()
        for split_id in reading.reader.list_ended_splits():
            count, expected = counts.get(split_id, 0), len(harness.rows[split_id])
            expect(
                count >= expected,
                f"list_ended_splits has {split_id} after {count} of its {expected} rows",
            )
    ended = sorted(reading.reader.list_ended_splits())
    expect(ended == sorted(harness.rows), f"at the end, list_ended_splits returned {ended}")


@clause(kit=SOURCES)
def reader_without_splits(harness: SourceHarness) -> None:
    """A reader without splits returns no rows: EndOfInput if the source has an end, else None."""
    harness.fill()
    reading = harness.open([], subtask=3, parallelism=4)
    expect(not reading.snapshot().splits, "a reader without splits has splits in its snapshot")
    for _ in range(_POLLS_AFTER_THE_END):
        result, seconds = measure(partial(reading.reader.poll, POLL_S))
        right = isinstance(result, EndOfInput) if harness.source.bounded else result is None
        expect(right, f"a reader without splits of a source {_end(harness)} returned {result}")
        expect(
            seconds < POLL_S + PROMPT_S, f"poll({POLL_S}) without splits returned in {seconds:g} s"
        )


def _end(harness: SourceHarness) -> str:
    return "with an end" if harness.source.bounded else "without an end"


@clause(kit=SOURCES, rests_on=[every_row_is_returned_once])
def poll_without_rows_returns_in_time(harness: SourceHarness) -> None:
    """A poll returns None within its timeout if there are no rows."""
    reading = _read_everything(harness)
    for timeout_s in (0.0, POLL_S, 4 * POLL_S):
        result, seconds = measure(partial(reading.reader.poll, timeout_s))
        expect(result is None, f"poll({timeout_s}) after all rows returned {result}")
        expect(
            seconds < timeout_s + PROMPT_S,
            f"poll({timeout_s}) without rows returned after {seconds:.1f} s. No checkpoint is taken"
            " meanwhile",
        )


@clause(kit=SOURCES, rests_on=[poll_without_rows_returns_in_time])
def close_ends_a_waiting_poll(harness: SourceHarness) -> None:
    """A close on another thread makes a waiting poll return, and may be repeated."""
    reading = _read_everything(harness)
    poll = _start_waiting_poll(reading)
    close = Call("close", reading.reader.close)
    expect(not close.is_running(PROMPT_S), f"close() did not return in {PROMPT_S:g} s")
    expect(
        not poll.is_running(PROMPT_S),
        f"poll({_LONG_POLL_S}) still waited {PROMPT_S:g} s after close()",
    )
    close.result()
    poll.result()
    reading.reader.close()


@clause(kit=SOURCES, rests_on=[poll_without_rows_returns_in_time])
def wake_ends_a_waiting_poll(harness: SourceHarness) -> None:
    """A wake on another thread makes a waiting poll return None, and is allowed at any time."""
    reading = _read_everything(harness)
    if type(reading.reader).wake is SourceReader.wake:
        raise NotTestable("the reader has no wake()")
    poll = _start_waiting_poll(reading)
    reading.reader.wake()
    expect(
        not poll.is_running(PROMPT_S),
        f"poll({_LONG_POLL_S}) still waited {PROMPT_S:g} s after wake()",
    )
    expect(poll.result() is None, f"after wake(), poll returned {poll.result()}")
    reading.reader.close()
    reading.reader.wake()


def _read_everything(harness: SourceHarness) -> Reading:
    """Return a reading that has returned all rows, of a source without an end.

    Raises:
        NotTestable: The source has an end.
    """
    reading = harness.open(harness.fill_endless())
    reading.read_all(harness.count_rows())
    return reading


def _start_waiting_poll(reading: Reading) -> Call:
    """Return a poll that waits for rows, after all rows were returned.

    Raises:
        NotTestable: Each of some polls returned None at once, so the reader does not wait.
    """
    for _ in range(_POLLS_BEFORE_ONE_WAITS):
        poll = Call("poll", partial(reading.reader.poll, _LONG_POLL_S))
        if poll.is_running(4 * POLL_S):
            return poll
        result = poll.result()
        expect(result is None, f"poll({_LONG_POLL_S}) after all rows returned {result}")
    raise NotTestable(
        f"poll({_LONG_POLL_S}) returned None at once, and does not wait: a subtask without rows"
        " keeps a core busy"
    )


CLAUSES = (
    bounded_end,
    ended_splits_have_no_more_rows,
    reader_without_splits,
    poll_without_rows_returns_in_time,
    close_ends_a_waiting_poll,
    wake_ends_a_waiting_poll,
)
