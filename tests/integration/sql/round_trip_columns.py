"""The columns of each database in the round-trip matrix, and how a client reads them exactly.

Columns with narrower types and modifiers than any schema asks for are part of them: a server
rounds, cuts and pads to such a column, often without a word.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
from tests.integration.sql.round_trips import StoredAs
from tests.support.edge_values import EdgeColumn
from tests.support.exact_values import Clock, Day, Instant, Local, Span

JSON_TEXTS: Sequence[str] = (
    *('{"a": [1, null, "é\\u00e9"]}', "null", "true", '""', "[]", "{}", "0", "-1", "1.5"),
    *('"\\ud83d\\ude00"', '{"": {"b": [[]]}}', "9007199254740993", "18446744073709551615"),
    *("0.1", "1e5", "-0.0", "123456789012345678901234567890", "0.12345678901234567890123"),
    *('{"a": 1, "a": 2}', " [1 , 2] ", '{"b": 1, "a": 2}', "1.0", "1.10", "1e400", '"a "'),
)
_JSON = (
    EdgeColumn("documents of JSON", partial(pa.array, [*JSON_TEXTS, None], pa.large_string())),
)
LABELS = (
    EdgeColumn("labels", partial(pa.array, ["good", "it's", "Good", "good ", "", "é", "1", None])),
)
_UUID_TEXTS = (
    *("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "6BA7B8109DAD11D180B400C04FD430C8"),
    *("00000000-0000-0000-0000-000000000000", "{6ba7b810-9dad-11d1-80b4-00c04fd430c8}", "no"),
)
UUIDS = (
    EdgeColumn("texts of UUIDs", partial(pa.array, [*_UUID_TEXTS, None])),
    EdgeColumn("uuid", partial(pa.array, [b"\0" * 16, b"\xff" * 16, None], pa.binary(16))),
)


def json_value(text: Any) -> object:
    """Return a document with exact numbers; an object as its pairs, so that none is lost."""
    return json.loads(text, parse_float=Decimal, parse_int=Decimal, object_pairs_hook=_pairs)


def _pairs(pairs: list[tuple[str, object]]) -> object:
    return ["object", sorted(map(list, pairs), key=repr)]


def to_decimal(value: Any) -> object:
    """Return a whole number as the decimal that it is in a column of decimals."""
    return Decimal(value) if isinstance(value, int) else value


def to_float(value: Any) -> object:
    """Return a whole number as the float that it is in a column of floats."""
    return float(value) if isinstance(value, int) else value


def to_number(value: Any) -> object:
    """Return a truth as the number that it is where there are no truths."""
    return int(value) if isinstance(value, bool) else value


def to_local(value: Any) -> object:
    """Return an instant as the time that it is in UTC, which MySQL's DATETIME keeps of it."""
    return Local(value.nanoseconds) if isinstance(value, Instant) else value


def to_uuid(value: Any) -> object:
    """Return text or bytes as the UUID that they are."""
    return uuid.UUID(bytes=value) if isinstance(value, bytes) else uuid.UUID(value)


def _each(element: Any) -> Any:
    def convert(values: Any) -> object:
        return [None if value is None else element(value) for value in values]

    return convert


def _local(microseconds: Any) -> object:
    return Local(int(microseconds) * 1_000)


def _instant(microseconds: Any) -> object:
    return Instant(int(microseconds) * 1_000)


def _clock(microseconds: Any) -> object:
    return Clock(int(microseconds) * 1_000)


def _span(microseconds: Any) -> object:
    return Span(int(microseconds) * 1_000)


# --- Postgres -----------------------------------------------------------------------------------

