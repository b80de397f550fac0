"""A function's dataclass changes while the job is stopped: kept, or refused before a record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, assert_exactly_once

from onceflow import (
    Checkpointing,
    HeapBackend,
    JobState,
    KeyedFunction,
    NoRestart,
    Pipeline,
    Record,
    RocksDBBackend,
    StateAccess,
    ValueStateDescriptor,
)
from onceflow.core.errors import StateIncompatible
from onceflow.core.state import StateBackend

Fields = Sequence[tuple[str, type, Any]]
"""Name, type and default of each."""
OLD: Fields = [("balance", int, 0), ("n", int, 0), ("first", str, "")]
WIDER: Fields = [("balance", float, 0.0), ("n", int, 0), ("seen_by", str, "the new one")]
OTHER: Fields = [("balance", str, ""), ("n", int, 0)]


class Balance(KeyedFunction):
    """Keeps one dataclass a key, of `fields`, and emits all of it."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        for name, kind, _ in self._fields:
            column = pa.string() if kind is str else pa.int64()
            input_schema = input_schema.append(pa.field(name, column))
        return input_schema

    def open(self, state: StateAccess) -> None:
        fields = [(name, kind, field(default=default)) for name, kind, default in self._fields]
        self._account = make_dataclass("Account", fields)
        self._state = state.value_state(ValueStateDescriptor[Any]("account", self._account))

    def process(self, record: Record) -> Record:
        account = self._state.get() or self._account()
        account.balance += record["amount"]
        account.n += 1
        self._state.set(account)
        emitted = {name: getattr(account, name) for name, _, _ in self._fields}
        return record | emitted | {"balance": int(account.balance)}


def pipeline_of(
    cluster: AnyCluster, directory: Path, source: CountingSource, fields: Fields, name: StateBackend
) -> tuple[Pipeline, DirectorySink]:
    pipeline = Pipeline(
        cluster,
        name="types",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=name,
        restart=NoRestart(),
        settings=SETTINGS,
    )
    sink = DirectorySink(str(directory / "out"))
    keyed = pipeline.read(source, uid="records").key_by("account")
    keyed.process(Balance(fields), uid="balance").write(sink, uid="out")
    return pipeline, sink


@pytest.mark.parametrize(
    ("backend", "by_savepoint"),
    [
        pytest.param(HeapBackend(), False, id="heap-checkpoint"),
        pytest.param(RocksDBBackend(), True, id="rocksdb-savepoint"),
        pytest.param(HeapBackend(), True, id="heap-savepoint", marks=pytest.mark.slow),
        pytest.param(RocksDBBackend(), False, id="rocksdb-checkpoint", marks=pytest.mark.slow),
    ],
)
def test_a_function_goes_on_with_a_wider_dataclass_and_not_with_another(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend, by_savepoint: bool
) -> None:
    half = CountingSource(500, accounts=20, ends_with=str(tmp_path / "never"))
    whole = CountingSource(1_000, accounts=20)
    pipeline, sink = pipeline_of(cluster, tmp_path, half, OLD, backend)
    job = pipeline.start()
    deadline = time.monotonic() + 60
    while job.status().records_in < half.records:
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.01)
    status = job.stop(60, savepoint=str(tmp_path / "kept") if by_savepoint else False)
    place = status.savepoints[-1].place if by_savepoint else None
    pipeline, _ = pipeline_of(cluster, tmp_path, whole, OTHER, backend)
    with pytest.raises(StateIncompatible, match="'account' .*`Account.balance` was int"):
        pipeline.start(from_savepoint=place).wait(60)
    assert len(sink.rows()) == half.records, "refused before a record"
    pipeline, _ = pipeline_of(cluster, tmp_path, whole, WIDER, backend)
    assert pipeline.start(from_savepoint=place).wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, whole)
    assert {row.get("seen_by") for row in sink.rows()} == {None, "the new one"}
