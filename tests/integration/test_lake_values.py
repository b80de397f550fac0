"""Values in lake tables, against the catalogue: as they were written, or refused by name.

A cell is one column of the catalogue, in one format and one write mode, as a value, as a partition
value or as a key. The cells by themselves are marked `slow`; the default run has many columns side
by side in one table.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.integration.lake_sink_kit import DeltaJob, IcebergJob, LakeJob
from tests.support.edge_values import NESTED, SCALARS, SHAPES, EdgeColumn
from tests.support.exact_values import exact_values
from tests.support.lake_values import Mode, check_cell, read_rows, run_cell, with_ids

from onceflow.core.arrow.nested_rows import take_batch, take_rows
from onceflow.core.errors import BadRow, ConfigError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import DeltaSink

_FORMATS = (IcebergJob, DeltaJob)
_UPSERT: dict[str, Any] = {"write_mode": "upsert", "primary_key": ("id",)}
_MODES: dict[Mode, dict[str, Any]] = {"append": {}, "upsert": _UPSERT}

_each_format = pytest.mark.parametrize("kind", _FORMATS, ids=["iceberg", "delta"])
_each_mode = pytest.mark.parametrize("mode", list(_MODES))


def _try_to_open(
    kind: type[LakeJob], directory: Path, rows: pa.RecordBatch, **settings: Any
) -> LakeJob | None:
    """Return a job whose table was made for `rows`; None if their type was refused by name."""
    job = kind(directory, rows.schema, **settings)
    try:
        return job.open()
    except ConfigError as error:
        refusal = str(error)
    assert any(repr(name) in refusal for name in rows.schema.names[1:])
    return None


def _of_shape(shape: str) -> list[EdgeColumn]:
    return [one for one in NESTED if any(one.name == f"{shape} of {each.name}" for each in SCALARS)]


@pytest.mark.slow
@_each_format
@_each_mode
@pytest.mark.parametrize("shape", ["value", *SHAPES])
def test_a_column_comes_back_as_it_was_or_is_refused_by_name(
    kind: type[LakeJob], mode: Mode, shape: str, tmp_path: Path
) -> None:
    for number, edge in enumerate(SCALARS if shape == "value" else _of_shape(shape)):
        rows = with_ids({"v": edge.values})
        directory = tmp_path / str(number)
        directory.mkdir()
        job = _try_to_open(kind, directory, rows, **_MODES[mode])
        if job is not None:
            check_cell(run_cell(job, rows, mode), rows)


@pytest.mark.slow
@_each_format
@_each_mode
def test_a_partition_value_comes_back_as_it_was_or_is_refused_by_name(
    kind: type[LakeJob], mode: Mode, tmp_path: Path
) -> None:
    for number, edge in enumerate(SCALARS):
        rows = with_ids({"v": edge.values})
        directory = tmp_path / str(number)
        directory.mkdir()
        job = _try_to_open(kind, directory, rows, partition_by=("v",), **_MODES[mode])
        if job is not None:
            check_cell(run_cell(job, rows, mode), rows)


@pytest.mark.slow
@_each_format
def test_a_key_of_every_type_finds_its_row(kind: type[LakeJob], tmp_path: Path) -> None:
    for number, edge in enumerate(SCALARS):
        directory = tmp_path / str(number)
        directory.mkdir()
        _check_keys(kind, _take_keys(edge.values), directory)


_SIDE_BY_SIDE = frozenset(
    {"int8", "int64", "double", "bool", "string", "string_view", "decimal128(38, 10)", "binary"}
    | {"list of int64", "struct of string", "required struct of string", "map of double"}
    | {"list of struct of string", "map to struct of int64", "list of list of string"}
    | {"struct of required struct of int64", "struct of map of string", "map to map of int64"}
    | {"list of map of string", "struct of struct of int64"}
)


@_each_format
@_each_mode
def test_columns_side_by_side_come_back_as_they_were(
    kind: type[LakeJob], mode: Mode, tmp_path: Path
) -> None:
    chosen = [one for one in (*SCALARS, *NESTED) if one.name in _SIDE_BY_SIDE]
    assert len(chosen) == len(_SIDE_BY_SIDE)
    rows = with_ids({f"c{number}": one.values for number, one in enumerate(chosen)})
    cell = run_cell(kind(tmp_path, rows.schema, **_MODES[mode]).open(), rows, mode)
    assert not cell.refused
    check_cell(cell, rows)


@_each_format
def test_a_null_record_with_required_fields_is_null_in_the_table(
    kind: type[LakeJob], tmp_path: Path
) -> None:
    fields = [
        pa.field("a", pa.int32(), nullable=False),
        pa.field("tags", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),
    ]
    # As a reader of Avro makes it: the parts of a null record are null.
    parts = [pa.array([1, None, 2], pa.int32()), pa.array([["x"], None, []], fields[1].type)]
    records = pa.StructArray.from_arrays(parts, fields=fields, mask=pa.array([False, True, False]))
    rows = with_ids({"v": records})
    for mode, settings in _MODES.items():
        (tmp_path / mode).mkdir()
        job = kind(tmp_path / mode, rows.schema, **settings).open()
        cell = run_cell(job, rows, mode)
        assert not cell.refused
        check_cell(cell, rows)


@_each_format
def test_a_null_in_a_required_field_of_a_record_is_refused_by_name(
    kind: type[LakeJob], tmp_path: Path
) -> None:
    fields = [pa.field("a", pa.int32(), nullable=False)]
    records = pa.StructArray.from_arrays([pa.array([None], pa.int32())], fields=fields)
    rows = with_ids({"v": records})
    for mode, settings in _MODES.items():
        (tmp_path / mode).mkdir()
        job = kind(tmp_path / mode, rows.schema, **settings).open()
        assert "column 'v'" in run_cell(job, rows, mode).refused[0]


@pytest.mark.parametrize("last", ["\ud7ff", "\U0010ffff", "\uffff"], ids=ascii)
def test_a_long_text_has_an_upper_bound_that_is_not_below_it(last: str, tmp_path: Path) -> None:
    text = "x" * 15 + last + "more"
    rows = with_ids({"v": pa.array([text, "a"])})
    job = IcebergJob(tmp_path, rows.schema).open()
    check_cell(run_cell(job, rows, "append"), rows)
    with job.table() as table:
        (task,) = table.scan().plan_files()
        field_id = table.schema().find_field("v").field_id
        assert task.file.upper_bounds[field_id] > text.encode()
        assert len(table.scan(row_filter=f"v == '{text}'").to_arrow()) == 1


def test_a_column_of_which_one_row_group_has_no_bounds_has_none(tmp_path: Path) -> None:
    long = "z" * 5000  # Parquet keeps no bounds of more than 4096 bytes
    rows = with_ids({"v": pa.array([long, "a"])})
    properties = {"write.parquet.row-group-limit": "1"}
    settings = {"write_mode": "upsert", "primary_key": ("v",), "properties": properties}
    job = IcebergJob(tmp_path, rows.schema, **settings).open()
    for checkpoint in (1, 2):
        writer = job.writer(first_checkpoint=checkpoint)
        writer.write(rows)
        assert isinstance(
            job.commit(checkpoint, *writer.pre_commit(CheckpointId(checkpoint))), Committed
        )
    assert job.ids() == [0, 1]


_NEGATIVE = pa.array(
    [Decimal("-1.50"), Decimal("-0.50"), Decimal("1.50"), None], pa.decimal128(5, 2)
)


def test_an_upsert_writes_no_negative_decimal_as_the_value_of_a_delta_partition(
    tmp_path: Path,
) -> None:
    rows = with_ids({"v": _NEGATIVE})
    job = DeltaJob(tmp_path, rows.schema, partition_by=("v",), **_UPSERT).open()
    cell = run_cell(job, rows, "upsert")
    assert cell.refused.keys() == {0, 1}
    check_cell(cell, rows)
    DeltaTable(job.path)


def test_an_upsert_into_a_delta_table_with_a_partition_that_it_would_damage_is_refused(
    tmp_path: Path,
) -> None:
    rows = with_ids({"v": _NEGATIVE})
    job = DeltaJob(tmp_path, rows.schema, partition_by=("v",)).open()
    check_cell(run_cell(job, rows, "append"), rows)
    with pytest.raises(ConfigError, match=r"partition v=-[01]\.50.*append to the table"):
        job.with_settings(**_UPSERT).open(2)


def test_a_partition_of_bytes_is_refused_by_name_in_delta(tmp_path: Path) -> None:
    rows = with_ids({"v": pa.array([b"a"])})
    with pytest.raises(ConfigError, match=r"column 'v'.*partition column of bytes"):
        DeltaJob(tmp_path, rows.schema, partition_by=("v",)).open()
    assert DeltaSink(str(tmp_path / "other"))  # a table without partitions takes it


_TEXTS = ("__HIVE_DEFAULT_PARTITION__", "a/b", "%2F", "..", "\u00e9", "y" * 300, "null", None)


@_each_format
@_each_mode
def test_a_text_names_its_partition_or_is_refused(
    kind: type[LakeJob], mode: Mode, tmp_path: Path
) -> None:
    rows = with_ids({"v": pa.array(_TEXTS)})
    job = kind(tmp_path, rows.schema, partition_by=("v",), **_MODES[mode]).open()
    cell = run_cell(job, rows, mode)
    by_merge = {_TEXTS.index("__HIVE_DEFAULT_PARTITION__"), _TEXTS.index("y" * 300)}
    assert cell.refused.keys() == (by_merge if (kind, mode) == (DeltaJob, "upsert") else set())
    check_cell(cell, rows)


def test_a_date_that_no_partition_can_name_is_a_bad_row(tmp_path: Path) -> None:
    rows = with_ids({"v": pa.array([3_000_000], pa.int32()).cast(pa.date32())})
    for kind in _FORMATS:
        directory = tmp_path / kind.__name__
        directory.mkdir()
        job = kind(directory, rows.schema, partition_by=("v",)).open()
        with pytest.raises(BadRow, match="column 'v'.*years 1 to 9999"):
            job.writer().write(rows)


def _take_keys(values: pa.Array) -> pa.Array:
    """Return each value once, without null."""
    rows = {repr(value): row for row, value in enumerate(exact_values(values)) if value is not None}
    return take_rows(values, np.array(list(rows.values()), np.int64))


def _check_keys(kind: type[LakeJob], keys: pa.Array, directory: Path) -> None:
    """Put each key, and put it again with another id: each is one row then, with the last id."""
    count = len(keys)
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("v", keys.type)])
    settings: dict[str, Any] = {"write_mode": "upsert", "primary_key": ("v",)}
    first = pa.RecordBatch.from_arrays([pa.array(range(count)), keys], schema=schema)
    job = _try_to_open(kind, directory, first, **settings)
    if job is None:
        return
    again = pa.RecordBatch.from_arrays([pa.array(range(1000, 1000 + count)), keys], schema=schema)
    refused = set(run_cell(job, first, "append").refused)
    writer = job.writer(first_checkpoint=2)
    kept = np.array([row for row in range(count) if row not in refused], np.int64)
    writer.write(take_batch(again, kept))
    assert isinstance(job.commit(2, *writer.pre_commit(CheckpointId(2))), Committed)
    assert sorted(read_rows(job)) == [1000 + row for row in range(count) if row not in refused]
