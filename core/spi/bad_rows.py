"""The handling of rows that a target can never take, and the tests of errors for such rows."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.arrow.nested_rows import take_batch, to_numpy
from onceflow.core.errors import BadRow, ConfigError, TargetRefused
from onceflow.core.setting_values import choice_of
from onceflow.core.spi import OnBadRow, RejectedRows

_ABOUT_A_NAME = frozenset({errno.ENAMETOOLONG, errno.EILSEQ})
"""The operating system errors about a name that was passed to it, and not about a disk."""

_CAUSES_MAX = 20
"""The maximum number of errors examined in a chain: chains of causes may be circles."""

_PASSING_STATUSES = frozenset({408, 425, 429})
"""The HTTP statuses below 500 that ask the client to try again: timeout, too early, too many."""

_CALLER_STATUSES = frozenset({401, 403, 407})
"""The HTTP statuses of a server that refuses the client's credentials or rights, and no value."""

_NETWORK_WORDS = ("connect", "timeout", "timedout", "unavailable")
"""The words in names of error classes that drivers use for a server that is away."""

_DATA_AT_FAULT = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    NotImplementedError,
    AssertionError,
)
"""The errors that code raises for a value that it cannot handle. Arrow's errors are subclasses of
these."""


def find_status(error: BaseException) -> int | None:
    """Return the HTTP status of a failed answer that `error` carries, or None if it has none.

    HTTP libraries keep the status in an attribute of the error, or of its `response`.
    """
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 400 <= status <= 599:
                return int(status)
    return None


def may_answer_otherwise(error: BaseException) -> bool | None:
    """Return True if the server that answered with a failure may answer another try otherwise.

    False if the server refuses the request itself, and None if `error` carries no HTTP status.
    """
    status = find_status(error)
    return None if status is None else status in _PASSING_STATUSES or status >= 500


def may_pass(error: BaseException, *, lasting: tuple[type[BaseException], ...] = ()) -> bool:
    """Return True if the network, a disk or a lack of memory may have caused `error`.

    Such a failure may end without a change by a person. An error of the classes `lasting` does not.
    """
    for cause in _walk_causes(error):
        # An answer decides: libraries derive the errors for refusals from OSError, too.
        if (otherwise := may_answer_otherwise(cause)) is not None:
            return otherwise
        if isinstance(cause, lasting):
            continue
        if isinstance(cause, OSError):
            if cause.errno not in _ABOUT_A_NAME:
                return True
        elif isinstance(cause, MemoryError) or is_named_for_network(type(cause)):
            return True
    return False


def is_data_at_fault(error: BaseException) -> bool:
    """Return True if the cause of `error` is a value that code, or a file system, cannot take."""
    if may_pass(error) or any(
        find_status(cause) in _CALLER_STATUSES for cause in _walk_causes(error)
    ):
        return False
    # Follow only explicit causes: an error that was being handled meanwhile need not be the cause.
    named: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if named is None or isinstance(named, (*_DATA_AT_FAULT, OSError)):
            break
        named = named.__cause__
    return isinstance(named, (*_DATA_AT_FAULT, OSError))


def waits_for_person(error: BaseException) -> bool:
    """Return True if a commit that fails by `error` fails until a person changes something.

    A committer then returns `RetryLater(…, until_fixed=True)`, and the status calls the commit
    stuck.
    """
    return isinstance(error, (BadRow, TargetRefused)) or is_data_at_fault(error)


def is_named_for_network(error_class: type[BaseException]) -> bool:
    """Return True if the name of a class, or of a base, says that a server is away."""
    names = (base.__name__.lower() for base in error_class.__mro__)
    return any(word in name for name in names for word in _NETWORK_WORDS)


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the errors behind it, each once: chains of causes may be circles."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


_SHOWN_LENGTH_MAX = 80
_ADVICE = (
    "The job can go on without such rows: on_bad_row='drop' leaves them out and counts them, and"
    " dead_letters= writes them to another sink"
)


