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
    BroadcastAccess,
    BroadcastProcessFunction,
    Checkpointing,
    HeapBackend,
    JobState,
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
from onceflow.connectors.spark.batch.savepoint_writer import savepoint_writer
from onceflow.core.errors import BadStateValue, ConfigError, SavepointRefused, StateIncompatible
from onceflow.core.state import StateBackend

KEYS, RECORDS = 100_000, 2_000


def opening(account: int) -> int:
    return account * 3 + 1


LIMITS = MapStateDescriptor[str, int]("limits", str, int)
DAYS_OFF = MapStateDescriptor[date, str]("days off", date, str)


class Remembers(BroadcastProcessFunction):
    """Adds what the state held before to each record, and counts on.

    `dealt` and `united` are what the subtask had of the lists without a key when it began.
    """

    def output_schema(self, records: pa.Schema, broadcast: pa.Schema) -> pa.Schema:
        for name in ("before", "listed", "first", "limit"):
            records = records.append(pa.field(name, pa.int64()))
        for name in ("dealt", "united"):
            records = records.append(pa.field(name, pa.list_(pa.int64())))
        return records.append(pa.field("day_off", pa.string()))

    def open(self, state: BroadcastAccess) -> None:
        operator = state.operator
        self._dealt = operator.list_state(ListStateDescriptor[int]("dealt", int)).get()
        self._united = operator.union_list_state(ListStateDescriptor[int]("united", int)).get()
        self._limits = state.broadcast_state(LIMITS)
        self._days_off = state.broadcast_state(DAYS_OFF)
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
            "limit": self._limits.get("gold"),
            "dealt": self._dealt,
            "united": self._united,
            "day_off": self._days_off.get(date(2026, 5, 1)),
        }

    def process_broadcast(self, record: Record) -> None:
        pass


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
    rules = pipeline.read(CountingSource(0), uid="rules").broadcast(LIMITS, DAYS_OFF)
    kept = records.key_by("account").connect(rules).process(Remembers(), uid="remembers")
    totals = kept.key_by("account").running(balance=sum_("amount"), n=count(), uid="totals")
    totals.write(DirectorySink(str(directory / "out")), uid="out")
    return pipeline


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(HeapBackend(), id="heap"),
        pytest.param(RocksDBBackend(), id="rocksdb", marks=pytest.mark.servers),
    ],
)
@pytest.mark.only_proof
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
    put_without_keys(savepoint)
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
        assert (row["limit"], row["day_off"]) == (500, "labour")
        assert sorted(row["united"]) == [7, 7, 8]
    dealt = {tuple(row["dealt"]) for row in rows}
    assert sorted(map(len, dealt)) == [2, 3]
    assert sorted(one for mine in dealt for one in mine) == [0, 1, 2, 3, 4]
    storage = str(tmp_path / "checkpoints")
    totals = by_key(state(storage, uid="totals"))
    assert len(totals) == KEYS
    assert totals["99999"] == {"balance": opening(99_999), "n": 1}
    assert totals["7"] == {"balance": opening(7) + amount_of(7), "n": 2}
    assert by_key(state(storage, uid="remembers", state="level"))["7"] == 8


def put_without_keys(savepoint: Path) -> None:
    """Write the states of `Remembers` that are not kept by key, and read them back."""
    put(savepoint, {"value": range(5)}, uid="remembers", state="dealt", stateType="operator-list")
    put(savepoint, {"value": [7, 7, 8]}, uid="remembers", state="united", stateType="union")
    limits = {"tier": ["gold", "plain"], "value": [500, 100]}
    broadcast = {"uid": "remembers", "stateType": "broadcast"}
    put(savepoint, limits, state="limits", mapKey="tier", **broadcast)
    days = {"map_key": [date(2026, 5, 1)], "value": ["labour"]}
    put(savepoint, days, state="days off", **broadcast)
    read = {"path": str(savepoint), "uid": "remembers"}
    for name, kind, held in (
        ("dealt", "operator-list", [0, 1, 2, 3, 4]),
        ("dealt", "list", [0, 1, 2, 3, 4]),
        ("united", "union", [7, 7, 8]),
        ("limits", "broadcast", [100, 500]),
        ("days off", "broadcast", ["labour"]),
    ):
        rows = state(**read, state=name, stateType=kind)
        assert sorted(rows["value"].to_pylist()) == held
    assert state(**read, state="limits")["map_key"].to_pylist() == ["gold", "plain"]
    with pytest.raises(SavepointRefused, match="has state 'limits' of operator 'remembers'"):
        put(savepoint, limits, state="limits", mapKey="tier", **broadcast)