POSTGRES_TYPES = (
    "CREATE TYPE label AS ENUM ('good', 'it''s')",
    "CREATE DOMAIN whole_second AS timestamp(0)",
    "CREATE DOMAIN past_second AS whole_second",
    "CREATE DOMAIN price AS numeric(5,2)",
    "CREATE DOMAIN prices AS numeric(5,2)[]",
    "CREATE DOMAIN code AS varchar(3)",
    "CREATE DOMAIN tenth AS interval(1)",
    "CREATE DOMAIN milli_time AS time(3)",
    "CREATE TYPE pair AS (a timestamp(0), b int)",
)
# Of a difference, because `extract` of a timestamp far away is a double.
_SINCE = "extract(epoch from {} - timestamp '1970-01-01') * 1000000"
_SINCE_UTC = "extract(epoch from {} - timestamptz '1970-01-01 00:00+00') * 1000000"
_EPOCH = "extract(epoch from {}) * 1000000"
_EPOCHS = (
    "CASE WHEN {0} IS NOT NULL THEN ARRAY(SELECT extract(epoch from e) * 1000000"
    " FROM unnest({0}) WITH ORDINALITY AS u(e, o) ORDER BY o) END"
)
_DAYS = (
    "CASE WHEN {0} IS NOT NULL THEN ARRAY(SELECT e - date '1970-01-01'"
    " FROM unnest({0}) WITH ORDINALITY AS u(e, o) ORDER BY o) END"
)


_TEXT = "{}::text"


def _without_spaces(text: Any) -> object:
    return text.rstrip(" ")


def _pg_bytes(value: Any) -> object:
    return bytes(value)


POSTGRES: dict[str, tuple[StoredAs, ...]] = {
    "numbers": (
        *map(StoredAs, ("smallint", "integer", "bigint", "boolean")),
        *(
            StoredAs(declared, means=to_decimal, text_of=_TEXT)
            for declared in ("numeric", "numeric(38,0)", "numeric(20,4)", "numeric(5,2)",
                             "numeric(3,0)", "numeric(3,-2)", "numeric(3,5)", "price")
        ),
        StoredAs("real", "{}::float8", means=to_float),
        StoredAs("double precision", means=to_float),
    ),
    "text": (
        *map(StoredAs, ("text", "varchar", "varchar(3)", "code", "bpchar")),
        # Spaces at the end are the type's own: it fills up with them.
        StoredAs("char(3)", "{}", shows=lambda text: text.rstrip(" ")),
        StoredAs("label", "{}::text", edges=LABELS),
        StoredAs("json", "{}::text", edges=_JSON),
        StoredAs("jsonb", "{}::text", shows=json_value, means=json_value, edges=_JSON),
        StoredAs("uuid", "{}", means=to_uuid, edges=UUIDS),
        StoredAs("bytea", shows=_pg_bytes),
    ),
    "times": (
        StoredAs("date", "{} - date '1970-01-01'", shows=Day, text_of=_TEXT),
        *(
            StoredAs(declared, _SINCE, shows=_local, text_of=_TEXT)
            for declared in ("timestamp", "timestamp(0)", "timestamp(3)", "timestamp(6)",
                             "whole_second", "past_second")
        ),
        *(
            StoredAs(declared, _SINCE_UTC, shows=_instant, text_of=_TEXT)
            for declared in ("timestamptz", "timestamptz(0)", "timestamptz(4)")
        ),
        *(
            StoredAs(declared, _EPOCH, shows=_clock, text_of=_TEXT)
            for declared in ("time", "time(0)", "time(2)", "milli_time", "timetz(0)")
        ),
        *(
            StoredAs(declared, _EPOCH, shows=_span, text_of=_TEXT)
            for declared in ("interval", "interval(0)", "interval(3)", "tenth", "interval year",
                             "interval month", "interval year to month", "interval day",
                             "interval hour", "interval minute", "interval second",
                             "interval second(2)", "interval day to hour", "interval day to minute",
                             "interval day to second", "interval hour to minute",
                             "interval hour to second(0)", "interval minute to second")
        ),
    ),
    "lists": (
        *(
            StoredAs(declared, text_of=_TEXT)
            for declared in ("integer[]", "smallint[]", "bigint[]", "boolean[]", "text[]")
        ),
        *(
            StoredAs(declared, means=_each(to_decimal), text_of=_TEXT)
            for declared in ("numeric[]", "numeric(5,2)[]", "numeric(3,-2)[]", "prices")
        ),
        StoredAs("real[]", "{}::float8[]", means=_each(to_float), text_of=_TEXT),
        StoredAs("double precision[]", means=_each(to_float), text_of=_TEXT),
        StoredAs("bytea[]", shows=_each(_pg_bytes), text_of=_TEXT),
        StoredAs("date[]", _DAYS, shows=_each(Day), text_of=_TEXT),
        StoredAs("timestamp[]", _EPOCHS, shows=_each(_local), text_of=_TEXT),
        StoredAs("timestamp(0)[]", _EPOCHS, shows=_each(_local), text_of=_TEXT),
        # Refused at the start: no row may be written to it in a way that alters one. Some take
        # texts.
        *(
            StoredAs(declared, text_of=_TEXT)
            for declared in ("varchar(3)[]", "price[]", "whole_second[]", "pair",
                             "bit(3)", "varbit(3)", "bit(3)[]", "money", "inet", "int4range",
                             "time(0)[]", "timestamptz(0)[]", "interval(0)[]", "timetz", "name")
        ),
        # Spaces at the end are the type's own: it fills up with them.
        StoredAs("char(3)[]", shows=_each(_without_spaces), text_of=_TEXT),
    ),
}  # fmt: skip

