"""A recorder of the states that a function asks for in `open`, while the pipeline is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, cast

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.plan.compiled_function import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    Kind,
    kind_of_type,
    kind_of_value,
)
from onceflow.core.state import ValueStateDescriptor


@dataclass(frozen=True, slots=True)
class RecordedState:
    """A record of a state, stored in the copy's attribute that holds the state in a slot."""

    descriptor: ValueStateDescriptor[Any]
    kind: Kind


class OpeningStates:
    """The context with which the copy opens. Records requested states instead of creating them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def value_state(self, descriptor: ValueStateDescriptor[Any]) -> RecordedState:
        """Return the record of `descriptor`."""
        kind = {int: INTEGER, float: FLOAT, bool: BOOLEAN}.get(cast("Any", descriptor.type))
        if isinstance(descriptor.type, pa.DataType):
            kind = kind_of_type(descriptor.type)
            if kind in (INTEGER, FLOAT) and descriptor.type not in (pa.int64(), pa.float64()):
                kind = None
        reason = ""
        if kind is None:
            reason = (
                f"is of type {descriptor.type}; give int, float, bool, or an Arrow type of"
                " timestamps (s, ms or us, without a zone or in UTC)"
            )
        elif descriptor.ttl is not None:
            reason = "has a time to live, which compiled functions do not have"
        elif descriptor.default is None:
            reason = "has no default, and a kernel has no None; give default=…"
        elif kind in (INTEGER, FLOAT, BOOLEAN) and kind_of_value(descriptor.default) != kind:
            reason = f"has default {descriptor.default!r}, which is not {kind} of 64 bits; give one"
        if kind is None or reason:
            raise ConfigError(
                f"{self._name} cannot be compiled: state {descriptor.name!r} {reason}, or leave"
                " compiled=True out"
            )
        return RecordedState(descriptor, kind)

    def __getattr__(self, name: str) -> NoReturn:
        raise ConfigError(
            f"{self._name} cannot be compiled: open() asks for {name}, and compiled functions have"
            " value states alone; leave compiled=True out"
        )
