"""The application of row changes to an Iceberg table by copy on write: whole files are replaced.

    1. plan the data files that may have a row of a changed key: by their bounds, and partitions
    2. read them one by one; files without such a row stay unchanged
    3. write the remaining rows of the other files, and the rows to put, into new files

A row that a positional delete has removed is not copied. A table with equality deletes, which
pyiceberg does not read, is not changed.

Rows are read exactly, in the table's current schema.

pyiceberg's own scan returns an empty list or map where a list or map of structs is null, and loses
renamed fields in lists of lists. An upsert that rewrote such rows would change them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    In,
    LessThanOrEqual,
    Reference,
)
from pyiceberg.io.pyarrow import (
    ArrowAccessor,
    ArrowProjectionVisitor,
    _get_column_projection_values,  # pyright: ignore[reportPrivateUsage]
    _get_file_format,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _read_all_delete_files,  # pyright: ignore[reportPrivateUsage]
    pyarrow_to_schema,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent
from pyiceberg.schema import visit_with_partner
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.types import ListType, MapType
from typing_extensions import override

from onceflow.core.arrow.kinds import cast_table
from onceflow.core.arrow.required_parts import make_lists
from onceflow.core.errors import TargetRefused
from onceflow.sinks.iceberg.data_files import PartitionedFiles
from onceflow.sinks.iceberg.table_rules import to_file_schema
from onceflow.sinks.lake.data_files import DataFileNames
from onceflow.sinks.lake.table import RowChanges
from onceflow.sinks.lake.writer import to_type


def read_rows(table: Table, task: FileScanTask) -> pa.Table:
    """Return the rows of the data file of `task` that no positional delete has removed."""
    schema, metadata = table.schema(), table.metadata
    with table.io.new_input(task.file.file_path).open() as stream:
        file_format = cast("Any", _get_file_format)(task.file.file_format)
        fragment = file_format.make_fragment(stream)
        batches = cast("list[pa.RecordBatch]", fragment.to_table().to_batches())
        physical_schema = cast("pa.Schema", fragment.physical_schema)
    file_schema = pyarrow_to_schema(
        physical_schema,
        metadata.name_mapping(),
        downcast_ns_timestamp_to_us=True,
        format_version=metadata.format_version,
    )
    projection = _ExactProjection(
        file_schema,
        downcast_ns_timestamp_to_us=True,
        projected_missing_fields=_get_column_projection_values(
            task.file,
            schema,
            schema,
            metadata.specs().get(task.file.spec_id),
            file_schema.field_ids,
        ),
        allow_timestamp_tz_mismatch=True,
    )
    project: Any = visit_with_partner
    deleted = _read_deleted_positions(table, task)
    projected: list[pa.Table] = []
    begin = 0
    for batch in batches:
        positions = np.setdiff1d(np.arange(begin, begin + batch.num_rows), deleted)
        # Copy the rows even if all are kept, because lists of a slice cannot be reassembled.
        rows = batch.take(pa.array(positions - begin))
        begin += batch.num_rows
        struct = project(schema, rows, projection, ArrowAccessor(file_schema))
        projected.append(pa.Table.from_batches([pa.RecordBatch.from_struct_array(struct)]))
    if not projected:
        empty: pa.Schema = schema_to_pyarrow(schema, include_field_ids=False)
        return empty.empty_table()
    # Batches may differ in the size limits of their lists and texts.
    return pa.concat_tables(projected, promote_options="permissive")


def _read_deleted_positions(table: Table, task: FileScanTask) -> Any:
    deletes: Any = _read_all_delete_files(table.io, [task]).get(task.file.file_path, [])
    return np.concatenate(
        [np.array([], np.int64), *(positions.to_numpy() for positions in deletes)]
    )


class _ExactProjection(ArrowProjectionVisitor):
    """A projection that reassembles lists and maps from their projected parts, with their nulls."""

    @override
    def list(
        self, list_type: ListType, list_array: pa.Array | None, value_array: pa.Array | None
    ) -> pa.Array | None:
        if list_array is None or value_array is None:
            return None
        if arrow.is_fixed_size_list(list_array.type):
            # Its elements below a null list stay in place.
            offsets = pa.array(np.arange(len(list_array) + 1) * list_array.type.list_size)
        else:
            offsets = cast("Any", list_array).offsets
        values = self._cast_if_needed(list_type.element_field, value_array)
        element = self._construct_field(list_type.element_field, values.type)
        is_small = arrow.is_list(list_array.type)
        kind = pa.list_(element) if is_small else pa.large_list(element)
        return make_lists(offsets, [values], kind, list_array.is_null())

    @override
    def map(
        self,
        map_type: MapType,
        map_array: pa.Array | None,
        key_result: pa.Array | None,
        value_result: pa.Array | None,
    ) -> pa.Array | None:
        if map_array is None or key_result is None or value_result is None:
            return None
        keys = self._cast_if_needed(map_type.key_field, key_result)
        items = self._cast_if_needed(map_type.value_field, value_result)
        kind = pa.map_(
            self._construct_field(map_type.key_field, keys.type),
            self._construct_field(map_type.value_field, items.type),
        )
        offsets = cast("Any", map_array).offsets
        return make_lists(offsets, [keys, items], kind, map_array.is_null())


_logger = logging.getLogger("onceflow.sinks.iceberg")

_KEYS_LISTED_MAX = 200
"""The largest number of values by which the library prunes files; with more, it reads all files
between the bounds."""
_NUMBER = "onceflow_number"


@dataclass(frozen=True, slots=True)
class RewrittenFiles:
    """The data files that a snapshot removes, and those that replace them."""

    removed: Sequence[DataFile]
    added: Sequence[DataFile]


def rewrite_files(
    table: Table, branch: str, changes: RowChanges, names: DataFileNames
) -> RewrittenFiles:
    """Write the files of the next snapshot, which nothing refers to yet.

    Holds `changes` and the rows of one data file in memory.

    Raises:
        TargetRefused: The table lacks a column of `changes`, or has other fields in a column.
    """
    known = [field.name for field in table.schema().fields]
    missing = [name for name in changes.puts.column_names if name not in known]
    if missing:
        advice = "give it its name again"
        if missing[0] in changes.key:
            advice += (
                ". If the column was dropped, do not add a column of this name: it would be"
                " null in all rows of the table, and each key would be there twice. Let a new"
                " job write the input into a new table"
            )
        else:
            advice += (
                ". If the column was dropped, add it, and drop it again after these rows"
                " are committed"
            )
        raise TargetRefused(
            f"the table no longer has the column {missing[0]!r}, but rows that wait for their"
            f" commit have it: {advice}"
        )
    now = to_file_schema(table.schema())
    for name, kind in zip(known, now.types, strict=True):
        if name in changes.puts.column_names:
            _require_same_fields(name, changes.puts.schema.field(name).type, kind)
    files = PartitionedFiles(table, names)
    removed: list[DataFile] = []
    try:
        for task in _plan(table, branch, changes):
            rows = read_rows(table, task)
            kept = _find_other_rows(rows, changes)
            if len(kept) < rows.num_rows:
                removed.append(task.file)
                _write(table, files, rows.take(kept))
        _write(table, files, changes.puts)
        return RewrittenFiles(removed, files.end())
    finally:
        files.drop()


def _require_same_fields(column: str, staged: pa.DataType, now: pa.DataType) -> None:
    """Raise TargetRefused unless the records in a column have the fields that were staged.

    A cast matches the fields of a record by their order. New fields at the end are null.

    Raises:
        TargetRefused: A field was dropped, renamed or moved.
    """
    if arrow.is_struct(staged) and arrow.is_struct(now):
        given = [field.name for field in staged]
        if given != [field.name for field in now][: len(given)]:
            raise TargetRefused(
                f"records in column {column!r} have the fields {[field.name for field in now]}"
                f" in the table, but {given} in rows that wait for their commit: give the"
                " table's fields their former names and order"
            )
    for index in range(min(staged.num_fields, now.num_fields)):
        _require_same_fields(column, staged.field(index).type, now.field(index).type)


def _plan(table: Table, branch: str, changes: RowChanges) -> Iterator[FileScanTask]:
    snapshot = table.snapshot_by_name(branch)
    if snapshot is None:
        return
    _require_no_equality_deletes(table, snapshot)
    scan = table.scan(row_filter=_to_filter(changes))
    yield from scan.use_ref(branch).plan_files()


def _require_no_equality_deletes(table: Table, snapshot: Snapshot) -> None:
    """Raise TargetRefused unless all deletes of `snapshot` are positional.

    The library refuses equality deletes that it plans, and ignores those whose bounds contain no
    changed key. Such deletes may delete other rows of a rewritten file, which would then reappear.

    Raises:
        TargetRefused: A delete file is an equality delete.
    """
    for manifest in snapshot.manifests(table.io):
        if manifest.content is not ManifestContent.DELETES:
            continue
        for entry in manifest.fetch_manifest_entry(table.io):
            if entry.data_file.content is DataFileContent.EQUALITY_DELETES:
                raise TargetRefused(
                    f"the table has equality deletes ({entry.data_file.file_path}), which pyiceberg"
                    " does not read: rows that they delete would come back. Have an engine apply"
                    " and remove them, in Spark by CALL system.rewrite_data_files(table => …,"
                    " options => map('delete-file-threshold', '1', 'remove-dangling-deletes',"
                    " 'true'))"
                )


def _find_other_rows(rows: pa.Table, changes: RowChanges) -> pa.Array:
    """Return the positions of the rows whose keys do not change, in rising order."""
    schema = pa.schema(
        [
            (name, _choose_key_type(changes.rows.schema.field(name).type, rows[name].type))
            for name in changes.key
        ]
    )
    keys = cast_table(changes.rows.select(changes.key), schema)
    numbered = rows.select(changes.key).append_column(_NUMBER, pa.array(np.arange(rows.num_rows)))
    keyed = cast_table(numbered, schema.append(pa.field(_NUMBER, pa.int64())))
    others = keyed.join(keys, keys=list(changes.key), join_type="left anti")
    return pa.array(np.sort(others[_NUMBER].to_numpy()))


def _choose_key_type(staged: pa.DataType, current: pa.DataType) -> pa.DataType:
    """Return the type in which keys are compared: the table's numbers may have become wider."""
    return current if arrow.is_integer(current) or arrow.is_decimal(current) else staged