def test_what_a_savepoint_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "bootstrap"
    with pytest.raises(BadStateValue, match=r"key 'b' occurs more than once.*group by the key"):
        put(place, {"key": ["a", "b", "b"], "value": [1, 2, 3]}, uid="u", state="s")
    with pytest.raises(BadStateValue, match=r"column 'value' is null in a row: {'key': 'b'"):
        put(place, {"key": ["a", "b"], "value": [1, None]}, uid="u", state="s")
    with pytest.raises(BadStateValue, match=r"key column 'key' is null"):
        put(place, {"key": ["a", None], "value": [1, 2]}, uid="u", state="s")
    with pytest.raises(BadStateValue, match=r"'value' holds.* does not fit msgpack/1:int"):
        put(place, {"key": ["a"], "value": ["x"]}, uid="u", state="s", valueType="int")
    unkeyed = {"uid": "u", "state": "s"}
    with pytest.raises(
        BadStateValue, match=r"map key 'b' occurs more than once.*'s' has one entry"
    ):
        twice = {"map_key": ["b", "a", "b"], "value": [1, 2, 3]}
        put(place, twice, stateType="broadcast", **unkeyed)
    with pytest.raises(BadStateValue, match=r"column 'value' is null in a row"):
        put(place, {"value": [1, None]}, stateType="operator-list", **unkeyed)
    with pytest.raises(ConfigError, match=r"column 'map_key'.*has only key, value"):
        put(place, {"key": ["a"], "value": [1]}, stateType="broadcast", **unkeyed)
    with pytest.raises(ConfigError, match=r"column 'amount'.*has only key, value"):
        put(place, {"key": ["a"], "value": [1]}, uid="u", state="s", value="amount")
    assert not (place / "_metadata").exists()
    assert list((place / "state").iterdir()) == []
    put(place, {"key": ["a"], "value": [1]}, uid="u", state="s")
    with pytest.raises(SavepointRefused, match="already has state 's' of operator 'u'"):
        put(place, {"key": ["b"], "value": [1]}, uid="u", state="s")
    with pytest.raises(StateIncompatible, match="max parallelism 128.*written with 64"):
        put(place, {"key": ["b"], "value": [1]}, uid="u", state="t", maxParallelism="64")
    with pytest.raises(SavepointRefused, match="is for job 'ledger', but this state is for"):
        put(place, {"key": ["b"], "value": [1]}, uid="u", state="t", job="other")
    (place / "_changing").touch()
    with pytest.raises(SavepointRefused, match=r"another program is changing .*_changing exists"):
        put(place, {"key": ["b"], "value": [1]}, uid="u", state="t")
    assert by_key(state(str(place), uid="u")) == {"a": 1}


def test_a_job_that_has_begun_is_refused_a_savepoint_of_tables(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        put(place, {"key": ["7"], "value": [41]}, uid="remembers", state="level")
    status = pipeline_of(tmp_path, HeapBackend(), None).start(from_savepoint=str(first)).wait(60)
    assert status.state is JobState.FINISHED, status.last_error
    with pytest.raises(
        SavepointRefused, match="written from DataFrames and can only start a new job"
    ):
        pipeline_of(tmp_path, HeapBackend(), None).start(from_savepoint=str(second)).wait(60)
    with pytest.raises(StateIncompatible, match="max_parallelism 128.*sets 64"):
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
    limits = spark.createDataFrame([("gold", 500), ("plain", 100)], "map_key STRING, value BIGINT")
    unkeyed = options | {"state": "limits", "stateType": "broadcast"}
    limits.write.format("onceflow-savepoint").mode("append").options(**unkeyed).save(place)
    assert sorted(state(place, uid="levels", state="limits")["value"].to_pylist()) == [100, 500]
    found = by_key(state(place, uid="levels", state="level"))
    assert len(found) == 1_000
    assert found["7"] == '{"level":7,"tags":["a"]}'
    with pytest.raises(Exception, match="already has state 'level' of operator 'levels'"):
        write.option("valueType", "Level").save(place)
