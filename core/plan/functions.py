"""The functions that users write: of records, of batches, and with keyed state.

Records that functions return or yield are copied.

A generator may yield the same dict repeatedly, and a function may keep and change a list that it
returned. A copy keeps the values that the record had when it was returned or yielded.
"""

from __future__ import annotations

import functools
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.plan.function_metrics import MetricsAccess
from onceflow.core.state import (
    AggregatingState,
    AggregatingStateDescriptor,
    BatchTimers,
    BatchValueState,
    KeyedBatch,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    Namespace,
    RawKeyedState,
    ReducingState,
    ReducingStateDescriptor,
    TimeDomain,
    Timer,
    Timers,
    ValueState,
    ValueStateDescriptor,
)


def copy_value(value: Any) -> Any:
    """Return a copy of `value`, with copies of all lists, dicts, sets, bytearrays and arrays."""
    # Test for the exact classes first. Most values have one of them, and `isinstance` with an
    # abstract class is slow.
    kind = value.__class__
    if kind is list or kind is tuple:
        return [copy_value(element) for element in value]
    if kind is dict:
        return {key: copy_value(item) for key, item in value.items()}
    if kind is bytearray:
        return bytes(value)
    if isinstance(value, (list, set)):
        return [copy_value(element) for element in cast("Iterable[Any]", value)]
    if isinstance(value, Mapping):
        return {key: copy_value(item) for key, item in _list_items(value)}
    # numpy arrays. numpy scalars also have these attributes and are cheap to copy.
    return value.copy() if hasattr(value, "__array__") and hasattr(value, "copy") else value


def _list_items(value: Any) -> Iterable[tuple[Any, Any]]:
    items: Iterable[tuple[Any, Any]] = value.items()
    return items


def copy_records(result: Record | Iterable[Record] | None) -> Iterator[Record]:
    """Yield a copy of each record of a function's result, at the time the function yields it."""
    if isinstance(result, Mapping):
        yield copy_value(result)
    elif result is not None:
        yield from map(copy_value, result)


Record: TypeAlias = dict[str, Any]
"""A row: column name to Python value, as in `pyarrow.RecordBatch.to_pylist`."""

BatchFunction: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
ArrowIteratorFunction: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
"""A function for Spark's `mapInArrow`."""
PandasIteratorFunction: TypeAlias = Callable[[Iterator[Any]], Iterable[Any]]
"""A function for Spark's `mapInPandas`: pandas DataFrames in and out."""

_ITERATES = re.compile(r"(\w+\.)*(Iterator|Iterable|Generator)\b")


def takes_iterator(function: Callable[..., Any]) -> bool:
    """Return True if `function` takes an iterator of batches instead of one batch.

    A function takes an iterator if it is a generator function, or if a type annotation of its
    parameter or result says so.
    """
    called: Any = function
    while isinstance(called, functools.partial):
        called = called.func  # pyright: ignore[reportUnknownMemberType]
    if not inspect.isroutine(called):
        called = type(called).__call__
    called = inspect.unwrap(called)
    if inspect.isgeneratorfunction(called):
        return True
    hints = getattr(called, "__annotations__", {}).values()
    return any(_ITERATES.match(hint if isinstance(hint, str) else repr(hint)) for hint in hints)


@check_fields
@dataclass(frozen=True)
class OutputTag:
    """A side output of a function: `OutputTag("late", "account STRING, amount BIGINT")`.

    `schema` is the schema of its records: an Arrow schema, a Spark `StructType` or DDL text. The
    function opens the side output in `open` with `side_output(tag)`. The stream of its records is
    `stream.side_output(tag)`.

    Raises:
        ConfigError: The name is empty or contains a space, or the schema is invalid.
    """

    name: str
    schema: pa.Schema

    def __init__(self, name: str, schema: SchemaLike) -> None:
        if not name or re.search(r"\s", name):
            raise ConfigError(f"OutputTag({name!r}): give it a name without spaces")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "schema", schema_of(schema))


