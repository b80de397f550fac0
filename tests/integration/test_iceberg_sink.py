"""The Iceberg sink over a SQLite catalog: one snapshot a checkpoint, whatever a commit meets."""

from __future__ import annotations

import pickle
import shutil
import sys
import traceback
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyiceberg.manifest import ManifestContent
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType, UUIDType
from tests.integration.lake_sink_kit import SCHEMA, SINK_ID, IcebergJob, one

from onceflow.core.errors import ConfigError, PreparedTransactionLost, SinkError
from onceflow.core.protocol.committables import AlreadyCommitted, Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import IcebergSink

_UTC = timezone.utc


def test_a_checkpoint_of_all_subtasks_is_one_snapshot_that_names_log_sink_and_checkpoint(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path).open()
    first = [job.prepare(3, one(subtask), subtask=subtask) for subtask in range(3)]
    assert job.ids() == []
    assert job.commit(3, *first) == Committed()
    assert job.ids() == [0, 1, 2]
    with job.table() as table:
        claim, snapshot = table.snapshots()
        assert claim.summary is not None
        assert claim.summary["total-records"] == "0"
        assert snapshot.summary is not None
        own = {k: v for k, v in snapshot.summary.additional_properties.items() if "onceflow" in k}
    assert own == {
        "onceflow.log-id": "log-1",
        "onceflow.sink-id": SINK_ID,
        "onceflow.attempt": "1",
        "onceflow.checkpoint": "3",
        "onceflow.checkpoint-before": "0",
        "onceflow.attempts": "1",
    }


def test_a_table_that_was_rolled_back_is_noticed_at_start_and_at_a_commit(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path).open()
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    prepared = job.prepare(2, one(2), first_checkpoint=2)
    with job.table() as table:
        table.manage_snapshots().rollback_to_snapshot(table.snapshots()[0].snapshot_id).commit()
    outcome = job.commit(2, prepared)
    assert isinstance(outcome, RetryLater), outcome
    assert outcome.until_fixed
    assert "was rolled back or replaced" in outcome.reason
    with pytest.raises(PreparedTransactionLost, match="the last one of sink id 'job.rows'"):
        job.sink.target_record(job.context(2))
    with job.table() as table, table.transaction() as transaction:
        transaction.remove_properties(f"onceflow.sink.{SINK_ID}.snapshot")
    assert job.open(attempt=2).commit(2, prepared, attempt=2) == Committed()
    assert job.ids() == [2]


def test_partition_spec_that_changes_under_a_running_job_is_kept_to_by_its_files(
    tmp_path: Path,
) -> None:
    job = IcebergJob(tmp_path, partition_by=("v",)).open()
    old = [job.prepare(1, one(0), subtask=0), job.prepare(1, one(1), subtask=1)]
    with job.table() as table, table.update_spec() as update:
        update.remove_field("v").add_field("id", "bucket[4]", "id_bucket")
    new = job.prepare(2, one(2))
    assert job.commit(2, *old, new) == Committed()
    assert job.ids() == [0, 1, 2]
    with job.table() as table:
        specs = {task.file.spec_id for task in table.scan().plan_files()}
        pruned = table.scan("id > 1").to_arrow().to_pylist()
    assert specs == {0, 1}
    assert pruned == one(2)


def test_manifests_are_merged_and_what_they_have_is_known_as_committed(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path, properties={"commit.manifest.min-count-to-merge": "4"}).open()
    prepared = {number: job.prepare(number, one(number)) for number in range(1, 11)}
    aside = shutil.copytree(tmp_path / "staging", tmp_path / "aside")
    for number, committable in prepared.items():
        assert job.commit(number, committable) == Committed()
    assert job.ids() == list(prepared)
    with job.table() as table:
        assert len(table.inspect.manifests()) < 4
    # A savepoint brings back what was staged, and says no more of what was committed.
    shutil.copytree(aside, tmp_path / "staging", dirs_exist_ok=True)
    with job.committer() as committer:
        assert [committer.abort(one) for one in prepared.values()] == [AlreadyCommitted()] * 10
    assert job.ids() == list(prepared)


