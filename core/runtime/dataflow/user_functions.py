"""Calls of user functions, and the records that these functions receive.

An error of a function is reported with the record and the user's traceback. This costs nothing for
records that do not fail: the position of a failed record is computed afterwards, from the number of
records that the call has not taken.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import length_hint
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import pyarrow as pa

from onceflow.core.arrow.exact_arrays import InexactValue, cast_exactly
from onceflow.core.arrow.instants import ERRORS as VALUE_ERRORS
from onceflow.core.arrow.instants import check_times_of_day
from onceflow.core.arrow.kinds import holds
from onceflow.core.errors import BadStateValue, OnceflowError, UserFunctionError
from onceflow.core.plan.functions import Record
from onceflow.core.spi.bad_rows import may_pass
from onceflow.core.spi.dead_letters import origin_columns, printable_rows
from onceflow.core.state.keys.key_columns import has_own_python_keys, python_keys

T = TypeVar("T")


def values_of(column: pa.Array) -> list[Any]:
    """Return the Python values of `column`, as `to_pylist` does.

    `to_pylist` creates one Arrow scalar per value. numpy's bulk conversions are several times as
    fast for the most common types, so they are used if they return equal values.

    Raises:
        ValueError: A time of day has nanoseconds, which `to_pylist` would truncate. `to_pylist`
            raises its own errors, too.
    """
    column_type = column.type
    # With a null, numpy would convert integers to floats.
    if column.null_count == 0 and (
        pa.types.is_integer(column_type) or pa.types.is_floating(column_type)
    ):
        return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
    if pa.types.is_string(column_type) or pa.types.is_large_string(column_type):
        return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
    if holds(column_type, pa.types.is_time64):
        check_times_of_day(column)
    return column.to_pylist()


RECORDS_AT_ONCE = 1_024
"""The number of records built at a time: all records of a batch do not fit into a core's cache."""

Maker: TypeAlias = Callable[[Sequence[Sequence[Any]]], list[Record]]


@lru_cache(maxsize=256)
def _maker(names: tuple[str, ...]) -> Maker:
    """Return a function that builds dicts with the keys `names` from columns of values.

    The code is generated, as for dataclasses: a dict display with constant keys takes a quarter of
    the time of `dict(zip(...))`. Column names are inserted as string literals; values never are.
    """
    if not names:
        return lambda columns: []
    variables = [f"v{index}" for index in range(len(names))]
    pairs = zip(names, variables, strict=True)
    items = ", ".join(f"{name!r}: {variable}" for name, variable in pairs)
    values = "".join(f"{variable}, " for variable in variables)
    code = f"lambda columns: [{{{items}}} for {values}in zip(*columns, strict=True)]"
    return cast("Maker", eval(code, {"__builtins__": {"zip": zip}}))  # noqa: S307


class BatchRecords:
    """The records of a batch, built from its columns' values."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self.rows = rows
        self._names = tuple(rows.schema.names)
        self._columns = _read_columns(rows)

    def keys(self, key: Sequence[str]) -> list[Any]:
        """Return each row's key: the value of one key column, or a tuple of several.

        Raises:
            BadStateValue: See `python_keys`.
        """
        columns = [self._keys_of(self._names.index(name)) for name in key]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def _keys_of(self, index: int) -> list[Any]:
        column = self.rows.column(index)
        if has_own_python_keys(column.type):
            return python_keys(column, self._names[index])
        return self._columns[index]

    def pieces(self) -> Iterator[list[Record]]:
        """Yield one dict per row, in row order, as lists of up to RECORDS_AT_ONCE records."""
        make = _maker(self._names)
        for start in range(0, self.rows.num_rows, RECORDS_AT_ONCE):
            stop = start + RECORDS_AT_ONCE
            yield make([column[start:stop] for column in self._columns])


def _read_columns(rows: pa.RecordBatch) -> list[list[Any]]:
    """Return the Python values of each column.

    Raises:
        UserFunctionError: Python cannot represent a value; names column and record.
    """
    columns: list[list[Any]] = []
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        try:
            columns.append(values_of(column))
        except VALUE_ERRORS as error:
            # Arrow's error does not name the row: find the first row that fails on its own.
            row = next(row for row in range(len(column)) if not _has_value(column, row))
            raise UserFunctionError(
                f"Python has no value for column {name!r} ({column.type}) of"
                f" {_shorten(record_text(rows, row))}: {error}",
                fingerprint=_digest(name, record_text(rows, row)),
            ) from error
    return columns


def _has_value(column: pa.Array, row: int) -> bool:
    try:
        values_of(column.slice(row, 1))
    except VALUE_ERRORS:
        return False
    return True


def keys_of_records(uid: str, records: BatchRecords, key: Sequence[str]) -> list[Any]:
    """Return each record's key. An error names the operator and the record.

    Raises:
        UserFunctionError: See `python_keys`.
    """
    try:
        return records.keys(key)
    except BadStateValue as error:
        raise user_error(uid, error, records.rows, error.row) from error


RECORD_LENGTH_MAX = 300
"""The number of characters of a record that an error shows."""
_REASON_LENGTH_MAX = 500
_TRACE_LENGTH_MAX = 4000
_FRAMES_MAX = 20
_RUNTIME = Path(__file__).parent
_LASTING = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    MemoryError,
)
"""The errors that a function raises again for the same record, unlike a disk or a network."""


def call_user(uid: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`. An error names the operator.

    Raises:
        UserFunctionError: The function raised an error that is not onceflow's own. The traceback is
            in the message, because the driver may not be able to import the error's class.
    """
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        _pass_on(error)
        raise user_error(uid, error) from error


