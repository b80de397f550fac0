"""The checks for dates and times of a DataFrame that Spark's Parquet files would alter.

Some session settings make Spark write altered values. INT96, Spark's format for timestamps, cannot
represent all timestamps. Both cases are refused with an error that names the setting or the column.
Source: Spark SQL guide, "Parquet Files".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from onceflow.core.arrow.kinds import holds
from onceflow.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_OUTPUT_TYPE = "spark.sql.parquet.outputTimestampType"
_INT96 = "INT96"
_ALTERING_SETTINGS: tuple[tuple[str, str, str], ...] = (
    # Truncates microseconds to milliseconds.
    (_OUTPUT_TYPE, "TIMESTAMP_MILLIS", "TIMESTAMP_MICROS"),
    # Both write days before 1582-10-15 in the Julian calendar, as different numbers.
    ("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY", "CORRECTED"),
    ("spark.sql.parquet.int96RebaseModeInWrite", "LEGACY", "CORRECTED"),
)
"""Triples of a setting, the value with which Spark alters times, and the value to use instead."""
_INT96_FIRST_US = -210_866_716_800_000_000
_INT96_LAST_US = 2**63 - 1 - 210_866_803_200_000_000
"""The range of microseconds since 1970 that survives INT96 between Spark and Arrow. Spark counts
from Julian day 0 in 64 bits. Arrow reads day 0 as null and has no negative days."""


def check_session_times(dataframe: DataFrame, schema: pa.Schema, what: str) -> None:
    """Raise ConfigError if the session would write altered dates or times for `dataframe`.

    Args:
        dataframe: The DataFrame that Spark is to write as Parquet.
        schema: The Arrow schema of the DataFrame.
        what: The call that reads the DataFrame, which errors name.
    """
    if not any(holds(column.type, _is_date_or_timestamp) for column in schema):
        return
    for name, altering, exact in _ALTERING_SETTINGS:
        if str(dataframe.sparkSession.conf.get(name, exact)).upper() == altering:
            raise ConfigError(
                f"{what}: the Spark session has {name}={altering}, with which Spark would write"
                f" other dates or times than the DataFrame has; set it to {exact} before the"
                " pipeline starts"
            )


def refuse_beyond_int96(dataframe: DataFrame) -> DataFrame:
    """Return `dataframe` with a check that fails in Spark for each timestamp beyond INT96's range.

    Spark raises the error when it evaluates the row. The error names the column.
    """
    if dataframe.sparkSession.conf.get(_OUTPUT_TYPE, _INT96) != _INT96:
        return dataframe
    expressions: list[str] = []
    for column in dataframe.schema.fields:
        name = _quote(column.name)
        condition = _to_condition(name, column.dataType)
        message = (
            f"column {column.name!r} holds a timestamp before the year -4712 or after 287558,"
            f" which INT96 does not keep; set {_OUTPUT_TYPE} of the session to TIMESTAMP_MICROS,"
            " or leave such rows out"
        )
        # The message is written as hex octets, because quoting rules differ between sessions.
        error = f"raise_error(decode(X'{message.encode().hex()}', 'UTF-8'))"
        expressions.append(
            f"CASE WHEN {condition} THEN {error} ELSE {name} END AS {name}" if condition else name
        )
    return dataframe.selectExpr(*expressions)


def _to_condition(value: str, kind: DataType, depth: int = 0) -> str:
    """Return the SQL condition for "`value` has a timestamp beyond INT96", or "" if it cannot."""
    from pyspark.sql.types import ArrayType, MapType, StructType, TimestampType

    if isinstance(kind, TimestampType):
        first, last = (f"timestamp_micros({end}L)" for end in (_INT96_FIRST_US, _INT96_LAST_US))
        return f"({value} < {first} OR {value} > {last})"
    if isinstance(kind, ArrayType):
        item = f"item_{depth}"
        inner = _to_condition(item, kind.elementType, depth + 1)
        return f"exists({value}, {item} -> {inner})" if inner else ""
    parts: list[str] = []
    if isinstance(kind, MapType):
        for side, inner_kind in (("map_keys", kind.keyType), ("map_values", kind.valueType)):
            parts.append(_to_condition(f"{side}({value})", ArrayType(inner_kind), depth))
    elif isinstance(kind, StructType):
        parts += [
            _to_condition(f"{value}.{_quote(field.name)}", field.dataType, depth)
            for field in kind.fields
        ]
    given = [part for part in parts if part]
    return f"({' OR '.join(given)})" if given else ""


def _quote(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _is_date_or_timestamp(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))