def _write(table: Table, files: PartitionedFiles, rows: pa.Table) -> None:
    """Write `rows`, whose columns have the table's names; missing columns are null."""
    target = to_file_schema(table.schema())
    names = [field.name for field in table.schema().fields]
    for batch in rows.to_batches():
        columns = [
            to_type(
                batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows),
                field.type,
            )
            for name, field in zip(names, target, strict=True)
        ]
        if batch.num_rows:
            files.write(pa.RecordBatch.from_arrays(columns, schema=target))


def _to_filter(changes: RowChanges) -> BooleanExpression:
    terms = [_to_term(name, changes.rows[name]) for name in changes.key]
    return reduce(And, terms)


def _to_term(name: str, column: pa.ChunkedArray) -> BooleanExpression:
    distinct, term = column.unique(), Reference(name)
    try:
        if len(distinct) <= _KEYS_LISTED_MAX:
            listed: BooleanExpression = cast("Any", In)(term, distinct.to_pylist())
            return listed
        bounds: Any = pc.min_max(column).as_py()
        at_least = cast("Any", GreaterThanOrEqual)(term, bounds["min"])
        return And(at_least, cast("Any", LessThanOrEqual)(term, bounds["max"]))
    except (TypeError, ValueError, OverflowError, pa.ArrowNotImplementedError) as error:
        # Python has no dates and times outside of the years 1 to 9999.
        _logger.debug(
            "key column %s has no bounds by which files could be skipped: %s", name, error
        )
        return AlwaysTrue()
