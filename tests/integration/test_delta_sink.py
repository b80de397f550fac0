"""The Delta sink in a directory: one version a checkpoint, whatever a commit meets."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from tests.integration.lake_sink_kit import SINK_ID, DeltaJob, one

from onceflow.core.errors import BadRow, ConfigError, PreparedTransactionLost
from onceflow.core.protocol.committables import (
    AlreadyCommitted,
    Committed,
    RetryLater,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import DeltaSink

_UTC = timezone.utc


def test_a_checkpoint_of_all_subtasks_is_one_version_with_txn_and_names(tmp_path: Path) -> None:
    job = DeltaJob(tmp_path).open()
    first = [job.prepare(3, one(subtask), subtask=subtask) for subtask in range(3)]
    assert job.ids() == []
    assert job.commit(3, *first) == Committed()
    assert job.commit(3, *first) == AlreadyCommitted()
    table = DeltaTable(job.path)
    assert job.ids() == [0, 1, 2]
    assert (table.version(), table.transaction_version(SINK_ID)) == (2, 3)
    (commit,) = table.history(1)
    assert {name: value for name, value in commit.items() if "onceflow" in name} == {
        "onceflow.log-id": "log-1",
        "onceflow.sink-id": SINK_ID,
        "onceflow.attempt": "1",
        "onceflow.checkpoint": "3",
        "onceflow.checkpoint-before": "0",
        "onceflow.attempts": "1",
    }


def test_a_table_that_was_restored_is_noticed_at_start_and_at_a_commit(tmp_path: Path) -> None:
    job = DeltaJob(tmp_path).open()
    job.open(attempt=2)
    assert job.commit(1, job.prepare(1, one(1)), attempt=2) == Committed()
    prepared = job.prepare(2, one(2))
    DeltaTable(job.path).restore(2)
    outcome = job.commit(2, prepared, attempt=2)
    assert isinstance(outcome, RetryLater), outcome
    assert outcome.until_fixed
    DeltaTable(job.path).restore(1)
    with pytest.raises(PreparedTransactionLost, match=r"version 4 restored .* version 3"):
        job.sink.target_record(job.context(3))
    DeltaTable(job.path).restore(3)
    assert job.commit(2, prepared, attempt=2) == Committed()
    assert job.ids() == [1, 2]


def test_a_table_that_was_restored_by_time_is_noticed_and_made_whole_by_version(
    tmp_path: Path,
) -> None:
    """The table's history does not have the version that belongs to a time."""
    job = DeltaJob(tmp_path).open()
    # A version's time is that of its file, which a file system may round down by some milliseconds.
    an_hour_ago = time.time() - 3600
    for file in (Path(job.path) / "_delta_log").iterdir():
        os.utime(file, (an_hour_ago, an_hour_ago))
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    DeltaTable(job.path).restore(datetime.now(_UTC) - timedelta(minutes=30))
    with pytest.raises(PreparedTransactionLost, match="Restore version 2"):
        job.sink.target_record(job.context(2))
    DeltaTable(job.path).restore(2)
    job.open(attempt=2)
    assert job.ids() == [1]


def test_a_secret_whose_file_is_away_in_a_commit_is_waited_for(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("geheim")
    job = DeltaJob(tmp_path, storage_options={"token": f"${{file:{secret}}}"}).open()
    prepared = job.prepare(1, one(1))
    secret.unlink()
    outcome = job.commit(1, prepared)
    assert isinstance(outcome, RetryLater), outcome
    assert "the secret's file" in outcome.reason
    secret.write_text("geheim")
    assert job.commit(1, prepared) == Committed()
    assert job.ids() == [1]


_TYPES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int32()),
        pa.field("flag", pa.bool_()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("raw", pa.binary()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("who", pa.struct([("name", pa.string()), ("age", pa.int32())])),
        pa.field("kind", pa.string()),
    ]
)


def test_values_of_all_types_and_partitions_are_read_back_as_they_were_written(
    tmp_path: Path,
) -> None:
    job = DeltaJob(tmp_path, schema=_TYPES, partition_by=("day", "kind", "at", "flag")).open()
    at = datetime(2026, 2, 28, 23, 59, 59, 999_999, _UTC)
    rows: list[dict[str, Any]] = [
        {
            "id": 1, "small": -5, "flag": True, "price": Decimal("-12.50"), "day": at.date(),
            "at": at, "raw": b"\x00\xff", "tags": ["a", None], "who": {"name": "Ada", "age": 36},
            "kind": "x/y=ü %",
        },
        {"id": 2, **dict.fromkeys(_TYPES.names[1:])},
    ]  # fmt: skip
    assert job.commit(1, job.prepare(1, rows)) == Committed()
    assert job.rows() == rows
    table = cast("Any", DeltaTable(job.path))
    found = table.to_pyarrow_table(filters=[("day", "=", date(2026, 2, 28))])
    assert found["id"].to_pylist() == [1]


def test_files_have_counts_and_bounds_by_which_readers_skip_them(tmp_path: Path) -> None:
    job = DeltaJob(tmp_path).open()
    rows = [*one(5), {"id": 9, "v": None}, {"id": -3, "v": "z" * 100}]
    assert job.commit(1, job.prepare(1, rows)) == Committed()
    log = (job.path / "_delta_log" / f"{2:020}.json").read_text(encoding="utf-8")
    (added,) = [action["add"] for action in map(json.loads, log.splitlines()) if "add" in action]
    assert json.loads(added["stats"]) == {
        "numRecords": 3,
        "nullCount": {"id": 0, "v": 1},
        "minValues": {"id": -3, "v": "v5"},
        "maxValues": {"id": 9, "v": "z" * 31 + "{"},
    }


