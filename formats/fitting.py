"""The conversion of written columns to the columns that are read: schema evolution.

Members are matched by name. A member that is not read is ignored. A missing member has the default
of the reader's schema, or null. Numbers may become wider, and text and bytes may become each other,
as in Avro. Units of time and digits of decimals may change if nothing is lost. Anything else is a
fault of its record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types as arrow

from onceflow.core.arrow.instants import map_entries
from onceflow.core.arrow.kinds import cast_rows

Faults: TypeAlias = dict[int, str]
"""The reasons why rows cannot be read, by the row's index."""

_Kinds: TypeAlias = tuple[Callable[[pa.DataType], bool], ...]

_TEXT: _Kinds = (
    arrow.is_string,
    arrow.is_large_string,
    arrow.is_string_view,
    arrow.is_binary,
    arrow.is_large_binary,
    arrow.is_binary_view,
    arrow.is_fixed_size_binary,
)
_READ_AS: tuple[tuple[_Kinds, _Kinds], ...] = (
    # Arrow converts an integer that a 16-bit float does not hold to infinity, so that pair is
    # excluded.
    (
        (arrow.is_integer,),
        (arrow.is_integer, arrow.is_float32, arrow.is_float64, arrow.is_decimal),
    ),
    # These are numbers without a logical type, in the column's unit.
    ((arrow.is_int64,), (arrow.is_timestamp,)),
    ((arrow.is_int32,), (arrow.is_date32,)),
    ((arrow.is_boolean,), (arrow.is_boolean,)),
    ((arrow.is_decimal,), (arrow.is_decimal,)),
    ((arrow.is_time,), (arrow.is_time,)),
    ((arrow.is_date,), (arrow.is_date,)),
    (_TEXT, _TEXT),
)
"""The pairs of kinds as written, and the kinds as which they may be read."""


def misfit(have: pa.DataType, want: pa.DataType) -> str | None:
    """Return why no value of `have` can be read as `want`, or None if it depends on the value."""
    if have == want or arrow.is_null(have) or _fits(have, want):
        return None
    return f"it was written as {have} and is read as {want}"


def _fits(have: pa.DataType, want: pa.DataType) -> bool:
    if arrow.is_dictionary(want):
        return _fits(have, want.value_type)
    if arrow.is_nested(have) or arrow.is_nested(want):
        return _can_fit_nested(have, want)
    if arrow.is_floating(have):
        return bool(arrow.is_floating(want) and want.bit_width >= have.bit_width)
    if arrow.is_timestamp(have):
        return bool(arrow.is_timestamp(want) and (have.tz is None) == (want.tz is None))
    return any(
        any(is_kind(have) for is_kind in written) and any(is_kind(want) for is_kind in read)
        for written, read in _READ_AS
    )


def _can_fit_nested(have: pa.DataType, want: pa.DataType) -> bool:
    if arrow.is_map(have) and arrow.is_map(want):
        return misfit(have.item_type, want.item_type) is None
    if arrow.is_list(have) and (arrow.is_list(want) or arrow.is_large_list(want)):
        return misfit(have.value_type, want.value_type) is None
    if not (arrow.is_struct(have) and arrow.is_struct(want)):
        return False
    members = {have.field(at).name: have.field(at).type for at in range(have.num_fields)}
    fields = [want.field(at) for at in range(want.num_fields)]
    return all(
        misfit(members[field.name], field.type) is None if field.name in members else field.nullable
        for field in fields
    )


def fit_column(column: pa.Array, want: pa.Field, faults: Faults) -> pa.Array:
    """Return `column` as `want`. Values that do not fit are null, with an entry in `faults`."""
    inside: Faults = {}
    result = fit_values(column, want.type, inside)
    for row, why in inside.items():
        faults.setdefault(row, f"column {want.name!r}: {why}")
    if not want.nullable and result.null_count:
        null: Any = result.is_null().to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(null).tolist():
            faults.setdefault(row, f"column {want.name!r} is NOT NULL and has no value")
    return result


def repeat_value(value: pa.Array, count: int) -> pa.Array:
    """Return an array that contains the only value of `value` `count` times."""
    # `pa.repeat` does not support a map inside a struct.
    return value.take(pa.array(np.zeros(count, np.int64)))


_CAST_ERRORS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError)


