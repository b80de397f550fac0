"""What users write or name to compute: functions of records and batches, keyed functions."""

from __future__ import annotations

import functools
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa

from onceflow.core.api.function_metrics import MetricsAccess
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.state import (
    AccumulatorColumn,
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
    StateTtlConfig,
    TimeDomain,
    Timer,
    Timers,
    ValueState,
    ValueStateDescriptor,
)
from onceflow.core.state.api.descriptors import DIGITS_MAX

Record: TypeAlias = dict[str, Any]
"""One row: column name to Python value, as `pyarrow.RecordBatch.to_pylist` gives it."""

BatchFunction: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
ArrowIteratorFunction: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
"""What Spark's `mapInArrow` takes."""
PandasIteratorFunction: TypeAlias = Callable[[Iterator[Any]], Iterable[Any]]
"""What Spark's `mapInPandas` takes: DataFrames of pandas in and out."""

_ITERATES = re.compile(r"(\w+\.)*(Iterator|Iterable|Generator)\b")


def takes_iterator(function: Callable[..., Any]) -> bool:
    """Whether `function` takes an iterator of batches, and not one: it yields, or says so.

    It says so by the annotation of its parameter or of what it returns.
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


AggregateOp: TypeAlias = Literal["sum", "count", "min", "max", "avg"]


@dataclass(frozen=True)
class OutputTag:
    """A side output of a function: `OutputTag("late", "account STRING, amount BIGINT")`.

    `schema` is that of its records: an Arrow schema, a Spark `StructType` or DDL text. The function
    asks for it in `open`, by `side_output(tag)`; the stream of what it emits there is
    `stream.side_output(tag)`.

    Raises:
        ConfigError: The name is empty or holds a space, or the schema is none.
    """

    name: str
    schema: pa.Schema

    def __init__(self, name: str, schema: SchemaLike) -> None:
        if not name or re.search(r"\s", name):
            raise ConfigError(f"OutputTag({name!r}): give it a name without spaces")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "schema", schema_of(schema))


class SideOutput(Protocol):
    """Takes records besides those that a function returns."""

    def emit(self, record: Record) -> None:
        """Send `record` to the stream of this side output; nowhere when no stream is taken of it.

        It belongs to the checkpoint of the record or timer at hand, as what is returned does.
        """
        ...


class OperatorAccess(Protocol):
    """Hands a function the state of its subtask, which belongs to no key."""

    @property
    def metrics(self) -> MetricsAccess:
        """Metrics of the function's own, by name; asked for in `open`."""
        ...

    @property
    def is_restored(self) -> bool:
        """Whether the job goes on from a checkpoint that holds state of this operator."""
        ...

    @property
    def subtask(self) -> int:
        """The number of this subtask, from 0."""
        ...

    @property
    def parallelism(self) -> int:
        """How many subtasks there are."""
        ...

    def list_state(self, descriptor: ListStateDescriptor[Any]) -> ListState[Any]:
        """Return a list whose elements are spread evenly over all subtasks at a restore."""
        ...

    def union_list_state(self, descriptor: ListStateDescriptor[Any]) -> ListState[Any]:
        """Return a list whose elements, those of all subtasks, go to every subtask at a restore."""
        ...

    def side_output(self, tag: OutputTag) -> SideOutput:
        """Return what takes records for `stream.side_output(tag)`; asked for in `open`."""
        ...


class StateAccess(Protocol):
    """Hands a keyed function its state: that of the record's key, unless it says otherwise."""

    @property
    def metrics(self) -> MetricsAccess:
        """Metrics of the function's own, by name; asked for in `open`."""
        ...

    @property
    def operator(self) -> OperatorAccess:
        """What hands out the state of the subtask, which belongs to no key."""
        ...

    def raw_keyed_state(self, name: str) -> RawKeyedState:
        """Return bytes for each key group, which go where the group's keys go."""
        ...

    def value_state(self, descriptor: ValueStateDescriptor[Any]) -> ValueState[Any]:
        """Return the state of one value a key."""
        ...

    def list_state(self, descriptor: ListStateDescriptor[Any]) -> ListState[Any]:
        """Return the state of a list a key."""
        ...

    def map_state(self, descriptor: MapStateDescriptor[Any, Any]) -> MapState[Any, Any]:
        """Return the state of a mapping a key."""
        ...

    def reducing_state(self, descriptor: ReducingStateDescriptor[Any]) -> ReducingState[Any]:
        """Return the state of one value a key, which a function folds others into."""
        ...

    def aggregating_state(
        self, descriptor: AggregatingStateDescriptor[Any, Any, Any]
    ) -> AggregatingState[Any, Any]:
        """Return the state of one accumulator a key."""
        ...

    def namespace(self, kind: Any) -> Namespace[Any]:
        """Return what hands out states for each value of type `kind`, besides the key."""
        ...

    def timers(self) -> Timers:
        """Return the timers of the record's key; asked for in `open` as a state is."""
        ...

    def side_output(self, tag: OutputTag) -> SideOutput:
        """Return what takes records for `stream.side_output(tag)`; asked for in `open`."""
        ...


