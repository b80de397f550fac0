"""Each window comes out once when it is due, and again if a late record is still in time."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import (
    EventTimeSessionWindows,
    HeapBackend,
    OutputTag,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    count,
    sum_,
)
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.graph import Feed
from onceflow.core.plan.windows import WindowAssigner, window_schema
from onceflow.core.plan.work import AggregateWindows
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot, StateHandle
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.runtime.dataflow import session_operators, window_operators
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.runtime.dataflow.session_operators import SessionAggregator
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator
from onceflow.core.state import StateContext, hash_keys
from onceflow.core.state.api import context as clock
from onceflow.core.state.keys.key_groups import key_group_of

_SCHEMA = pa.schema([("key", pa.int64()), ("at", pa.int64()), ("amount", pa.int64())])
_AGGREGATES = {"n": count(), "total": sum_("amount")}
_GROUPS = range(8)
_FIRST = CheckpointId(1)

Window = tuple[int, int, int, int, int]
"""Key, start, end, number of records, sum."""


class _Running:
    """An operator, and the windows that it has emitted since the last question."""

    def __init__(self, operator: WindowAggregator | SessionAggregator) -> None:
        self.operator = operator
        self.batches: list[pa.RecordBatch] = []
        operator.outputs.append(lambda batch: self.batches.append(batch.rows))

    def take(self, *rows: tuple[int, int | None, int], is_hashed: bool = False) -> list[Window]:
        columns = zip(*rows, strict=True)
        batch = pa.record_batch(
            [pa.array(list(column), pa.int64()) for column in columns], schema=_SCHEMA
        )
        hashes = hash_keys([batch.column("key")]) if is_hashed else None
        self.operator.receive(Batch(batch, hashes))
        return self.emitted()

    def advance(self, watermark: int) -> list[Window]:
        self.operator.on_watermark(watermark)
        return self.emitted()

    def emitted(self) -> list[Window]:
        rows = [tuple(row.values()) for batch in self.batches for row in batch.to_pylist()]
        self.batches.clear()
        return sorted(
            (key, round(start.timestamp() * 1000), round(end.timestamp() * 1000), n, total)
            for key, start, end, n, total in rows
        )

    def snapshot(self) -> OperatorSnapshot:
        """Return the snapshot, whose handles hold the state themselves."""
        return self.operator.snapshot(_FIRST).upload(MemoryStorage(inline_bytes_max=1_000_000))


@contextmanager
def _running(
    windows: WindowAssigner,
    *,
    lateness_ms: int = 0,
    late: OutputTag | None = None,
    event_time: Sequence[tuple[int, int, int]] = (),
    directory: Path = Path("/nowhere"),
    restored: Sequence[StateHandle] = (),
) -> Generator[_Running]:
    time = None if isinstance(windows, TumblingProcessingTimeWindows) else "at"
    work = AggregateWindows(("key",), windows, time, lateness_ms, _AGGREGATES, late)
    results = {name: one.result_type(_SCHEMA) for name, one in _AGGREGATES.items()}
    context = StateContext("op", 0, _GROUPS, len(_GROUPS), directory)
    is_session = isinstance(windows, EventTimeSessionWindows)
    operator = (SessionAggregator if is_session else WindowAggregator)(
        "op",
        work,
        HeapBackend().open(context, restored, MemoryStorage()),
        _SCHEMA,
        window_schema(_SCHEMA, work.key, work.time, results),
        _GROUPS,
        tuple(map(msgspec.msgpack.encode, event_time)),
    )
    yield _Running(operator)
    operator.close()


_TUMBLING = TumblingEventTimeWindows(1.0)


def test_windows_of_each_key_come_out_once_when_they_are_due() -> None:
    with _running(_TUMBLING) as run:
        assert run.take((1, 100, 5), (2, 999, 7), (1, 1_000, 11), (1, 0, 1)) == []
        assert run.advance(998) == []
        assert run.advance(999) == [(1, 0, 1_000, 2, 6), (2, 0, 1_000, 1, 7)]
        assert run.advance(999) == []
        assert run.advance(1_998) == []
        # A watermark that goes back changes nothing.
        assert run.advance(500) == []
        assert run.take((2, 5_500, 1), (1, 3_000, 2)) == []
        assert run.advance(4_500) == [(1, 1_000, 2_000, 1, 11), (1, 3_000, 4_000, 1, 2)]
        assert run.advance(9_000) == [(2, 5_000, 6_000, 1, 1)]


def test_windows_that_are_over_leave_no_state_behind() -> None:
    with _running(_TUMBLING, lateness_ms=500) as run:
        run.take((1, 100, 5), (2, 2_100, 7))
        assert run.snapshot().keyed
        run.advance(1_498)
        assert run.take((1, 200, 1)) == [(1, 0, 1_000, 2, 6)]
        run.advance(1_499)
        table = run.operator._table  # pyright: ignore[reportPrivateUsage]
        assert table.namespaces().tolist() == [2_000]
        run.advance(3_499)
        assert table.namespaces().tolist() == []


@pytest.mark.parametrize(
    ("windows_max", "entries_max", "batches_count"), [(64, 1_000, 1), (3, 1_000, 7), (64, 1, 21)]
)
def test_overlapping_windows_that_are_due_at_once_are_emitted_together(
    monkeypatch: pytest.MonkeyPatch, windows_max: int, entries_max: int, batches_count: int
) -> None:
    monkeypatch.setattr(window_operators, "WINDOWS_SELECTED_MAX", windows_max)
    monkeypatch.setattr(window_operators, "ENTRIES_MERGED_MAX", entries_max)
    with _running(SlidingEventTimeWindows(1.0, 0.5)) as run:
        records = [(key, 500 * step, 1 + step) for step in range(20) for key in (1, 2)]
        assert run.take(*records) == []
        run.operator.on_watermark(10_499)
        assert len(run.batches) == batches_count
        assert run.emitted() == [
            (key, start, start + 1_000, len(steps), sum(1 + step for step in steps))
            for key in (1, 2)
            for start in range(-500, 10_000, 500)
            if (steps := [step for step in range(20) if start <= 500 * step < start + 1_000])
        ]


def test_overlapping_windows_share_their_records() -> None:
    with _running(SlidingEventTimeWindows(1.0, 0.5)) as run:
        run.take((1, 600, 1), (1, 1_200, 2))
        assert run.advance(999) == [(1, 0, 1_000, 1, 1)]
        assert run.advance(1_499) == [(1, 500, 1_500, 2, 3)]
        assert run.advance(5_000) == [(1, 1_000, 2_000, 1, 2)]


@pytest.mark.parametrize("windows", [_TUMBLING, SlidingEventTimeWindows(1.0, 0.5)])
def test_a_late_record_that_is_in_time_has_its_own_windows_emitted_again(
    windows: WindowAssigner,
) -> None:
    with _running(windows, lateness_ms=300) as run:
        run.take((1, 600, 1), (2, 600, 1))
        run.advance(1_298)
        assert run.take((1, 700, 2)) == [(1, 0, 1_000, 2, 3)]
        assert run.operator.rejected == 0
        run.advance(1_299)
        run.take((1, 400, 2))
        assert run.operator.rejected == 1


@pytest.mark.parametrize("windows", [_TUMBLING, SlidingEventTimeWindows(1.0, 0.5)])
def test_a_window_that_has_just_fired_takes_late_records_at_once(windows: WindowAssigner) -> None:
    with _running(windows, lateness_ms=300) as run:
        run.take((1, 400, 1))
        assert (1, 0, 1_000, 1, 1) in run.advance(999)
        assert run.take((1, 300, 2)) == [(1, 0, 1_000, 2, 3)] + [
            one for one in run.emitted() if one[1] < 0
        ]


@pytest.mark.parametrize("slide_s", [1.0, 0.5])
def test_windows_that_are_kept_for_late_records_come_out_once(slide_s: float) -> None:
    with _running(SlidingEventTimeWindows(1.0, slide_s), lateness_ms=9_000) as run:
        run.take((1, 600, 1), (1, 1_600, 2), (1, 2_600, 4))
        fired = [run.advance(1_000 * second - 1) for second in range(1, 6)]
        mine = [window for windows in fired for window in windows if window[1] % 1_000 == 0]
        assert mine == [
            (1, start, start + 1_000, 1, total) for start, total in ((0, 1), (1_000, 2), (2_000, 4))
        ]


def test_windows_that_end_together_are_all_removed() -> None:
    with _running(_TUMBLING) as run:
        run.take((1, 100, 1), (1, 1_100, 2), (1, 2_100, 4))
        run.advance(1_999)
        table = run.operator._table  # pyright: ignore[reportPrivateUsage]
        assert table.namespaces().tolist() == [2_000]


def test_windows_begin_at_their_offset() -> None:
    with _running(TumblingEventTimeWindows(1.0, 0.3)) as run:
        run.take((1, 299, 1), (1, 300, 2), (1, 1_299, 4))
        assert run.advance(299) == [(1, -700, 300, 1, 1)]
        assert run.advance(MAX_WATERMARK) == [(1, 300, 1_300, 2, 6)]


def test_a_sum_that_overflows_is_told_with_its_record() -> None:
    largest = 2**63 - 1
    with _running(_TUMBLING) as run:
        run.take((1, 100, largest))
        with pytest.raises(UserFunctionError, match=f"'amount': {largest}"):
            run.take((1, 200, largest))


def test_late_records_are_counted_and_some_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with _running(_TUMBLING) as run, caplog.at_level(logging.WARNING):
        run.advance(1_999)
        for number in range(1, 13):
            assert run.take((1, number, number), (1, 1_999 + number, 1)) == []
        assert run.operator.rejected == 12
        texts = [record.getMessage() for record in caplog.records]
        assert [text.partition(" so far")[0].split()[-1] for text in texts] == ["1", "10"]
        assert "event time is at 1999 ms" in texts[0]
        assert "'amount': 10" in texts[1]
        assert run.advance(2_999) == [(1, 2_000, 3_000, 12, 12)]


@pytest.mark.parametrize("is_hashed", [False, True])
def test_late_records_go_to_their_side_output_and_the_others_to_windows(is_hashed: bool) -> None:
    with _running(_TUMBLING, late=OutputTag("late", _SCHEMA)) as run:
        late: list[int] = []
        run.operator.outlet(Feed("op", _SCHEMA, "late")).append(
            lambda batch: late.extend(batch.rows.column("amount").to_pylist())
        )
        run.advance(999)
        run.take((1, 999, 1), (2, 1_000, 2), (3, 0, 3), is_hashed=is_hashed)
        run.take((1, 5, 4), is_hashed=is_hashed)
        assert late == [1, 3, 4]
        assert run.operator.rejected == 0
        assert run.advance(1_999) == [(2, 1_000, 2_000, 1, 2)]


@pytest.mark.parametrize("is_hashed", [False, True])
@pytest.mark.parametrize("windows", [_TUMBLING, SlidingEventTimeWindows(1.0, 1.0)])
def test_key_groups_that_were_ahead_fire_no_window_twice(
    is_hashed: bool, windows: WindowAssigner
) -> None:
    keys = range(20)
    ahead = [key for key in keys if key_group_of(key, len(_GROUPS)) < 4]
    behind = [key for key in keys if key not in ahead]
    with _running(windows, event_time=[(0, 3, 1_999), (4, 7, 999)]) as run:
        run.take(*((key, 1_500, key) for key in keys), is_hashed=is_hashed)
        assert run.operator.rejected == len(ahead)
        assert run.advance(1_500) == []
        run.take(*((key, 2_500, key) for key in keys), is_hashed=is_hashed)
        assert run.advance(1_999) == [(key, 1_000, 2_000, 1, key) for key in behind]
        assert run.advance(2_999) == [(key, 2_000, 3_000, 1, key) for key in keys]


def test_a_window_that_had_fired_before_a_restore_is_emitted_for_late_records_alone() -> None:
    ahead = next(key for key in range(20) if key_group_of(key, len(_GROUPS)) < 4)
    behind = next(key for key in range(20) if key_group_of(key, len(_GROUPS)) >= 4)
    event_time = [(0, 3, 1_999), (4, 7, 999)]
    with _running(_TUMBLING, event_time=event_time, lateness_ms=9_000) as run:
        made = run.take((ahead, 1_500, 1), (behind, 1_500, 2))
        assert made == [(ahead, 1_000, 2_000, 1, 1)]
        assert run.advance(1_999) == [(behind, 1_000, 2_000, 1, 2)]


def test_event_time_is_stored_and_goes_no_further_than_the_last_window_at_the_end() -> None:
    with _running(_TUMBLING) as run:
        run.advance(50)
        run.take((1, 100, 5), (1, 1_100, 6))
        assert _event_time(run) == [(0, 7, 50)]
        ended = run.advance(MAX_WATERMARK)
        assert ended == [(1, 0, 1_000, 1, 5), (1, 1_000, 2_000, 1, 6)]
        assert _event_time(run) == [(0, 7, 1_999)]
        assert run.advance(MAX_WATERMARK) == []
        assert _event_time(run) == [(0, 7, 1_999)]


def _event_time(run: _Running) -> list[tuple[int, int, int]]:
    elements = run.snapshot().lists[EVENT_TIME]
    return [msgspec.msgpack.decode(element, type=tuple[int, int, int]) for element in elements]


def test_records_without_event_time_are_refused_by_their_record() -> None:
    with _running(_TUMBLING) as run, pytest.raises(UserFunctionError, match="'amount': 8"):
        run.take((1, 100, 5), (1, None, 8))


def test_windows_of_the_clock_are_due_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    monkeypatch.setattr(
        window_operators, "StateClock", lambda: clock.StateClock(wall_clock=lambda: now_s)
    )
    with _running(TumblingProcessingTimeWindows(1.0)) as run:
        assert run.operator.due_in_s is None
        run.take((1, None, 5))
        assert run.operator.due_in_s == 1.0
        run.operator.on_watermark(MAX_WATERMARK)
        run.operator.on_time()
        assert run.emitted() == []
        now_s = 10.5
        run.take((1, None, 6))
        assert run.operator.due_in_s == 0.5
        now_s = 11.2
        # A record that comes before the timer does not join a window that is over.
        assert run.take((1, None, 7)) == [(1, 10_000, 11_000, 2, 11)]
        now_s = 13.0
        assert run.operator.due_in_s == 0
        run.operator.on_time()
        assert run.emitted() == [(1, 11_000, 12_000, 1, 7)]
        assert run.operator.due_in_s is None
        assert EVENT_TIME not in run.snapshot().lists


def test_a_record_in_the_last_millisecond_by_the_clock_is_in_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 10.0
    monkeypatch.setattr(
        window_operators, "StateClock", lambda: clock.StateClock(wall_clock=lambda: now_s)
    )
    with _running(TumblingProcessingTimeWindows(1.0)) as run:
        run.take((1, None, 5))
        now_s = 10.999
        run.operator.on_time()
        assert run.take((1, None, 6)) == []
        now_s = 11.0
        assert run.operator.due_in_s == 0
        run.operator.on_time()
        assert run.emitted() == [(1, 10_000, 11_000, 2, 11)]
        assert run.operator.rejected == 0


def test_windows_of_the_clock_begin_at_their_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.2
    monkeypatch.setattr(
        window_operators, "StateClock", lambda: clock.StateClock(wall_clock=lambda: now_s)
    )
    with _running(TumblingProcessingTimeWindows(1.0, 0.3)) as run:
        run.take((1, None, 5))
        now_s = 10.3
        run.operator.on_time()
        assert run.emitted() == [(1, 9_300, 10_300, 1, 5)]


def test_records_exactly_a_gap_apart_share_a_session_until_it_is_emitted() -> None:
    with _running(EventTimeSessionWindows(1.0)) as run:
        assert run.take((1, 0, 1), (2, 0, 1), (3, 0, 1)) == []
        assert run.take((1, 1_000, 1), (2, 1_001, 1)) == []
        # A session is due one millisecond before its end, as in Flink.
        assert run.advance(998) == []
        assert run.advance(999) == [(2, 0, 1_000, 1, 1), (3, 0, 1_000, 1, 1)]
        assert run.take((3, 1_000, 1)) == []
        assert run.advance(2_000) == [
            (1, 0, 2_000, 2, 2), (2, 1_001, 2_001, 1, 1), (3, 1_000, 2_000, 1, 1),
        ]  # fmt: skip


def test_a_session_is_emitted_at_the_first_moment_of_a_bucket_of_the_queue() -> None:
    with _running(EventTimeSessionWindows(1.0)) as run:
        for start in range(1, 1_002, session_operators.BUCKET_MS_MIN):
            run.take((start, start, 1))
        for start in range(1, 1_002, session_operators.BUCKET_MS_MIN):
            assert run.advance(start + 999) == [(start, start, start + 1_000, 1, 1)]


def test_a_session_that_had_fired_before_a_restore_is_not_emitted_again() -> None:
    """At another parallelism, the key groups of one subtask may have had other event times."""
    ahead = next(key for key in range(20) if key_group_of(key, len(_GROUPS)) < 4)
    behind = next(key for key in range(20) if key_group_of(key, len(_GROUPS)) >= 4)
    windows, event_time = EventTimeSessionWindows(1.0), [(0, 3, 1_999), (4, 7, 999)]
    with _running(windows, lateness_ms=9_000) as run:
        run.take((ahead, 1_000, 1), (behind, 1_000, 2))
        kept = run.snapshot().keyed
    with _running(windows, lateness_ms=9_000, event_time=event_time, restored=kept) as run:
        assert run.advance(1_999) == [(behind, 1_000, 2_000, 1, 2)]


def test_open_windows_of_the_clock_are_emitted_once_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        window_operators, "StateClock", lambda: clock.StateClock(wall_clock=lambda: 10.2)
    )
    with _running(TumblingProcessingTimeWindows(1.0)) as run:
        run.take((1, None, 5), (2, None, 6))
        run.operator.flush()
        assert run.emitted() == [(1, 10_000, 11_000, 1, 5), (2, 10_000, 11_000, 1, 6)]
        assert run.operator.due_in_s is None
        # The last rows of an earlier function follow the first end.
        run.take((1, None, 7))
        run.operator.flush()
        run.operator.flush()
        assert run.emitted() == [(1, 10_000, 11_000, 1, 7)]


def test_event_windows_have_no_clock() -> None:
    with _running(_TUMBLING) as run:
        run.take((1, 100, 5))
        assert run.operator.due_in_s is None
        run.operator.on_time()
        assert run.emitted() == []


def test_many_windows_come_out_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_operators, "ROWS_A_BATCH", 4)
    with _running(_TUMBLING) as run:
        run.take(*((key, 100, key) for key in range(10)))
        run.operator.on_watermark(999)
        assert [batch.num_rows for batch in run.batches] == [4, 4, 2]
        assert [key for key, *_ in run.emitted()] == list(range(10))


@pytest.mark.parametrize("spread", [1, 100, 1 << 16, 1 << 20])
def test_records_far_apart_are_in_windows_of_their_own(spread: int) -> None:
    with _running(_TUMBLING) as run:
        times = (0, 1_000 * spread, 5, 2_000 * spread)
        run.take(*((1, time, 1) for time in times))
        made = run.advance(MAX_WATERMARK)
        assert [(start, n) for _, start, _, n, _ in made] == [
            (0, 2),
            (1_000 * spread, 1),
            (2_000 * spread, 1),
        ]


def test_an_empty_batch_changes_nothing() -> None:
    with _running(_TUMBLING) as run:
        run.operator.receive(Batch(pa.RecordBatch.from_pylist([], _SCHEMA)))
        assert run.advance(MAX_WATERMARK) == []
        assert _event_time(run) == [(0, 7, NO_WATERMARK)]
