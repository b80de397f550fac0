"""The keys of rows as values that compare as Postgres compares them.

type                     value
smallint to bigint       int
boolean                  int
date                     int: days since 2000
timestamp, timestamptz   int: microseconds since 2000
numeric                  Decimal
text, varchar            str
bytea, uuid              str: its digits, which have the order of the bytes
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from typing_extensions import assert_never

from onceflow.clients.postgres.catalog import literal
from onceflow.clients.postgres.pgoutput import Value
from onceflow.core.errors import BadRecord, InvariantViolation
from onceflow.sources.postgres.columns import format_uuid
from onceflow.sources.postgres.first_copy import Key, KeyValue
from onceflow.sources.postgres.table import SourceColumn, SourceTable

_DAY_US = 86_400_000_000
_NUMERIC_HEADER = struct.Struct("!HhHH")
_NEGATIVE = 0x4000
_SPECIAL_MIN = 0xC000
"""The least mark of a number that is not finite, in place of its sign."""
_INFINITIES = {"date": 2**31 - 1, "timestamp": 2**63 - 1, "timestamptz": 2**63 - 1}
"""The number of `infinity`; that of `-infinity` is its negative, less one."""


def key_of(table: SourceTable, row: Sequence[Value], *, copy_anew: str) -> Key:
    """Return the key of `row`, which has the table's columns.

    `copy_anew` is the advice for a user whose first copy cannot continue.

    Raises:
        BadRecord: The row has no value in a column of the key, or one without a place in its order.
    """
    names = [column.name for column in table.columns]
    return tuple(
        _comparable(table, column, row[names.index(column.name)], copy_anew)
        for column in table.key_columns
    )


def _comparable(table: SourceTable, column: SourceColumn, value: Value, copy_anew: str) -> KeyValue:
    """Return the value of a key's column: Python orders such values as Postgres does."""
    if not isinstance(value, bytes):
        raise BadRecord(
            f"a change of table {table.name} has no value in column {column.name!r} of its key"
        )
    match column.order:
        case "uuid":
            return format_uuid(value)
        case "text":
            return value.decode()
        case "bytea":
            return value.hex()
        case "numeric":
            number = _read_numeric(value)
            if number is None:
                raise BadRecord(
                    f"column {column.name!r} of the key of table {table.name} has a value that is"
                    " no finite number, which has no place in the first copy. Read the column as"
                    f" text: give schema= with string for it. {copy_anew}"
                )
            return number
        case "number" | "bool" | "date" | "timestamp" | "timestamptz":
            return int.from_bytes(value, "big", signed=True)
        case None:
            raise _make_order_error(column)
        case _ as unknown:
            assert_never(unknown)


def _read_numeric(value: bytes) -> Decimal | None:
    """Return the number without any rounding, or None if it is not finite."""
    count, weight, sign, _ = _NUMERIC_HEADER.unpack_from(value)
    if sign >= _SPECIAL_MIN:
        return None
    number = 0
    for digit in struct.unpack_from(f"!{count}h", value, _NUMERIC_HEADER.size):
        number = number * 10_000 + digit
    digits = tuple(map(int, str(number)))
    return Decimal((int(sign == _NEGATIVE), digits, 4 * (weight - count + 1)))


def key_literals(table: SourceTable, key: Key) -> str:
    """Return the SQL expressions of the values of `key`, to compare with `order_expression`."""
    return ", ".join(
        _literal(column, value) for column, value in zip(table.key_columns, key, strict=True)
    )


def _literal(column: SourceColumn, value: KeyValue) -> str:
    match column.order:
        case "date" | "timestamp" | "timestamptz":
            return _time_literal(column.order, int(value))
        case "bool":
            return "true" if value else "false"
        case "bytea":
            return f"'\\x{value}'::pg_catalog.bytea"
        case "numeric":
            return f"'{value}'::pg_catalog.numeric"
        case "number":
            return str(value)
        case "text" | "uuid":
            text = literal(str(value))
            return text if column.has_own_order else f"pg_catalog.convert_to({text}, 'UTF8')"
        case None:
            raise _make_order_error(column)
        case _ as unknown:
            assert_never(unknown)


def _make_order_error(column: SourceColumn) -> InvariantViolation:
    return InvariantViolation(f"column {column.name!r} has no known order")


def _time_literal(order: Literal["date", "timestamp", "timestamptz"], number: int) -> str:
    """Return the date or time with this number, as an expression of constants alone.

    It has no rounding, and does not depend on the session's time zone.
    """
    infinity = _INFINITIES[order]
    if number in (infinity, -infinity - 1):
        sign = "" if number == infinity else "-"
        return f"'{sign}infinity'::pg_catalog.{order}"
    if order == "date":
        return f"('2000-01-01'::pg_catalog.date + ({number}))"
    days, microseconds = divmod(number, _DAY_US)
    time = (
        f"('2000-01-01'::pg_catalog.timestamp + '{days} days'::pg_catalog.interval"
        f" + '{microseconds} microseconds'::pg_catalog.interval)"
    )
    return time if order == "timestamp" else f"({time} AT TIME ZONE 'UTC')"
