"""The exact reading of a data file's rows in the table's current schema.

pyiceberg's own scan returns an empty list or map where a list or map of structs is null, and loses
renamed fields in lists of lists. An upsert that rewrote such rows would change them.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow
from pyiceberg.io.pyarrow import (
    ArrowAccessor,
    ArrowProjectionVisitor,
    _get_column_projection_values,  # pyright: ignore[reportPrivateUsage]
    _get_file_format,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
    _read_all_delete_files,  # pyright: ignore[reportPrivateUsage]
    pyarrow_to_schema,
    schema_to_pyarrow,
)
from pyiceberg.schema import visit_with_partner
from pyiceberg.table import FileScanTask, Table
from pyiceberg.types import ListType, MapType
from typing_extensions import override

from onceflow.core.arrow.required_parts import make_lists


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
