"""The description of a state in a snapshot: its name, its kind, and its signature.

The kinds of state are listed here. The signature gives the types: of a value, list or map by its
serializer, of a table of aggregates by its `AccumulatorShape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from onceflow.core.errors import StateIncompatible
from onceflow.core.state.api import descriptors
from onceflow.core.state.types.serializers import serializer_of

StateKind: TypeAlias = Literal["value", "list", "map", "accumulators"]


@dataclass(frozen=True, slots=True)
class StateMeta:
    """The description of one state in a snapshot."""

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


def describe_value_state(descriptor: descriptors.ValueStateDescriptor[Any]) -> StateMeta:
    """Return a snapshot's description of a value state."""
    return StateMeta(descriptor.name, "value", serializer_of(descriptor.type).signature)


def describe_list_state(descriptor: descriptors.ListStateDescriptor[Any]) -> StateMeta:
    """Return a snapshot's description of a list state."""
    return StateMeta(descriptor.name, "list", serializer_of(descriptor.type).signature)


def describe_map_state(descriptor: descriptors.MapStateDescriptor[Any, Any]) -> StateMeta:
    """Return a snapshot's description of a map state."""
    key, value = serializer_of(descriptor.key_type), serializer_of(descriptor.type)
    return StateMeta(descriptor.name, "map", f"{key.signature} -> {value.signature}")


def aggregates_of(meta: StateMeta) -> tuple[str, dict[str, str]]:
    """Return the key part of a table's signature, and the operation and type of each aggregate."""
    keys, bracket, listed = meta.signature.partition("]")
    # Split by "),", because the arguments of an aggregate may have commas.
    pieces = listed.removesuffix(")").split("),") if listed else []
    return keys + bracket, dict(piece.split("=", 1) for piece in pieces)