def call_user_on_records(
    uid: str, step: Callable[[Iterator[Record]], T], batch: BatchRecords
) -> Iterator[T]:
    """Yield the results of `step` for one piece of `batch` after another.

    `step` must take the records of its iterator one by one.

    Raises:
        UserFunctionError: `step` raised an error that is not onceflow's own; names the record.
    """
    before = 0
    for records in batch.pieces():
        left = iter(records)
        try:
            made = step(left)
        except (Exception, SystemExit) as error:
            _pass_on(error)
            # The iterator knows the number of records left; the failed record is the one before
            # these.
            row = before + len(records) - length_hint(left) - 1
            raise user_error(uid, error, batch.rows, row) from error
        before += len(records)
        yield made


def mistake(uid: str, text: str) -> UserFunctionError:
    """Return the error for a function of `uid` that has returned a wrong result."""
    return UserFunctionError(text, fingerprint=_digest(uid, text))


def as_schema(made: object, schema: pa.Schema, uid: str) -> pa.RecordBatch:
    """Return `made`, the result of the function of `uid`, as a batch of `schema`.

    Raises:
        UserFunctionError: It is not a batch, has other columns, or does not cast without loss.
    """
    if not isinstance(made, pa.RecordBatch):
        raise mistake(
            uid,
            f"the function of operator {uid!r} returned {type(made).__name__}, but it must return"
            " a pyarrow.RecordBatch. A function that takes an iterator of batches, like one for"
            " Spark's mapInArrow, is recognized by its `yield`, or by the annotations (batches:"
            " Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]",
        )
    names = made.schema.names
    if names != schema.names:
        if sorted(names) != sorted(schema.names):
            raise mistake(
                uid,
                f"the function of operator {uid!r} returned {names}, but its schema has"
                f" {schema.names}; pass schema=… if the columns change",
            )
        made = made.select(schema.names)
    if made.schema == schema:
        return made
    columns: list[pa.Array] = []
    for field, column in zip(schema, made.columns, strict=True):
        try:
            columns.append(cast_exactly(column, field.type))
        except InexactValue as error:
            at = f", in {_shorten(record_text(made, error.row))}" if error.row >= 0 else ""
            raise mistake(
                uid,
                f"the function of operator {uid!r} returned column {field.name!r} as"
                f" {column.type}, which does not cast to {field.type} without loss: {error}{at}",
            ) from error
    return pa.record_batch(columns, schema=schema)


def user_error(
    uid: str,
    error: BaseException,
    rows: pa.RecordBatch | None = None,
    row: int | None = None,
) -> UserFunctionError:
    """Return the UserFunctionError for `error` in operator `uid`, at `row` of `rows` if known."""
    reason = traceback.format_exception_only(error)[-1].strip()[:_REASON_LENGTH_MAX]
    kind = type(error).__name__
    if rows is None or row is None:
        record = where = _find_line(error)
    else:
        record = record_text(rows, row)
        where = f"{_shorten(record)} ({_origin(rows, row)})"
    # Use the record and the error's class, but not its text, which may contain a time or an
    # address: the same mistake must get the same fingerprint.
    fingerprint = "" if may_pass(error, lasting=_LASTING) else _digest(uid, kind, record)
    return UserFunctionError(
        f"operator {uid!r} failed: {reason}; at {where}\n{_trace(error)}",
        fingerprint=fingerprint,
    )


def record_text(rows: pa.RecordBatch, row: int) -> str:
    """Return one whole record as text."""
    # ASCII is shown alike by logs and terminals of all machines, and escapes lone surrogates.
    return ascii(printable_rows(rows.slice(row, 1))[0])


def result_error(uid: str, problem: str, what: str, record: object) -> UserFunctionError:
    """Return the error for a function of `uid` whose result `record` has a `problem`.

    `what` distinguishes this mistake from others: the column, or another text.
    """
    text = ascii(record)
    return UserFunctionError(
        f"operator {uid!r} returned {problem}; it is {_shorten(text)}",
        fingerprint=_digest(uid, what, text),
    )


def _pass_on(error: BaseException) -> None:
    """Raise onceflow's own errors again, except BadStateValue."""
    # BadStateValue does not name the record, so the caller adds it.
    if isinstance(error, OnceflowError) and not isinstance(error, BadStateValue):
        raise error


def _find_line(error: BaseException) -> str:
    """Return the line that raised, which is the same if the error occurs again."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"


def _origin(rows: pa.RecordBatch, row: int) -> str:
    batch = f"row {row} of a batch of {rows.num_rows}"
    names = origin_columns(rows.schema)
    if not names:
        return batch
    topic, partition, offset = (rows.column(name)[row].as_py() for name in names)
    return f"topic {topic}, partition {partition}, offset {offset}"


def _shorten(text: str) -> str:
    if len(text) <= RECORD_LENGTH_MAX:
        return f"record {text}"
    return f"record {text[:RECORD_LENGTH_MAX]}… of {len(text)} characters"


def _trace(error: BaseException) -> str:
    """Return the traceback from the first frame outside the runtime on."""
    trace = error.__traceback__
    while trace and Path(trace.tb_frame.f_code.co_filename).parent == _RUNTIME:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace, limit=-_FRAMES_MAX)
    return "".join(lines)[-_TRACE_LENGTH_MAX:].rstrip()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]