class BadRows:
    """The bad rows of one writer since the last call of `take`.

    A writer returns `take()` from `SinkWriter.take_rejected`. With `OnBadRow.FAIL`, the first bad
    row is raised and none is kept. The engine decides what to do with rejected rows.
    """

    def __init__(self, on_bad_row: OnBadRow, schema: pa.Schema, *, where: str = "") -> None:
        """Keep bad rows or raise an error, as `on_bad_row` says.

        Args:
            on_bad_row: The policy.
            schema: The sink's schema, in which rejected rows are returned.
            where: The beginning of the error text.
        """
        self._on_bad_row = on_bad_row
        self._schema = schema
        self._where = where and f"{where}: "
        self._rejected: list[RejectedRows] = []

    @property
    def fail(self) -> bool:
        """True if a bad row ends the job, so that looking for further ones is not needed."""
        return self._on_bad_row is OnBadRow.FAIL

    def sift(
        self, batch: pa.RecordBatch, bad: pa.BooleanArray, why: str, *, shows: str = ""
    ) -> pa.RecordBatch:
        """Return the rows of `batch` that are not `bad`; reject the others for `why`.

        Args:
            batch: Rows in the sink's schema; columns may be decoded.
            bad: One value per row; null counts as false.
            why: The reason, the same for all.
            shows: A column whose value goes into the reason of each row.

        Raises:
            BadRow: There is a bad row, and bad rows fail the job; names the first one.
        """
        bad = pc.fill_null(bad, False)
        # Nearly every batch is good: one check without a copy finds that out.
        first = pc.index(bad, True).as_py()
        if first < 0:
            return batch
        if self.fail:
            value = f", but {quote_value(batch.column(shows), first)}" if shows else ""
            raise self._make_error(f"{why}{value} (row {first} of its batch)")
        is_bad = to_numpy(bad)
        rows = take_batch(batch, np.flatnonzero(is_bad))
        reasons = [
            f"{why}, but {quote_value(rows.column(shows), row)}" if shows else why
            for row in range(rows.num_rows)
        ]
        self.reject(rows, reasons)
        return take_batch(batch, np.flatnonzero(~is_bad))

    def reject(self, rows: pa.RecordBatch, reasons: Sequence[str]) -> None:
        """Record `rows` as rejected, with one reason each.

        Raises:
            BadRow: Bad rows fail the job; contains the first reason.
        """
        if not rows.num_rows:
            return
        if self.fail:
            raise self._make_error(reasons[0])
        self._rejected.append(RejectedRows(_encode(rows, self._schema), list(reasons)))

    def without(self, batch: pa.RecordBatch, refusals: Mapping[int, str]) -> pa.RecordBatch:
        """Return the rows of `batch` that have no reason in `refusals`; reject the others.

        Raises:
            BadRow: A row has a reason, and bad rows fail the job; names the first one.
        """
        if not refusals:
            return batch
        bad = sorted(refusals)
        if self.fail:
            raise self._make_error(f"{refusals[bad[0]]} (row {bad[0]} of its batch)")
        rows = np.array(bad, np.int64)
        self.reject(take_batch(batch, rows), [refusals[row] for row in bad])
        return take_batch(batch, np.setdiff1d(np.arange(batch.num_rows), rows))

    def _make_error(self, reason: str) -> BadRow:
        return BadRow(f"{self._where}{reason}. {_ADVICE}")

    @property
    def any(self) -> bool:
        """True if rows were rejected since the last call of `take`."""
        return bool(self._rejected)

    def forget(self) -> None:
        """Drop the recorded rows: they are written again or not at all."""
        self._rejected.clear()

    def take(self) -> Sequence[RejectedRows]:
        """Return the rows rejected since the last call, and forget them."""
        rejected, self._rejected = self._rejected, []
        return rejected


def quote_value(column: pa.Array, row: int) -> str:
    """Return the value at `row` as a short text for an error message."""
    try:
        text = repr(column[row].as_py())
    except (ValueError, OverflowError):
        # Python cannot hold these dates and nanoseconds, so use the text that Arrow's array prints.
        text = " ".join(str(column.slice(row, 1)).split()).strip("[] ")
    return text if len(text) <= _SHOWN_LENGTH_MAX else f"{text[:_SHOWN_LENGTH_MAX]}…"


def quote_row(rows: pa.RecordBatch, row: int) -> str:
    """Return the record at `row` as text for an error message, in the form of a dict."""
    values = (
        f"{name!r}: {quote_value(column, row)}"
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
    )
    return f"{{{', '.join(values)}}}"


def _encode(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return decoded `rows` in `schema`: with its dictionaries, run ends and extensions."""
    if rows.schema.equals(schema):
        return rows
    columns = [_encode_column(rows.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _encode_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    # Check this first, because the storage of an extension may itself be a dictionary or run-end
    # encoded.
    if isinstance(kind, pa.BaseExtensionType):
        storage = _encode_column(column, kind.storage_type)
        extended: pa.Array = pa.ExtensionArray.from_storage(kind, storage)
        return extended
    if arrow.is_run_end_encoded(kind):
        encoded: pa.Array = pc.run_end_encode(
            cast_rows(column, kind.value_type), cast("Any", kind).run_end_type
        )
        return encoded
    if arrow.is_dictionary(kind):
        # Arrow encodes with 32-bit indices only; the cast below narrows them to the schema's.
        column = cast_rows(column, kind.value_type).dictionary_encode()
    return cast_rows(column, kind)


def bad_row_policy(on_bad_row: OnBadRow | str, dead_letters: bool) -> OnBadRow:
    """Return the policy for bad rows of a `write`.

    `dead_letters` is True if the write names a sink for dead letters.

    Raises:
        ConfigError: There is no such policy, or it contradicts `dead_letters`.
    """
    policy = choice_of(OnBadRow, on_bad_row, setting="on_bad_row")
    if not dead_letters and policy is OnBadRow.DEAD_LETTER:
        raise ConfigError("on_bad_row='dead_letter' needs dead_letters=<the sink that takes them>")
    if dead_letters and policy is OnBadRow.DROP:
        raise ConfigError("on_bad_row='drop' and dead_letters= exclude each other; omit one")
    return OnBadRow.DEAD_LETTER if dead_letters else policy
