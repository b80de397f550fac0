"""The reader of Postgres rows: COPY in binary format, decoded by Arrow's own driver (ADBC).

All tasks of a plan read one snapshot. The Python process in which Spark plans exports the snapshot
and holds it open, because a task can only use an open snapshot. It is held until `_HELD_S` after
the plan, or until Spark ends that process, possibly after a minute without work. A task that begins
later fails; it never reads another state of the table. A task that has begun keeps the snapshot.

Types that cannot be decoded (json, uuid, enums, intervals, …) are selected as text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, cast

import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_manager import dbapi as manager
from adbc_driver_postgresql import dbapi as adbc
from typing_extensions import override

from onceflow.clients.postgres.catalog import identifier, literal, quote
from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession
from onceflow.connectors.spark.readers.sql import (
    Bounds,
    ReadColumn,
    RowSource,
    TaskPlan,
    stride_conditions,
)
from onceflow.connectors.spark.readers.sql_filters import Comparable
from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import ConfigError, SinkError
from onceflow.sinks.postgres.dialect import POSTGRES
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sources.postgres.text_values import TEXT_SETTINGS

_HELD_S = 600.0
"""The time in seconds for which a snapshot is held for tasks that have not begun."""
_BATCH_BYTES = 4 * 1024 * 1024
_PRECISION_MAX = 38
_ANY_NUMERIC = pa.decimal128(38, 18)
"""The type as which Spark's JDBC reader reads numeric without limits."""
_TYPMOD_OFFSET = 4
"""The offset of type modifiers.

Postgres stores a type's limit plus 4, the size of a value's header.
"""
_DAYS = (-719_162, 2_932_896)
_MICROSECONDS = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The range in microseconds since 1970 of the years 1 to 9999, which Spark supports.

Infinity is outside it.
"""

_COMPARED: dict[str, Comparable] = {
    **dict.fromkeys(("int2", "int4", "int8", "float4", "float8", "numeric"), Comparable.NUMBER),
    **dict.fromkeys(("text", "varchar"), Comparable.TEXT),
    "bool": Comparable.BOOLEAN,
    "date": Comparable.DATE,
    "timestamp": Comparable.LOCAL_TIME,
    "timestamptz": Comparable.INSTANT,
}
_DENIED = re.compile(
    r"permission denied for (?P<kind>schema|table|view|materialized view|relation)"
    r" (?P<name>\"[^\"]+\"|\S+)"
)
_LOST_SHAPE = "has an array of several dimensions, or whose indexes do not begin at 1"
_AS_THEY_ARE = frozenset({*_COMPARED, "bpchar", "bytea"})
# The texts of values must not depend on the settings of the server, the database or the role. The
# time zone, the order of day and month, and lc_monetary stay as they are: they also decide what the
# user's own query computes.
_TEXT_FORM: Mapping[str, str] = {
    "DateStyle": "ISO",
    **{
        name: TEXT_SETTINGS[name]
        for name in ("IntervalStyle", "extra_float_digits", "bytea_output")
    },
}

_PAGES = """
    SELECT coalesce(max(pg_catalog.pg_relation_size(c.oid)), 0)
            / pg_catalog.current_setting('block_size')::bigint,
        (SELECT relkind::text FROM pg_catalog.pg_class WHERE oid = {name}::regclass)
    FROM pg_catalog.pg_class AS c
    WHERE c.oid = {name}::regclass
        OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree({name}::regclass))
