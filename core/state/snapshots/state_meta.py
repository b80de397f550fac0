"""What a snapshot says about one state: its name, its kind, and its signature.

The kinds of state are listed here. The signature tells the types: of a value, list or map by the
serializer, of a table of aggregates by its `AccumulatorShape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from onceflow.core.errors import StateIncompatible
from onceflow.core.state.api.descriptors import (
    ListStateDescriptor,
    MapStateDescriptor,
    ValueStateDescriptor,
)
from onceflow.core.state.types.serializers import serializer_of

StateKind: TypeAlias = Literal["value", "list", "map", "accumulators"]


@dataclass(frozen=True, slots=True)
class StateMeta:
    """What a snapshot says about one state."""

    name: str
    kind: StateKind
    signature: str

    def check_equal(self, other: StateMeta, label: str) -> None:
        """Raise StateIncompatible unless `other`, of another part of the snapshot, is equal."""
        if self != other:
            raise StateIncompatible(
                f"the parts of one snapshot hold state {self.name!r} of {label} as {self.kind}"
                f" {self.signature} and as {other.kind} {other.signature}: they were not written"
                " together; restore another checkpoint"
            )


def describe_value_state(descriptor: ValueStateDescriptor[Any]) -> StateMeta:
    """Return how a snapshot describes a value state."""
    return StateMeta(descriptor.name, "value", serializer_of(descriptor.type).signature)


def describe_list_state(descriptor: ListStateDescriptor[Any]) -> StateMeta:
    """Return how a snapshot describes a list state."""
    return StateMeta(descriptor.name, "list", serializer_of(descriptor.type).signature)


def describe_map_state(descriptor: MapStateDescriptor[Any, Any]) -> StateMeta:
    """Return how a snapshot describes a map state."""
    key, value = serializer_of(descriptor.key_type), serializer_of(descriptor.type)
    return StateMeta(descriptor.name, "map", f"{key.signature} -> {value.signature}")


def aggregates_of(meta: StateMeta) -> tuple[str, dict[str, str]]:
    """Return the key part of a table's signature, and what each aggregate is, in order."""
    keys, bracket, listed = meta.signature.partition("]")
    # By "),": the arguments of an aggregate have commas of their own.
    pieces = listed.removesuffix(")").split("),") if listed else []
    return keys + bracket, dict(piece.split("=", 1) for piece in pieces)
