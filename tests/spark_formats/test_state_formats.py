"""Checkpoints and savepoints as DataFrames: listed, and the state of any operator in them read."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.spark_formats import state_job
from tests.spark_formats.state_rows import by_key, state
from tests.support.counting_source import amount_of

from onceflow import HeapBackend, JobState, RocksDBBackend, connectors
from onceflow.connectors.spark.readers.checkpoints import CheckpointsReader, checkpoints_schema
from onceflow.core.errors import CheckpointCorrupt, ConfigError


@dataclass(frozen=True)
class Kept:
    """The results that a job has left."""

    storage: str
    savepoint: str


@pytest.fixture(scope="module", params=["heap", "rocksdb"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """A job's checkpoints and a savepoint, all of them after the same records."""
    directory = tmp_path_factory.mktemp(request.param)
    backend = HeapBackend() if request.param == "heap" else RocksDBBackend()
    job = state_job.start(directory, backend)
    try:
        state_job.await_all_records_in_a_checkpoint(job)
        place = job.savepoint()
        assert job.stop(60).state is JobState.STOPPED
    finally:
        job.cancel()
    return Kept(str(directory / "checkpoints"), place)


def ids_of(account: int) -> list[int]:
    return list(range(account, state_job.RECORDS, state_job.ACCOUNTS))


def test_every_kind_of_state_is_read_typed_from_checkpoint_and_savepoint(kept: Kept) -> None:
    days: dict[tuple[str, date], int] = defaultdict(int)
    for number in range(state_job.RECORDS):
        key = str(number % state_job.ACCOUNTS), state_job.FIRST_DAY + timedelta(days=number % 3)
        days[key] += amount_of(number)
    lists = {str(account): set(ids_of(account)) for account in range(state_job.ACCOUNTS)}
    totals = dict[tuple[str, int], list[int]]()
    for number in range(state_job.RECORDS):
        totals.setdefault((str(number % state_job.ACCOUNTS), amount_of(number)), []).append(number)
    for path in (kept.storage, kept.savepoint):
        last = state(path, uid="remembers", state="last")
        assert last.schema.names == ["key_group", "key", "value"]
        assert last.schema.types == [pa.int32(), pa.string(), pa.int64()]
        values = by_key(last)
        assert len(values) == state_job.ACCOUNTS
        seen = by_key(state(path, uid="remembers", state="seen"))
        assert {key: dict(found)["amount"] for key, found in seen.items()} == values
        ids = by_key(state(path, uid="remembers", state="ids"))
        assert {key: set(found) for key, found in ids.items()} == lists
        assert all(len(found) == state_job.RECORDS // state_job.ACCOUNTS for found in ids.values())
        entries = state(path, uid="remembers", state="days").to_pylist()
        assert {(row["key"], row["map_key"]): row["value"] for row in entries} == days
        assert {
            key: (found["total"], found["n"], found["most"])
            for key, found in by_key(state(path, uid="totals")).items()
        } == {key: (key[1] * len(n), len(n), max(n)) for key, n in totals.items()}


def test_positions_of_a_source_are_read_and_values_as_json_or_bytes(kept: Kept) -> None:
    splits = state(kept.storage, uid="records")["value"].to_pylist()
    assert {json.loads(split)["id"] for split in splits} == {"0", "1"}
    seen = by_key(state(kept.savepoint, uid="remembers", state="seen", valueFormat="json"))
    assert set(json.loads(seen["7"])) == {"id", "amount"}
    last = state(kept.savepoint, uid="remembers", state="last", valueFormat="binary")
    assert last.schema.field("value").type == pa.binary()
    assert {str(key): msgspec.msgpack.decode(data) for key, data in by_key(last).items()} == by_key(
        state(kept.savepoint, uid="remembers", state="last")
    )


@pytest.mark.spark
def test_spark_reads_the_checkpoints_and_the_state_in_them_as_dataframes(
    spark: SparkSession, kept: Kept
) -> None:
    connectors.register(spark)
    rows = spark.read.format("onceflow-checkpoints").load(kept.storage).collect()
    rows.sort(key=lambda row: (row["completed_at"], row["id"]))
    assert {row["kind"] for row in rows} == {"checkpoint", "savepoint"}
    assert [row["path"] for row in rows if row["kind"] == "savepoint"] == [kept.savepoint]
    last = rows[-1]
    assert (last["job"], last["parallelism"], last["max_parallelism"]) == ("remembers", 2, 16)
    assert last["completed_at"] >= last["triggered_at"]
    assert last["problem"] is None
    operators = {one["uid"]: one for one in last["operators"]}
    states = {one["name"]: (one["kind"], one["type"]) for one in operators["remembers"]["states"]}
    assert states == {
        "days": ("map", "msgpack/1:date -> ttl/1:msgpack/1:int"),
        "ids": ("list", "ttl/1:msgpack/1:int"),
        "last": ("value", "msgpack/1:int"),
        "seen": ("value", "msgpack/1:dict[str,int]"),
    }
    assert [one["name"] for one in operators["records"]["states"]] == ["splits"]
    assert operators["remembers"]["size_bytes"] > 0
    frame = spark.read.format("onceflow-state").options(uid="totals", job="remembers")
    (n,) = frame.load(kept.storage).selectExpr("sum(value.n) AS n").collect()
    assert n["n"] == state_job.RECORDS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"uid": "remember"}, "no operator 'remember': did you mean 'remembers'"),
        ({"uid": "remembers", "state": "dais"}, "no state 'dais': did you mean 'days'"),
        ({"uid": "remembers"}, r"days \(keyed\), ids \(keyed\).* Choose one"),
        ({"uid": "totals", "checkpoint": "999"}, "holds no checkpoint 999"),
        ({"uid": "totals", "job": "remembrs"}, "no job 'remembrs': did you mean 'remembers'"),
        ({"uid": "totals", "sate": "x"}, "did you mean 'state'"),
        ({"state": "days"}, "needs option 'uid'"),
    ],
)
def test_what_is_not_there_is_told_with_what_comes_nearest(
    kept: Kept, options: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        state(kept.storage, **options)


def test_a_missing_and_a_truncated_file_are_named(kept: Kept, tmp_path: Path) -> None:
    savepoint = tmp_path / "savepoint"
    shutil.copytree(kept.savepoint, savepoint)
    first, second = sorted((savepoint / "state").glob("remembers@*"))[:2]
    with first.open("r+b") as file:
        file.truncate(first.stat().st_size // 2)
    with pytest.raises(CheckpointCorrupt, match=rf"{first.name}.*is damaged"):
        state(str(savepoint), uid="remembers", state="last")
    second.unlink()
    shutil.copy(Path(kept.savepoint) / "state" / first.name, first)
    with pytest.raises(CheckpointCorrupt, match=rf"{second.name}.*is gone"):
        state(str(savepoint), uid="remembers", state="last")
    storage = tmp_path / "storage"
    shutil.copytree(kept.storage, storage)
    shutil.rmtree(next(storage.glob("remembers/savepoints/*")) / "state")
    problems = {row["kind"]: row["problem"] for row in listed(storage)}
    assert problems["checkpoint"] is None
    assert "is gone" in problems["savepoint"]


def listed(storage: Path) -> list[dict[str, Any]]:
    reader = CheckpointsReader({"path": str(storage)}, checkpoints_schema())
    return [row for t in reader.partitions() for b in reader.read(t) for row in b.to_pylist()]