class BatchStates(Protocol):
    """Hands a `KeyedBatchFunction` its states: those of a batch's keys and others."""

    @property
    def metrics(self) -> MetricsAccess:
        """Metrics of the function's own, by name; asked for in `open`."""
        ...

    @property
    def operator(self) -> OperatorAccess:
        """What hands out the state of the subtask, which belongs to no key."""
        ...

    def raw_keyed_state(self, name: str) -> RawKeyedState:
        """Return bytes for each key group, which go where the group's keys go."""
        ...

    def value_state(self, descriptor: ValueStateDescriptor[Any]) -> BatchValueState:
        """Return the state of one value a key."""
        ...

    def timers(self) -> BatchTimers:
        """Return the timers of the batch's keys; asked for in `open` as a state is."""
        ...


class FunctionOfRecords:
    """What functions of records and timers share. Pickled: make resources in `open`."""

    def on_timer(self, timer: Timer) -> Record | Iterable[Record] | None:
        """Return the record or records that follow now that `timer` has fired, or None.

        The states are those of `timer.key`. Called once for each timer of a restored and continued
        stream, as `process` is for each record. Needed only where timers are registered.
        """
        raise NotImplementedError(
            f"{type(self).__name__} registers timers and has no on_timer() to take them"
        )

    def on_end(self) -> Record | Iterable[Record] | None:
        """Return the last record or records, now that all input of this subtask has ended.

        Called once, with all rows of bounded input decided or by a stop that drains, before the
        last snapshot; not when a job stops otherwise. There is no key here: what is kept by key
        comes out by timers. What it returns is committed once, whatever is killed: an attempt that
        fails before is repeated with the state of the last checkpoint.
        """
        return None

    def snapshot_state(self, checkpoint: int) -> None:
        """Bring states up to date that are not kept by key; `checkpoint` takes them as they are.

        As in `ProcessFunction`. There is no key here: keyed states are up to date already.
        """

    def close(self) -> None:
        """Release what `open` took. Not called when the process is killed."""


