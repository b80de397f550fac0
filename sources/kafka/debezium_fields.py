"""What the schema beside a payload says of numbers: in which unit they count time.

Debezium chooses the unit by the column's precision, so that a DATETIME of MySQL counts milliseconds
and one with six digits microseconds. The messages themselves do not say it; only the schema that
Kafka Connect's JSON converter writes beside them, unless it is told not to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pyarrow as pa
from pyarrow import types as arrow

_CONNECT = "org.apache.kafka.connect.data"
_DECIMAL = f"{_CONNECT}.Decimal"
_DAYS = "days"
_UNITS: Mapping[object, str] = {
    "io.debezium.time.Timestamp": "ms",
    "io.debezium.time.MicroTimestamp": "us",
    "io.debezium.time.NanoTimestamp": "ns",
    f"{_CONNECT}.Timestamp": "ms",
    "io.debezium.time.Date": _DAYS,
    f"{_CONNECT}.Date": _DAYS,
}
"""The unit of numbers, by the name of their schema."""
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_KNOWN_MAX = 64
"""Schemas that are remembered: one for each version of the table's columns."""


@dataclass(frozen=True, slots=True)
class Units:
    """How the numbers of one schema become those of the columns."""

    fault: str | None = None
    """Why no record of it can be read."""
    factors: Sequence[tuple[int, str, int, int]] = ()
    """(Index, name, multiply by, divide by) of each column whose unit is another one."""

    def convert(self, record: Any) -> None:
        """Bring the times of `record` into the units of its columns.

        Raises:
            ValueError: One is finer than its column's unit; or the schema itself is at fault.
        """
        if self.fault is not None:
            raise ValueError(self.fault)
        for index, name, many, one in self.factors:
            value = getattr(record, f"c{index}")
            if isinstance(value, int):
                count, remainder = divmod(value * many, one)
                if remainder:
                    raise ValueError(f"column {name!r}: {value} is finer than the column's unit")
                setattr(record, f"c{index}", count)


_NO_UNITS = Units()


class WrittenUnits:
    """The units of the schemas that one reader has met."""

    def __init__(self, columns: pa.Schema) -> None:
        self._columns = columns
        self._is_needed = any(map(_counts_time_or_digits, columns.types))
        self._known: dict[bytes, Units] = {}

    def of(self, schema: msgspec.Raw) -> Units:
        """Return the units of `schema`, as it stands beside a payload; empty where none does."""
        text = bytes(schema)
        if not text or not self._is_needed:
            return _NO_UNITS
        units = self._known.get(text)
        if units is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            units = self._known[text] = _units_of(_fields_of(text), self._columns)
        return units


def _counts_time_or_digits(kind: pa.DataType) -> bool:
    if arrow.is_list(kind):
        return _counts_time_or_digits(kind.value_type)
    return bool(arrow.is_timestamp(kind) or arrow.is_date(kind) or arrow.is_decimal(kind))


def _fields_of(text: bytes) -> Mapping[str, Any]:
    """Return the fields of the row, by their names, as the envelope's schema has them."""
    envelope: Any = msgspec.json.decode(text)
    if not isinstance(envelope, dict):
        return {}
    members: list[dict[str, Any]] = cast("Any", envelope).get("fields") or []
    rows = [one for one in members if one.get("field") in ("after", "before")]
    fields: list[dict[str, Any]] = rows[0].get("fields") or [] if rows else []
    return {one["field"]: one for one in fields}


def _units_of(fields: Mapping[str, Any], columns: pa.Schema) -> Units:
    factors: list[tuple[int, str, int, int]] = []
    for index, column in enumerate(columns):
        field, kind = fields.get(column.name), column.type
        if field is None:
            continue
        is_list = arrow.is_list(kind) and isinstance(field.get("items"), dict)
        name = (field["items"] if is_list else field).get("name")
        kind = kind.value_type if is_list else kind
        unit = _UNITS.get(name)
        if arrow.is_decimal(kind) and name == _DECIMAL:
            return Units(
                f"column {column.name!r} ({column.type}) was written as bytes in base64"
                f" ({_DECIMAL}): set Debezium's decimal.handling.mode=string, or use Avro"
            )
        if unit is None or not arrow.is_temporal(kind):
            continue
        expected = kind.unit if arrow.is_timestamp(kind) else _DAYS
        if unit == expected:
            continue
        if is_list or _DAYS in (unit, expected):
            return Units(
                f"column {column.name!r} ({column.type}) was written in {unit} ({name}): give it a"
                " type of this unit"
            )
        factors.append((index, column.name, _PER_SECOND[expected], _PER_SECOND[unit]))
    return Units(factors=factors)
