"""Columns of the catalogue in lake tables: written as a job does, read as no code of ours does.

Data files are read by pyarrow. Which files a table has, and the values of its partitions, come from
pyiceberg's manifests, and from the text of Delta's log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any, Literal, cast
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.schema import Schema
from tests.integration.lake_sink_kit import DeltaJob, IcebergJob, LakeJob
from tests.support.exact_values import exact_value, exact_values, same

from onceflow.core.protocol.committables import AlreadyCommitted, Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow, SinkWriter

Mode = Literal["append", "upsert"]
_ADDED_ID = 1_000_000


@dataclass(frozen=True)
class Cell:
    """The expected value of one column in the table, by the row's id."""

    refused: dict[int, str] = field(default_factory=dict[int, str])
    """Why a row was refused."""
    read: dict[int, dict[str, object]] = field(default_factory=dict[int, dict[str, object]])


def with_ids(columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return `columns` beside a column of ids; shorter ones are filled with nulls."""
    count = max(map(len, columns.values()))
    filled = [
        pa.concat_arrays([column, pa.nulls(count - len(column), column.type)])
        if len(column) < count
        else column
        for column in columns.values()
    ]
    fields = [pa.field("id", pa.int64(), nullable=False)]
    fields += [pa.field(name, column.type) for name, column in columns.items()]
    return pa.RecordBatch.from_arrays([pa.array(range(count)), *filled], schema=pa.schema(fields))


def run_cell(job: LakeJob, rows: pa.RecordBatch, mode: Mode) -> Cell:
    """Write `rows` and read what the table has then.

    With `upsert`, a second checkpoint replaces the first accepted row by itself and adds another
    one, so that all others are rewritten beside them.
    """
    writer = job.writer(on_bad_row=OnBadRow.DEAD_LETTER)
    writer.write(rows)
    refused = {
        row: why
        for rejected in writer.take_rejected()
        for row, why in zip(rejected.rows.column("id").to_pylist(), rejected.reasons, strict=True)
    }
    commit_rows(job, 1, writer)
    accepted = [row for row in range(rows.num_rows) if row not in refused]
    if mode == "upsert" and accepted:
        writer = job.writer(first_checkpoint=2)
        writer.write(rows.slice(accepted[0], 1))
        added = [pa.array([_ADDED_ID])]
        added += [pa.nulls(1, column.type) for column in rows.columns[1:]]
        writer.write(pa.RecordBatch.from_arrays(added, schema=rows.schema))
        commit_rows(job, 2, writer)
    return Cell(refused, read_rows(job))


def check_cell(cell: Cell, rows: pa.RecordBatch) -> None:
    """Raise AssertionError unless each row was refused by a column's name, or is as it was."""
    written = _to_rows(rows)
    for row, columns in written.items():
        if row in cell.refused:
            assert any(f"column {name!r}" in cell.refused[row] for name in rows.schema.names[1:])
            assert row not in cell.read
        else:
            assert same(cell.read.get(row), columns), (row, columns, cell.read.get(row))
    assert set(cell.read) <= {*written, _ADDED_ID}


def commit_rows(job: LakeJob, checkpoint: int, writer: SinkWriter) -> None:
    """Commit what `writer` was given, under `checkpoint`, and close the writer."""
    committables = writer.pre_commit(CheckpointId(checkpoint))
    writer.close()
    if committables:
        outcome = job.commit(checkpoint, *committables)
        assert isinstance(outcome, Committed | AlreadyCommitted), outcome


def read_rows(job: LakeJob) -> dict[int, dict[str, object]]:
    """Return the rows of the table by id, as no code of the sink reads them."""
    if isinstance(job, IcebergJob):
        return _read_iceberg(job)
    assert isinstance(job, DeltaJob)
    return _read_delta(job)


def _read_iceberg(job: IcebergJob) -> dict[int, dict[str, object]]:
    with job.table() as table:
        spec, schema = table.spec(), table.schema()
        tasks = list(table.scan().plan_files())
    assert not any(task.delete_files for task in tasks)
    files = [task.file for task in tasks]
    read: dict[int, dict[str, object]] = {}
    for file in files:
        rows = _to_rows(pq.ParquetFile(urlparse(file.file_path).path).read(), schema)
        values: Any = file.partition
        for number, partition in enumerate(cast("Any", spec.fields)):
            name = schema.find_field(partition.source_id).name
            for row in rows.values():
                assert (values[number] is None) == (row[name] is None)
        _add(read, rows)
    return read


def _read_delta(job: DeltaJob) -> dict[int, dict[str, object]]:
    files: dict[str, Mapping[str, str | None]] = {}
    kinds: dict[str, str] = {}
    for version in sorted((job.path / "_delta_log").glob("*.json")):
        # Not at U+2028, which texts in statistics have.
        for line in version.read_bytes().splitlines():
            action = json.loads(line)
            if "metaData" in action:
                columns = json.loads(action["metaData"]["schemaString"])["fields"]
                kinds = {column["name"]: column["type"] for column in columns}
            if "add" in action:
                files[unquote(action["add"]["path"])] = action["add"]["partitionValues"]
            if "remove" in action:
                del files[unquote(action["remove"]["path"])]
    read: dict[int, dict[str, object]] = {}
    for path, partition in files.items():
        rows = _to_rows(pq.ParquetFile(job.path / path).read())
        values = {name: _parse_partition(text, kinds[name]) for name, text in partition.items()}
        _add(read, {key: {**row, **values} for key, row in rows.items()})
    return read


def _parse_partition(text: str | None, kind: str) -> object:
    """Return the value that the text of a Delta log means.

    Source: Delta transaction log protocol, "Partition Value Serialization".
    """
    if text is None or text == "":
        return None
    if kind in ("byte", "short", "integer", "long"):
        return int(text)
    if kind == "float":
        return float(np.float32(text))
    if kind == "double":
        return float(text)
    if kind.startswith("decimal"):
        return Decimal(text)
    if kind == "boolean":
        return {"true": True, "false": False}[text]
    if kind == "date":
        return exact_value(date.fromisoformat(text))
    if kind == "timestamp":
        instant = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return exact_value(instant if instant.tzinfo else instant.replace(tzinfo=timezone.utc))
    return exact_value(datetime.fromisoformat(text)) if kind == "timestamp_ntz" else text


def _add(read: dict[int, dict[str, object]], rows: Mapping[int, dict[str, object]]) -> None:
    assert not read.keys() & rows.keys(), (
        f"rows are twice in the table: {read.keys() & rows.keys()}"
    )
    read.update(rows)


def _to_rows(
    rows: pa.RecordBatch | pa.Table, schema: Schema | None = None
) -> dict[int, dict[str, object]]:
    """Return `rows` by id, with the names that `schema` has for the ids of a file's fields."""
    columns: list[list[object]] = [exact_values(column) for column in cast("Any", rows).columns]
    names: Sequence[str] = rows.schema.names
    if schema is not None:
        names = [_table_name(field, schema) for field in rows.schema]
        columns = [
            [_with_table_names(value, field.type, schema) for value in column]
            for field, column in zip(rows.schema, columns, strict=True)
        ]
    by_id = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    return {cast("int", row["id"]): row for row in by_id}


def _table_name(field: pa.Field, schema: Schema) -> str:
    """Return a column's name in the table: data files have sanitized names, and the same ids.

    Source: Iceberg table specification, "Column Projection".
    """
    assert field.metadata is not None, f"field {field} has no id"
    return schema.find_field(int(field.metadata[b"PARQUET:field_id"])).name


def _with_table_names(value: Any, kind: pa.DataType, schema: Schema) -> object:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {
            _table_name(field, schema): _with_table_names(value[field.name], field.type, schema)
            for field in cast("pa.StructType", kind)
        }
    if pa.types.is_map(kind):
        item = cast("pa.MapType", kind).item_type
        return {key: _with_table_names(inner, item, schema) for key, inner in value.items()}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner_kind = cast("pa.ListType", kind).value_type
        return [_with_table_names(inner, inner_kind, schema) for inner in value]
    return value
