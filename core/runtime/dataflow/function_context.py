"""The objects that a function receives in `open`: its states and its side outputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn, TypeVar

import pyarrow as pa

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.plan.functions import OutputTag, Record
from onceflow.core.runtime.dataflow.function_metrics import FunctionMetrics
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.runtime.dataflow.result_rows import ResultRows
from onceflow.core.state import (
    KeyedBatchStates,
    KeyedStates,
    KeyedStateStore,
    ListState,
    ListStateDescriptor,
    MapState,
    MapStateDescriptor,
    RawKeyedState,
)
from onceflow.core.state.states.operator_state import BroadcastMap, OperatorStateStore

K = TypeVar("K")
V = TypeVar("V")


class SideBuffer:
    """A buffer of the records that a function emits to one side output during the current batch."""

    def __init__(self, uid: str, tag: OutputTag) -> None:
        self.tag = tag
        self._results = ResultRows(uid, tag.schema)

    def emit(self, record: Record) -> None:
        """Add a copy of the record.

        Raises:
            UserFunctionError: The record has other columns than the tag.
        """
        self._results.take_record(record)

    def take_batch(self) -> pa.RecordBatch | None:
        """Return the buffered rows and clear the buffer; None if it is empty."""
        return self._results.batch() if self._results.count else None


class SideOutputs:
    """The side outputs that one function has opened."""

    def __init__(self, operator: RunningOperator) -> None:
        self._operator = operator
        self._buffers: dict[str, SideBuffer] = {}

    def open(self, tag: OutputTag) -> SideBuffer:
        """Return the buffer of `tag`; each call returns the same buffer.

        Raises:
            ConfigError: A side output with that name has other columns.
        """
        buffer = self._buffers.setdefault(tag.name, SideBuffer(self._operator.uid, tag))
        if buffer.tag != tag:
            raise ConfigError(
                f"operator {self._operator.uid!r} has two side outputs named {tag.name!r}, with"
                f" columns {buffer.tag.schema} and {tag.schema}; give each a name of its own"
            )
        self._operator.side_schemas[tag.name] = tag.schema
        return buffer

    @property
    def metrics(self) -> FunctionMetrics:
        """The metrics of the function."""
        return self._operator.function_metrics

    def count_rejected(self, records: int) -> None:
        """Count records that the function rejects."""
        self._operator.rejected += records

    def flush(self) -> None:
        """Emit the buffered rows."""
        for name, buffer in self._buffers.items():
            batch = buffer.take_batch()
            if batch is not None:
                self._operator.emit_to(name, batch)


class BroadcastStates:
    """The broadcast states of one subtask, as named in `broadcast(…)`."""

    def __init__(
        self,
        uid: str,
        store: OperatorStateStore,
        descriptors: Collection[MapStateDescriptor[Any, Any]],
    ) -> None:
        self._uid = uid
        self._descriptors = {descriptor.name: descriptor for descriptor in descriptors}
        self._states = {
            name: store.broadcast_state(descriptor)
            for name, descriptor in self._descriptors.items()
        }

    def find_state(self, descriptor: MapStateDescriptor[Any, Any]) -> BroadcastMap[Any, Any]:
        """Return the state of `descriptor`.

        Raises:
            ConfigError: `broadcast()` was not given an equal descriptor.
        """
        if self._descriptors.get(descriptor.name) != descriptor:
            known = ", ".join(map(str, self._descriptors.values())) or "none"
            raise ConfigError(
                f"operator {self._uid!r} uses broadcast state {descriptor}, but broadcast() was"
                f" given {known}: use one descriptor for both"
            )
        return self._states[descriptor.name]

    def may_change(self, now: bool) -> None:
        """Allow or forbid changes. Only a record that every subtask gets may change the states."""
        for state in self._states.values():
            state.may_change = now


class KeyedContext(KeyedStates):
    """The context that a function of a keyed stream receives in `open`."""

    def __init__(
        self,
        store: KeyedStateStore,
        states: OperatorStateStore,
        operator: UnkeyedContext,
        side_outputs: SideOutputs,
        broadcast: BroadcastStates | None = None,
    ) -> None:
        super().__init__(store)
        self.operator = operator
        """The context for state of the subtask, which belongs to no key."""
        self.metrics = operator.metrics
        """The function's own metrics, by name."""
        self._states = states
        self._side_outputs = side_outputs
        self._broadcast = broadcast

    def raw_keyed_state(self, name: str) -> RawKeyedState:
        """Return bytes for each key group."""
        return self._states.raw_keyed_state(name)

    def side_output(self, tag: OutputTag) -> SideBuffer:
        """Return the buffer for the records of `stream.side_output(tag)`."""
        return self._side_outputs.open(tag)

    def count_rejected(self, records: int) -> None:
        """Count records that the function rejects; see `LateRecords`."""
        self._side_outputs.count_rejected(records)

    def broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return a state that was named in `broadcast(descriptor)`."""
        if self._broadcast is None:
            raise ConfigError(
                f"a function uses broadcast state {descriptor.name!r}, but is connected with no"
                " broadcast stream"
            )
        return self._broadcast.find_state(descriptor)


class BatchContext:
    """The context that a function of batches receives in `open`."""

    def __init__(
        self, of_keys: KeyedBatchStates, states: OperatorStateStore, operator: UnkeyedContext
    ) -> None:
        self.operator = operator
        """The context for state of the subtask, which belongs to no key."""
        self.metrics = operator.metrics
        """The function's own metrics, by name."""
        self.value_state = of_keys.value_state
        self.timers = of_keys.timers
        self.raw_keyed_state = states.raw_keyed_state


