"""The Delta sink in a directory: one version a checkpoint, whatever a commit meets."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from onceflow.core.errors import BadRow, ConfigError, Fenced, PreparedTransactionLost
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import (
    CommitterContext,
    GlobalCommitter,
    OnBadRow,
    SinkWriter,
    WriterContext,
)
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import DeltaSink

_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
_SINK_ID = "job.rows"
_UTC = timezone.utc


class _Job:
    """The sink over a directory, without an engine."""

    def __init__(self, directory: Path, schema: pa.Schema = _SCHEMA, **settings: Any) -> None:
        self.path, self.schema = directory / "table", schema
        given: dict[str, Any] = {"create": True, **settings}
        self.sink = DeltaSink(str(self.path), **given)
        self.staging = FileStagingArea.in_directory(str(directory / "staging"), _SINK_ID)

    def open(self, attempt: int = 1, log_id: str = "log-1") -> _Job:
        self.sink.open(self.context(attempt, log_id), self.schema)
        return self

    def context(self, attempt: int = 1, log_id: str = "log-1") -> CommitterContext:
        return CommitterContext("job", "rows", _SINK_ID, AttemptId(attempt), log_id, self.staging)

    def writer(
        self, attempt: int = 1, subtask: int = 0, on_bad_row: OnBadRow = OnBadRow.FAIL
    ) -> SinkWriter:
        return self.sink.writer(
            WriterContext(
                job="job",
                uid="rows",
                sink_id=_SINK_ID,
                subtask=subtask,
                parallelism=2,
                attempt=AttemptId(attempt),
                first_checkpoint=CheckpointId(1),
                schema=self.schema,
                staging=self.staging,
                on_bad_row=on_bad_row,
            )
        )

    def prepare(
        self, checkpoint: int, rows: Sequence[Mapping[str, Any]], **context: Any
    ) -> Committable:
        writer = self.writer(**context)
        writer.write(self.batch(rows))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        return committable

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=self.schema)

    def commit(
        self, checkpoint: int, *committables: Committable, attempt: int = 1
    ) -> CommitOutcome:
        with self.committer(attempt) as committer:
            return committer.commit_checkpoint(CheckpointId(checkpoint), committables)

    @contextmanager
    def committer(self, attempt: int = 1) -> Generator[GlobalCommitter, None, None]:
        committer = self.sink.committer(self.context(attempt))
        try:
            yield committer
        finally:
            committer.close()

    def rows(self) -> list[dict[str, Any]]:
        table = cast("Any", DeltaTable(self.path)).to_pyarrow_table()
        rows: list[dict[str, Any]] = table.to_pylist()
        return sorted(rows, key=lambda row: row["id"])

    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows()]


def one(number: int) -> list[dict[str, Any]]:
    return [{"id": number, "v": f"v{number}"}]


def test_a_checkpoint_of_all_subtasks_is_one_version_with_txn_and_names(tmp_path: Path) -> None:
    job = _Job(tmp_path).open()
    first = [job.prepare(3, one(subtask), subtask=subtask) for subtask in range(3)]
    assert job.ids() == []
    assert job.commit(3, *first) == Committed()
    assert job.commit(3, *first) == AlreadyCommitted()
    table = DeltaTable(job.path)
    assert job.ids() == [0, 1, 2]
    assert (table.version(), table.transaction_version(_SINK_ID)) == (2, 3)
    (commit,) = table.history(1)
    assert {name: value for name, value in commit.items() if "onceflow" in name} == {
        "onceflow.log-id": "log-1",
        "onceflow.sink-id": _SINK_ID,
        "onceflow.attempt": "1",
        "onceflow.checkpoint": "3",
        "onceflow.checkpoint-before": "0",
        "onceflow.attempts": "1",
    }


def test_two_drivers_and_another_writer_between_make_one_version_of_a_checkpoint(
    tmp_path: Path,
) -> None:
    """The table that a driver has loaded is overtaken before it makes its version."""
    from onceflow.sinks.delta.table import DeltaLakeTable
    from onceflow.sinks.lake.committer import LakeCommitter

    job = _Job(tmp_path).open()
    prepared = job.prepare(1, one(1))
    outcomes: list[CommitOutcome] = []

    class Overtaken(DeltaLakeTable):
        def load(self) -> Any:
            version = super().load()
            if not outcomes:
                rows: Any = pa.Table.from_batches([job.batch(one(7))])
                write_deltalake(job.path, rows, mode="append")
                outcomes.append(job.commit(1, prepared))
            return version

    location = cast("Any", job.sink)._location
    committer = LakeCommitter(Overtaken(location, _SINK_ID), job.context())
    outcomes.append(committer.commit_checkpoint(CheckpointId(1), [prepared]))
    assert outcomes == [Committed(), AlreadyCommitted()]
    assert job.ids() == [1, 7]


def test_an_older_attempt_and_another_job_are_refused_by_name(tmp_path: Path) -> None:
    job = _Job(tmp_path).open(attempt=2)
    with pytest.raises(Fenced, match="attempt 2 of the same job has claimed it"):
        job.open(attempt=2)
    with pytest.raises(ConfigError, match="belongs to decision log 'log-1'"):
        job.open(attempt=3, log_id="log-2")


def test_claims_tell_what_was_committed_before_each_attempt(tmp_path: Path) -> None:
    job = _Job(tmp_path).open()
    assert job.commit(4, job.prepare(4, one(1))) == Committed()
    job.open(attempt=2)
    record = job.sink.target_record(job.context(2))
    assert (record.attempt, record.through) == (2, 4)
    assert [(claim.attempt, claim.checkpoint) for claim in record.claims] == [(1, 0), (2, 4)]


def test_a_table_that_was_restored_is_noticed_at_start_and_at_a_commit(tmp_path: Path) -> None:
    job = _Job(tmp_path).open()
    job.open(attempt=2)
    assert job.commit(1, job.prepare(1, one(1)), attempt=2) == Committed()
    prepared = job.prepare(2, one(2))
    DeltaTable(job.path).restore(2)
    outcome = job.commit(2, prepared, attempt=2)
    assert isinstance(outcome, RetryLater), outcome
    assert outcome.until_mended
    with pytest.raises(PreparedTransactionLost, match="version 4 has restored an older version"):
        job.sink.target_record(job.context(3))
    DeltaTable(job.path).restore(3)


def test_a_table_that_was_deleted_and_created_anew_gets_no_rows_of_the_old_one(
    tmp_path: Path,
) -> None:
    job = _Job(tmp_path).open()
    prepared = job.prepare(1, one(1))
    shutil.rmtree(job.path)
    outcome = job.commit(1, prepared)
    assert isinstance(outcome, RetryLater), outcome
    assert "does not exist" in outcome.reason
    outcome = job.open(attempt=2).commit(1, prepared, attempt=2)
    assert isinstance(outcome, Lost), outcome
    assert "was deleted and created anew" in outcome.reason
    assert job.ids() == []


def test_data_files_that_somebody_deleted_are_lost_by_name(tmp_path: Path) -> None:
    job = _Job(tmp_path).open()
    prepared = job.prepare(1, one(1))
    (file,) = job.path.glob("*.parquet")
    file.unlink()
    assert job.commit(1, prepared) == Lost(f"Delta table {job.path}: data file {file.name} is gone")


def test_aborted_files_are_deleted_and_committed_ones_never(tmp_path: Path) -> None:
    job = _Job(tmp_path).open()
    aborted, committed = job.prepare(1, one(1)), job.prepare(1, one(2), subtask=1)
    assert job.commit(1, committed) == Committed()
    with job.committer() as committer:
        assert committer.abort(aborted) == Aborted()
        assert committer.abort(committed) == AlreadyCommitted()
        assert committer.in_doubt() == []
    assert job.ids() == [2]
    assert len(list(job.path.glob("*.parquet"))) == 1


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
    job = _Job(tmp_path, schema=_TYPES, partition_by=("day", "kind", "at", "flag")).open()
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
    job = _Job(tmp_path).open()
    rows = [*one(5), {"id": 9, "v": None}, {"id": -3, "v": "z" * 100}]
    assert job.commit(1, job.prepare(1, rows)) == Committed()
    log = (job.path / "_delta_log" / f"{2:020}.json").read_text(encoding="utf-8")
    (added,) = [action["add"] for action in map(json.loads, log.splitlines()) if "add" in action]
    assert json.loads(added["stats"]) == {
        "numRecords": 3,
        "nullCount": {"id": 0, "v": 1},
        "minValues": {"id": -3},
        "maxValues": {"id": 9},
    }


def test_rows_that_the_table_can_never_take_fail_or_are_set_aside_by_name(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("price", pa.decimal128(20, 3))])
    table = pa.schema([pa.field("id", pa.int64(), nullable=False), ("price", pa.decimal128(6, 2))])
    _Job(tmp_path, schema=table).open()
    job = _Job(tmp_path, schema=schema).open(attempt=2)
    rows: list[dict[str, Any]] = [
        {"id": 1, "price": Decimal("1.500")},
        {"id": None, "price": Decimal(1)},
        {"id": 3, "price": Decimal("99999.000")},
    ]
    with pytest.raises(BadRow, match="column 'id' is required in the table"):
        job.prepare(1, rows)
    writer = job.writer(on_bad_row=OnBadRow.DROP)
    writer.write(job.batch(rows))
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert sum(len(some.reasons) for some in writer.take_rejected()) == 2
    writer.close()
    assert job.commit(1, committable) == Committed()
    assert job.rows() == [{"id": 1, "price": Decimal("1.50")}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([("id", pa.int64()), ("v", pa.string()), ("w", pa.int32())], "has no column 'w'.*evolve"),
        ([("v", pa.string())], "requires column 'id'"),
        ([("id", pa.string()), ("v", pa.string())], "column 'id': the table has int64, and"),
    ],
)
def test_columns_that_do_not_fit_are_refused_at_start(
    columns: list[Any], message: str, tmp_path: Path
) -> None:
    job = _Job(tmp_path).open()
    with pytest.raises(ConfigError, match=message):
        job.sink.validate(job.context(), pa.schema(columns))


def test_a_table_evolves_by_new_columns(tmp_path: Path) -> None:
    job = _Job(tmp_path).open()
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    new = pa.schema([*_SCHEMA, pa.field("w", pa.float64())])
    job = _Job(tmp_path, schema=new, evolve=True).open(attempt=2)
    prepared = job.prepare(2, [{"id": 2, "v": None, "w": 0.5}], attempt=2)
    assert job.commit(2, prepared, attempt=2) == Committed()
    assert job.rows() == [{"id": 1, "v": "v1", "w": None}, {"id": 2, "v": None, "w": 0.5}]


def test_a_table_with_rules_that_files_do_not_show_is_refused(tmp_path: Path) -> None:
    job = _Job(tmp_path).open()
    DeltaTable(job.path).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(ConfigError, match=r"rules that the sink does not check: delta\.constraint"):
        job.open(attempt=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition_by": ("id",)}, "partition_by is for a table that is created"),
        ({"partition_by": "id", "create": True}, "give a tuple of column names"),
        (
            {"storage_options": {"AWS_S3_ALLOW_UNSAFE_RENAME": "true"}},
            "could make the same version",
        ),
    ],
)
def test_settings_that_are_wrong_by_themselves_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DeltaSink("/data/t"), **settings)


def test_a_missing_table_and_a_missing_extra_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="does not exist; create it, or say create=True"):
        _Job(tmp_path, create=False).open()
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"install onceflow\[delta\]"):
        _Job(tmp_path).open()


def test_the_description_prints_no_storage_option() -> None:
    sink = DeltaSink("s3://lake/t", storage_options={"AWS_SECRET_ACCESS_KEY": "geheim"})
    assert "geheim" not in repr(sink)
    assert pickle.loads(pickle.dumps(sink)) == sink
