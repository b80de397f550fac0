"""Rows that replace and delete others by key, in tables of both formats: each commit once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import deltalake
import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.types import LongType
from tests.integration.lake_sink_kit import DeltaJob, IcebergJob, LakeJob, MakeLakeJob
from tests.support.lake_faults import CommitFaults, FaultyDeltaTable
from tests.support.row_deletes import delete_by_equality, delete_by_position

from onceflow.core.errors import BadRow, ConfigError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow
from onceflow.sinks import DeltaSink

J = TypeVar("J", bound=LakeJob)

_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("v", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("op", pa.string()),
    ]
)


def put(key: int, value: str, region: str = "eu") -> dict[str, Any]:
    return {"id": key, "region": region, "v": value, "tags": [value], "op": "u"}


def delete(key: int) -> dict[str, Any]:
    return {"id": key, "op": "d"}


@pytest.fixture(params=[IcebergJob, DeltaJob], ids=["iceberg", "delta"])
def make_job(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeLakeJob:
    monkeypatch.setattr(deltalake, "DeltaTable", FaultyDeltaTable)
    settings = {"write_mode": "upsert", "primary_key": ("id",), "operation_column": "op"}

    def make(schema: pa.Schema = _SCHEMA, **changed: Any) -> LakeJob:
        job: LakeJob = request.param(tmp_path, schema=schema, **{**settings, **changed})
        return job

    return make


def change(
    job: LakeJob, checkpoint: int, rows: Sequence[Mapping[str, Any]], **context: Any
) -> None:
    prepared = job.prepare(checkpoint, rows, **context)
    assert job.commit(checkpoint, prepared) == committables.Committed()


def values(job: LakeJob) -> dict[int, str]:
    return {row["id"]: row["v"] for row in job.rows()}


def test_rows_are_added_replaced_and_deleted_by_key_in_one_version_a_checkpoint(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    change(job, 1, [put(1, "a"), put(2, "b"), put(3, "c")])
    change(job, 2, [put(2, "B"), delete(3), delete(9), put(4, "d")])
    assert values(job) == {1: "a", 2: "B", 4: "d"}
    assert job.rows()[1] == {"id": 2, "region": "eu", "v": "B", "tags": ["B"]}
    change(job, 3, [delete(1), put(1, "again"), put(5, "e"), delete(5)])
    assert values(job) == {1: "again", 2: "B", 4: "d"}


def test_the_last_change_of_a_key_counts_over_gathered_checkpoints_and_subtasks(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    prepared = [
        job.prepare(1, [put(1, "first"), put(2, "stays")], subtask=1),
        job.prepare(2, [delete(1), put(3, "x")], subtask=0),
        job.prepare(3, [put(1, "last"), delete(3)], subtask=2),
    ]
    assert job.commit(3, *reversed(prepared)) == committables.Committed()
    assert values(job) == {1: "last", 2: "stays"}


def test_changes_of_a_branch_replace_rows_of_the_branch_alone(tmp_path: Path) -> None:
    job = IcebergJob(
        tmp_path,
        schema=_SCHEMA,
        write_mode="upsert",
        primary_key=("id",),
        operation_column="op",
    ).open()
    change(job, 1, [put(1, "a"), put(2, "b")])
    with job.table() as table:
        head = table.current_snapshot()
        assert head is not None
        table.manage_snapshots().create_branch(head.snapshot_id, "audit").commit()
    job = job.with_settings(branch="audit").open(attempt=2)
    for checkpoint, rows in ((2, [put(1, "A")]), (3, [put(1, "AA"), delete(2)])):
        prepared = job.prepare(checkpoint, rows, attempt=2, first_checkpoint=2)
        assert job.commit(checkpoint, prepared, attempt=2) == committables.Committed()
    assert values(job) == {1: "a", 2: "b"}
    with job.table() as table:
        assert table.scan().use_ref("audit").to_arrow()["v"].to_pylist() == ["AA"]


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("refused", committables.Committed()),
        ("unanswered", committables.Unknown),
        ("made, not answered", committables.AlreadyCommitted()),
        ("made, called failed", committables.AlreadyCommitted()),
    ],
)
def test_changes_whose_reply_is_lost_or_wrong_are_applied_once(
    fault: str, answer: object, make_job: MakeLakeJob
) -> None:
    """The second try does not undo the rows that another program wrote in between."""
    job = make_job().open()
    change(job, 1, [put(1, "a"), put(2, "b")])
    prepared = job.prepare(2, [put(1, "A"), delete(2)])
    CommitFaults.fault = fault
    outcome = job.commit(2, prepared)
    assert CommitFaults.fault == ""
    assert outcome == answer or type(outcome) is answer, outcome
    again = (
        committables.Committed()
        if isinstance(outcome, committables.Unknown)
        else committables.AlreadyCommitted()
    )
    assert job.commit(2, prepared) == again
    assert values(job) == {1: "A"}
    with job.committer() as committer:
        assert committer.in_doubt() == []


def test_changes_that_another_writer_overtakes_are_applied_to_what_it_wrote(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    change(job, 1, [put(1, "a")])
    prepared = job.prepare(2, [put(1, "mine"), delete(7)])
    other = make_job(write_mode="append", primary_key=(), operation_column=None)
    row = {"id": 7, "region": "eu", "v": "theirs", "tags": None}
    other.schema = pa.schema([field for field in _SCHEMA if field.name != "op"])
    CommitFaults.between.append(lambda: other.append([row, {**row, "id": 8}]))
    assert job.commit(2, prepared) == committables.Committed()
    assert values(job) == {1: "mine", 8: "theirs"}


def test_changes_of_nothing_prove_their_checkpoint(make_job: MakeLakeJob) -> None:
    """A merge that finds no row to change makes no version by itself."""
    job = make_job().open()
    change(job, 1, [put(1, "a")])
    change(job, 2, [delete(9)])
    with job.committer() as committer:
        assert committer.read_committed_through() == 2
    job.open(attempt=2)
    assert job.sink.target_record(job.context(2)).through == 2
    assert values(job) == {1: "a"}


@pytest.mark.servers
def test_undecided_changes_are_forgotten_and_committed_ones_never_undone(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    undecided, decided = job.prepare(2, [put(1, "never")]), job.prepare(1, [put(1, "a")])
    assert job.commit(1, decided) == committables.Committed()
    files = set(job.data_files())
    with job.committer() as committer:
        assert committer.abort(undecided) == committables.Aborted()
        assert committer.abort(decided) == committables.AlreadyCommitted()
        assert committer.in_doubt() == []
    assert set(job.data_files()) == files
    assert values(job) == {1: "a"}


@pytest.mark.servers
def test_a_table_in_another_ones_place_gets_no_changes(make_job: MakeLakeJob) -> None:
    job = make_job().open()
    prepared = job.prepare(1, [put(1, "a")])
    job.drop()
    outcome = job.open(attempt=2).commit(1, prepared, attempt=2)
    assert isinstance(outcome, committables.Lost), outcome
    assert job.replaced in outcome.reason


@pytest.mark.servers
def test_rows_move_between_partitions_and_files_without_a_changed_key_stay(
    make_job: MakeLakeJob,
) -> None:
    job = make_job(partition_by=("region",)).open()
    change(job, 1, [put(1, "a"), put(2, "b", "us"), put(500, "c", "asia")])
    before = set(job.data_files())
    change(job, 2, [put(1, "moved", "us")])
    assert values(job) == {1: "moved", 2: "b", 500: "c"}
    assert {row["id"]: row["region"] for row in job.rows()} == {1: "us", 2: "us", 500: "asia"}
    assert before < set(job.data_files()), "old files stay for readers of older versions"


@pytest.mark.servers
def test_many_keys_and_a_key_of_several_columns_find_their_rows(make_job: MakeLakeJob) -> None:
    job = make_job(primary_key=("id", "region")).open()
    change(job, 1, [put(n, "old", region) for n in range(600) for region in ("eu", "us")])
    change(job, 2, [put(n, "new", "eu") for n in range(0, 600, 2)])
    rows = job.rows()
    assert len(rows) == 1200
    new = {(row["id"], row["region"]) for row in rows if row["v"] == "new"}
    assert new == {(n, "eu") for n in range(0, 600, 2)}


def test_bad_changes_are_named_and_what_a_delete_has_besides_its_key_does_not_matter(
    make_job: MakeLakeJob,
) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64()),
            pa.field("price", pa.decimal128(6, 2), nullable=False),
            pa.field("op", pa.string()),
        ]
    )
    job = make_job(schema=schema).open()
    price = {"price": Decimal("1.50")}
    with pytest.raises(BadRow, match="primary key column 'id' is null"):
        job.prepare(1, [{"id": None, **price, "op": "c"}])
    with pytest.raises(BadRow, match="operation column 'op' says none of"):
        job.prepare(1, [{"id": 1, **price, "op": "x"}])
    wide = schema.set(1, pa.field("price", pa.decimal128(20, 3)))
    job.schema = wide
    with pytest.raises(BadRow, match="column 'price' is required in the table"):
        job.prepare(1, [{"id": 1, "price": None, "op": "c"}])
    with pytest.raises(BadRow, match="99999.000'\\) is not"):
        job.prepare(1, [{"id": 1, "price": Decimal(99999), "op": "c"}])
    rows: list[dict[str, Any]] = [
        {"id": 1, "price": Decimal("2.000"), "op": "c"},
        {"id": 2, "price": Decimal("99999.000"), "op": "d"},
        {"id": 3, "price": None, "op": "d"},
    ]
    change(job, 1, rows)
    assert job.rows() == [{"id": 1, "price": Decimal("2.00")}]


def test_rejected_changes_leave_the_writer_as_they_came(make_job: MakeLakeJob) -> None:
    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        [pa.field("id", pa.int64()), pa.field("v", text, nullable=False), ("op", pa.string())]
    )
    job = make_job(schema=schema).open()
    rows: list[dict[str, Any]] = [
        {"id": 1, "v": "a", "op": "c"},
        {"id": None, "v": "b", "op": "c"},
        {"id": 3, "v": "c", "op": "d"},
        {"id": 4, "v": None, "op": "u"},
        {"id": 5, "v": "e", "op": "?"},
    ]
    writer = job.writer(on_bad_row=OnBadRow.DEAD_LETTER)
    writer.write(job.batch(rows))
    rejected = writer.take_rejected()
    assert all(some.rows.schema == schema for some in rejected)
    assert sorted(row["op"] for some in rejected for row in some.rows.to_pylist()) == [
        "?",
        "c",
        "u",
    ]
    assert job.commit(1, *writer.pre_commit(CheckpointId(1))) == committables.Committed()
    writer.close()
    assert values(job) == {1: "a"}


@pytest.mark.servers
def test_rows_that_wait_from_another_write_mode_are_refused_by_name(make_job: MakeLakeJob) -> None:
    job = make_job().open()
    waiting = job.prepare(1, [put(1, "a")])
    appending = make_job(write_mode="append", primary_key=(), operation_column=None)
    outcome = appending.commit(1, waiting)
    assert isinstance(outcome, committables.RetryLater), outcome
    assert "was written with write_mode='upsert'" in outcome.reason
    assert job.commit(1, waiting) == committables.Committed()
    appending.schema = pa.schema([field for field in _SCHEMA if field.name != "op"])
    row = {"id": 2, "region": "eu", "v": "b", "tags": None}
    waiting = appending.prepare(2, [row])
    outcome = job.commit(2, waiting)
    assert isinstance(outcome, committables.RetryLater), outcome
    assert "with write_mode='append'" in outcome.reason
    assert appending.commit(2, waiting) == committables.Committed()
    assert values(job) == {1: "a", 2: "b"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"write_mode": "upsert"}, "finds rows by their key; pass primary_key"),
        ({"write_mode": "merge"}, "give 'append' or 'upsert'"),
        ({"primary_key": ("id",)}, "write_mode='append' never does"),
        ({"operation_column": "op"}, "write_mode='append' never looks at"),
        ({"write_mode": "upsert", "primary_key": "id"}, "takes a list"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DeltaSink("/data/t", **settings)


_UTC = timezone.utc
_AT = datetime(2026, 2, 28, 23, 59, 59, 999_999)


@pytest.mark.servers
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        (pa.string(), 'it\'s "a"', "ü % b"),
        (pa.decimal128(12, 2), Decimal("-1.50"), Decimal("2.00")),
        (pa.date32(), _AT.date(), date(1969, 12, 31)),
        (pa.timestamp("us", "UTC"), _AT.replace(tzinfo=_UTC), datetime(1969, 1, 1, tzinfo=_UTC)),
        (pa.timestamp("us"), _AT, datetime(1969, 1, 1)),
        (pa.binary(), b"\x00\xff", b"'"),
        (pa.bool_(), True, False),
        (pa.dictionary(pa.int32(), pa.string()), "a", "b"),
    ],
    ids=str,
)
def test_keys_of_all_types_find_their_rows(
    kind: pa.DataType, first: Any, second: Any, make_job: MakeLakeJob
) -> None:
    schema = pa.schema([("key", kind), ("id", pa.int64()), ("op", pa.string())])
    job = make_job(schema=schema, primary_key=("key",)).open()
    rows = [{"key": key, "id": n, "op": "c"} for n, key in enumerate((first, second))]
    change(job, 1, rows)
    change(job, 2, [{"key": first, "id": 7, "op": "u"}, {"key": second, "op": "d"}])
    assert job.ids() == [7]


@pytest.mark.servers
def test_rows_of_an_older_partition_spec_are_replaced_under_the_new_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "write_mode": "upsert",
        "primary_key": ("id",),
        "operation_column": "op",
        "partition_by": ("region",),
    }
    job = IcebergJob(tmp_path, schema=_SCHEMA, **settings).open()
    change(job, 1, [put(1, "a"), put(2, "b", "us"), put(3, "c", "us")])
    with job.table() as table, table.update_spec() as update:
        update.remove_field("region").add_field("id", "bucket[4]", "id_bucket")
    change(job, 2, [put(2, "B"), delete(3), put(4, "d")])
    assert values(job) == {1: "a", 2: "B", 4: "d"}
    with job.table() as table:
        assert {task.file.spec_id for task in table.scan().plan_files()} == {0, 1}
        assert table.scan("id = 2").to_arrow()["v"].to_pylist() == ["B"]


def test_rows_that_an_equality_delete_has_removed_do_not_come_back(tmp_path: Path) -> None:
    """The library skips a delete whose bounds have none of the keys that change."""
    job = make_keyed_job(IcebergJob, tmp_path).open()
    change(job, 1, [{"id": key, "v": "old"} for key in (1, 2, 3)])
    with job.table() as table:
        delete_by_equality(table, "id", 2)
    prepared = job.prepare(2, [{"id": 3, "v": "new"}])
    outcome = job.commit(2, prepared)
    assert isinstance(outcome, committables.RetryLater), outcome
    assert "rows that they delete would come back" in outcome.reason


def test_rows_that_a_positional_delete_has_removed_do_not_come_back(tmp_path: Path) -> None:
    """A large file is read in batches, and positions count from its beginning."""
    job = make_keyed_job(IcebergJob, tmp_path).open()
    ids, gone = np.arange(200_000), [5, 150_000]
    with job.table() as table:
        schema = table.schema().as_arrow()
        table.append(pa.table([ids, ["old"] * len(ids)], schema=schema))
        (task,) = table.scan().plan_files()
        delete_by_position(table, task.file.file_path, gone)
    change(job, 2, [{"id": 3, "v": "new"}])
    with job.table() as table:
        left = table.scan().to_arrow()
    assert sorted(left["id"].to_pylist()) == sorted(set(ids.tolist()) - set(gone))


def test_keys_are_compared_in_the_wider_type_that_the_table_has_got_meanwhile(
    tmp_path: Path,
) -> None:
    job = make_keyed_job(IcebergJob, tmp_path, pa.int32()).open()
    change(job, 1, [{"id": 1, "v": "old"}, {"id": 2, "v": "old"}])
    prepared = job.prepare(2, [{"id": 1, "v": "new"}])
    wide = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
    with job.table() as table:
        with table.update_schema() as update:
            update.update_column("id", LongType())
        rows = [{"id": 1, "v": "old"}, {"id": 2**40, "v": "theirs"}]
        table.refresh().overwrite(pa.Table.from_pylist(rows, schema=wide))
    assert job.commit(2, prepared) == committables.Committed()
    assert values(job) == {1: "new", 2**40: "theirs"}


def test_a_column_that_the_table_gets_before_the_commit_is_null_in_replaced_rows(
    tmp_path: Path,
) -> None:
    job = make_keyed_job(DeltaJob, tmp_path).open()
    change(job, 1, [{"id": 1, "v": "old"}])
    prepared = job.prepare(2, [{"id": 1, "v": "new"}])
    wide = pa.schema([*job.schema, pa.field("w", pa.int64())])
    rows: Any = pa.Table.from_pylist([{"id": 1, "v": "old", "w": 5}], schema=wide)
    deltalake.write_deltalake(job.path, rows, mode="overwrite", schema_mode="overwrite")
    assert job.commit(2, prepared) == committables.Committed()
    assert job.rows() == [{"id": 1, "v": "new", "w": None}]


def test_a_table_that_takes_only_new_rows_is_refused_at_start_and_at_a_commit(
    tmp_path: Path,
) -> None:
    job = make_keyed_job(DeltaJob, tmp_path).open()
    prepared = job.prepare(1, [{"id": 1, "v": "a"}])
    DeltaTable(job.path).alter.set_table_properties({"delta.appendOnly": "true"})
    outcome = job.commit(1, prepared)
    assert isinstance(outcome, committables.RetryLater), outcome
    assert "delta.appendOnly=true" in outcome.reason
    with pytest.raises(ConfigError, match=r"delta\.appendOnly=true"):
        job.open(attempt=2)


def make_keyed_job(kind: type[J], directory: Path, key: pa.DataType | None = None) -> J:
    schema = pa.schema(
        [pa.field("id", key or pa.int64(), nullable=False), pa.field("v", pa.string())]
    )
    return kind(directory, schema=schema, write_mode="upsert", primary_key=("id",))


@pytest.mark.servers
@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes_come_to_what_a_dictionary_has(seed: int, make_job: MakeLakeJob) -> None:
    """Over many files and partitions, gathered now and then."""
    random = Random(seed)
    job = make_job(partition_by=("region",)).open()
    expected: dict[int, str] = {}
    waiting: list[committables.Committable] = []
    for checkpoint in range(1, 16):
        rows: list[dict[str, Any]] = []
        for _ in range(random.randrange(1, 40)):
            key = random.randrange(60)
            if random.random() < 0.3:
                rows.append(delete(key))
                expected.pop(key, None)
            else:
                value = f"{checkpoint}-{random.random()}"
                rows.append(put(key, value, random.choice(["eu", "us", "asia"])))
                expected[key] = value
        waiting.append(job.prepare(checkpoint, rows))
        if random.random() < 0.6 or checkpoint == 15:
            assert job.commit(checkpoint, *waiting) == committables.Committed()
            waiting.clear()
            assert values(job) == expected
            assert len(job.rows()) == len(expected)