def test_a_table_that_lists_its_features_is_written_again_after_a_restart(tmp_path: Path) -> None:
    """deltalake adds a feature to such a table when the sink claims it."""
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("at", pa.timestamp("us"))])
    job = DeltaJob(tmp_path, schema=schema).open()
    rows = [{"id": 1, "at": datetime(2024, 1, 2)}]
    assert job.commit(1, job.prepare(1, rows)) == Committed()
    job.open(attempt=2)
    later = job.prepare(2, [{"id": 2, "at": None}], attempt=2)
    assert job.commit(2, later, attempt=2) == Committed()
    assert _read_ids(job) == [1, 2]


def test_rows_that_wait_are_not_added_to_a_table_that_has_got_a_rule(tmp_path: Path) -> None:
    job = DeltaJob(tmp_path).open()
    prepared = job.prepare(1, one(-1))
    DeltaTable(job.path).alter.add_constraint({"positive": "id > 0"})
    outcome = job.commit(1, prepared)
    assert isinstance(outcome, RetryLater), outcome
    assert outcome.until_fixed
    assert "delta.constraints.positive" in outcome.reason
    assert "wait for their commit" in outcome.reason
    DeltaTable(job.path).alter.drop_constraint("positive")
    assert job.commit(1, prepared) == Committed()
    assert job.ids() == [-1]


def test_an_empty_partition_value_which_would_be_read_as_null_is_a_bad_row(tmp_path: Path) -> None:
    job = DeltaJob(tmp_path, partition_by=("v",)).open()
    with pytest.raises(BadRow, match="which the table would store as null"):
        job.prepare(1, [{"id": 1, "v": ""}])
    assert job.commit(1, job.prepare(1, [{"id": 1, "v": " "}, {"id": 2, "v": None}])) == Committed()
    assert [row["v"] for row in job.rows()] == [" ", None]


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_of_partitions_have_four_digits_of_a_year_and_say_that_they_are_utc(
    zone: str | None, tmp_path: Path
) -> None:
    kind = pa.timestamp("us", zone)
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("at", kind)])
    job = DeltaJob(tmp_path, schema=schema, partition_by=("at",)).open()
    at = datetime(999, 1, 2, 3, 4, 5, 6, tzinfo=_UTC if zone else None)
    assert job.commit(1, job.prepare(1, [{"id": 1, "at": at}])) == Committed()
    (add,) = _added_files(job)
    text = "0999-01-02T03:04:05.000006Z" if zone else "0999-01-02 03:04:05.000006"
    assert add["partitionValues"] == {"at": text}
    assert _read_ids(job) == [1]


def test_dates_beyond_the_year_9999_have_no_bounds(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("day", pa.date32())])
    job = DeltaJob(tmp_path, schema=schema).open()
    writer = job.writer()
    days = pa.array([3_000_000], pa.int32()).cast(pa.date32())
    writer.write(pa.RecordBatch.from_arrays([pa.array([1]), days], schema=schema))
    assert job.commit(1, *writer.pre_commit(CheckpointId(1))) == Committed()
    (add,) = _added_files(job)
    assert json.loads(add["stats"]) == {"numRecords": 1, "nullCount": {"id": 0, "day": 0}}


def _added_files(job: DeltaJob) -> list[dict[str, Any]]:
    newest = max((job.path / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in newest.read_text().splitlines()]
    return [action["add"] for action in actions if "add" in action]


def _read_ids(job: DeltaJob) -> list[int]:
    rows = QueryBuilder().register("t", DeltaTable(job.path)).execute("SELECT id FROM t")
    return sorted(pa.table(cast("Any", rows.read_all()))["id"].to_pylist())


def test_a_table_with_rules_that_files_do_not_show_is_refused(tmp_path: Path) -> None:
    job = DeltaJob(tmp_path).open()
    DeltaTable(job.path).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(ConfigError, match=r"rules that the sink does not check: delta\.constraint"):
        job.open(attempt=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition_by": ("id",)}, "partition_by is only for a table that the sink creates"),
        ({"partition_by": "id", "create": True}, "takes a list"),
        (
            {"storage_options": {"AWS_S3_ALLOW_UNSAFE_RENAME": "true"}},
            "could write the same version",
        ),
    ],
)
def test_settings_that_are_wrong_by_themselves_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DeltaSink("/data/t"), **settings)


@pytest.mark.parametrize("evolve", [False, True])
def test_a_column_whose_name_differs_in_case_alone_is_refused_with_its_name_in_the_table(
    tmp_path: Path, evolve: bool
) -> None:
    """Delta adds no such column, however often the job is started again."""
    DeltaJob(tmp_path, pa.schema([("id", pa.int64()), ("Value", pa.string())])).open()
    rows = pa.schema([("id", pa.int64()), ("value", pa.string())])
    with pytest.raises(ConfigError, match="has column 'Value', but the rows have 'value'"):
        DeltaJob(tmp_path, rows, evolve=evolve).open(attempt=2)


def test_a_missing_table_and_a_missing_extra_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="does not exist; create it, or set create=True"):
        DeltaJob(tmp_path, create=False).open()
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"install onceflow\[delta\]"):
        DeltaJob(tmp_path).open()


def test_the_description_prints_no_storage_option() -> None:
    sink = DeltaSink("s3://lake/t", storage_options={"AWS_SECRET_ACCESS_KEY": "geheim"})
    assert "geheim" not in repr(sink)
    assert pickle.loads(pickle.dumps(sink)) == sink
