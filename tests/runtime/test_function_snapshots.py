"""Tests the state of keyed functions that is updated before snapshots."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.test_union import begin
from tests.spark_formats.state_rows import state as state_of
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import kill_a_slot
from tests.support.waiting import await_status

from onceflow import (
    BatchStates,
    HeapBackend,
    KeyedBatch,
    KeyedBatchFunction,
    KeyedFunction,
    ListStateDescriptor,
    OutputTag,
    ProcessWindowFunction,
    Record,
    RocksDBBackend,
    StateAccess,
    StateBackend,
    TimeWindow,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
)
from onceflow.core.errors import UserFunctionError

ACCOUNTS = 100
TOLD = OutputTag("told", "id BIGINT")


class Counts:
    """Counts accounts in a dict, which raw state keeps, and what a subtask has counted in lists."""

    def __init__(self, state: StateAccess | BatchStates) -> None:
        self._raw = state.raw_keyed_state("index")
        self._counts: dict[str, int] = {}
        for group in self._raw.key_groups:
            self._counts.update(json.loads(self._raw.get(group) or b"{}"))
        groups = set(map(self._raw.key_group_of, self._counts))
        assert groups <= set(self._raw.key_groups), "an account is elsewhere"
        operator = state.operator
        self._mine = operator.list_state(ListStateDescriptor[int]("mine", int))
        self._counted = sum(self._mine.get())
        self._begun = operator.union_list_state(ListStateDescriptor[int]("begun", int))
        assert operator.is_restored == bool(self._begun.get())
        # Each subtask is given what all of them have kept.
        assert len(set(self._begun.get())) < 2, self._begun.get()
        self._starts = max(self._begun.get(), default=0) + 1

    def of(self, account: str) -> int:
        self._counts[account] = count = self._counts.get(account, 0) + 1
        self._counted += 1
        return count

    def keep(self) -> None:
        by_group = defaultdict[int, dict[str, int]](dict)
        for account, count in self._counts.items():
            by_group[self._raw.key_group_of(account)][account] = count
        for group, counts in by_group.items():
            self._raw.put(group, json.dumps(counts).encode())
        self._mine.update([self._counted] if self._counted else [])
        self._begun.update([self._starts])


class OwnIndex(KeyedFunction):
    """Holds against what comes how often it has seen an account; tells of each snapshot."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: StateAccess) -> None:
        self.counts = Counts(state)
        self.last = state.value_state(ValueStateDescriptor[int]("last", int, default=0))
        self.told = state.side_output(TOLD)

    def process(self, record: Record) -> Record:
        count = self.counts.of(record["account"])
        # What the engine keeps of the key never differs from what the function does.
        assert (count - 1, count) == (self.last.get(), record["n"])
        self.last.set(count)
        return record

    def snapshot_state(self, checkpoint: int) -> None:
        self.counts.keep()
        self.told.emit({"id": checkpoint})


class OwnIndexOfBatches(KeyedBatchFunction):
    """Numbers the records of each account; tells of each snapshot."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("n", pa.int64()))

    def open(self, state: BatchStates) -> None:
        self._counts = Counts(state)
        self._last = state.value_state(ValueStateDescriptor[int]("last", int, default=0))
        self._told = state.operator.side_output(TOLD)

    def process(self, batch: KeyedBatch) -> pa.RecordBatch:
        numbers = [self._counts.of(one.as_py()) for one in batch.rows.column("account")]
        # What the engine keeps of the keys never differs from what the function does.
        accounts = batch.keys.column("account").to_pylist()
        last = dict(zip(batch.rows.column("account").to_pylist(), numbers, strict=True))
        before = self._last.get_many().to_pylist()
        added = [last[one] - known for one, known in zip(accounts, before, strict=True)]
        assert added == batch.counts.tolist()
        self._last.put_many(pa.array([last[account] for account in accounts]))
        return batch.rows.append_column("n", pa.array(numbers, pa.int64()))

    def snapshot_state(self, checkpoint: int) -> None:
        self._counts.keep()
        self._told.emit({"id": checkpoint})


class OwnIndexOfWindows(ProcessWindowFunction):
    """Numbers the windows of each account."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        names = ("account", "start_ms", "window", "records")
        types = (pa.string(), pa.int64(), pa.int64(), pa.list_(pa.int64()))
        return pa.schema(zip(names, types, strict=True))

    def open(self, state: StateAccess) -> None:
        self._counts = Counts(state)

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> Record:
        return {
            "account": key,
            "start_ms": window.start_ms,
            "window": self._counts.of(key),
            "records": sorted(record["n"] for record in records),
        }

    def snapshot_state(self, checkpoint: int) -> None:
        self._counts.keep()


