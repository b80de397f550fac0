"""The statistics of one data file in Delta's log: counts of nulls, and bounds of columns.

Readers skip a file by its bounds, so a bound is exact, or wider than all values. The datasets of
the Python package `deltalake` treat an absent bound as a bound that no value lies within. A file
therefore has bounds of all columns whose bounds these readers look for, or of no column.

    integers, decimals, booleans, dates   exact
    floats                                exact; none if a value is infinite or not a number
    timestamps                            whole milliseconds around all values
    text                                  32 characters, the upper one above all texts that are cut

Source: Delta transaction log protocol, "Per-file Statistics".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import is_bytes
from onceflow.sinks.lake.text_bounds import shorten_upper_text

_TEXT_LENGTH_MAX = 32
_MILLISECOND = timedelta(milliseconds=1)


class FileStatistics:
    """A collector of the statistics of one file."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self._with_nan: set[str] = set()

    def add(self, rows: pa.Table) -> None:
        """Record the properties of `rows`, which are written to the file."""
        for field in rows.schema:
            # Parquet's bounds do not cover NaN.
            if arrow.is_floating(field.type) and pc.any(pc.is_nan(rows.column(field.name))).as_py():
                self._with_nan.add(field.name)

    def describe(self, metadata: Any, columns: pa.Schema) -> str:
        """Return the statistics as JSON, from the Parquet `metadata` of the whole file."""
        nulls: dict[str, int] = {}
        bounds: dict[str, tuple[Any, Any]] = {}
        unbounded = set(self._with_nan)
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.row_group(group).column(number)
                # Paths of members of structs and lists contain a dot, as some names do.
                name, ends = column.path_in_schema, column.statistics
                if "." in name or ends is None or not ends.has_null_count:
                    continue
                nulls[name] = nulls.get(name, 0) + ends.null_count
                pair = _read_ends(ends)
                if pair is not None:
                    low, high = bounds.get(name, pair)
                    bounds[name] = min(low, pair[0]), max(high, pair[1])
                elif ends.null_count < column.num_values:
                    unbounded.add(name)
        written = {
            field.name: _to_json(bounds, field.name, unbounded)
            for field in columns
            if _is_bounded(field.type) and nulls.get(field.name) != metadata.num_rows
        }
        described: dict[str, Any] = {"numRecords": metadata.num_rows, "nullCount": nulls}
        known = {name: pair for name, pair in written.items() if pair is not None}
        if len(known) == len(written):
            described["minValues"] = {name: low for name, (low, _) in known.items()}
            described["maxValues"] = {name: high for name, (_, high) in known.items()}
        return msgspec.json.encode(described).decode()


def _is_bounded(kind: pa.DataType) -> bool:
    """Return True if readers look for bounds of columns of this type."""
    return not (arrow.is_nested(kind) or is_bytes(kind))


def _read_ends(ends: Any) -> tuple[Any, Any] | None:
    if not ends.has_min_max:
        return None
    try:
        return ends.min, ends.max
    except (OverflowError, ValueError):
        # Python has no dates before year 1 or after year 9999.
        return None


def _to_json(
    bounds: Mapping[str, tuple[Any, Any]], name: str, unbounded: set[str]
) -> tuple[object, object] | None:
    """Return both bounds of a column in JSON form, or None if the column has none."""
    if name in unbounded or name not in bounds:
        return None
    low, high = bounds[name]
    if isinstance(low, float) and not (math.isfinite(low) and math.isfinite(high)):
        return None
    if isinstance(low, str):
        above = shorten_upper_text(high, _TEXT_LENGTH_MAX)
        return None if above is None else (low[:_TEXT_LENGTH_MAX], above)
    if isinstance(low, datetime):
        return _to_milliseconds(low, high)
    return _to_number(low), _to_number(high)


def _to_milliseconds(low: datetime, high: datetime) -> tuple[str, str] | None:
    """Return the whole milliseconds around all times: the one at or before, the one at or after."""
    above = high
    if high.microsecond % 1_000:
        try:
            above = high + _MILLISECOND
        except OverflowError:
            # The last millisecond of year 9999 has no successor.
            return None
    return _to_time(low), _to_time(above)


def _to_time(value: datetime) -> str:
    zone = "" if value.tzinfo is None else "Z"
    return value.replace(tzinfo=None).isoformat("T", "milliseconds") + zone


def _to_number(value: object) -> object:
    if isinstance(value, Decimal):
        # A number with all digits, because a float would round it.
        return msgspec.Raw(format(value, "f").encode())
    return value.isoformat() if isinstance(value, date) else value