class SideOutput(Protocol):
    """An additional output of a function."""

    def emit(self, record: Record) -> None:
        """Send `record` to the stream of this side output. If no stream uses it, drop the record.

        It belongs to the same checkpoint as the record or timer that is being processed, like
        returned records.
        """
        ...


class OperatorAccess(Protocol):
    """Gives a function the state of its subtask, which does not belong to a key."""

    @property
    def metrics(self) -> MetricsAccess:
        """The function's own metrics, by name. Use it in `open`."""
        ...

    @property
    def is_restored(self) -> bool:
        """True if the job was restored from a checkpoint that contains state of this operator."""
        ...

    @property
    def subtask(self) -> int:
        """The number of this subtask, from 0."""
        ...

    @property
    def parallelism(self) -> int:
        """The number of subtasks."""
        ...

    def list_state(self, descriptor: ListStateDescriptor[Any]) -> ListState[Any]:
        """Return a list state. A restore distributes its elements evenly over all subtasks."""
        ...

    def union_list_state(self, descriptor: ListStateDescriptor[Any]) -> ListState[Any]:
        """Return a list state. A restore gives every subtask the elements of all subtasks."""
        ...

    def side_output(self, tag: OutputTag) -> SideOutput:
        """Return the output for `stream.side_output(tag)`. Call it in `open`."""
        ...


class StateAccess(Protocol):
    """Gives a keyed function its state, by default the state of the current record's key."""

    @property
    def metrics(self) -> MetricsAccess:
        """The function's own metrics, by name. Use it in `open`."""
        ...

    @property
    def operator(self) -> OperatorAccess:
        """The access to the state of the subtask, which does not belong to a key."""
        ...

    def raw_keyed_state(self, name: str) -> RawKeyedState:
        """Return the state of raw bytes for each key group. It moves with the keys of its group."""
        ...

    def value_state(self, descriptor: ValueStateDescriptor[Any]) -> ValueState[Any]:
        """Return the state of one value for each key."""
        ...

    def list_state(self, descriptor: ListStateDescriptor[Any]) -> ListState[Any]:
        """Return the state of one list for each key."""
        ...

    def map_state(self, descriptor: MapStateDescriptor[Any, Any]) -> MapState[Any, Any]:
        """Return the state of one mapping for each key."""
        ...

    def reducing_state(self, descriptor: ReducingStateDescriptor[Any]) -> ReducingState[Any]:
        """Return the state of one value for each key, with which a function combines new values."""
        ...

    def aggregating_state(
        self, descriptor: AggregatingStateDescriptor[Any, Any, Any]
    ) -> AggregatingState[Any, Any]:
        """Return the state of one accumulator for each key."""
        ...

    def namespace(self, kind: Any) -> Namespace[Any]:
        """Return access to states that belong to a key and a namespace value of type `kind`."""
        ...

    def timers(self) -> Timers:
        """Return the timers of the current record's key. Call it in `open`, as for a state."""
        ...

    def side_output(self, tag: OutputTag) -> SideOutput:
        """Return the output for `stream.side_output(tag)`. Call it in `open`."""
        ...


class BatchStates(Protocol):
    """Gives a `KeyedBatchFunction` its states: those of the batch's keys, and operator states."""

    @property
    def metrics(self) -> MetricsAccess:
        """The function's own metrics, by name. Use it in `open`."""
        ...

    @property
    def operator(self) -> OperatorAccess:
        """The access to the state of the subtask, which does not belong to a key."""
        ...

    def raw_keyed_state(self, name: str) -> RawKeyedState:
        """Return the state of raw bytes for each key group. It moves with the keys of its group."""
        ...

    def value_state(self, descriptor: ValueStateDescriptor[Any]) -> BatchValueState:
        """Return the state of one value for each key."""
        ...

    def timers(self) -> BatchTimers:
        """Return the timers of the batch's keys. Call it in `open`, as for a state."""
        ...