def test_files_have_the_tables_partitions_column_ids_bounds_and_size(tmp_path: Path) -> None:
    job = IcebergJob(
        tmp_path,
        partition_by=("bucket(4, id)",),
        properties={"write.target-file-size-bytes": "2000"},
    ).open()
    writer = job.writer()
    for start in range(0, 30_000, 10_000):
        writer.write(job.batch([{"id": start + n, "v": f"{n:040}"} for n in range(10_000)]))
    assert job.commit(1, *writer.pre_commit(CheckpointId(1))) == Committed()
    writer.close()
    with job.table() as table:
        files = [task.file for task in table.scan().plan_files()]
        manifests = table.inspect.manifests().to_pylist()
        found = table.scan(row_filter="id = 77").to_arrow().to_pylist()
    assert {file.partition[0] for file in files} == {0, 1, 2, 3}
    assert all(set(file.lower_bounds) == {1, 2} for file in files)
    assert sum(file.record_count for file in files) == 30_000
    assert all(manifest["content"] == ManifestContent.DATA for manifest in manifests)
    assert found == [{"id": 77, "v": f"{77:040}"}]


SCHEMA_OF_TYPES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int32()),
        pa.field("flag", pa.bool_()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("ratio", pa.float64()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("raw", pa.binary()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("who", pa.struct([("name", pa.string()), ("age", pa.int32())])),
        pa.field("kind", pa.dictionary(pa.int32(), pa.string())),
    ]
)


def test_values_of_all_types_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path, schema=SCHEMA_OF_TYPES, partition_by=("day(at)", "kind")).open()
    at = datetime(2026, 2, 28, 23, 59, 59, 999_999)
    rows: list[dict[str, Any]] = [
        {
            "id": 1, "small": -5, "flag": True, "price": Decimal("-12.50"), "ratio": 0.1,
            "day": at.date(), "at": at.replace(tzinfo=_UTC), "local": at, "raw": b"\x00\xff",
            "tags": ["a", None], "who": {"name": "Ada", "age": 36}, "kind": "x/y",
        },
        {"id": 2, **dict.fromkeys(SCHEMA_OF_TYPES.names[1:])},
    ]  # fmt: skip
    assert job.commit(1, job.prepare(1, rows)) == Committed()
    assert job.rows() == rows


def test_a_null_and_the_text_null_are_two_partitions(tmp_path: Path) -> None:
    """Their directories have the same name."""
    job = IcebergJob(tmp_path, partition_by=("v",)).open()
    rows: list[dict[str, Any]] = [{"id": 1, "v": None}, {"id": 2, "v": "null"}, {"id": 3, "v": ""}]
    assert job.commit(1, job.prepare(1, rows)) == Committed()
    with job.table() as table:
        for term, expected in (("v = 'null'", 2), ("v is null", 1), ("v = ''", 3)):
            assert table.scan(term).to_arrow()["id"].to_pylist() == [expected]


def test_bytes_are_partitioned_by_their_beginning(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("p", pa.binary())])
    job = IcebergJob(tmp_path, schema=schema, partition_by=("truncate(2, p)",)).open()
    rows: list[dict[str, Any]] = [
        {"id": 1, "p": b"\xff\x00a"},
        {"id": 2, "p": b"\xff\x00b"},
        {"id": 3, "p": None},
    ]
    assert job.commit(1, job.prepare(1, rows)) == Committed(files=2)
    assert job.rows() == rows


def test_a_column_that_iceberg_cannot_keep_is_refused_at_start(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path).open()
    columns = pa.schema([("id", pa.int64()), ("v", pa.timestamp("ns"))])
    with pytest.raises(ConfigError, match="cannot take the rows' columns"):
        job.sink.validate(job.context(), columns)


def test_a_table_evolves_by_new_columns_and_wider_types(tmp_path: Path) -> None:
    old = pa.schema([pa.field("id", pa.int32(), nullable=False), ("v", pa.string())])
    job = IcebergJob(tmp_path, schema=old).open()
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    new = pa.schema([("id", pa.int64()), ("v", pa.string()), ("w", pa.float64())])
    job = IcebergJob(tmp_path, schema=new, evolve=True).open(attempt=2)
    prepared = job.prepare(2, [{"id": 1 << 40, "v": None, "w": 0.5}], attempt=2, first_checkpoint=2)
    assert job.commit(2, prepared, attempt=2) == Committed()
    assert job.rows() == [
        {"id": 1, "v": "v1", "w": None},
        {"id": 1 << 40, "v": None, "w": 0.5},
    ]


def test_a_table_or_branch_that_is_not_there_is_named(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path, create=False)
    with pytest.raises(ConfigError, match=r"shop\.orders is not in catalog 'default'; create it"):
        job.open()
    job = IcebergJob(tmp_path).open()
    with pytest.raises(
        ConfigError, match="the table does not have this branch; create it: ALTER TABLE"
    ):
        job.with_settings(branch="audit").open(attempt=2)


