"""The rows of a snapshot's states that are not kept by key, as columns.

    split, union   subtask, element, value; one row for each element
    broadcast      map_key, value; one row for each entry of one subtask: all subtasks are equal
    raw-keyed      key_group, value: the function's own bytes

Values are typed like those of keyed state; see `state_columns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from onceflow.core.arrow.exact_arrays import array_of
from onceflow.core.errors import StateIncompatible
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot, StateHandle
from onceflow.core.state.api.context import StateReader
from onceflow.core.state.keys.key_codec import decode_key
from onceflow.core.state.readers.state_columns import (
    ValueForm,
    key_column,
    key_type_of,
    value_type_of,
)
from onceflow.core.state.states import operator_state


@dataclass(frozen=True, slots=True)
class OperatorState:
    """A snapshot's description of one state that is not kept by key. Can be pickled."""

    mode: operator_state.Mode
    name: str
    key_signature: str
    signature: str
    sample: bytes | None
    """Any key of a broadcast state, which gives the type of all keys; None if there is none."""

    @property
    def type(self) -> str:
        """The names of its types."""
        return " -> ".join(filter(None, (self.key_signature, self.signature)))

    def schema(self, form: ValueForm) -> pa.Schema:
        """Return the columns of its rows."""
        value = pa.field("value", value_type_of(self.signature, form).arrow)
        match self.mode:
            case "split" | "union":
                return pa.schema([("subtask", pa.int32()), ("element", pa.int32()), value])
            case "broadcast":
                key = None if self.sample is None else decode_key(self.sample)
                return pa.schema([("map_key", key_type_of(key)), value])
            case "raw-keyed":
                return pa.schema([("key_group", pa.int32()), value])

    def batch(self, saved: operator_state.Saved, subtask: int, form: ValueForm) -> pa.RecordBatch:
        """Return the rows of one subtask.

        Raises:
            StateIncompatible: A value does not fit its column's type.
        """
        schema, elements = self.schema(form), saved.elements
        try:
            return pa.record_batch(self._columns(elements, subtask, schema, form), schema=schema)
        except (pa.ArrowException, msgspec.MsgspecError, OverflowError, ValueError) as error:
            raise StateIncompatible(
                f"{self.mode} state {self.name!r} ({self.type}) does not fit {schema}: {error};"
                " read it with valueFormat=json or valueFormat=binary"
            ) from error

    def _columns(
        self, elements: Sequence[bytes], subtask: int, schema: pa.Schema, form: ValueForm
    ) -> list[pa.Array]:
        value_type = value_type_of(self.signature, form)
        match self.mode:
            case "split" | "union":
                return [
                    pa.array([subtask] * len(elements), pa.int32()),
                    pa.array(range(len(elements)), pa.int32()),
                    array_of([value_type.value(element) for element in elements], value_type.arrow),
                ]
            case "broadcast":
                keys = [decode_key(key) for key in elements[::2]]
                values = [value_type.value(element) for element in elements[1::2]]
                return [key_column(keys, schema.types[0]), array_of(values, value_type.arrow)]
            case "raw-keyed":
                pairs = list(operator_state.parse_groups(elements))
                return [
                    pa.array([group for group, _ in pairs], pa.int32()),
                    pa.array([data for _, data in pairs], pa.binary()),
                ]


def operator_states(
    parts: Iterable[tuple[int, OperatorSnapshot]], reader: StateReader
) -> list[OperatorState]:
    """Return the states of an operator that are not kept by key; `parts` are by subtask.

    All subtasks have the same states, so only one handle of each mode is read.

    Raises:
        StateIncompatible: A newer onceflow wrote the states.
        StateCorrupt, CheckpointCorrupt: A file is damaged or missing; names it.
    """
    firsts: dict[operator_state.Mode, tuple[str, StateHandle]] = {}
    for subtask, part in parts:
        for handle in part.raw:
            mode = operator_state.find_mode(handle)
            if mode is not None:
                firsts.setdefault(mode, (f"{part.uid}[{subtask}]: {handle.name}", handle))
    return [
        OperatorState(mode, saved.name, saved.key_signature, saved.signature, _sample(mode, saved))
        for mode, (label, handle) in firsts.items()
        for saved in operator_state.read_saved(reader.read(handle), label)
    ]


def _sample(mode: operator_state.Mode, saved: operator_state.Saved) -> bytes | None:
    return saved.elements[0] if mode == "broadcast" and saved.elements else None