class FunctionOfRecords:
    """The base of functions of records and timers. It is pickled: create resources in `open`."""

    fires_at_end: bool = False
    """True if processing-time timers that are not due yet fire at the end of bounded inputs."""

    def on_timer(self, timer: Timer) -> Record | Iterable[Record] | None:
        """Return the output records for the fired `timer`, or None for no output.

        The keyed states have the values of `timer.key`. Called once for each timer, with the same
        guarantee across restores as `process` for records. Needed only if the function registers
        timers.
        """
        raise NotImplementedError(
            f"{type(self).__name__} registers timers and has no on_timer() to take them"
        )

    def on_end(self) -> Record | Iterable[Record] | None:
        """Return the last output records after all input of this subtask has ended.

        Called once, before the last snapshot, when all rows of bounded input are decided or when a
        stop drains the job. Not called when a job stops in another way. There is no current key:
        use timers to emit keyed state. The returned records are committed exactly once, even if
        processes are killed. If the attempt fails before the commit, it is repeated from the last
        checkpoint.
        """
        return None

    def snapshot_state(self, checkpoint: int) -> None:
        """Update the operator states. `checkpoint` stores them as they are when this returns.

        As in `ProcessFunction`. There is no current key, and keyed states are already up to date.
        """

    def close(self) -> None:
        """Release what `open` took. Not called when the process is killed."""


class KeyedFunction(FunctionOfRecords, ABC):
    """A function of one record and the state of its key.

    Pickled to the slots: create connections and other resources in `open`, not in `__init__`. One
    instance serves one subtask on one thread. Records of one key and one source split come in the
    order of the split.
    """

    @abstractmethod
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns. Runs on the driver."""

    def open(self, state: StateAccess) -> None:
        """Open every state. Called once, after restore, before the first record.

        If a restored state is not opened here, the restore fails with an error that names it.
        Opening a state later fails, too.
        """

    @abstractmethod
    def process(self, record: Record) -> Record | Iterable[Record] | None:
        """Return the output records for `record`, or None for no output.

        An exception ends the attempt, and the record is processed again after the restart.
        """


class KeyedBatchFunction(ABC):
    """A function of an Arrow batch and the states of all its keys at once.

    Pickled to the slots, like a `KeyedFunction`. The grouping of rows into batches is arbitrary.
    The result for a row must not depend on the other rows in the batch.
    """

    @abstractmethod
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the schema of the batches that `process` returns. Runs on the driver."""

    def open(self, state: BatchStates) -> None:  # noqa: B027 - optional hook
        """Open every state. Called once, after restore, before the first batch."""

    @abstractmethod
    def process(self, batch: KeyedBatch) -> pa.RecordBatch | None:
        """Return the output records of `batch`, any number of them, or None for no output.

        An exception ends the attempt, and the records are processed again after the restart.
        """

    def on_timers(self, timers: KeyedBatch, domain: TimeDomain) -> pa.RecordBatch | None:
        """Return the output for fired `timers` of one time domain, or None for no output.

        `timers` has the key columns and `timer_ms`, the time that each timer was registered for.
        Timers of one key are in time order. The states have the values of these keys. The grouping
        of timers into calls is arbitrary. A timer that is already due may fire even if it is
        deleted now. Needed only if the function registers timers.
        """
        raise NotImplementedError(
            f"{type(self).__name__} registers timers and has no on_timers() to take them"
        )

    def on_end(self) -> pa.RecordBatch | None:
        """Return the last batch, now that all input of this subtask has ended.

        Called once, before the last snapshot, when all rows of bounded input are decided or when a
        stop drains the job. Not called when a job stops in another way. The returned records are
        committed exactly once, even if processes are killed. If the attempt fails before the
        commit, it is repeated from the last checkpoint.
        """
        return None

    def snapshot_state(self, checkpoint: int) -> None:  # noqa: B027 - optional hook
        """Update the operator states. `checkpoint` stores them as they are when this returns.

        As in `ProcessFunction`. There is no current batch, and keyed states are already up to date.
        """

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took. Not called when the process is killed."""
