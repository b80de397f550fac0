"""Keyed and operator state: the objects that functions read and write, and the state backends."""

from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader, StateWriter
from onceflow.core.state.api.descriptors import (
    AccumulatorColumn,
    AggregateFunction,
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.state.backends import HeapBackend, RocksDBBackend
from onceflow.core.state.keys.key_groups import hash_key, hash_keys, key_group_of, key_groups
from onceflow.core.state.states.batch_states import BatchValueState, KeyedBatch, KeyedBatchStates
from onceflow.core.state.states.batch_timers import BatchTimers
from onceflow.core.state.states.keyed_states import KeyedStates, Namespace
from onceflow.core.state.states.operator_state import RawKeyedState
from onceflow.core.state.states.timers import TimeDomain, Timer, Timers
from onceflow.core.state.stores.keyed_store import (
    AggregatingState,
    KeyedStateStore,
    ListState,
    MapState,
    PendingKeyedSnapshot,
    ReducingState,
    StateBackend,
    ValueState,
)
from onceflow.core.state.types.serializers import Serializer

__all__ = [
    "AccumulatorColumn",
    "AccumulatorTable",
    "AggregateFunction",
    "AggregatingState",
    "AggregatingStateDescriptor",
    "BatchTimers",
    "BatchValueState",
    "HeapBackend",
    "KeyedBatch",
    "KeyedBatchStates",
    "KeyedStateStore",
    "KeyedStates",
    "ListState",
    "ListStateDescriptor",
    "MapState",
    "MapStateDescriptor",
    "Namespace",
    "PendingKeyedSnapshot",
    "RawKeyedState",
    "ReducingState",
    "ReducingStateDescriptor",
    "RocksDBBackend",
    "Serializer",
    "StateBackend",
    "StateContext",
    "StateHandle",
    "StateReader",
    "StateTtlConfig",
    "StateWriter",
    "TimeDomain",
    "Timer",
    "Timers",
    "ValueState",
    "ValueStateDescriptor",
    "hash_key",
    "hash_keys",
    "key_group_of",
    "key_groups",
]
