"""Functions of an iterator of batches, like those of Spark's `mapInArrow` and `mapInPandas`.

Such a function pulls its batches, but an operator receives them. So the function runs on a separate
thread, and the two threads take turns: at any moment one of them waits for the other.

A call of the function lasts from barrier to barrier. It begins with the first batch after a barrier
and its iterator ends before the next barrier. By then all results of the batches that the function
has taken are emitted, including those that it held back. So no call spans two checkpoints, and a
restart begins with a new call.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow.exact_arrays import InexactValue, exact_array_of_pandas
from onceflow.core.arrow.instants import values_inside
from onceflow.core.arrow.kinds import cast_rows, is_list
from onceflow.core.imports import naming_extras
from onceflow.core.runtime.dataflow.user_functions import as_schema, call_user, mistake

_LEAVE_S = 10.0
"""The time in seconds that a function may take to clean up if its call is abandoned."""


class _Turn(Enum):
    """Signals of the operator to the function's thread; input batches are sent as they are."""

    GO_ON = "the batch that came out is on its way"
    END = "no more batches before the barrier"
    LEAVE = "the call is given up"


class _Asks(Enum):
    """Signals of the function's thread to the operator; output batches are sent as they are."""

    FOR_MORE = "the next batch, or the end"
    NOTHING = "the call is over"


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class _Left(BaseException):
    """An exception that the iterator raises to end an abandoned call.

    It is a BaseException, so that no `except Exception` of the user catches it.
    """