# --- MySQL and MariaDB --------------------------------------------------------------------------

MYSQL_TYPES = ("ALTER DATABASE CHARACTER SET utf8mb4",)
MARIADB_TYPES = MYSQL_TYPES
_MYSQL_SINCE = "timestampdiff(microsecond, '1970-01-01', {})"
_MYSQL_CLOCK = "floor(time_to_sec({0})) * 1000000 + microsecond({0})"
# A float is shown in six digits. Not by `+ 0e0`, which makes 0.0 of -0.0.
_MYSQL_FLOAT = "{} * 1e0"
_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")


def _as_decimal(value: Any) -> object:
    return to_decimal(to_number(value))


MYSQL: dict[str, tuple[StoredAs, ...]] = {
    "numbers": (
        *(
            StoredAs(f"{declared}{sign}", means=to_number)
            for declared in (*_INTEGERS, "tinyint(1)")
            for sign in ("", " unsigned")
        ),
        *(StoredAs(f"bit({bits})", "{} + 0", means=to_number) for bits in (1, 8, 64)),
        *(
            StoredAs(declared, means=_as_decimal)
            for declared in ("decimal(38,0)", "decimal(20,4)", "decimal(5,2)", "decimal(65,30)",
                             "decimal(5,2) unsigned", "decimal(3,0)")
        ),
        *(
            StoredAs(declared, _MYSQL_FLOAT, means=to_float)
            for declared in ("float", "float unsigned", "double", "double unsigned", "float(30)")
        ),
        # Refused at the start: they round.
        *map(StoredAs, ("float(7,3)", "double(9,2)", "year")),
    ),
    "text": (
        *map(StoredAs, ("varchar(3)", "varchar(300)", "char(3)", "tinytext", "text", "longtext")),
        *(
            StoredAs(f"{declared} character set {charset}")
            for declared in ("varchar(30)", "text")
            for charset in ("utf8mb3", "ascii", "latin1")
        ),
        StoredAs("enum('good', 'it''s')", edges=LABELS),
        StoredAs("set('good', 'it''s')", edges=LABELS),
        StoredAs("json", shows=json_value, means=json_value, edges=_JSON),
        *map(StoredAs, ("binary(3)", "varbinary(3)", "tinyblob", "blob", "longblob")),
    ),
    "times": (
        StoredAs("date", "datediff({}, '1970-01-01')", shows=Day),
        *(
            StoredAs(declared, _MYSQL_SINCE, shows=_local, means=to_local)
            for declared in ("datetime", "datetime(3)", "datetime(6)")
        ),
        *(
            StoredAs(f"{declared} null", "unix_timestamp({}) * 1000000", shows=_instant)
            for declared in ("timestamp", "timestamp(3)", "timestamp(6)")
        ),
        *(StoredAs(declared, _MYSQL_CLOCK, shows=_clock)
          for declared in ("time", "time(3)", "time(6)")),
    ),
}  # fmt: skip
# JSON is text there, which a constraint of the server's own checks.
MARIADB: dict[str, tuple[StoredAs, ...]] = {
    **MYSQL,
    "text": (
        *(stored for stored in MYSQL["text"] if stored.declared != "json"),
        StoredAs("json", edges=_JSON),
        StoredAs("uuid", shows=uuid.UUID, means=to_uuid, edges=UUIDS),
    ),
}

