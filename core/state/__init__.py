"""Keyed and operator state: what functions read and write, and the backends that keep it."""

from onceflow.core.state.accumulators import AccumulatorTable
from onceflow.core.state.api import (
    KeyedStateStore,
    ListState,
    MapState,
    PendingSnapshot,
    StateBackend,
    ValueState,
)
from onceflow.core.state.backends import HeapBackend, RocksDBBackend
from onceflow.core.state.context import StateContext, StateHandle, StateReader, StateWriter
from onceflow.core.state.descriptors import (
    AccumulatorColumn,
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)
from onceflow.core.state.key_groups import hash_key, hash_keys, key_group_of, key_groups
from onceflow.core.state.serializers import Serializer

__all__ = [
    "AccumulatorColumn",
    "AccumulatorTable",
    "HeapBackend",
    "KeyedStateStore",
    "ListState",
    "ListStateDescriptor",
    "MapState",
    "MapStateDescriptor",
    "PendingSnapshot",
    "RocksDBBackend",
    "Serializer",
    "StateBackend",
    "StateContext",
    "StateHandle",
    "StateReader",
    "StateWriter",
    "ValueState",
    "ValueStateDescriptor",
    "hash_key",
    "hash_keys",
    "key_group_of",
    "key_groups",
]