class BatchIteratorFunction(ABC):
    """A function of iterators as the operator calls it, on record batches."""

    @abstractmethod
    def call(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the results of the function for `batches`, in its schema."""


class ArrowFunction(BatchIteratorFunction):
    """A function from record batches to record batches."""

    def __init__(self, uid: str, function: Callable[..., Any], schema: pa.Schema) -> None:
        self._uid = uid
        self._function = function
        self._schema = schema

    def call(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the results, cast to the schema."""
        for made in _results(self._uid, self._function, batches):
            yield as_schema(made, self._schema, self._uid)


class PandasFunction(BatchIteratorFunction):
    """A function from pandas DataFrames to pandas DataFrames."""

    def __init__(self, uid: str, function: Callable[..., Any], schema: pa.Schema) -> None:
        """Raise MissingExtra if pandas is not installed."""
        with naming_extras():
            self._pandas: Any = import_module("pandas")
        self._frame: type[Any] = self._pandas.DataFrame
        self._uid = uid
        self._function = function
        self._schema = schema

    def call(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the results, matched by column name, or by position if columns have no names."""
        frames = map(self._to_frame, batches)
        for made in _results(self._uid, self._function, frames):
            yield self._to_batch(made)

    def _to_frame(self, batch: pa.RecordBatch) -> Any:
        """Return `batch` as a DataFrame, in types that keep null apart from integers and NaN.

        Raises:
            UserFunctionError: pandas cannot represent a column or one of its values.
        """
        batch = _decode_runs(batch)
        try:
            # Otherwise integers would become floats, and those above 2^53 would change their value.
            frame = batch.to_pandas(integer_object_nulls=True)
        except pa.ArrowException as error:
            name = next(name for name in batch.schema.names if not _suits_pandas(batch, name))
            raise mistake(
                self._uid,
                f"map_pandas of operator {self._uid!r}: pandas has no values for column {name!r} of"
                f" {batch.schema.field(name).type}: {error}. Cast the column or leave it out"
                " before, by sql() or map_batches()",
            ) from error
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if column.null_count and pa.types.is_integer(field.type):
                name = str(field.type)  # int64 is Int64 in pandas, uint8 is UInt8
                dtype = name.replace("int", "Int").replace("uI", "UI")
                frame[field.name] = frame[field.name].astype(dtype)
            elif pa.types.is_floating(field.type) and _has_missing(column):
                frame[field.name] = self._mask_floats(column)
            elif pa.types.is_nested(field.type) and _has_missing_in_lists(column):
                frame[field.name] = self._to_objects(column)
        return frame

    def _mask_floats(self, column: pa.Array) -> Any:
        """Return floats as pandas' Float64 or Float32, which distinguish null from NaN."""
        # pandas has no such type of 16 bits; the 32-bit type holds the same numbers.
        is_double = pa.types.is_float64(column.type)
        wide = cast_rows(column, pa.float64() if is_double else pa.float32())
        values = wide.fill_null(0.0).to_numpy(zero_copy_only=False).copy()
        mask = column.is_null().to_numpy(zero_copy_only=False)
        return self._pandas.arrays.FloatingArray(values, mask)

    def _to_objects(self, column: pa.Array) -> Any:
        """Return nested values as Python's, and lists as arrays of objects instead of floats."""
        values = column.to_pylist()
        if is_list(column.type):
            values = [None if value is None else _array_of_objects(value) for value in values]
        return self._pandas.Series(values, dtype=object)

    def _to_batch(self, made: Any) -> pa.RecordBatch:
        names = self._schema.names
        if not isinstance(made, self._frame):
            raise mistake(
                self._uid,
                f"map_pandas of operator {self._uid!r} yielded {type(made).__name__}, but it must"
                " yield pandas.DataFrame",
            )
        labels = list(made.columns)
        if all(isinstance(label, str) for label in labels) and labels:
            frame = made
            fits = sorted(labels) == sorted(names)
        else:
            fits = len(labels) == len(names)
            frame = made.set_axis(names, axis=1) if fits else made
        if not fits:
            raise mistake(
                self._uid,
                f"map_pandas of operator {self._uid!r} yielded columns {labels}, but its schema"
                f" has {names}",
            )
        arrays: list[pa.Array] = []
        for field in self._schema:
            try:
                arrays.append(exact_array_of_pandas(frame[field.name], field.type))
            except InexactValue as error:
                raise mistake(
                    self._uid,
                    f"map_pandas of operator {self._uid!r} yielded values for column"
                    f" {field.name!r} that do not fit {field.type}: {error}",
                ) from error
        return pa.record_batch(arrays, schema=self._schema)


def _decode_runs(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return `batch` with the values of run-end-encoded columns."""
    columns = [
        pc.run_end_decode(column) if pa.types.is_run_end_encoded(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _suits_pandas(batch: pa.RecordBatch, name: str) -> bool:
    try:
        batch.select([name]).to_pandas()
    except pa.ArrowException:
        return False
    return True


_WITHOUT_NULLS = (pa.types.is_floating, pa.types.is_timestamp, pa.types.is_duration)
"""The kinds of values for which numpy arrays cannot represent null."""


def _has_missing(column: pa.Array) -> bool:
    """Return True if floats contain a null or NaN, which pandas' own floats do not distinguish."""
    if column.null_count:
        return True
    # Arrow cannot check half floats for NaN.
    wide = column.cast(pa.float32()) if pa.types.is_float16(column.type) else column
    return pc.any(pc.is_nan(wide)).as_py() is True


def _has_missing_in_lists(column: pa.Array) -> bool:
    """Return True if a list contains a null that `to_pandas` would turn into NaN or NaT."""
    if is_list(column.type) and any(is_kind(column.type.value_type) for is_kind in _WITHOUT_NULLS):
        return bool(pc.list_flatten(column).null_count)
    return any(
        pa.types.is_nested(inner.type) and _has_missing_in_lists(inner)
        for inner in values_inside(column)
    )


def _array_of_objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _results(uid: str, function: Callable[..., Any], batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the results of `function` for `batches`. Closes the function's generator at the end."""
    results = call_user(uid, lambda: iter(function(batches)))
    end = object()
    try:
        while (made := call_user(uid, next, results, end)) is not end:
            yield made
    finally:
        close = getattr(results, "close", None)
        if close is not None:
            close()


class BatchIteratorCalls:
    """The calls of one function in one subtask. The chain's thread feeds them and ends them."""

    def __init__(self, uid: str, function: BatchIteratorFunction) -> None:
        self._uid = uid
        self._function = function
        self._to_function: queue.SimpleQueue[pa.RecordBatch | _Turn] = queue.SimpleQueue()
        self._to_operator: queue.SimpleQueue[pa.RecordBatch | _Asks | _Failed] = queue.SimpleQueue()
        self._calling = False
        self._thread: threading.Thread | None = None
        self.cpu_s = 0.0
        """The CPU time of the function's thread up to its last turn."""

    def feed(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Pass `batch` to the function; yield the results until the function asks for more.

        Raises:
            UserFunctionError: The function raised, or returned before it had taken every batch.
        """
        if self._thread is None:
            name = f"function of {self._uid}"
            self._thread = threading.Thread(target=self._main, name=name, daemon=True)
            self._thread.start()
        self._calling = True
        yield from self._take_turns(batch)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """End the iterator of the current call, if any; yield the remaining results.

        Raises:
            UserFunctionError: The function raised.
        """
        if self._calling:
            yield from self._take_turns(_Turn.END)

    def close(self) -> None:
        """Abandon the current call and close its generator. Idempotent."""
        thread, self._thread = self._thread, None
        # A function that hangs must not keep the slot from ending: its thread is a daemon.
        if thread is not None:
            self._to_function.put(_Turn.LEAVE)
            thread.join(_LEAVE_S)

    def _take_turns(self, turn: pa.RecordBatch | _Turn) -> Iterator[pa.RecordBatch]:
        while True:
            self._to_function.put(turn)
            match self._to_operator.get():
                case _Asks.FOR_MORE:
                    return
                case _Asks.NOTHING:
                    self._calling = False
                    return
                case _Failed(error):
                    self._calling = False
                    raise error
                case rows:
                    yield rows
                    turn = _Turn.GO_ON

    # --- the function's thread ----------------------------------------------------------------

    def _main(self) -> None:
        with contextlib.suppress(_Left):
            while True:
                first = self._to_function.get()
                if isinstance(first, _Turn):
                    return
                self._call(first)

    def _call(self, first: pa.RecordBatch) -> None:
        fed = _Fed(first, self._ask)
        try:
            results = self._function.call(fed)
            try:
                for rows in results:
                    self._ask(rows)
            finally:
                # Close the user's generator on the thread on which it ran, also if the call is
                # abandoned.
                cast("Any", results).close()
            # A function may stop early only by an error: batches that it did not take would
            # be lost without a message.
            if not fed.ended:
                raise mistake(
                    self._uid,
                    f"the function of operator {self._uid!r} returned before it had read every"
                    " batch, so rows would be lost. Make it read its iterator to the end",
                )
        except _Left:
            raise
        except BaseException as error:  # the edge of the thread: the chain's raises it
            self._tell(_Failed(error))
        else:
            self._tell(_Asks.NOTHING)

    def _ask(self, what: pa.RecordBatch | _Asks) -> pa.RecordBatch | _Turn:
        """Send `what` to the operator and return its answer."""
        self._tell(what)
        turn = self._to_function.get()
        if turn is _Turn.LEAVE:
            raise _Left
        return turn

    def _tell(self, what: pa.RecordBatch | _Asks | _Failed) -> None:
        # Read here, because thread_time measures the calling thread.
        self.cpu_s = time.thread_time()
        self._to_operator.put(what)


class _Fed(Iterator[pa.RecordBatch]):
    """The iterator that the function receives."""

    def __init__(
        self,
        first: pa.RecordBatch,
        ask: Callable[[_Asks], pa.RecordBatch | _Turn],
    ) -> None:
        self._first: pa.RecordBatch | None = first
        self._ask = ask
        self.ended = False

    def __next__(self) -> pa.RecordBatch:
        if self.ended:
            raise StopIteration
        first, self._first = self._first, None
        if first is not None:
            return first
        turn = self._ask(_Asks.FOR_MORE)
        if isinstance(turn, _Turn):
            self.ended = True
            raise StopIteration
        return turn
