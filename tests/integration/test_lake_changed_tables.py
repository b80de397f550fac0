"""Tables whose columns or partitions somebody changes while rows wait for their commit."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.table.update import SetLocationUpdate
from pyiceberg.table.update.schema import UpdateSchema
from pyiceberg.types import LongType, StringType
from tests.integration.lake_sink_kit import DeltaJob, IcebergJob, LakeJob, one

from onceflow.core.errors import BadRow, ConfigError, OnceflowError, PreCommitFailed
from onceflow.core.protocol.committables import Aborted, Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow

_NULL = [{"id": 1, "v": None}]
_ID = pa.field("id", pa.int64(), nullable=False)


def test_iceberg_column_that_is_dropped_under_a_job_stops_its_commits(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path).open()
    prepared = job.prepare(1, one(1))
    _change(job, lambda update: update.delete_column("v"))
    _refuse(job.commit(1, prepared), "column 'v' was dropped while the job writes it")
    with pytest.raises(ConfigError, match="has no column 'v'"):
        job.open(attempt=2)
    job.schema = pa.schema([_ID])
    job.open(attempt=2)
    assert job.commit(1, prepared, attempt=2) == Committed()
    assert job.rows() == [{"id": 1}]


def test_iceberg_column_that_is_dropped_and_created_anew_loses_no_value_in_silence(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path).open()
    writer = job.writer()
    _change(job, lambda update: update.delete_column("v"))
    _change(job, lambda update: update.add_column("v", StringType()))
    writer.write(job.batch(one(1)))
    (prepared,) = writer.pre_commit(CheckpointId(1))
    writer.close()
    _refuse(job.commit(1, prepared), "was dropped and created anew")
    job.open(attempt=2)
    _refuse(job.commit(1, prepared, attempt=2), "was dropped and created anew")
    assert job.rows() == []


def test_iceberg_columns_that_are_renamed_widened_and_added_find_their_values(
    tmp_path: Path,
) -> None:
    schema = pa.schema([_ID, pa.field("n", pa.int32()), pa.field("v", pa.string())])
    job = IcebergJob(tmp_path, schema=schema).open()
    prepared = job.prepare(1, [{"id": 1, "n": 7, "v": "a"}])
    _change(job, lambda update: update.rename_column("v", "w").update_column("n", LongType()))
    _change(job, lambda update: update.add_column("v", LongType()))
    assert job.commit(1, prepared) == Committed()
    assert job.rows() == [{"id": 1, "n": 7, "w": "a", "v": None}]


@pytest.mark.parametrize(
    ("rows", "answer"),
    [(_NULL, "column 'v' is now required"), (one(1), "")],
    ids=["null", "no null"],
)
def test_iceberg_column_that_gets_required_never_gets_a_null(
    rows: Sequence[Mapping[str, Any]], answer: str, tmp_path: Path
) -> None:
    job = IcebergJob(tmp_path).open()
    prepared = job.prepare(1, rows)
    _change(job, lambda update: update.update_column("v", required=True))
    if answer:
        _refuse(job.commit(1, prepared), answer)
        _change(job, lambda update: update.make_column_optional("v"))
    assert job.commit(1, prepared) == Committed()
    assert job.rows() == rows


def test_iceberg_required_column_that_is_added_keeps_the_table_readable(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path).open()
    prepared = job.prepare(1, one(1))
    _change(job, lambda update: update.add_column("r", LongType(), required=True))
    _refuse(job.commit(1, prepared), "the required column 'r', which the files lack")
    assert job.rows() == []


def test_iceberg_table_that_gets_another_location_takes_the_rows_that_wait(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path).open()
    prepared, aborted = job.prepare(1, one(1)), job.prepare(1, one(2), subtask=1)
    with job.table() as table, table.transaction() as transaction:
        moved = SetLocationUpdate(location=f"{table.location()}_moved")
        transaction._apply((moved,), ())  # pyright: ignore[reportPrivateUsage]
    assert job.commit(1, prepared) == Committed()
    with job.committer() as committer:
        assert committer.abort(aborted) == Aborted()
    job.open(attempt=2)
    later = job.prepare(2, one(3), attempt=2, first_checkpoint=2)
    assert job.commit(2, later, attempt=2) == Committed()
    assert job.ids() == [1, 3]
    assert len(job.data_files()) == 2


@pytest.mark.parametrize("change", ["moved", "dropped", "renamed", "in a list"])
def test_iceberg_record_whose_fields_are_changed_gets_no_value_of_another_field(
    change: str, tmp_path: Path
) -> None:
    record = pa.struct([("a", pa.string()), ("b", pa.string())])
    schema = pa.schema([_ID, pa.field("r", record), pa.field("l", pa.list_(record))])
    job = IcebergJob(tmp_path, schema=schema, write_mode="upsert", primary_key=("id",)).open()
    value = {"a": "A", "b": "B"}
    rows = [{"id": 1, "r": value, "l": [value]}]
    prepared = job.prepare(1, rows)
    with job.table() as table, table.update_schema(allow_incompatible_changes=True) as update:
        match change:
            case "moved":
                update.move_first(("r", "b"))
            case "dropped":
                update.delete_column(("r", "b"))
            case "renamed":
                update.rename_column(("r", "b"), "c")
            case _:
                update.move_first(("l", "element", "b"))
    _refuse(job.commit(1, prepared), "give the table's fields their former names and order")
    assert job.rows() == []
    undo: dict[str, Callable[[UpdateSchema], object]] = {
        "moved": lambda update: update.move_first(("r", "a")),
        "dropped": lambda update: update.add_column(("r", "b"), StringType()),
        "renamed": lambda update: update.rename_column(("r", "c"), "b"),
        "in a list": lambda update: update.move_first(("l", "element", "a")),
    }
    _change(job, undo[change])
    _change(job, lambda update: update.add_column(("r", "new"), StringType()))
    assert job.commit(1, prepared) == Committed()
    assert job.rows() == [{"id": 1, "r": {**value, "new": None}, "l": [value]}]


@pytest.mark.parametrize(
    ("other", "partition_by", "reason"),
    [
        ([_ID, pa.field("v", pa.int64())], [], "column 'v' now has type"),
        ([_ID], [], "it no longer has the column 'v'"),
        ([_ID, pa.field("w", pa.string())], [], "it no longer has the column 'v'"),
        ([_ID, pa.field("v", pa.string(), nullable=False)], [], "column 'v' no longer takes null"),
        ([_ID, pa.field("v", pa.string())], ["v"], "it is now partitioned by ['v']"),
        ([_ID, pa.field("v", pa.string())], ["id"], "it is now partitioned by ['id']"),
    ],
    ids=["type", "dropped", "renamed", "required", "partitioned", "partitioned by a number"],
)
def test_delta_table_that_is_overwritten_with_another_schema_gets_no_file_that_does_not_fit(
    other: list[pa.Field], partition_by: list[str], reason: str, tmp_path: Path
) -> None:
    job = DeltaJob(tmp_path).open()
    prepared = job.prepare(1, _NULL)
    version = DeltaTable(job.path).version()
    _overwrite(job, other, partition_by)
    _refuse(job.commit(1, prepared), reason)
    assert [row["id"] for row in job.rows()] == [7]
    DeltaTable(job.path).restore(version)
    assert job.commit(1, prepared) == Committed()
    assert job.rows() == _NULL


@pytest.mark.parametrize(
    ("kind", "value", "other", "reason"),
    [
        (pa.float64(), 1.5, pa.field("v", pa.int64()), "column 'v' now has type int64"),
        (pa.int64(), 1, pa.field("v", pa.int32()), "column 'v' now has type int32"),
        (pa.string(), "a", pa.field("w", pa.string()), "it no longer has the column 'v'"),
        (pa.string(), None, pa.field("v", pa.string(), nullable=False), "no longer takes null"),
        (pa.decimal128(9, 2), "1.25", pa.field("v", pa.decimal128(9, 1)), "changes cannot be"),
    ],
    ids=["fraction", "narrower", "renamed", "required", "scale"],
)
def test_delta_table_that_is_overwritten_with_another_schema_gets_no_change_that_does_not_fit(
    kind: pa.DataType, value: object, other: pa.Field, reason: str, tmp_path: Path
) -> None:
    schema = pa.schema([_ID, pa.field("v", kind)])
    settings = {"write_mode": "upsert", "primary_key": ("id",)}
    job = DeltaJob(tmp_path, schema=schema, **settings).open()
    cell = pa.scalar(value).cast(kind) if isinstance(value, str) else pa.scalar(value, kind)
    rows = [{"id": 1, "v": cell.as_py()}]
    prepared = job.prepare(1, rows)
    version = DeltaTable(job.path).version()
    _overwrite(job, [_ID, other], [])
    _refuse(job.commit(1, prepared), reason)
    assert [row["id"] for row in job.rows()] == [7]
    DeltaTable(job.path).restore(version)
    assert job.commit(1, prepared) == Committed()
    assert job.rows() == rows


_UPSERT = {"write_mode": "upsert", "primary_key": ("id",)}


@pytest.mark.parametrize("settings", [{}, _UPSERT], ids=["append", "upsert"])
@pytest.mark.parametrize("kind", [IcebergJob, DeltaJob])
@pytest.mark.parametrize("policy", [OnBadRow.DROP, OnBadRow.FAIL])
def test_a_null_is_taken_once_its_column_allows_it_under_the_job(
    policy: OnBadRow,
    kind: type[IcebergJob | DeltaJob],
    settings: Mapping[str, Any],
    tmp_path: Path,
) -> None:
    job = kind(tmp_path, **settings).open()
    _set_required(job, required=True)
    job.open(attempt=2)
    writer = job.writer(attempt=2, on_bad_row=policy)
    if policy is OnBadRow.DROP:
        writer.write(job.batch(_NULL))
        assert [len(rejected.reasons) for rejected in writer.take_rejected()] == [1]
        # The table is as it was: such rows are left out, and the others are written.
        writer.write(job.batch([{"id": 2, "v": "b"}]))
        (good,) = writer.pre_commit(CheckpointId(1))
        assert job.commit(1, good, attempt=2) == Committed()
    _set_required(job, required=False)
    with pytest.raises(OnceflowError, match="changed under the job: column 'v'") as refused:
        writer.write(job.batch(_NULL))
        writer.take_rejected()
        writer.pre_commit(CheckpointId(2))
    assert not isinstance(refused.value, BadRow)
    assert isinstance(refused.value, PreCommitFailed) == (policy is OnBadRow.DROP)
    writer.close()
    job.open(attempt=3)
    prepared = job.prepare(2, _NULL, attempt=3, on_bad_row=policy)
    assert job.commit(2, prepared, attempt=3) == Committed()
    assert _NULL[0] in job.rows()


def _set_required(job: LakeJob, *, required: bool) -> None:
    """Have column `v` refuse nulls, or take them, as another program does."""
    if isinstance(job, IcebergJob):
        _change(job, lambda update: update.update_column("v", required=required))
        return
    assert isinstance(job, DeltaJob)
    _overwrite(job, [_ID, pa.field("v", pa.string(), nullable=not required)], [])


def _change(job: IcebergJob, change: Callable[[UpdateSchema], object]) -> None:
    """Change the columns as another program does, also in ways that Iceberg warns of."""
    with job.table() as table, table.update_schema(allow_incompatible_changes=True) as update:
        change(update)


def _overwrite(job: DeltaJob, columns: list[pa.Field], partition_by: list[str]) -> None:
    """Overwrite the table with one row, whose id is 7."""
    cells = [pa.array(["7"]).cast(field.type) for field in columns]
    rows: Any = pa.Table.from_arrays(cells, schema=pa.schema(columns))
    write_deltalake(
        job.path, rows, mode="overwrite", schema_mode="overwrite", partition_by=partition_by
    )


def _refuse(outcome: object, reason: str) -> None:
    assert isinstance(outcome, RetryLater), outcome
    assert outcome.until_fixed
    assert reason in outcome.reason


def test_iceberg_table_that_is_upgraded_under_a_job_is_refused_with_a_way_on(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path).open()
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    prepared = job.prepare(2, one(2), first_checkpoint=2)
    former = _upgrade(job)
    outcome = job.commit(2, prepared)
    _refuse(outcome, "has format version 3, but the sink writes only version 2")
    _refuse(outcome, f"metadata_file => '{former}'")
    with pytest.raises(ConfigError, match="as another table, in Spark by CALL") as refused:
        job.open(attempt=2)
    assert former in str(refused.value)
    with job.catalog() as catalog:
        catalog.register_table(("shop", "orders_2"), former)
    other = job.with_settings(table="shop.orders_2").open(attempt=2)
    assert other.commit(2, prepared, attempt=2) == Committed()
    with job.catalog() as catalog:
        rows = catalog.load_table(("shop", "orders_2")).scan().to_arrow().to_pylist()
    assert sorted(row["id"] for row in rows) == [1, 2]


def test_iceberg_table_without_a_former_metadata_file_is_refused_with_a_way_on(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path).open()
    _upgrade(job)
    for file in (tmp_path / "warehouse").rglob("*.metadata.json"):
        if not file.name.startswith("upgraded"):
            file.unlink()
    with pytest.raises(
        ConfigError,
        match="can be read. If .* Otherwise create another table of version 2, .* sources again",
    ):
        job.open(attempt=2)


def _upgrade(job: IcebergJob) -> str:
    """Set the table to format version 3, as Spark does; return its former metadata file."""
    with job.table() as table:
        former = table.metadata_location
    directory, _, name = former.removeprefix("file://").rpartition("/")
    metadata = json.loads(Path(directory, name).read_text())
    metadata["format-version"], metadata["next-row-id"] = 3, 0
    entry = {"metadata-file": former, "timestamp-ms": metadata["last-updated-ms"]}
    metadata["metadata-log"].append(entry)
    upgraded = Path(directory, f"upgraded-{name}")
    upgraded.write_text(json.dumps(metadata))
    with closing(sqlite3.connect(job.directory / "catalog.db")) as catalog, catalog:
        catalog.execute(
            "UPDATE iceberg_tables SET metadata_location = ?, previous_metadata_location = ?"
            " WHERE table_name = 'orders'",
            (f"file://{upgraded}", former),
        )
    return former
