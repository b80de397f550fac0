"""Iceberg tables that lose a partition spec, or its source column, while rows wait for a commit."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.update import RemovePartitionSpecsUpdate, RemoveSchemasUpdate
from pyiceberg.transforms import BucketTransform, IdentityTransform, TruncateTransform
from pyiceberg.types import StringType
from tests.integration.lake_sink_kit import IcebergJob, one

from onceflow.core.protocol.committables import Committable, Committed, RetryLater

_ID = pa.field("id", pa.int64(), nullable=False)
_WITHOUT_COLUMN = pa.schema([_ID])
_UPSERT: dict[str, Any] = {"write_mode": "upsert", "primary_key": ("id",)}
_ADVICE = "Stop the job and start it without the column"


@pytest.mark.parametrize(
    ("term", "kind", "value"),
    [
        ("v", pa.string(), "a"),
        ("v", pa.date32(), date(2026, 2, 28)),
        ("v", pa.decimal128(9, 2), Decimal("1.25")),
        ("v", pa.binary(), b"\x00\xff"),
        ("bucket(4, v)", pa.string(), "a"),
        ("year(v)", pa.date32(), date(2026, 2, 28)),
        ("truncate(2, v)", pa.string(), None),
    ],
    ids=["text", "date", "decimal", "bytes", "bucket", "year", "null"],
)
def test_rows_that_wait_when_their_partition_column_is_dropped_are_committed_without_it(
    term: str, kind: pa.DataType, value: object, tmp_path: Path
) -> None:
    schema = pa.schema([_ID, pa.field("v", kind)])
    job = IcebergJob(tmp_path, schema=schema, partition_by=(term, "bucket(3, id)")).open()
    prepared = job.prepare(1, [{"id": 1, "v": value}])
    _drop_partition_column(job)
    _require_stuck(job, prepared, _ADVICE)
    job.schema = _WITHOUT_COLUMN
    job.open(attempt=2)
    assert job.commit(1, prepared, attempt=2) == Committed(files=1)
    assert job.rows() == [{"id": 1}]
    with job.table() as table:
        assert table.scan(row_filter="id == 1").to_arrow().to_pylist() == [{"id": 1}]


def test_changes_that_wait_when_their_partition_column_is_dropped_are_committed_without_it(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path, partition_by=("v",), **_UPSERT).open()
    prepared = job.prepare(1, one(1))
    _drop_partition_column(job)
    _require_stuck(job, prepared, _ADVICE)
    job.schema = _WITHOUT_COLUMN
    job.open(attempt=2)
    assert job.commit(1, prepared, attempt=2) == Committed(files=1)
    assert job.rows() == [{"id": 1}]


def test_changes_that_wait_when_nothing_tells_a_dropped_column_from_a_renamed_one_are_refused(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path, **_UPSERT).open()
    prepared = job.prepare(1, one(1))
    _drop_partition_column(job)
    _remove_former_schemas(job)
    job.schema = _WITHOUT_COLUMN
    job.open(attempt=2)
    _require_stuck(job, prepared, "If the column was dropped, add it, and drop it again", attempt=2)
    # The advice.
    with job.table() as table, table.update_schema() as update:
        update.add_column("v", StringType())
    assert job.commit(1, prepared, attempt=2) == Committed(files=1)
    _drop_partition_column(job)
    later = job.prepare(2, [{"id": 2}], attempt=2, first_checkpoint=2)
    assert job.commit(2, later, attempt=2) == Committed(files=1)
    assert job.rows() == [{"id": 1}, {"id": 2}]


def test_changes_that_wait_when_a_column_is_renamed_keep_its_values(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path, **_UPSERT).open()
    prepared = job.prepare(1, one(1))
    with job.table() as table, table.update_schema() as update:
        update.rename_column("v", "w")
    job.schema = pa.schema([_ID, pa.field("w", pa.string())])
    job.open(attempt=2)
    _require_stuck(job, prepared, "give it its name again", attempt=2)
    with job.table() as table, table.update_schema() as update:
        update.rename_column("w", "v")
    assert job.commit(1, prepared, attempt=2) == Committed(files=1)
    assert job.rows() == one(1)


def test_changes_whose_key_is_dropped_are_refused_without_advice_that_doubles(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path, **_UPSERT).open()
    prepared = job.prepare(1, one(1))
    with job.table() as table, table.update_schema(allow_incompatible_changes=True) as update:
        update.set_identifier_fields()
        update.delete_column("id")
    _require_stuck(job, prepared, "do not add a column of this name", attempt=1)


@pytest.mark.parametrize("removes_schemas", [False, True])
def test_commits_go_on_over_manifests_whose_partition_column_is_dropped(
    removes_schemas: bool, tmp_path: Path
) -> None:
    job = IcebergJob(tmp_path, partition_by=("v",)).open()
    first = job.prepare(1, one(1))
    assert job.commit(1, first) == Committed(files=1)
    waiting = job.prepare(2, one(2), first_checkpoint=2)
    _drop_partition_column(job)
    if removes_schemas:
        _remove_former_schemas(job)
    job.schema = _WITHOUT_COLUMN
    job.open(attempt=2)
    assert job.commit(2, waiting, attempt=2) == Committed(files=1)
    with job.table() as table, table.transaction() as transaction:
        transaction.set_properties({"commit.manifest.min-count-to-merge": "2"})
    later = job.prepare(3, [{"id": 3}], attempt=2, first_checkpoint=3)
    assert job.commit(3, later, attempt=2) == Committed(files=1)
    assert job.ids() == [1, 2, 3]
    with job.table() as table:
        (merged,) = [m for m in table.inspect.manifests().to_pylist() if not m["partition_spec_id"]]
    assert merged["existing_data_files_count"] == 2


@pytest.mark.parametrize("removes_schemas", [False, True])
def test_files_whose_partition_column_is_dropped_take_changes(
    removes_schemas: bool, tmp_path: Path
) -> None:
    job = IcebergJob(tmp_path, partition_by=("v",), **_UPSERT).open()
    rows = [{"id": number, "v": f"v{number % 2}"} for number in range(4)]
    assert job.commit(1, job.prepare(1, rows)) == Committed(files=2)
    _drop_partition_column(job)
    with job.table() as table, table.update_schema() as update:
        update.add_column("w", StringType())
    if removes_schemas:
        _remove_former_schemas(job)
    job.schema = pa.schema([_ID, pa.field("w", pa.string())])
    job.open(attempt=2)
    changed = job.prepare(2, [{"id": 2, "w": "new"}], attempt=2, first_checkpoint=2)
    assert isinstance(job.commit(2, changed, attempt=2), Committed)
    assert job.rows() == [{"id": i, "w": "new" if i == 2 else None} for i in range(4)]


def test_files_whose_partition_spec_is_removed_get_into_no_other_partition(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path, partition_by=("v",)).open()
    with job.table() as table, table.update_spec() as update:
        update.add_field("id", BucketTransform(4), "part")
    prepared = job.prepare(1, one(1))
    with job.table() as table, table.update_spec() as update:
        update.remove_field("part")
    with job.table() as table, table.transaction() as transaction:
        removal = RemovePartitionSpecsUpdate.model_validate({"spec-ids": [1]})
        transaction._apply((removal,), ())  # pyright: ignore[reportPrivateUsage]
    _require_stuck(job, prepared, "was removed from the table")
    with job.table() as table, table.update_spec() as update:
        update.add_field("id", TruncateTransform(4), "other")
    with job.table() as table:
        assert table.metadata.default_spec_id == 1
    _require_stuck(job, prepared, "was removed from the table")
    # The advice.
    with job.table() as table, table.update_spec() as update:
        update.remove_field("other").remove_field("v")
    with job.table() as table, table.update_spec() as update:
        update.add_field("v", IdentityTransform(), "v")
    assert job.commit(1, prepared) == Committed(files=1)
    with job.table() as table:
        for row_filter in ("v == 'v1'", "id == 1"):
            assert table.scan(row_filter=row_filter).to_arrow().to_pylist() == one(1)


def _drop_partition_column(job: IcebergJob) -> None:
    """Stop partitioning by `v`, and drop the column, as another program does."""
    with job.table() as table, table.update_spec() as update:
        for field in table.spec().fields:
            if field.source_id == table.schema().find_field("v").field_id:
                update.remove_field(field.name)
    with job.table() as table, table.update_schema(allow_incompatible_changes=True) as columns:
        columns.delete_column("v")


def _remove_former_schemas(job: IcebergJob) -> None:
    """Remove all schemas but the current one, as an engine that expires snapshots may do."""
    with job.table() as table, table.transaction() as transaction:
        current = table.metadata.current_schema_id
        former = [schema for schema in table.schemas() if schema != current]
        removal = RemoveSchemasUpdate.model_validate({"schema-ids": former})
        transaction._apply((removal,), ())  # pyright: ignore[reportPrivateUsage]


def _require_stuck(job: IcebergJob, prepared: Committable, reason: str, attempt: int = 1) -> None:
    outcome = job.commit(1, prepared, attempt=attempt)
    assert isinstance(outcome, RetryLater), outcome
    assert outcome.until_fixed
    assert reason in outcome.reason