@pytest.mark.servers
def test_bytes_by_key_group_and_lists_of_functions_go_through_kills_rescaling_and_backends(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """Records and windows of each account are numbered without a gap, whatever happens between.

    By a function of batches, one of records and one of windows.
    """
    sink, told = (DirectorySink(str(tmp_path / name)) for name in ("out", "told"))
    savepoint: str | None = None
    runs: list[tuple[int, StateBackend]] = [(2, HeapBackend()), (3, RocksDBBackend())]
    for step, (parallelism, backend) in enumerate(runs):
        count = 2_000 * (step + 1)
        source = CountingSource(
            count, accounts=ACCOUNTS, batch_rows=20, pause_s=0.01, ends_with=str(tmp_path / "ends")
        )
        pipeline = begin(cluster, tmp_path, backend=backend, parallelism=parallelism)
        records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("id"))
        numbered = records.key_by("account").process_batches(OwnIndexOfBatches(), uid="batches")
        indexed = numbered.key_by("account").process(OwnIndex(), uid="index")
        windows = indexed.key_by("account").window(TumblingEventTimeWindows(0.5))
        windows.process(OwnIndexOfWindows(), uid="windows").write(sink, uid="out")
        numbered.side_output(TOLD).union(indexed.side_output(TOLD)).write(told, uid="told")
        job = pipeline.start(from_savepoint=savepoint) if savepoint else pipeline.start()
        await_status(job, lambda s: any(one.attempt == s.attempt for one in s.history))
        kill_a_slot(job, step)
        # The last window of each account waits for records that do not come.
        starts = range(0, count - 500, 500)
        await_status(job, lambda s: len(sink.rows()) >= ACCOUNTS * len(starts))
        savepoint = job.stop(60, savepoint=str(tmp_path / f"kept-{step}")).savepoints[-1].place
        rows = sink.rows()
        assert Counter((row["account"], row["start_ms"]) for row in rows) == Counter(
            (str(account), start) for account in range(ACCOUNTS) for start in starts
        )
        for row in rows:
            before = row["start_ms"] // 500
            assert row["window"] == before + 1
            assert row["records"] == list(range(before * 5 + 1, before * 5 + 6))
        counted = {uid: total_of(savepoint, uid, "mine") for uid in ("batches", "index", "windows")}
        assert counted["windows"] == len(rows)
        assert counted["batches"] == counted["index"] == total_of(savepoint, "index", "last")
    # What snapshot_state emits belongs to the checkpoint that it is called for.
    assert told.rows()


def total_of(savepoint: str, uid: str, state: str) -> int:
    """Return the sum of a state's values."""
    return sum(state_of(savepoint, uid=uid, state=state)["value"].to_pylist())


class UsesAKey(OwnIndex):
    def snapshot_state(self, checkpoint: int) -> None:
        self.last.set(1)


def test_state_of_a_key_is_refused_by_name_where_there_is_none(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline = begin(cluster, tmp_path, restart=False)
    records = pipeline.read(CountingSource(100, ends_with=str(tmp_path / "ends")), uid="records")
    numbered = records.key_by("account").process_batches(OwnIndexOfBatches(), uid="batches")
    indexed = numbered.key_by("account").process(UsesAKey(), uid="index")
    indexed.write(DirectorySink(str(tmp_path / "out")), uid="out")
    with pytest.raises(
        UserFunctionError, match=r"'index'.*in snapshot_state\(\), where no key is set"
    ):
        pipeline.run(60)
