"""A pipeline whose state changes between two starts: refused by name, or only that is dropped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.clusters import SLOWLY_ON_SPARK, AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    HeapBackend,
    JobState,
    NoRestart,
    Pipeline,
    Record,
    RocksDBBackend,
    Stream,
    ValueStateDescriptor,
    count,
    max_,
    sum_,
)
from onceflow.core.errors import StateIncompatible
from onceflow.core.plan.functions import KeyedFunction, StateAccess
from onceflow.core.state import StateBackend

SOURCE = CountingSource(3_000, accounts=20, batch_rows=10)
SLOWLY = replace(SOURCE, pause_s=0.1)
"""The same records, at a pace at which the job is stopped long before their end."""
Work = Callable[[Stream], Stream]


class Balance(KeyedFunction):
    """Emits each record with what its account's records add up to, and how many they are."""

    def __init__(self, total: str, number: str) -> None:
        self._names = (total, number)

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("balance", pa.int64())).append(
            pa.field("n", pa.int64())
        )

    def open(self, state: StateAccess) -> None:
        total, number = self._names
        self._total = state.value_state(ValueStateDescriptor[int](total, int, default=0))
        self._number = state.value_state(ValueStateDescriptor[int](number, int, default=0))

    def process(self, record: Record) -> Record:
        self._total.set(self._total.get() + int(record["amount"]))
        self._number.set(self._number.get() + 1)
        return record | {"balance": self._total.get(), "n": self._number.get()}


def processed(total: str = "total", number: str = "number") -> Work:
    return lambda records: records.key_by("account").process(Balance(total, number), uid="balance")


def run_aggregates(records: Stream) -> Stream:
    return records.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")


def pipeline_of(
    cluster: AnyCluster,
    directory: Path,
    work: Work,
    *,
    backend: StateBackend | None = None,
    allow: bool = False,
    source: CountingSource = SOURCE,
) -> tuple[Pipeline, DirectorySink]:
    pipeline = Pipeline(
        cluster,
        name="changes",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=backend or HeapBackend(),
        restart=NoRestart(),
        settings=SETTINGS,
        allow_non_restored_state=allow,
    )
    sink = DirectorySink(str(directory / "out"))
    work(pipeline.read(source, uid="records")).write(sink, uid="out")
    return pipeline, sink


def stop_half_way(pipeline: Pipeline) -> None:
    job = pipeline.start()
    deadline = time.monotonic() + 60
    while job.status().checkpoints_completed < 3:
        assert time.monotonic() < deadline, job.status()
        assert not job.status().state.ended, job.status()
        time.sleep(0.01)
    assert job.stop(60).state is JobState.STOPPED


def assert_each_record_once_and_counts_go_on(sink: DirectorySink) -> None:
    """Offsets and sink id are kept, and so is the number of records of each account."""
    rows = sink.rows()
    assert sorted(row["id"] for row in rows) == list(range(SOURCE.records))
    by_account: dict[str, list[int]] = {}
    for row in rows:
        by_account.setdefault(row["account"], []).append(row["n"])
    for numbers in by_account.values():
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize(
    "backend",
    [pytest.param(HeapBackend(), id="heap"), pytest.param(RocksDBBackend(), id="rocksdb")],
)
def test_renamed_state_is_refused_by_name_and_dropped_alone_where_allowed(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    stop_half_way(pipeline_of(cluster, tmp_path, processed(), backend=backend, source=SLOWLY)[0])
    renamed = processed(total="saldo")
    with pytest.raises(StateIncompatible, match="'total' .*uses 'number', 'saldo'"):
        pipeline_of(cluster, tmp_path, renamed, backend=backend)[0].run(60)
    pipeline, sink = pipeline_of(cluster, tmp_path, renamed, backend=backend, allow=True)
    status = pipeline.run(60)
    assert status.state is JobState.FINISHED
    assert status.dropped_state == ("state 'total' of balance",)
    assert_each_record_once_and_counts_go_on(sink)


@SLOWLY_ON_SPARK
def test_running_turned_into_process_under_one_uid_is_refused_by_name(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    stop_half_way(pipeline_of(cluster, tmp_path, run_aggregates, source=SLOWLY)[0])
    with pytest.raises(StateIncompatible, match="'running'.*uses 'number', 'total'"):
        pipeline_of(cluster, tmp_path, processed())[0].run(60)
    assert pipeline_of(cluster, tmp_path, run_aggregates)[0].run(60).dropped_state == ()


def test_an_aggregate_is_added_and_another_removed_while_the_others_go_on(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    stop_half_way(pipeline_of(cluster, tmp_path, run_aggregates, source=SLOWLY)[0])

    def changed(records: Stream) -> Stream:
        return records.key_by("account").running(n=count(), most=max_("amount"), uid="balance")

    with pytest.raises(
        StateIncompatible, match="aggregate 'most' would contain only records from now on"
    ):
        pipeline_of(cluster, tmp_path, changed)[0].run(60)
    pipeline, sink = pipeline_of(cluster, tmp_path, changed, allow=True)
    status = pipeline.run(60)
    assert status.dropped_state == ("aggregate 'balance' of balance",)
    assert_each_record_once_and_counts_go_on(sink)
    later = [row for row in sink.rows() if "most" in row]
    assert later
    for account in {row["account"] for row in later}:
        rows = sorted((r for r in later if r["account"] == account), key=lambda row: row["n"])
        assert rows[0]["most"] == amount_of(rows[0]["id"]), "it begins with the first new record"


def test_a_stateful_operator_is_removed_only_where_that_is_allowed(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    stop_half_way(pipeline_of(cluster, tmp_path, run_aggregates, source=SLOWLY)[0])

    def removed(records: Stream) -> Stream:
        return records

    def stateless(records: Stream) -> Stream:
        return records.map(lambda record: record, uid="balance")

    for work in (removed, stateless):
        with pytest.raises(StateIncompatible, match="holds state of balance.*allow_non_restored"):
            pipeline_of(cluster, tmp_path, work)[0].run(60)
    pipeline, sink = pipeline_of(cluster, tmp_path, stateless, allow=True)
    status = pipeline.run(60)
    assert status.dropped_state == ("the state of operator 'balance'",)
    assert sorted(row["id"] for row in sink.rows()) == list(range(SOURCE.records))