class KeyedFunction(FunctionOfRecords, ABC):
    """A function of one record and the state of its key.

    Pickled to the slots: build connections and other resources in `open`, not in `__init__`. One
    instance serves one subtask, on one thread; the records of one key come in the order in which
    each source split holds them.
    """

    @abstractmethod
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns. Runs on the driver."""

    def open(self, state: StateAccess) -> None:
        """Take hold of every state. Called once, after restore, before the first record.

        A restored state that is not asked for here is refused by name, and so is one that is asked
        for later.
        """

    @abstractmethod
    def process(self, record: Record) -> Record | Iterable[Record] | None:
        """Return the record or records that follow from `record`, or None for none of them.

        Raising ends the attempt; the record is processed again after the restart.
        """


class KeyedBatchFunction(ABC):
    """A function of an Arrow batch and the states of all its keys at once.

    Pickled to the slots, as a `KeyedFunction` is. Which rows are in one batch is chance: what it
    returns for a row must not depend on that.
    """

    @abstractmethod
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the schema of the batches that `process` returns. Runs on the driver."""

    def open(self, state: BatchStates) -> None:  # noqa: B027 - optional hook
        """Take hold of every state. Called once, after restore, before the first batch."""

    @abstractmethod
    def process(self, batch: KeyedBatch) -> pa.RecordBatch | None:
        """Return the records that follow from `batch`, in any number, or None for none of them.

        Raising ends the attempt; the records are processed again after the restart.
        """

    def on_timers(self, timers: KeyedBatch, domain: TimeDomain) -> pa.RecordBatch | None:
        """Return what follows now that `timers`, of one time domain, have fired, or None.

        Its rows are the key columns and `timer_ms`, the time that each was registered for; those of
        one key are in the order of their times. The states are those of its keys. Which timers are
        in one call is chance, and deleting one that is due already may come too late. Needed only
        where timers are registered.
        """
        raise NotImplementedError(
            f"{type(self).__name__} registers timers and has no on_timers() to take them"
        )

    def on_end(self) -> pa.RecordBatch | None:
        """Return the last batch, now that all input of this subtask has ended.

        Called once, with all rows of bounded input decided or by a stop that drains, before the
        last snapshot; not when a job stops otherwise. What it returns is committed once, whatever
        is killed: an attempt that fails before is repeated with the state of the last checkpoint.
        """
        return None

    def snapshot_state(self, checkpoint: int) -> None:  # noqa: B027 - optional hook
        """Bring states up to date that are not kept by key; `checkpoint` takes them as they are.

        As in `ProcessFunction`. There is no batch here: states of keys are up to date already.
        """

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took. Not called when the process is killed."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A running aggregate over the records of a key: `sum_("amount")`, `count()`."""

    op: AggregateOp
    column: str | None

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        """Return the type of what the aggregate over `schema` comes to.

        Raises:
            ConfigError: The column is not there or cannot be aggregated.
        """
        return self.total("", schema).result_type

    def total(self, name: str, schema: pa.Schema) -> AccumulatorColumn:
        """Return what is kept of the aggregate called `name` over `schema`.

        Raises:
            ConfigError: The column is not there or cannot be aggregated.
        """
        return AccumulatorColumn(name, self.op, self._total_type(schema))

    def _total_type(self, schema: pa.Schema) -> pa.DataType:
        if self.column is None:
            return pa.int64()
        if self.column not in schema.names:
            raise ConfigError(
                f"{self.op}({self.column!r}): no such column; there are {', '.join(schema.names)}"
            )
        column_type = schema.field(self.column).type
        if pa.types.is_integer(column_type):
            return pa.int64()
        if pa.types.is_floating(column_type):
            return pa.float64()
        if pa.types.is_decimal(column_type) and column_type.precision <= DIGITS_MAX:
            digits = DIGITS_MAX if self.op == "sum" else column_type.precision
            return pa.decimal128(digits, column_type.scale)
        if self.op in ("min", "max") and _is_time(column_type):
            return column_type
        times = "" if self.op in ("sum", "avg") else ", a date, a time or a timestamp"
        raise ConfigError(
            f"{self.op}({self.column!r}): cannot aggregate {column_type}; it takes integers, floats"
            f" and decimals of up to {DIGITS_MAX} digits{times}; for others use process() with a"
            " function of your own"
        )


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind))


def sum_(column: str) -> Aggregate:
    """Return the running sum of `column`; nulls are skipped; overflow is an error.

    Of integers 64 bits, of decimals 38 digits and the column's scale, of floats a float64.
    """
    return Aggregate("sum", column)


def count() -> Aggregate:
    """Return the running number of records, 1 for the first record of a key."""
    return Aggregate("count", None)


def min_(column: str) -> Aggregate:
    """Return the smallest value of `column` so far; nulls are skipped, and -0.0 is below 0.0."""
    return Aggregate("min", column)


def max_(column: str) -> Aggregate:
    """Return the largest value of `column` so far; nulls are skipped, and 0.0 is above -0.0."""
    return Aggregate("max", column)


def avg(column: str) -> Aggregate:
    """Return the average of `column` so far; nulls are skipped, null until there is a value.

    Of decimals it has four more digits, up to 38 in all, the last of them rounded half away from
    zero; of integers and floats it is a float64.
    """
    return Aggregate("avg", column)


def running_schema(schema: pa.Schema, aggregates: Mapping[str, Aggregate]) -> pa.Schema:
    """Return `schema` with one more column for each aggregate, in the order given.

    Raises:
        ConfigError: There is none, a name is taken, or a column cannot be aggregated.
    """
    if not aggregates:
        raise ConfigError("running() needs at least one aggregate, such as balance=sum_('amount')")
    fields = list(schema)
    for name, aggregate in aggregates.items():
        if name in schema.names:
            raise ConfigError(f"running({name}=…): the stream has a column {name!r} already")
        fields.append(pa.field(name, aggregate.result_type(schema)))
    return pa.schema(fields)


def check_running_ttl(ttl: object) -> None:
    """Raise ConfigError unless running aggregates may have this time to live.

    Aggregates cannot return values that have expired.
    """
    if ttl is not None and not isinstance(ttl, StateTtlConfig):
        raise ConfigError(
            f"running(ttl={ttl!r}): give a StateTtlConfig; an aggregate needs another name"
        )
    if ttl is not None and not ttl.never_returns_expired:
        raise ConfigError(
            f"running(ttl=…): visibility={ttl.visibility!r} is not for running aggregates: what has"
            " expired begins anew, whether it is deleted yet or not"
        )
