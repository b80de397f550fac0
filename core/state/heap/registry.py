"""The states of one store, by name, and what its snapshot held that nobody has asked for yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape
from onceflow.core.state.api.context import StateContext
from onceflow.core.state.api.descriptors import (
    USED,
    AccumulatorColumn,
    ListStateDescriptor,
    MapStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.state.snapshots.canonical import StateMeta
from onceflow.core.state.types.serializers import serializer_of


def value_meta(descriptor: ValueStateDescriptor[Any]) -> StateMeta:
    """Return how a snapshot describes a value state."""
    return StateMeta(descriptor.name, "value", serializer_of(descriptor.type).signature)


def list_meta(descriptor: ListStateDescriptor[Any]) -> StateMeta:
    """Return how a snapshot describes a list state."""
    return StateMeta(descriptor.name, "list", serializer_of(descriptor.type).signature)


def map_meta(descriptor: MapStateDescriptor[Any, Any]) -> StateMeta:
    """Return how a snapshot describes a map state."""
    key, value = serializer_of(descriptor.key_type), serializer_of(descriptor.type)
    return StateMeta(descriptor.name, "map", f"{key.signature} -> {value.signature}")


def shape_of(
    name: str,
    key_types: Sequence[pa.DataType],
    columns: Sequence[AccumulatorColumn],
    *,
    namespaced: bool = False,
    ttl: StateTtlConfig | None = None,
) -> AccumulatorShape:
    """Return the shape of a table of accumulators, with a column of last uses if they expire.

    Raises:
        ConfigError: A key or column type cannot be aggregated by or over.
    """
    kept = tuple(columns) if ttl is None else (*columns, USED)
    return AccumulatorShape(name, tuple(key_types), kept, namespaced)


class Registry:
    """The states of a store by name; one name is one state for the life of the store."""

    def __init__(self, context: StateContext) -> None:
        self._label = str(context)
        self._claimed: dict[str, tuple[StateMeta, Any]] = {}
        self._complete = False

    def find(self, asked: StateMeta) -> Any | None:
        """Return the state object of this name, None when it was not asked for before.

        Raises:
            ConfigError: It was, as another kind or type; or it is asked for too late.
        """
        if asked.name not in self._claimed:
            if self._complete:
                raise ConfigError(
                    f"state {asked.name!r} of {self._label} is asked for while records are"
                    " processed: ask for every state in open(), which is when a restored one is"
                    " looked for"
                )
            return None
        meta, state = self._claimed[asked.name]
        if meta != asked:
            raise ConfigError(
                f"state {asked.name!r} of {self._label} is used as {meta.kind} {meta.signature} and"
                f" as {asked.kind} {asked.signature}; give each state a name of its own"
            )
        return state

    def complete(self) -> None:
        """Take no other name from here on."""
        self._complete = True

    def add(self, meta: StateMeta, state: Any) -> None:
        """Let `state` answer to its name."""
        self._claimed[meta.name] = (meta, state)
