"""The value states of all keys of a batch, read and written as columns.

A state of numbers, booleans, dates or instants is a column of one table, which all states of the
operator share, so each key is looked up once a batch. A state of another type, or one that expires,
is the same value state that a function by record uses, and is processed key by key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.arrow.exact_arrays import InexactValue, array_of, cast_exactly, exact_array
from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.aggregates.running import Grouping
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.api.descriptors import AccumulatorColumn, ValueStateDescriptor
from onceflow.core.state.keys.key_columns import Ints, python_row_keys, read_key_columns
from onceflow.core.state.keys.key_groups import Hashes, hash_key_columns, hash_keys
from onceflow.core.state.keys.key_index import KeyIndex
from onceflow.core.state.states.batch_timers import BatchTimers, HashedKeys, Values
from onceflow.core.state.states.keyed_states import KeyedStates
from onceflow.core.state.stores.keyed_store import KeyedStateStore, ValueState

COLUMNS_STATE = "onceflow.values"
"""The name under which snapshots hold the states that are columns of the table."""


@dataclass(frozen=True, slots=True)
class KeyedBatch:
    """The records of a batch, grouped by key.

    `order` holds the row numbers, sorted by key; rows of one key keep their order. Key k has the
    positions `firsts[k]` to `firsts[k] + counts[k] - 1` in `order`. Values per key are in the order
    of the keys.
    """

    rows: pa.RecordBatch
    key: tuple[str, ...]
    _group: Grouping

    @property
    def order(self) -> Ints:
        """The row numbers of the batch, sorted by key."""
        return self._group.order

    @property
    def firsts(self) -> Ints:
        """The index in `order` of each key's first row."""
        return self._group.firsts

    @property
    def counts(self) -> Ints:
        """The number of rows of each key, at least 1."""
        return self._group.counts

    @property
    def key_count(self) -> int:
        """The number of keys."""
        return len(self._group.firsts)

    @property
    def keys(self) -> pa.RecordBatch:
        """The key columns, with one row for each key."""
        return self.rows.select(list(self.key)).take(pa.array(self.order[self.firsts]))

    def sort_by_key(self, column: str) -> npt.NDArray[Any]:
        """Return the values of a column, sorted by key like `order`."""
        values: npt.NDArray[Any] = self.rows.column(column).to_numpy(zero_copy_only=False)
        return values[self.order]

    def spread(self, per_key: Values) -> npt.NDArray[Any]:
        """Return one value for each row, sorted like `order`, from one value for each key."""
        return self._group.spread(np.asarray(per_key))

    def lasts(self, per_place: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the last value of each key, from one value for each row, sorted like `order`."""
        return self._group.lasts(per_place)

    def in_row_order(self, per_place: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return values that are sorted like `order`, in the order of the batch's rows."""
        return self._group.in_row_order(per_place)


class BatchValueState(ABC):
    """A state with one value for each key of the current batch."""

    @abstractmethod
    def get_many(self) -> pa.Array:
        """Return the values of the keys, in their order.

        A missing value is the default, or null.
        """

    @abstractmethod
    def put_many(self, values: Values) -> None:
        """Set the value of each key, in the keys' order; a null clears the value.

        Raises:
            BadStateValue: The number of values differs from that of the keys, or a value has
                another type.
        """


class KeyedBatchStates:
    """Creates the states of a batch's keys while the operator opens, and serves them afterwards."""

    def __init__(
        self,
        store: KeyedStateStore,
        key: Sequence[str],
        schema: pa.Schema,
        clock: StateClock | None = None,
    ) -> None:
        self._store = store
        self._key = tuple(key)
        self._key_fields = [schema.field(name) for name in key]
        self._clock = clock or StateClock()
        self._by_key = KeyedStates(store, self._clock)
        self._asked: dict[str, tuple[ValueStateDescriptor[Any], BatchValueState]] = {}
        self._columns: list[AccumulatorColumn] = []
        self._open = True
        self.table: AccumulatorTable | None = None
        self.entries: Ints = np.zeros(0, np.int64)
        """The entries of the keys of the current batch."""
        self._has_rows_of_keys = False
        self._batch: KeyedBatch | None = None
        self._hashes: Hashes | None = None
        """The hashes of the rows' keys, or None if they are not known."""
        self._hashed_keys: HashedKeys | None = None
        self.registered: BatchTimers | None = None
        """The timers, or None if the function has not asked for timers."""

    @property
    def cleaned_a_record(self) -> int:
        """The number of entries of expiring states to check for each record."""
        return self._by_key.cleaned_a_record

    def value_state(self, descriptor: ValueStateDescriptor[Any]) -> BatchValueState:
        """Return the value state called `name`, with the values that a snapshot has of it.

        Raises:
            ConfigError: The operator has opened already, the name is in use, or the type has no
                column.
            StateIncompatible: The snapshot holds the name with another type.
        """
        before = self._asked.get(descriptor.name)
        if before is not None and before[0] == descriptor:
            return before[1]
        if before is not None or not self._open:
            raise ConfigError(
                f"state {descriptor.name!r} is declared as {descriptor}"
                + (f" and as {before[0]}" if before is not None else " while batches are processed")
                + ": declare each state once, in open(), with its own name"
            )
        kind = _arrow_type(descriptor)
        stored = _column_type(kind)
        state: BatchValueState
        if stored is None or descriptor.ttl is not None:
            self._has_rows_of_keys = True
            state = _ValuesByKey(self, self._by_key.value_state(descriptor), descriptor, kind)
        else:
            state = _ColumnValues(self, len(self._columns), descriptor, kind)
            self._columns.append(_column(descriptor.name, stored))
        self._asked[descriptor.name] = descriptor, state
        return state

    def timers(self) -> BatchTimers:
        """Return the timers of the batch's keys. Each call returns the same object.

        Raises:
            ConfigError: The operator has opened already, or a key column has a name that timers
                need.
        """
        if self.registered is None:
            if not self._open:
                raise ConfigError(
                    "timers() is called while batches are processed: call it in open()"
                )
            self.registered = BatchTimers(self._store, self, self._key_fields, self._clock)
        return self.registered

    def finish_open(self) -> None:
        """Create the table. Must be called once all states have been asked for."""
        self._open = False
        if self._columns:
            types = [field.type for field in self._key_fields]
            self.table = self._store.accumulators(COLUMNS_STATE, types, self._columns)

    def begin(self, rows: pa.RecordBatch, hashes: Hashes | None) -> KeyedBatch:
        """Group `rows` by key and return them. From here on, the states hold these keys' values."""
        arrays = [rows.column(name) for name in self._key]
        if self.table is not None:
            group = self.table.group(arrays, hashes)
        else:
            columns = read_key_columns(arrays, self._key)
            known = hash_key_columns(columns) if hashes is None else hashes
            group = Grouping.of(KeyIndex(columns).resolve(columns, known)[0])
        self.entries = group.entries
        self._batch = KeyedBatch(rows, self._key, group)
        self._hashes, self._hashed_keys = hashes, None
        if self._has_rows_of_keys:
            self._store.prefetch(self.python_keys())
        return self._batch

    def end(self) -> None:
        """Finish the batch, and release the entries of its keys in the table."""
        if self.table is not None:
            self.table.finish(self.entries)
        self._batch = self._hashes = self._hashed_keys = None

    def batch(self) -> KeyedBatch:
        """Return the current batch.

        Raises:
            ConfigError: There is no current batch.
        """
        if self._batch is None:
            raise ConfigError(
                "a state or timer of process_batches is used outside of process() and on_timers()"
            )
        return self._batch

    def hash_keys_at_hand(self) -> HashedKeys:
        """Return the keys of the current batch, with one row for each key, and their hashes."""
        if self._hashed_keys is None:
            batch = self.batch()
            keys, hashes = batch.keys.columns, self._hashes
            mine = hash_keys(keys) if hashes is None else hashes[batch.order[batch.firsts]]
            self._hashed_keys = keys, mine
        return self._hashed_keys

    def python_keys(self) -> list[Any]:
        """Return the keys as Python values, in their order."""
        keys = self.batch().keys
        return python_row_keys(keys.columns, keys.schema.names)

    def set_current_key(self, key: Any) -> None:
        """Select the key that the states by key read and write."""
        self._store.set_current_key(key)

    def to_values(self, values: Values, kind: pa.DataType, name: str) -> pa.Array:
        """Return `values`, one for each key, as one array of type `kind`.

        Raises:
            BadStateValue: The number of values differs from that of the keys, or `kind` cannot hold
                one
                exactly.
        """
        try:
            return cast_exactly(self._one_a_key(values, f"put_many of state {name!r}"), kind)
        except (pa.ArrowException, InexactValue) as error:
            raise BadStateValue(
                f"state {name!r} holds {kind} and cannot hold these values: {error}"
            ) from error

    def to_timers(self, values: Values, method: str) -> pa.Array:
        """Return the timer times that `method` got, one for each key, as milliseconds.

        Raises:
            BadStateValue: The number of times differs from that of the keys, or they are no
                integers.
        """
        try:
            array = self._one_a_key(values, method)
            kind = array.type
            # An Arrow timestamp would be read as its ticks, which may be microseconds.
            if pa.types.is_integer(kind) or pa.types.is_null(kind):
                return array.cast(pa.int64())
        except pa.ArrowException as error:
            raise BadStateValue(f"{method} needs milliseconds since 1970: {error}") from error
        raise BadStateValue(
            f"{method} needs milliseconds since 1970 as whole numbers, but was given {kind}"
        )

    def _one_a_key(self, values: Values, what: str) -> pa.Array:
        count = self.batch().key_count
        if len(values) != count:
            raise BadStateValue(
                f"{what} was given {len(values)} values, but the batch has {count} keys. Give one"
                " value for each key, in the order of the batch's keys"
            )
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        return values if isinstance(values, pa.Array) else pa.array(values)


class _ColumnValues(BatchValueState):
    """Values in a column of the table."""

    def __init__(
        self,
        states: KeyedBatchStates,
        index: int,
        descriptor: ValueStateDescriptor[Any],
        kind: pa.DataType,
    ) -> None:
        self._states = states
        self._index = index
        self._name = descriptor.name
        self._kind = kind
        default = descriptor.default
        self._default = None if default is None else _to_scalar(default, kind, descriptor.name)

    def get_many(self) -> pa.Array:
        """Return the values of the keys."""
        self._states.batch()
        assert self._states.table is not None
        values = self._states.table.values(self._index, self._states.entries)
        if values.type != self._kind:
            values = cast_rows(values, self._kind)
        if self._default is not None and values.null_count:
            values = values.fill_null(self._default)
        return values

    def put_many(self, values: Values) -> None:
        """Set the values of the keys."""
        checked = self._states.to_values(values, self._kind, self._name)
        assert self._states.table is not None
        self._states.table.put(self._index, self._states.entries, checked)


def _to_scalar(default: Any, kind: pa.DataType, name: str) -> pa.Scalar:
    try:
        return exact_array([default], kind)[0]
    except InexactValue as error:
        raise ConfigError(
            f"state {name!r} holds {kind}, and its default {default!r:.80} does not fit: {error}"
        ) from error


class _ValuesByKey(BatchValueState):
    """Values in a value state, read and written key by key."""

    def __init__(
        self,
        states: KeyedBatchStates,
        kept: ValueState[Any],
        descriptor: ValueStateDescriptor[Any],
        kind: pa.DataType,
    ) -> None:
        self._states = states
        self._kept = kept
        self._name = descriptor.name
        self._kind = kind

    def get_many(self) -> pa.Array:
        """Return the values of the keys."""
        values: list[Any] = []
        for key in self._states.python_keys():
            self._states.set_current_key(key)
            values.append(self._kept.get())
        return array_of(values, self._kind)

    def put_many(self, values: Values) -> None:
        """Set the values of the keys."""
        checked = self._states.to_values(values, self._kind, self._name)
        for key, value in zip(self._states.python_keys(), checked.to_pylist(), strict=True):
            self._states.set_current_key(key)
            self._kept.set(value)


_PYTHON_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    date: pa.date32(),
    str: pa.string(),
    bytes: pa.binary(),
}