class UnkeyedContext:
    """The context that a function of a stream without keys receives in `open`."""

    def __init__(
        self,
        uid: str,
        store: OperatorStateStore,
        side_outputs: SideOutputs,
        broadcast: BroadcastStates | None = None,
    ) -> None:
        self._uid = uid
        self._store = store
        self._side_outputs = side_outputs
        self._broadcast = broadcast
        self.subtask, self.parallelism = store.subtask, store.parallelism
        self.is_restored = store.is_restored
        self.metrics = side_outputs.metrics
        """The function's own metrics, by name."""

    def list_state(self, descriptor: ListStateDescriptor[V]) -> ListState[V]:
        """Return a list whose elements are spread evenly over all subtasks at a restore."""
        return self._store.list_state(descriptor)

    def union_list_state(self, descriptor: ListStateDescriptor[V]) -> ListState[V]:
        """Return a list whose elements from all subtasks go to every subtask at a restore."""
        return self._store.union_list_state(descriptor)

    def side_output(self, tag: OutputTag) -> SideBuffer:
        """Return the buffer for the records of `stream.side_output(tag)`."""
        return self._side_outputs.open(tag)

    def broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return a state that was named in `broadcast(descriptor)`."""
        if self._broadcast is None:
            self._refuse("broadcast_state")
        return self._broadcast.find_state(descriptor)

    @property
    def operator(self) -> UnkeyedContext:
        """The context for state of the subtask, which is this context."""
        return self

    def raw_keyed_state(self, name: str) -> NoReturn:
        """Raise ConfigError: the stream has no keys."""
        self._refuse("raw_keyed_state")

    def value_state(self, descriptor: Any) -> NoReturn:
        """Raise ConfigError: the stream has no keys."""
        self._refuse("value_state")

    def map_state(self, descriptor: Any) -> NoReturn:
        """Raise ConfigError: the stream has no keys."""
        self._refuse("map_state")

    def reducing_state(self, descriptor: Any) -> NoReturn:
        """Raise ConfigError: the stream has no keys."""
        self._refuse("reducing_state")

    def aggregating_state(self, descriptor: Any) -> NoReturn:
        """Raise ConfigError: the stream has no keys."""
        self._refuse("aggregating_state")

    def namespace(self, kind: Any) -> NoReturn:
        """Raise ConfigError: the stream has no keys."""
        self._refuse("namespace")

    def timers(self) -> NoReturn:
        """Raise ConfigError: the stream has no keys."""
        self._refuse("timers")

    def _refuse(self, asked: str) -> NoReturn:
        raise ConfigError(
            f"operator {self._uid!r} uses {asked}(), but its stream has no keys: put .key_by(…)"
            " before it"
        )


class NoKey:
    """The key while no key is set: using keyed state raises BadStateValue."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __hash__(self) -> int:
        raise BadStateValue(
            f"keyed state or timers were used in {self._where}(), where no key is set; use"
            " state.operator, or do this where a record is processed"
        )


NO_KEY_OF_BROADCAST = NoKey("process_broadcast")
NO_KEY_OF_END = NoKey("on_end")
NO_KEY_OF_SNAPSHOT = NoKey("snapshot_state")
