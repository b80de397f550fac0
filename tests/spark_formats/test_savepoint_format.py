"""A savepoint made of DataFrames: a job starts from it, and goes on as if it had made the rows."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.spark_formats.state_rows import by_key, state
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    HeapBackend,
    JobState,
    KeyedFunction,
    ListStateDescriptor,
    LocalProcesses,
    MapStateDescriptor,
    NoRestart,
    Pipeline,
    Record,
    RocksDBBackend,
    ValueStateDescriptor,
    connectors,
    count,
    sum_,
)
from onceflow.connectors.spark.arrow_rows import spark_schema
from onceflow.connectors.spark.savepoint_writer import savepoint_writer
from onceflow.core.errors import BadStateValue, ConfigError, SavepointRefused, StateIncompatible
from onceflow.core.functions import StateAccess
from onceflow.core.state import StateBackend

KEYS, RECORDS = 100_000, 2_000


def opening(account: int) -> int:
    return account * 3 + 1


class Remembers(KeyedFunction):
    """Adds what the state held before to each record, and counts on."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        for name in ("before", "listed", "first"):
            input_schema = input_schema.append(pa.field(name, pa.int64()))
        return input_schema

    def open(self, state: StateAccess) -> None:
        self._level = state.value_state(ValueStateDescriptor[int]("level", int, default=-1))
        self._list = state.list_state(ListStateDescriptor[int]("list", int))
        self._days = state.map_state(MapStateDescriptor[date, int]("days", date, int))

    def process(self, record: Record) -> Record:
        level = self._level.get()
        self._level.set(level + 1)
        listed = sum(self._list.get())
        return record | {
            "before": level,
            "listed": listed,
            "first": self._days.get(date(2026, 1, 1)) or -1,
        }


def put(path: Path, rows: dict[str, Any], **options: str) -> None:
    """Write a table as Spark does, in two tasks."""
    table = pa.RecordBatch.from_pydict(rows)
    given = {"path": str(path), "job": "ledger", **options}
    writer = savepoint_writer(given, spark_schema(table.schema), overwrite=False)
    half = table.num_rows // 2
    try:
        parts = [table.slice(0, half), table.slice(half)]
        messages = [writer.write(iter([part])) for part in parts]
        writer.commit(messages)
    except BaseException:
        writer.abort([])
        raise


def pipeline_of(directory: Path, backend: StateBackend, max_parallelism: int | None) -> Pipeline:
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="ledger",
        parallelism=2,
        max_parallelism=max_parallelism,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        state_backend=backend,
        restart=NoRestart(),
        settings=SETTINGS,
    )
    records = pipeline.read(CountingSource(RECORDS, accounts=RECORDS), uid="records")
    kept = records.key_by("account").process(Remembers(), uid="remembers")
    totals = kept.key_by("account").running(balance=sum_("amount"), n=count(), uid="totals")
    totals.write(DirectorySink(str(directory / "out")), uid="out")
    return pipeline


@pytest.mark.parametrize(
    "backend",
    [pytest.param(HeapBackend(), id="heap"), pytest.param(RocksDBBackend(), id="rocksdb")],
)
def test_a_job_starts_from_tables_and_their_values_go_on_exactly(
    tmp_path: Path, backend: StateBackend
) -> None:
    savepoint, accounts = tmp_path / "bootstrap", range(KEYS)
    keys = [str(account) for account in accounts]
    put(
        savepoint,
        {"account": keys, "balance": [opening(a) for a in accounts], "n": [1] * KEYS},
        uid="totals",
        key="account",
        stateType="running",
        aggregates="balance=sum,n=count",
    )
    put(savepoint, {"key": keys, "value": accounts}, uid="remembers", state="level")
    put(
        savepoint,
        {"key": keys[:RECORDS], "value": [[a, a] for a in accounts[:RECORDS]]},
        uid="remembers",
        state="list",
        stateType="list",
    )
    put(
        savepoint,
        {
            "key": keys[:RECORDS] * 2,
            "map_key": [date(2026, 1, 1)] * RECORDS + [date(2026, 1, 2)] * RECORDS,
            "value": list(accounts[:RECORDS]) * 2,
        },
        uid="remembers",
        state="days",
        stateType="map",
    )
    assert by_key(state(str(savepoint), uid="remembers", state="level"))["99999"] == 99_999
    pipeline = pipeline_of(tmp_path, backend, None)
    job = pipeline.start(from_savepoint=str(savepoint))
    assert job.wait(90).state is JobState.FINISHED, job.status().last_error
    rows = DirectorySink(str(tmp_path / "out")).rows()
    assert sorted(row["id"] for row in rows) == list(range(RECORDS))
    for row in rows:
        account = int(row["account"])
        assert (row["before"], row["listed"]) == (account, 2 * account)
        assert row["first"] == (account or -1)
        assert (row["balance"], row["n"]) == (opening(account) + amount_of(row["id"]), 2)
    storage = str(tmp_path / "checkpoints")
    totals = by_key(state(storage, uid="totals"))
    assert len(totals) == KEYS
    assert totals["99999"] == {"balance": opening(99_999), "n": 1}
    assert totals["7"] == {"balance": opening(7) + amount_of(7), "n": 2}
    assert by_key(state(storage, uid="remembers", state="level"))["7"] == 8


