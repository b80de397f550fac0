"""What the runtime hands to a function when it opens, besides keyed state: its side outputs."""

from __future__ import annotations

from onceflow.core.errors import ConfigError
from onceflow.core.functions import OutputTag, Record
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.runtime.dataflow.user_functions import batch_of
from onceflow.core.state import KeyedStates, KeyedStateStore


class SideBuffer:
    """Keeps what a function emits to one side output until the batch at hand is done."""

    def __init__(self, tag: OutputTag) -> None:
        self.tag = tag
        self.records: list[Record] = []
        self.emit = self.records.append


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
        buffer = self._buffers.setdefault(tag.name, SideBuffer(tag))
        if buffer.tag != tag:
            raise ConfigError(
                f"operator {self._operator.uid!r} has two side outputs named {tag.name!r}, with"
                f" columns {buffer.tag.schema} and {tag.schema}; give each a name of its own"
            )
        self._operator.side_schemas[tag.name] = tag.schema
        return buffer

    def flush(self) -> None:
        """Emit what is kept."""
        for name, buffer in self._buffers.items():
            if buffer.records:
                uid = self._operator.uid
                self._operator.emit_to(name, batch_of(buffer.records, buffer.tag.schema, uid))
                buffer.records.clear()


class FunctionContext(KeyedStates):
    """What a keyed function opens with."""

    def __init__(self, store: KeyedStateStore, side_outputs: SideOutputs) -> None:
        super().__init__(store)
        self._side_outputs = side_outputs

    def side_output(self, tag: OutputTag) -> SideBuffer:
        """Return what takes records for `stream.side_output(tag)`."""
        return self._side_outputs.open(tag)