def _arrow_type(descriptor: ValueStateDescriptor[Any]) -> pa.DataType:
    if isinstance(descriptor.type, pa.DataType):
        return descriptor.type
    kind = _PYTHON_TYPES.get(descriptor.type)
    if kind is None:
        raise ConfigError(
            f"state {descriptor.name!r} of type {descriptor.type} has no column: give an Arrow type"
            f" or one of {', '.join(python_type.__name__ for python_type in _PYTHON_TYPES)}; a"
            " function of one record (process) can have any type"
        )
    return kind


def _column_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type in which the table stores values of `kind`, or None if it cannot."""
    types = pa.types
    if types.is_integer(kind) and kind != pa.uint64():
        return pa.int64()
    if types.is_floating(kind):
        return pa.float64()
    alike = types.is_boolean(kind) or types.is_date32(kind) or types.is_timestamp(kind)
    return kind if alike else None


_NOT_IN_NAMES = frozenset("=,()[]")


def _column(name: str, kind: pa.DataType) -> AccumulatorColumn:
    if _NOT_IN_NAMES.intersection(name):
        raise ConfigError(
            f"state name {name!r} has one of the characters = , ( ) [ ], which are reserved in"
            " states of process_batches; choose another name"
        )
    return AccumulatorColumn(name, "last", kind)
