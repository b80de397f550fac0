"""A source stores the position and the event time of each split, and reads decided splits alone."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from onceflow import WatermarkStrategy
from onceflow.core.errors import ConfigError
from onceflow.core.plan.graph import Feed
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import Shutdown, SourceExhausted, Wait
from onceflow.core.protocol.record_times import AGE_MAX_MS, RecordTimes
from onceflow.core.protocol.splits import Split, SplitState
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.source_operator import SPLITS, SourceOperator, decode_split
from onceflow.core.runtime.dataflow.subtask import SourceSubtask
from onceflow.core.spi import EndOfInput, OutputBatch, SourceReader
from onceflow.core.spi.dead_letters import DEAD_LETTERS, DEAD_LETTERS_TAG, DeadLetter
from onceflow.core.spi.source import Outage

_FIRST, _SECOND, _THIRD = (CheckpointId(number) for number in (1, 2, 3))


class _Reader(SourceReader):
    """Reads what a test says."""

    def __init__(self, *splits: str) -> None:
        self.positions = dict.fromkeys(splits, b"0")
        self.runs: Sequence[tuple[str, int]] | None = None
        self.ended: list[str] = []
        self.record_times: Sequence[tuple[int, int]] = ()
        self.committed: list[Sequence[Split]] = []
        self.outage: Outage | None = None
        self.is_closed = False

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        raise NotImplementedError

    def snapshot(self) -> Sequence[Split]:
        return [Split(name, position) for name, position in self.positions.items()]

    def find_outage(self) -> Outage | None:
        return self.outage

    def rows_by_split(self) -> Sequence[tuple[str, int]] | None:
        return self.runs

    def list_ended_splits(self) -> Sequence[str]:
        return self.ended

    def take_record_times(self) -> Sequence[tuple[int, int]]:
        return self.record_times

    def add_splits(self, splits: Sequence[Split]) -> None:
        self.positions |= {split.id: split.position for split in splits}

    def commit(self, splits: Sequence[Split]) -> None:
        self.committed.append(splits)

    def close(self) -> None:
        self.is_closed = True


def _at_once(work: Callable[[], None]) -> None:
    work()


def _operator(reader: SourceReader, *splits: str, timed: bool = True) -> SourceOperator:
    strategy = WatermarkStrategy("at", max_out_of_orderness=0.01)
    states = [SplitState(Split(name, b"0")) for name in splits]
    return SourceOperator("records", reader, _at_once, {None: strategy} if timed else {}, states)


def _read(operator: SourceOperator, *times_ms: int) -> None:
    operator.process(Batch(pa.record_batch([pa.array(times_ms, pa.int64())], names=["at"])))


def _store(operator: SourceOperator, checkpoint: CheckpointId) -> dict[str, tuple[bytes, Any]]:
    no_storage: Any = None
    elements = operator.snapshot(checkpoint).upload(no_storage).lists[SPLITS]
    states = map(decode_split, elements)
    return {state.split.id: (state.split.position, state.event_time_ms) for state in states}


def test_each_split_keeps_its_position_and_its_event_time() -> None:
    reader = _Reader("a", "b")
    operator = _operator(reader, "a", "b")
    assert operator.has_watermarks
    reader.runs = [("a", 2), ("b", 1), ("a", 1)]
    _read(operator, 100, 300, 50, 200)
    reader.positions = {"a": b"3", "b": b"1"}
    assert _store(operator, _FIRST) == {"a": (b"3", 300), "b": (b"1", 50)}
    assert operator.next_watermark() == 50 - 10 - 1
    assert operator.next_watermark() is None


def test_rows_of_a_reader_with_one_split_need_no_names() -> None:
    operator = _operator(_Reader("a"), "a")
    _read(operator, 100, 90)
    assert operator.next_watermark() == 100 - 10 - 1
    two = _operator(_Reader("a", "b"), "a", "b")
    with pytest.raises(
        ConfigError, match="_Reader with 2 splits does not return the split of each row"
    ):
        _read(two, 100)


def test_a_split_that_has_ended_holds_event_time_back_no_longer() -> None:
    reader = _Reader("a", "b")
    operator = _operator(reader, "a", "b")
    reader.runs = [("a", 1)]
    _read(operator, 100)
    assert operator.next_watermark() is None
    reader.ended = ["b"]
    assert operator.next_watermark() == 100 - 10 - 1


def test_a_source_without_event_time_emits_rows_and_no_watermark() -> None:
    operator = _operator(_Reader("a", "b"), timed=False)
    emitted: list[Batch] = []
    operator.outputs.append(emitted.append)
    _read(operator, 100)
    assert [batch.rows.num_rows for batch in emitted] == [1]
    assert not operator.has_watermarks
    assert operator.next_watermark() is None
    assert _store(operator, _FIRST) == {"a": (b"0", None), "b": (b"0", None)}


@pytest.mark.parametrize("timed", [False, True])
def test_new_splits_are_read_once_a_checkpoint_with_them_is_decided(timed: bool) -> None:
    reader = _Reader("a")
    operator = _operator(reader, "a", timed=timed)
    operator.take_offer([Split("b", b"7")])
    assert _store(operator, _FIRST) == {"a": (b"0", None), "b": (b"7", None)}
    operator.on_aborted(_FIRST)
    operator.on_completed(_FIRST)
    assert list(reader.positions) == ["a"]
    assert _store(operator, _SECOND) == {"a": (b"0", None), "b": (b"7", None)}
    operator.on_completed(_SECOND)
    assert reader.positions == {"a": b"0", "b": b"7"}
    assert _store(operator, _THIRD) == {"a": (b"0", None), "b": (b"7", None)}
    if timed:
        # Event time waits for the new split.
        reader.runs = [("a", 1)]
        _read(operator, 100)
        assert operator.next_watermark() is None
        reader.runs = [("b", 1)]
        _read(operator, 60)
        assert operator.next_watermark() == 60 - 10 - 1


def test_positions_are_told_to_the_source_once_they_are_decided() -> None:
    reader = _Reader("a")
    operator = _operator(reader, "a")
    for number, checkpoint in enumerate((_FIRST, _SECOND, _THIRD)):
        reader.positions = {"a": b"%d" % number}
        operator.snapshot(checkpoint)
    assert reader.committed == []
    operator.on_completed(_SECOND)
    operator.on_completed(_FIRST)
    operator.on_completed(_SECOND)
    assert [list(one) for one in reader.committed] == [[Split("a", b"1")]]
    operator.on_completed(_THIRD)
    assert [list(one) for one in reader.committed] == [[Split("a", b"1")], [Split("a", b"2")]]


def test_positions_of_an_aborted_checkpoint_are_told_to_nobody() -> None:
    reader = _Reader("a")
    operator = _operator(reader, "a")
    operator.snapshot(_FIRST)
    operator.on_aborted(_FIRST)
    operator.on_completed(_FIRST)
    assert reader.committed == []
    operator.close()
    assert reader.is_closed


def test_times_of_records_are_counted_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = _Reader("a")
    operator = _operator(reader, timed=False)
    _read(operator, 100)
    assert operator.take_record_times() is None
    monkeypatch.setattr(time, "time", lambda: 1_000.0)
    reader.record_times = [(999_000, 2), (0, 1)]
    _read(operator, 100)
    # A record that is older than is counted has the greatest age that is counted.
    assert operator.take_record_times() == RecordTimes(
        1, {999_000: 2, 1_000_000 - AGE_MAX_MS: 1}, 1_998_000
    )
    assert operator.take_record_times() is None


def test_a_server_that_the_reader_waits_for_is_told() -> None:
    reader = _Reader("a")
    operator = _operator(reader, timed=False)
    assert operator.list_waits() == ()
    reader.outage = Outage("broker at nowhere", 4.5)
    assert operator.list_waits() == (Wait("records", "broker at nowhere", 4.5),)


_TABLES = {name: pa.schema([("at", pa.int64())]) for name in ("orders", "customers", "unused")}


def _rows_of(output: str, *times_ms: int) -> OutputBatch:
    return OutputBatch(output, pa.record_batch([pa.array(times_ms, pa.int64())], names=["at"]))


def test_rows_of_an_output_go_to_its_receivers_and_are_counted_once() -> None:
    operator = SourceOperator("shop", _Reader("a"), _at_once, outputs=_TABLES)
    received: dict[str, list[Batch]] = {"orders": [], "customers": []}
    for name, batches in received.items():
        operator.outlet(Feed("shop", _TABLES[name], name)).append(batches.append)
    operator.receive_rows((_rows_of("customers", 1), _rows_of("orders", 1, 2, 3)))
    operator.receive_rows(_rows_of("orders", 4))
    operator.receive_rows(_rows_of("unused", 5, 6))
    sizes = {name: [batch.rows.num_rows for batch in of] for name, of in received.items()}
    assert sizes == {"orders": [3, 1], "customers": [1]}
    assert operator.records_in == 7


def test_a_reader_that_returns_other_outputs_than_its_source_has_is_refused() -> None:
    operator = SourceOperator("shop", _Reader("a"), _at_once, outputs=_TABLES)
    with pytest.raises(ConfigError, match="poll of _Reader returned rows of output 'parts'"):
        operator.receive_rows(_rows_of("parts", 1))
    with pytest.raises(ConfigError, match="poll of _Reader returned a RecordBatch: return an"):
        _read(operator, 1)
    plain = SourceOperator("in", _Reader("a"), _at_once)
    with pytest.raises(ConfigError, match="'in' has the outputs none, and poll of _Reader"):
        plain.receive_rows(_rows_of("orders", 1))


@pytest.mark.parametrize(
    ("returned", "name"),
    [
        ([_rows_of("orders", 1)], "list"),
        ((_rows_of("orders", 1).rows,), "tuple of RecordBatch"),
        (pa.table({"at": [1]}), "Table"),
    ],
)
def test_a_value_that_is_not_in_the_contract_of_poll_is_refused_by_its_type(
    returned: Any, name: str
) -> None:
    operator = SourceOperator("shop", _Reader("a"), _at_once, outputs=_TABLES)
    with pytest.raises(ConfigError, match=f"poll of _Reader returned a {name}: return a RecordB"):
        operator.receive_rows(returned)


def test_each_output_has_its_event_time_in_each_split() -> None:
    reader = _Reader("a", "b")
    strategies: dict[str | None, WatermarkStrategy] = {
        "orders": WatermarkStrategy("at"),
        "customers": WatermarkStrategy("at"),
    }
    states = [SplitState(Split(name, b"0")) for name in "ab"]
    operator = SourceOperator("shop", reader, _at_once, strategies, states, _TABLES)
    reader.runs = [("a", 2), ("b", 1), ("b", 1), ("a", 1), ("a", 1)]
    operator.receive_rows(
        (_rows_of("orders", 10, 30, 7), _rows_of("unused", 999), _rows_of("customers", 20, 25))
    )
    assert operator.next_watermark() is None
    reader.runs = [("b", 1)]
    operator.receive_rows(_rows_of("customers", 40))
    assert operator.next_watermark() == 7 - 1
    no_storage: Any = None
    elements = operator.snapshot(_FIRST).upload(no_storage).lists[SPLITS]
    assert [decode_split(element).output_times_ms for element in elements] == [
        (("customers", 25), ("orders", 30)),
        (("customers", 40), ("orders", 7)),
    ]
    reader.runs = [("b", 1)]
    with pytest.raises(ConfigError, match=r"\[\('b', 1\)\], but the batches .* have \[2\] rows"):
        operator.receive_rows(_rows_of("orders", 1, 2))


def test_bad_records_of_a_poll_without_rows_are_dead_letters_at_once() -> None:
    """The next barrier is after these records, so a crash would lose dead letters that wait."""

    class _BadRecords(_Reader):
        """Finds a bad record in each poll, and no row."""

        def __init__(self) -> None:
            super().__init__("a")
            self.polled: list[EndOfInput | None] = [None, EndOfInput()]
            self.rejected: list[DeadLetter] = []

        def poll(self, timeout_s: float) -> EndOfInput | None:
            self.rejected.append(DeadLetter("it is not JSON"))
            return self.polled.pop(0)

        def take_rejected(self) -> Sequence[DeadLetter]:
            taken, self.rejected = self.rejected, []
            return taken

    operator = _operator(_BadRecords(), "a", timed=False)
    letters: list[int] = []
    outlet = operator.outlet(Feed("records", DEAD_LETTERS, DEAD_LETTERS_TAG))
    outlet.append(lambda batch: letters.append(batch.rows.num_rows))
    reports: queue.SimpleQueue[object] = queue.SimpleQueue()
    subtask = SourceSubtask(SubtaskRef("records", 0), operator, [operator], [], reports.put, 0.0)
    subtask.start()
    assert isinstance(reports.get(timeout=60), SourceExhausted)
    subtask.post(Shutdown("the test ends"))
    assert subtask.join(60)
    assert letters == [1, 1]
