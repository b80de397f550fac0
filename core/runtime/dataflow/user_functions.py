"""Calls of the user's functions, and the records that they see.

What a function raises is told with the record and the user's traceback. Records that do not fail
cost nothing more: the place of one that does is found afterwards, from how many records of the
batch the call has left over.
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

from onceflow.core.api.functions import Record
from onceflow.core.arrow.exact_arrays import InexactValue, cast_exactly
from onceflow.core.arrow.instants import ERRORS as VALUE_ERRORS
from onceflow.core.arrow.instants import check_times_of_day
from onceflow.core.arrow.kinds import holds
from onceflow.core.errors import BadStateValue, OnceflowError, UserFunctionError
from onceflow.core.spi.dead_letters import origin_columns, printable_rows
from onceflow.core.state.keys.python_keys import has_own_python_keys, python_keys

T = TypeVar("T")


def values_of(column: pa.Array) -> list[Any]:
    """Return the Python values of `column`, as `to_pylist` does.

    That goes through one Arrow scalar a value; numpy's bulk conversions are several times as fast
    for the types that carry most data, so they are used wherever they give equal values.

    Raises:
        ValueError: A time of day has nanoseconds, which `to_pylist` would cut off. Besides it, what
            that raises.
    """
    column_type = column.type
    # With a null, numpy would make floats of integers.
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
"""A batch's records are made and used up in pieces: all of them do not stay in a core's cache."""

Maker: TypeAlias = Callable[[Sequence[Sequence[Any]]], list[Record]]


@lru_cache(maxsize=256)
def _maker(names: tuple[str, ...]) -> Maker:
    """Return what makes dicts of these keys of columns of values.

    It is compiled, as dataclasses are: a display of constant keys takes a quarter of the time of
    `dict(zip(...))`. Column names come in as literals of strings, values never.
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
    """The records of a batch, made of its columns' values."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self.rows = rows
        self._names = tuple(rows.schema.names)
        self._columns = _columns_of(rows)

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
        """Yield one dict a row, in row order, some of them at a time."""
        make = _maker(self._names)
        for start in range(0, self.rows.num_rows, RECORDS_AT_ONCE):
            stop = start + RECORDS_AT_ONCE
            yield make([column[start:stop] for column in self._columns])


def _columns_of(rows: pa.RecordBatch) -> list[list[Any]]:
    """Return the Python values of each column.

    Raises:
        UserFunctionError: Python has no value for one; names column and record.
    """
    columns: list[list[Any]] = []
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        try:
            columns.append(values_of(column))
        except VALUE_ERRORS as error:
            # Arrow's error names no row: the first one that fails by itself is it.
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
    """Return each record's key, naming operator and record where one has no Python value.

    Raises:
        UserFunctionError: See `python_keys`.
    """
    try:
        return records.keys(key)
    except BadStateValue as error:
        raise user_error(uid, error, records.rows, error.row) from error


RECORD_LENGTH_MAX = 300
"""Characters of a record that an error shows."""
_REASON_LENGTH_MAX = 500
_TRACE_LENGTH_MAX = 4000
_FRAMES_MAX = 20
_RUNTIME = Path(__file__).parent
_FILES = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def call_user(uid: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, naming the operator when it raises.

    Raises:
        UserFunctionError: It raised something that is not onceflow's own; the traceback is in the
            message, because the original class may not exist on the driver.
    """
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        _pass_on(error)
        raise user_error(uid, error) from error


def call_user_on_records(
    uid: str, step: Callable[[Iterator[Record]], T], batch: BatchRecords
) -> Iterator[T]:
    """Yield `step` of some records of `batch` after the other; it takes them one by one.

    Raises:
        UserFunctionError: It raised something that is not onceflow's own; names the record.
    """
    before = 0
    for records in batch.pieces():
        left = iter(records)
        try:
            made = step(left)
        except (Exception, SystemExit) as error:
            _pass_on(error)
            # The iterator knows how many records are left, so the one that failed is the one before
            # these.
            row = before + len(records) - length_hint(left) - 1
            raise user_error(uid, error, batch.rows, row) from error
        before += len(records)
        yield made


def mistake(uid: str, text: str) -> UserFunctionError:
    """Return the error of a function of `uid` that has returned what it must not."""
    return UserFunctionError(text, fingerprint=_digest(uid, text))


def as_schema(made: object, schema: pa.Schema, uid: str) -> pa.RecordBatch:
    """Return `made`, which the function of `uid` has returned, as a batch of `schema`.

    Raises:
        UserFunctionError: It is no batch, has other columns, or does not cast without loss.
    """
    if not isinstance(made, pa.RecordBatch):
        raise mistake(
            uid,
            f"the function of operator {uid!r} returned {type(made).__name__}, and it must return a"
            " pyarrow.RecordBatch; a function that takes an iterator of batches, as Spark's"
            " mapInArrow does, is known by its `yield`, or by annotations:"
            " (batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]",
        )
    names = made.schema.names
    if names != schema.names:
        if sorted(names) != sorted(schema.names):
            raise mistake(
                uid,
                f"the function of operator {uid!r} returned {names}, and its schema says"
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
    """Return what is told of `error`, raised in operator `uid`, at `row` of `rows` if known."""
    reason = traceback.format_exception_only(error)[-1].strip()[:_REASON_LENGTH_MAX]
    kind = type(error).__name__
    if rows is None or row is None:
        record = where = _find_line(error)
    else:
        record = record_text(rows, row)
        where = f"{_shorten(record)} ({_origin(rows, row)})"
    # By the record and the class of the error, without its text, which may hold a time or an
    # address: the same mistake must be known again.
    fingerprint = "" if _may_pass(error) else _digest(uid, kind, record)
    return UserFunctionError(
        f"operator {uid!r} failed: {reason}; at {where}\n{_trace(error)}",
        fingerprint=fingerprint,
    )


def record_text(rows: pa.RecordBatch, row: int) -> str:
    """Return the whole of one record as text."""
    # As ASCII: logs and terminals of other machines show it alike, and half of a surrogate breaks
    # nothing.
    return ascii(printable_rows(rows.slice(row, 1))[0])


def result_error(uid: str, problem: str, what: str, record: object) -> UserFunctionError:
    """Return the error of a function of `uid` that has returned `record`, which is `problem`.

    `what` is the column, or what else tells this mistake from others.
    """
    text = ascii(record)
    return UserFunctionError(
        f"operator {uid!r} returned {problem}; it is {_shorten(text)}",
        fingerprint=_digest(uid, what, text),
    )


def _pass_on(error: BaseException) -> None:
    """Raise `error` again if it says itself what is wrong."""
    # A BadStateValue is told with the record, which it does not know itself.
    if isinstance(error, OnceflowError) and not isinstance(error, BadStateValue):
        raise error


def _find_line(error: BaseException) -> str:
    """Return the line that raised, which is the same one when the same thing happens again."""
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
    """Return the user's own frames: those below the calls that the runtime makes."""
    trace = error.__traceback__
    while trace and Path(trace.tb_frame.f_code.co_filename).parent == _RUNTIME:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace, limit=-_FRAMES_MAX)
    return "".join(lines)[-_TRACE_LENGTH_MAX:].rstrip()


def _may_pass(error: BaseException) -> bool:
    """Whether the failure may be the network's, so that trying again is right however often."""
    seen: set[int] = set()
    at: BaseException | None = error
    # Chains of causes may be circles, which users can make by `raise … from`.
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, (OSError, TimeoutError)) and not isinstance(at, _FILES):
            return True
        at = at.__cause__ or at.__context__
    return False


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]