# --- SQLite -------------------------------------------------------------------------------------


def to_sqlite(value: Any) -> object:
    """Return a value in the form in which SQLite keeps it, as the documents say."""
    match value:
        case bool():
            return int(value)
        case Decimal():
            return format(value, "f")
        case Day():
            return dt.date.fromordinal(value.days + _EPOCH_DAY).isoformat()
        case Clock():
            return f"{_EPOCH_TIME + dt.timedelta(microseconds=value.nanoseconds // 1_000):{_TIME}}"
        case Local() | Instant():
            moment = _EPOCH_TIME + dt.timedelta(microseconds=value.nanoseconds // 1_000)
            # %Y has no zeros before the year 999.
            zone = "+00:00" if isinstance(value, Instant) else ""
            return f"{moment.date().isoformat()} {moment:{_TIME}}{zone}"
        case _:
            return value


_EPOCH_TIME = dt.datetime(1970, 1, 1)
_EPOCH_DAY = _EPOCH_TIME.toordinal()
_TIME = "%H:%M:%S.%f"
_AFFINITIES = ("INTEGER", "INT", "BIGINT", "TEXT", "VARCHAR(3)", "CLOB", "BLOB", "", "ANY",
               "NUMERIC", "DECIMAL(5,2)", "BOOLEAN", "DATE", "DATETIME", "TIMESTAMP",
               "STRING")  # fmt: skip
SQLITE: tuple[StoredAs, ...] = (
    *(StoredAs(declared, means=to_sqlite) for declared in _AFFINITIES),
    *(
        StoredAs(declared, means=lambda value: to_float(to_sqlite(value)))
        for declared in ("REAL", "DOUBLE", "FLOAT")
    ),
)
STRICT: tuple[StoredAs, ...] = (
    *(
        StoredAs(declared, means=to_sqlite)
        for declared in ("INT", "INTEGER", "TEXT", "BLOB", "ANY")
    ),
    StoredAs("REAL", means=lambda value: to_float(to_sqlite(value))),
)
"""Columns of a STRICT table, in which each value has its column's type, and any in ANY."""

KEYS: dict[str, frozenset[str]] = {
    "postgres": frozenset(
        {"integer", "numeric", "price", "numeric(20,4)", "boolean"}
        | {"varchar", "code", "bpchar", "char(3)", "uuid", "bytea", "date", "timestamp"}
        | {"timestamp(0)", "whole_second", "timestamptz(4)", "time(2)", "interval(0)"}
        | {"interval hour", "interval"}
    ),
    "mysql": frozenset(
        {"int", "decimal(20,4)", "binary(3)", "varbinary(3)", "date"}
        | {"datetime(3)", "timestamp(3) null", "time(3)"}
    ),
    "mariadb": frozenset({"uuid", "datetime(3)"}),
    "sqlite": frozenset({"INTEGER", "TEXT", "BLOB", "", "DATE"}),
}
"""The columns that the matrix has as keys, too."""
