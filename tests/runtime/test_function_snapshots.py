"""What a keyed function keeps in a form of its own: brought up to date before each snapshot."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow as pa
import pytest
from tests.runtime.test_union import begin
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_status, kill_a_slot

from onceflow import (
    HeapBackend,
    KeyedFunction,
    ListStateDescriptor,
    OutputTag,
    Pipeline,
    Record,
    RocksDBBackend,
    StateAccess,
    StateBackend,
    ValueStateDescriptor,
)
from onceflow.core.errors import UserFunctionError
from onceflow.core.pipeline import Job

ACCOUNTS = 100
TOLD = OutputTag("told", "id BIGINT")


class OwnIndex(KeyedFunction):
    """Counts the records of each account in a dict, and how often a subtask began in a union list.

    Tells of each snapshot by a side output.
    """

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("n", pa.int64()))

    def open(self, state: StateAccess) -> None:
        self.raw = state.raw_keyed_state("index")
        self.last = state.value_state(ValueStateDescriptor[int]("last", int))
        self.told = state.side_output(TOLD)
        self.counts: dict[str, int] = {}
        for group in self.raw.key_groups:
            self.counts.update(json.loads(self.raw.get(group) or b"{}"))
        groups = set(map(self.raw.key_group_of, self.counts))
        assert groups <= set(self.raw.key_groups), "an account is elsewhere"
        self._begun = state.operator.union_list_state(ListStateDescriptor[int]("begun", int))
        total = sum(self._begun.get())
        assert state.operator.is_restored == bool(total)
        self._mine = 1 + (total if state.operator.subtask == 0 else 0)

    def process(self, record: Record) -> Record:
        account = record["account"]
        self.counts[account] = count = self.counts.get(account, 0) + 1
        # What the engine keeps of the key never differs from what the function does.
        assert (self.last.get() or 0) == count - 1
        self.last.set(count)
        return record | {"n": count}

    def snapshot_state(self, checkpoint: int) -> None:
        by_group = defaultdict[int, dict[str, int]](dict)
        for account, count in self.counts.items():
            by_group[self.raw.key_group_of(account)][account] = count
        for group, counts in by_group.items():
            self.raw.put(group, json.dumps(counts).encode())
        self._begun.update([self._mine])
        self.told.emit({"id": checkpoint})


def indexing(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    function: KeyedFunction,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    restart: bool = True,
) -> tuple[Pipeline, DirectorySink, DirectorySink]:
    sink, told = (DirectorySink(str(directory / name)) for name in ("out", "told"))
    pipeline = begin(cluster, directory, backend=backend, parallelism=parallelism, restart=restart)
    records = pipeline.read(source, uid="records")
    counted = records.key_by("account").process(function, uid="index")
    counted.write(sink, uid="out")
    counted.side_output(TOLD).write(told, uid="told")
    return pipeline, sink, told


def await_rows(job: Job, sink: DirectorySink, count: int) -> None:
    await_status(job, lambda s: len(sink.rows()) >= count)


def test_bytes_by_key_group_go_with_their_keys_through_kills_rescaling_and_backends(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """Each account's records are numbered without a gap, whatever happens in between."""
    savepoint: str | None = None
    runs: list[tuple[int, StateBackend]] = [(2, HeapBackend()), (3, RocksDBBackend())]
    for step, (parallelism, backend) in enumerate(runs):
        count = 2_000 * (step + 1)
        source = CountingSource(
            count, accounts=ACCOUNTS, batch_rows=20, pause_s=0.01, ends_with=str(tmp_path / "ends")
        )
        pipeline, sink, told = indexing(
            cluster, tmp_path, source, OwnIndex(), backend=backend, parallelism=parallelism
        )
        job = pipeline.start(from_savepoint=savepoint) if savepoint else pipeline.start()
        await_status(job, lambda s: any(one.attempt == s.attempt for one in s.history))
        kill_a_slot(job, step)
        await_rows(job, sink, count)
        savepoint = job.stop(60, savepoint=str(tmp_path / f"kept-{step}")).savepoints[-1].place
        per_account = count // ACCOUNTS
        numbers = Counter((row["account"], row["n"]) for row in sink.rows())
        assert numbers == Counter(
            (str(account), n) for account in range(ACCOUNTS) for n in range(1, per_account + 1)
        )
        # What snapshot_state emits belongs to the checkpoint that it is called for.
        assert told.rows()


class UsesAKey(OwnIndex):
    def snapshot_state(self, checkpoint: int) -> None:
        self.last.set(1)


def test_state_of_a_key_is_refused_by_name_where_there_is_none(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(100, ends_with=str(tmp_path / "ends"))
    pipeline, _, _ = indexing(cluster, tmp_path, source, UsesAKey(), restart=False)
    with pytest.raises(
        UserFunctionError, match=r"'index'.*in snapshot_state\(\), where there is no"
    ):
        pipeline.run(60)