def test_a_branch_gets_the_rows_and_main_does_not(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path).open()
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    with job.table() as table:
        head = table.current_snapshot()
        assert head is not None
        table.manage_snapshots().create_branch(head.snapshot_id, "audit").commit()
    job = job.with_settings(branch="audit").open(attempt=2)
    prepared = job.prepare(2, one(2), attempt=2, first_checkpoint=2)
    assert job.commit(2, prepared, attempt=2) == Committed()
    assert job.ids() == [1]
    with job.table() as table:
        assert table.scan().use_ref("audit").to_arrow().num_rows == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"table": "orders"}, "must be a namespace and a name"),
        ({"table": "shop..orders"}, "must be a namespace and a name"),
        ({"partition_by": ("id",)}, "partition_by is only for a table that the sink creates"),
        ({"partition_by": "id", "create": True}, "takes a list"),
    ],
)
def test_settings_that_are_wrong_by_themselves_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(IcebergSink("shop.orders"), **settings)


@pytest.mark.parametrize(
    ("term", "message"),
    [("nothing", "partition_by names 'nothing'"), ("day(v)", "but the column is string")],
)
def test_partitions_that_cannot_be_are_refused(term: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        IcebergJob(tmp_path, partition_by=(term,)).open()


UUIDS = pa.schema([SCHEMA.field("id"), ("u", pa.binary(16)), ("v", pa.string())])


def _create_uuid_table(job: IcebergJob, *partitions: PartitionField) -> None:
    fields = [
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "u", UUIDType()),
        NestedField(3, "v", StringType()),
    ]
    with job.catalog() as catalog:
        catalog.create_namespace("shop")
        spec = PartitionSpec(*partitions)
        catalog.create_table(("shop", "orders"), Schema(*fields), partition_spec=spec)


@pytest.mark.parametrize("is_partitioned", [False, True])
@pytest.mark.parametrize("settings", [{}, {"write_mode": "upsert", "primary_key": ("id",)}])
def test_a_column_of_uuids_takes_rows_and_changes(
    tmp_path: Path, settings: dict[str, Any], *, is_partitioned: bool
) -> None:
    job = IcebergJob(tmp_path, UUIDS, **settings)
    bucket = PartitionField(2, 1000, BucketTransform(4), "p")
    _create_uuid_table(job, *([bucket] if is_partitioned else []))
    first, second = UUID(int=5), UUID(int=9)
    rows: list[dict[str, Any]] = [
        {"id": 1, "u": first.bytes, "v": "a"},
        {"id": 2, "u": None, "v": "b"},
    ]
    job.open().commit(1, job.prepare(1, rows))
    if settings:
        changed = job.prepare(2, [{"id": 1, "u": second.bytes, "v": "c"}])
        assert job.commit(2, changed) == Committed()
    value = {"u": second, "v": "c"} if settings else {"u": first, "v": "a"}
    assert job.rows() == [{"id": 1, **value}, {"id": 2, "u": None, "v": "b"}]
    with job.table() as table:
        found = table.scan(row_filter=f"u = '{value['u']}'").plan_files()
        assert [task.file.record_count for task in found] == [1 if is_partitioned else 2]


def test_uuids_that_are_keys_or_name_partitions_are_refused_at_start(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path, UUIDS, write_mode="upsert", primary_key=("u",))
    _create_uuid_table(job, PartitionField(2, 1000, IdentityTransform(), "p"))
    with pytest.raises(ConfigError, match=r"'u': .* part of primary_key, .* fixed\[16\] or string"):
        job.open()
    with pytest.raises(ConfigError, match=r"partitions the table by its value .* bucket\(N, col"):
        job.with_settings(primary_key=("id",)).open()


_ODD = pa.struct([("1st day", pa.int64())])