"""


@dataclass(frozen=True, slots=True)
class PostgresRows(RowSource):
    """A table or a query of Postgres."""

    dialect: ClassVar[Dialect] = POSTGRES
    endpoint: PostgresEndpoint

    @override
    def format_instant(self, text: str) -> str:
        return f"TIMESTAMPTZ '{text}+00'"

    @override
    def columns(self) -> Sequence[ReadColumn]:
        """Return all columns, as the server describes them.

        Raises:
            ConfigError: There is no such table, or the query is not valid.
            SinkError: The server does not answer now.
        """
        with self._connect() as connection, connection.cursor() as cursor:
            # This describes the query without reading. A wrong name is already an error here.
            schema = cursor.adbc_execute_schema(f"SELECT * FROM {self.relation}")  # noqa: S608
        return [_column(field) for field in schema]

    @override
    def plan(self, columns: Sequence[ReadColumn], bounds: Bounds | None, tasks: int) -> TaskPlan:
        """Return the division of the rows into tasks, and the snapshot that all tasks read.

        Raises:
            ConfigError: A query needs a column by which its rows are divided.
            SinkError: The server does not answer now.
        """
        if tasks == 1:
            return TaskPlan(("",))
        if bounds is not None:
            conditions = stride_conditions(columns, bounds, tasks, self.words)
        elif self.table is not None:
            conditions = self._by_ctid(tasks)
        else:
            raise ConfigError(
                f"numPartitions={tasks} of a query needs partitionColumn, lowerBound and upperBound"
            )
        snapshot = _hold_snapshot(self.endpoint) if len(conditions) > 1 else ""
        return TaskPlan(conditions, snapshot)

    @override
    def batches(
        self, statement: str, columns: Sequence[ReadColumn], snapshot: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that `statement` selects.

        Raises:
            ConfigError: A value does not fit its column's Arrow type. The message names the column.
            SinkError: The server refused the query, the connection broke, or the snapshot is gone.
        """
        with self._connect() as connection, connection.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if snapshot:
                cursor.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            for name, value in _TEXT_FORM.items():
                cursor.execute(f"SET LOCAL {name} = {literal(value)}")
            cursor.adbc_statement.set_options(
                **{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)}
            )
            cursor.execute(statement)
            try:
                for batch in cursor.fetch_record_batch():
                    if batch.num_rows:
                        yield _convert(batch, columns)
            except OSError as error:
                raise self._explain_broken_stream(error) from None

    def _by_ctid(self, tasks: int) -> tuple[str, ...]:
        """Return ranges of the table's pages. In one snapshot each row is in exactly one range."""
        assert self.table is not None
        name = literal(identifier(self.table))
        with self.endpoint.connect("onceflow read") as session:
            # Use the longest part of a partitioned table: every part is divided at the same pages.
            ((pages, kind),) = session.query(_PAGES.format(name=name))
        if kind not in ("r", "p", "m"):
            raise ConfigError(
                f"numPartitions={tasks}: {self.table} is a view or a foreign table, which has no"
                " pages to divide; give partitionColumn, lowerBound and upperBound, or"
                " numPartitions=1"
            )
        count = max(1, min(tasks, int(pages)))
        cuts = [int(pages) * index // count for index in range(1, count)]
        if not cuts:
            return ("",)
        bounds = [f"'({cut},0)'::tid" for cut in cuts]
        return (
            f"ctid < {bounds[0]}",
            *(f"ctid >= {low} AND ctid < {high}" for low, high in pairwise(bounds)),
            f"ctid >= {bounds[-1]}",
        )

    @contextmanager
    def _connect(self) -> Generator[adbc.Connection, None, None]:
        try:
            with adbc.connect(
                self.endpoint.conninfo("onceflow read"), autocommit=True
            ) as connection:
                yield connection
        except manager.Error as error:
            raise self._explain(error) from None

    def _explain(self, error: manager.Error) -> Exception:
        text = self.endpoint.without_secrets(" ".join(str(error).split()))
        if "snapshot" in text and ("invalid" in text or "does not exist" in text):
            return SinkError(
                f"reading {self.relation} of {self.endpoint}: this task began too late, when the"
                f" snapshot of its plan was released: {text}. Give numPartitions= at most the"
                " number of tasks that run at once, or read with one task"
            )
        wrong = error.sqlstate is not None and error.sqlstate.startswith(("42", "28", "3D"))
        kind = ConfigError if wrong else SinkError
        return kind(f"reading {self.relation} of {self.endpoint}: {text}{self._grant(text)}")

    def _explain_broken_stream(self, error: OSError) -> Exception:
        """Return the error of a statement that fails after it has returned rows."""
        text = self.endpoint.without_secrets(" ".join(str(error).split()))
        message = f"reading {self.relation} of {self.endpoint}: {text}"
        if _LOST_SHAPE in text:
            return ConfigError(f"{message}. Select the column as text by query=")
        return SinkError(message)

    def _grant(self, text: str) -> str:
        """Return advice with the GRANT statement if the server denied the right to read."""
        denied = _DENIED.search(text)
        if denied is None:
            return ""
        name = denied["name"] if self.table is None else identifier(self.table)
        right = f"SELECT ON {name}"
        if denied["kind"] == "schema":
            right = f"USAGE ON SCHEMA {denied['name']}"
        role = dict(self.endpoint.parameters).get("user")
        return f". Run as the owner: GRANT {right} TO {quote(role) if role else 'this role'}"


def _column(field: pa.Field) -> ReadColumn:
    metadata = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    name = metadata.get("ADBC:postgresql:typname") or metadata.get("POSTGRESQL:type", "")
    expression = quote(field.name)
    if name == "numeric":
        kind = _numeric(metadata.get("POSTGRESQL:typmod", ""))
        return ReadColumn(field.name, expression, kind, Comparable.NUMBER)
    if pa.types.is_list(field.type):
        element = _element(field.type.value_type)
        if element is not None:
            if name.startswith("_"):
                expression = _refuse_lost_shape(field.name)
            return ReadColumn(field.name, expression, pa.list_(element))
    elif name in _AS_THEY_ARE:
        return ReadColumn(field.name, expression, field.type, _COMPARED.get(name))
    return ReadColumn(field.name, f"{expression}::text", pa.string())


def _refuse_lost_shape(column: str) -> str:
    """Return the expression of an array column, which fails for arrays that no list can hold.

    The driver would return the elements of all dimensions in one list.
    """
    name = quote(column)
    # The cast of this text fails, and the server quotes the text in its error.
    why = f"{literal(f'column {column!r} {_LOST_SHAPE}: ')} || {name}::text"
    return (
        f"CASE WHEN coalesce(pg_catalog.array_ndims({name}), 1) = 1"
        f" AND coalesce(pg_catalog.array_lower({name}, 1), 1) = 1"
        # A slice has the array's own type.
        f" THEN {name} ELSE ({name})[({why})::int:] END"
    )


def _element(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of an array's elements, or None if the array is read as text."""
    if getattr(kind, "type_name", "") == "numeric":
        return _ANY_NUMERIC
    plain = not isinstance(kind, pa.BaseExtensionType) and not pa.types.is_nested(kind)
    return kind if plain and not pa.types.is_time(kind) else None


def _numeric(modifier: str) -> pa.DataType:
    number = int(modifier or "-1")
    if number < _TYPMOD_OFFSET:
        return _ANY_NUMERIC
    packed = number - _TYPMOD_OFFSET
    # These are eleven bits with a sign: PostgreSQL 15 and later have numeric(3, -2).
    precision, scale = packed >> 16, ((packed & 0x7FF) ^ 1024) - 1024
    if scale < 0:
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    return pa.decimal128(min(precision, _PRECISION_MAX), min(scale, _PRECISION_MAX))


def _convert(batch: pa.RecordBatch, columns: Sequence[ReadColumn]) -> pa.RecordBatch:
    arrays = [_array(array, column) for array, column in zip(batch.columns, columns, strict=True)]
    names = [column.name for column in columns]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _array(array: pa.Array, column: ReadColumn) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    elif pa.types.is_list(array.type) and array.type != column.type:
        # The elements of numeric[] arrive as text of a type of the driver's own.
        array = array.cast(pa.list_(pa.string()))
    values = array.flatten() if isinstance(array, pa.ListArray) else array
    if pa.types.is_timestamp(values.type):
        _require_within(values.view(pa.int64()), _MICROSECONDS, column)
    elif pa.types.is_date32(values.type):
        _require_within(values.view(pa.int32()), _DAYS, column)
    if array.type == column.type:
        return array
    try:
        return cast_rows(array, column.type)
    except pa.ArrowException as error:
        raise ConfigError(
            f"column {column.name!r}: a value does not fit {column.type}, the type as which the"
            f" column is read: {error}. Select it as text by query="
        ) from error


def _require_within(numbers: pa.Array, ends: tuple[int, int], column: ReadColumn) -> None:
    span = cast("dict[str, int | None]", pc.min_max(numbers).as_py())
    least, most = span["min"], span["max"]
    if least is not None and most is not None and (least < ends[0] or most > ends[1]):
        raise ConfigError(
            f"column {column.name!r} has a time that is infinite, or outside the years 1 to"
            " 9999, which Spark does not support. Leave the column out, or select another"
            " expression by query="
        )


_held: list[PostgresSession] = []
"""The sessions that this process holds open. A timer releases each, or a call releases all."""
_held_lock = threading.Lock()


def _hold_snapshot(endpoint: PostgresEndpoint) -> str:
    """Return the name of a new snapshot, which this process holds open for a while."""
    session = endpoint.connect("onceflow read: snapshot")
    try:
        session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        session.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        ((name,),) = session.query("SELECT pg_catalog.pg_export_snapshot()")
    except BaseException:
        session.close()
        raise
    with _held_lock:
        _held.append(session)
    timer = threading.Timer(_HELD_S, _release_session, [session])
    timer.daemon = True
    timer.start()
    return str(name)


def _release_session(session: PostgresSession) -> None:
    with _held_lock:
        if session in _held:
            _held.remove(session)
    session.close()


def release_sessions() -> None:
    """Release all snapshots that this process holds. Tasks that have begun keep theirs."""
    with _held_lock:
        held = list(_held)
    for session in held:
        _release_session(session)
