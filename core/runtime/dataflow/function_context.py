"""What the runtime hands to a function when it opens: its states and its side outputs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn, TypeVar

import pyarrow as pa

from onceflow.core.api.functions import OutputTag, Record
from onceflow.core.errors import BadStateValue, ConfigError
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
from onceflow.core.state.operator_state import BroadcastMap, OperatorStateStore

K = TypeVar("K")
V = TypeVar("V")


class SideBuffer:
    """Keeps what a function emits to one side output until the batch at hand is done."""

    def __init__(self, uid: str, tag: OutputTag) -> None:
        self.tag = tag
        self._results = ResultRows(uid, tag.schema)

    def emit(self, record: Record) -> None:
        """Take one more record, as it is now.

        Raises:
            UserFunctionError: It has other columns than the tag.
        """
        self._results.take_record(record)

    def take_batch(self) -> pa.RecordBatch | None:
        """Return what is kept, and keep nothing of it; None: nothing is."""
        return self._results.batch() if self._results.count else None


class SideOutputs:
    """The side outputs that one function has asked for."""

    def __init__(self, operator: RunningOperator) -> None:
        self._operator = operator
        self._buffers: dict[str, SideBuffer] = {}

    def open(self, tag: OutputTag) -> SideBuffer:
        """Return the buffer of `tag`; the same for each call.

        Raises:
            ConfigError: There is one of that name with other columns.
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
        """Count records that the function leaves out."""
        self._operator.rejected += records

    def flush(self) -> None:
        """Emit what is kept."""
        for name, buffer in self._buffers.items():
            batch = buffer.take_batch()
            if batch is not None:
                self._operator.emit_to(name, batch)


class BroadcastStates:
    """The broadcast states of one subtask: those that `broadcast(…)` has named."""

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
            ConfigError: `broadcast()` has named none that is the same.
        """
        if self._descriptors.get(descriptor.name) != descriptor:
            known = ", ".join(map(str, self._descriptors.values())) or "none"
            raise ConfigError(
                f"operator {self._uid!r} asks for broadcast state {descriptor}, and broadcast()"
                f" was given {known}: use one descriptor for both"
            )
        return self._states[descriptor.name]

    def may_change(self, now: bool) -> None:
        """Say whether a record is at hand that every subtask gets."""
        for state in self._states.values():
            state.may_change = now


class KeyedContext(KeyedStates):
    """What a function of a keyed stream opens with."""

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
        """What hands out the state of the subtask, which belongs to no key."""
        self.metrics = operator.metrics
        """Metrics of the function's own, by name."""
        self._states = states
        self._side_outputs = side_outputs
        self._broadcast = broadcast

    def raw_keyed_state(self, name: str) -> RawKeyedState:
        """Return bytes for each key group."""
        return self._states.raw_keyed_state(name)

    def side_output(self, tag: OutputTag) -> SideBuffer:
        """Return what takes records for `stream.side_output(tag)`."""
        return self._side_outputs.open(tag)

    def count_rejected(self, records: int) -> None:
        """Count records that the function leaves out; see `LateRecords`."""
        self._side_outputs.count_rejected(records)

    def broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return a state that `broadcast(descriptor)` has named."""
        if self._broadcast is None:
            raise ConfigError(
                f"broadcast state {descriptor.name!r} is asked for by a function that is connected"
                " with no broadcast stream"
            )
        return self._broadcast.find_state(descriptor)


class BatchContext:
    """What a function of batches opens with."""

    def __init__(
        self, of_keys: KeyedBatchStates, states: OperatorStateStore, operator: UnkeyedContext
    ) -> None:
        self.operator = operator
        """What hands out the state of the subtask, which belongs to no key."""
        self.metrics = operator.metrics
        """Metrics of the function's own, by name."""
        self.value_state = of_keys.value_state
        self.timers = of_keys.timers
        self.raw_keyed_state = states.raw_keyed_state


class UnkeyedContext:
    """What a function of a stream without a key opens with."""

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
        """Metrics of the function's own, by name."""

    def list_state(self, descriptor: ListStateDescriptor[V]) -> ListState[V]:
        """Return a list whose elements are spread evenly over all subtasks at a restore."""
        return self._store.list_state(descriptor)

    def union_list_state(self, descriptor: ListStateDescriptor[V]) -> ListState[V]:
        """Return a list whose elements, those of all subtasks, go to every subtask at a restore."""
        return self._store.union_list_state(descriptor)

    def side_output(self, tag: OutputTag) -> SideBuffer:
        """Return what takes records for `stream.side_output(tag)`."""
        return self._side_outputs.open(tag)

    def broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return a state that `broadcast(descriptor)` has named."""
        if self._broadcast is None:
            self._refuse("broadcast_state")
        return self._broadcast.find_state(descriptor)

    @property
    def operator(self) -> UnkeyedContext:
        """What hands out the state of the subtask: there is no other."""
        return self

    def raw_keyed_state(self, name: str) -> NoReturn:
        """Refuse: there is no key."""
        self._refuse("raw_keyed_state")

    def value_state(self, descriptor: Any) -> NoReturn:
        """Refuse: there is no key."""
        self._refuse("value_state")

    def map_state(self, descriptor: Any) -> NoReturn:
        """Refuse: there is no key."""
        self._refuse("map_state")

    def reducing_state(self, descriptor: Any) -> NoReturn:
        """Refuse: there is no key."""
        self._refuse("reducing_state")

    def aggregating_state(self, descriptor: Any) -> NoReturn:
        """Refuse: there is no key."""
        self._refuse("aggregating_state")

    def namespace(self, kind: Any) -> NoReturn:
        """Refuse: there is no key."""
        self._refuse("namespace")

    def timers(self) -> NoReturn:
        """Refuse: there is no key."""
        self._refuse("timers")

    def _refuse(self, asked: str) -> NoReturn:
        raise ConfigError(
            f"operator {self._uid!r} asks for {asked}() and its stream has no keys: put"
            " .key_by(…) before it"
        )


class NoKey:
    """The key while there is none: no keyed state can be used."""

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