def test_what_a_savepoint_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "bootstrap"
    with pytest.raises(BadStateValue, match=r"key 'b' comes more than once.*group by it first"):
        put(place, {"key": ["a", "b", "b"], "value": [1, 2, 3]}, uid="u", state="s")
    with pytest.raises(BadStateValue, match=r"column 'value' is null in a row: {'key': 'b'"):
        put(place, {"key": ["a", "b"], "value": [1, None]}, uid="u", state="s")
    with pytest.raises(BadStateValue, match=r"key column 'key' is null"):
        put(place, {"key": ["a", None], "value": [1, 2]}, uid="u", state="s")
    with pytest.raises(BadStateValue, match=r"'value' holds a value that is no msgpack/1:int"):
        put(place, {"key": ["a"], "value": ["x"]}, uid="u", state="s", valueType="int")
    with pytest.raises(ConfigError, match=r"column 'amount'.*has key, value"):
        put(place, {"key": ["a"], "value": [1]}, uid="u", state="s", value="amount")
    assert not (place / "_metadata").exists()
    assert list((place / "state").iterdir()) == []
    put(place, {"key": ["a"], "value": [1]}, uid="u", state="s")
    with pytest.raises(SavepointRefused, match="has state 's' of operator 'u' already"):
        put(place, {"key": ["b"], "value": [1]}, uid="u", state="s")
    with pytest.raises(StateIncompatible, match="max parallelism 128.*written with 64"):
        put(place, {"key": ["b"], "value": [1]}, uid="u", state="t", maxParallelism="64")
    with pytest.raises(SavepointRefused, match="is for job 'ledger', and this state is for"):
        put(place, {"key": ["b"], "value": [1]}, uid="u", state="t", job="other")
    (place / "_changing").touch()
    with pytest.raises(SavepointRefused, match=r"another program changes .*_changing is there"):
        put(place, {"key": ["b"], "value": [1]}, uid="u", state="t")
    assert by_key(state(str(place), uid="u")) == {"a": 1}


def test_a_job_that_has_begun_is_refused_a_savepoint_of_tables(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        put(place, {"key": ["7"], "value": [41]}, uid="remembers", state="level")
    status = pipeline_of(tmp_path, HeapBackend(), None).start(from_savepoint=str(first)).wait(60)
    assert status.state is JobState.FINISHED, status.last_error
    with pytest.raises(SavepointRefused, match="made of DataFrames, for a job that begins"):
        pipeline_of(tmp_path, HeapBackend(), None).start(from_savepoint=str(second)).wait(60)
    with pytest.raises(StateIncompatible, match="max_parallelism 128.*asks for 64"):
        pipeline_of(tmp_path / "other", HeapBackend(), 64).start(from_savepoint=str(second)).wait(
            60
        )


@pytest.mark.spark
def test_spark_makes_a_savepoint_of_a_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    connectors.register(spark)
    place = str(tmp_path / "bootstrap")
    frame = spark.range(1_000).selectExpr(
        "CAST(id AS string) AS account",
        "named_struct('level', id, 'tags', array('a')) AS value",
    )
    options = {"job": "ledger", "uid": "levels", "state": "level", "key": "account"}
    write = frame.write.format("onceflow-savepoint").mode("append").options(**options)
    write.option("valueType", "Level").save(place)
    found = by_key(state(place, uid="levels"))
    assert len(found) == 1_000
    assert found["7"] == '{"level":7,"tags":["a"]}'
    with pytest.raises(Exception, match="'level' of operator 'levels' already"):
        write.option("valueType", "Level").save(place)