@pytest.mark.parametrize("settings", [{}, {"write_mode": "upsert", "primary_key": ("row id",)}])
@pytest.mark.parametrize("partition", ["order day", "bucket(4, a.b)", "s p.1st day"])
def test_columns_whose_names_avro_does_not_allow_partition_a_table(
    tmp_path: Path, settings: dict[str, Any], partition: str
) -> None:
    """A data file has other names for such columns than the table."""
    row_id = pa.field("row id", pa.int64(), nullable=False)
    others = {"order day": pa.string(), "a.b": pa.int64(), "s p": _ODD}
    schema = pa.schema([row_id, *(pa.field(name, kind) for name, kind in others.items())])
    job = IcebergJob(tmp_path, schema, partition_by=(partition,), **settings).open()
    rows: list[dict[str, Any]] = [
        {"row id": 1, "order day": "mon/1", "a.b": 5, "s p": {"1st day": 6}},
        {"row id": 2, "order day": None, "a.b": None, "s p": None},
    ]
    assert job.commit(1, job.prepare(1, rows)) == Committed()
    if settings:
        rows[0] = {"row id": 1, "order day": "tue", "a.b": 7, "s p": {"1st day": 8}}
        assert job.commit(2, job.prepare(2, rows[:1])) == Committed()
    with job.table() as table:
        found = table.scan().to_arrow().sort_by("row id").to_pylist()
        assert found == rows
        assert {each.file.record_count for each in table.scan().plan_files()} == {1}


def test_names_with_quotes_and_dots_are_names(tmp_path: Path) -> None:
    job = IcebergJob(tmp_path, table=("shop", "a.b \"c\" 'd'")).open()
    assert job.commit(1, job.prepare(1, one(1))) == Committed()
    with job.catalog() as catalog:
        table = catalog.load_table(("shop", "a.b \"c\" 'd'"))
        assert table.scan().to_arrow().to_pylist() == one(1)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = IcebergJob(tmp_path)
    monkeypatch.setitem(sys.modules, "pyiceberg.table", None)
    with pytest.raises(ConfigError, match=r"install onceflow\[iceberg\]"):
        job.open()


def test_a_catalog_that_is_away_or_unknown_is_named(tmp_path: Path) -> None:
    sink = IcebergSink("shop.orders", catalog={"type": "sql"})
    with pytest.raises(ConfigError, match=r"the catalog of Iceberg table shop\.orders"):
        sink.validate(IcebergJob(tmp_path).context(), pa.schema([("id", pa.int64())]))
    job = IcebergJob(tmp_path).open()
    prepared = job.prepare(1, one(1))
    catalog = tmp_path / "catalog.db"
    catalog.rename(tmp_path / "away.db")
    catalog.mkdir()
    outcome = job.commit(1, prepared)
    assert isinstance(outcome, RetryLater), outcome
    assert "cannot be reached: OperationalError" in outcome.reason
    catalog.rmdir()
    (tmp_path / "away.db").rename(catalog)
    assert job.commit(1, prepared) == Committed()


def test_the_description_prints_no_property_of_the_catalog() -> None:
    sink = IcebergSink("shop.orders", catalog={"uri": "postgresql://u:geheim@db/x"})
    assert "geheim" not in repr(sink)
    assert pickle.loads(pickle.dumps(sink)) == sink


@pytest.mark.parametrize(
    "catalog",
    [
        {"uri": "postgres://u:geheim@db/x"},
        {"uri": "http://localhost:1", "token": "geheim\n"},
        {"uri": "http://localhost:1", "token": "geheim\n2"},
    ],
)
def test_an_error_of_a_catalog_prints_none_of_its_secrets(
    catalog: dict[str, str], tmp_path: Path
) -> None:
    """The libraries quote a URI without a known scheme, and a header that cannot be sent."""
    sink = IcebergSink("shop.orders", catalog=catalog)
    with pytest.raises(ConfigError, match=r"the catalog of Iceberg table shop\.orders") as refusal:
        sink.validate(IcebergJob(tmp_path).context(), pa.schema([("id", pa.int64())]))
    assert "geheim" not in "".join(traceback.format_exception(refusal.value))


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>We are back soon.</html>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


def test_a_page_in_the_stead_of_a_catalogs_answer_is_no_wrong_setting(tmp_path: Path) -> None:
    """A gateway says so while the catalog is away."""
    with HTTPServer(("127.0.0.1", 0), _Page) as gateway:
        thread = Thread(target=gateway.serve_forever)
        thread.start()
        sink = IcebergSink(
            "shop.orders", catalog={"uri": f"http://127.0.0.1:{gateway.server_port}"}
        )
        try:
            with pytest.raises(SinkError, match=r"cannot be reached: ValidationError"):
                sink.validate(IcebergJob(tmp_path).context(), pa.schema([("id", pa.int64())]))
        finally:
            gateway.shutdown()
            thread.join(60)