def fit_values(column: pa.Array, want: pa.DataType, faults: Faults) -> pa.Array:
    """Return `column` as the type `want`.

    Values that do not fit are null, with an entry in `faults`.
    """
    if column.type == want:
        return column
    try:
        return _convert(column, want)
    except _CAST_ERRORS:
        pass
    parts: list[pa.Array] = []
    for row in range(len(column)):
        try:
            parts.append(_convert(column.slice(row, 1), want))
        except _CAST_ERRORS as error:
            faults.setdefault(row, f"a value does not fit {want}: {error}")
            parts.append(pa.nulls(1, want))
    return pa.concat_arrays(parts) if parts else pa.nulls(0, want)


def _convert(column: pa.Array, want: pa.DataType) -> pa.Array:
    """Return `column` as `want`, converted member by member.

    Raises:
        ArrowInvalid: A value does not fit. Also raises the others of `_CAST_ERRORS`.
    """
    have = column.type
    if have == want:
        return column
    if arrow.is_struct(have):
        structs = cast("pa.StructArray", column)
        members = {have.field(at).name: structs.field(at) for at in range(have.num_fields)}
        fields = [want.field(at) for at in range(want.num_fields)]
        parts = [
            _convert(members[field.name], field.type)
            if field.name in members
            else pa.nulls(len(column), field.type)
            for field in fields
        ]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null())
    # Convert the items: a cast of the whole list refuses values inside an item that is null.
    if arrow.is_list(have) and arrow.is_list(want):
        items = _convert(column.flatten(), want.value_type)
        lists: pa.Array = pa.ListArray.from_arrays(list_offsets(column), items, type=want)
        return lists
    if arrow.is_map(have) and arrow.is_map(want):
        keys, items = map_entries(column)
        keys, items = _convert(keys, want.key_type), _convert(items, want.item_type)
        maps: pa.Array = pa.MapArray.from_arrays(list_offsets(column), keys, items, type=want)
        return maps
    return cast_rows(column, want)


def list_offsets(column: pa.Array) -> pa.Array:
    """Return the offsets of the items of each list or map; null for a null list."""
    ends = np.cumsum(list_lengths(column), dtype=np.int32)
    offsets = np.concatenate([np.zeros(1, np.int32), ends])
    absent = np.append(column.is_null().to_numpy(zero_copy_only=False), False)
    return pa.array(offsets, mask=absent) if absent.any() else pa.array(offsets)


def list_lengths(column: pa.Array) -> NDArray[np.int64]:
    """Return the number of items of each list or map; 0 for a null list."""
    if arrow.is_map(column.type):
        offsets: pa.Array = cast("pa.MapArray", column).offsets
        present: Any = column.is_valid().to_numpy(zero_copy_only=False)
        counts: Any = np.where(present, np.diff(offsets.to_numpy()), 0)
    else:
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        counts = lengths.to_numpy(zero_copy_only=False)
    return cast("NDArray[np.int64]", counts.astype(np.int64))


class Fitting:
    """The mapping from the members of one writer's schema to the columns of the reader."""

    def __init__(
        self,
        written: pa.Schema,
        columns: pa.Schema,
        *,
        aliases: Mapping[str, Sequence[str]],
        defaults: Mapping[str, pa.Array],
    ) -> None:
        """Match by name.

        Args:
            written: The columns that records of the writer's schema hold.
            columns: The columns to read.
            aliases: Further names under which a column may have been written, by its name.
            defaults: The values of columns that may be missing, as arrays of one value.
        """
        self.fault: str | None = None
        """The reason why no record of this schema can be read, or None."""
        self._columns = columns
        self._defaults = defaults
        self._sources: list[str | None] = []
        for column in columns:
            names = (column.name, *aliases.get(column.name, ()))
            source = next((name for name in names if written.get_field_index(name) >= 0), None)
            self._sources.append(source)
            if source is not None:
                why = misfit(written.field(source).type, column.type)
            elif column.nullable or column.name in defaults:
                why = None
            else:
                why = "its schema has no such field, and the column is NOT NULL without a default"
            if why is not None and self.fault is None:
                self.fault = f"column {column.name!r}: {why}"

    @property
    def wanted(self) -> frozenset[str]:
        """The members that become columns."""
        return frozenset(source for source in self._sources if source is not None)

    def columns(
        self, members: Mapping[str, pa.Array], count: int, faults: Faults
    ) -> list[pa.Array]:
        """Return each column with `count` rows. Add to `faults` the rows that cannot be read."""
        columns: list[pa.Array] = []
        for column, source in zip(self._columns, self._sources, strict=True):
            if source is not None:
                columns.append(fit_column(members[source], column, faults))
            elif column.name in self._defaults:
                default = repeat_value(self._defaults[column.name], count)
                columns.append(fit_column(default, column, faults))
            else:
                columns.append(pa.nulls(count, column.type))
        return columns
