"""Functions of two streams, of a broadcast stream, and of records without a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import pyarrow as pa

from onceflow.core.plan.functions import FunctionOfRecords, OperatorAccess, Record, StateAccess
from onceflow.core.state import MapState, MapStateDescriptor


class FunctionOfKeys:
    """The base of functions that the engine calls for a key's windows or pairs."""

    def open(self, state: StateAccess) -> None:
        """Open states and side outputs. All windows of a key share its keyed state."""

    def snapshot_state(self, checkpoint: int) -> None:
        """Update the operator states. `checkpoint` stores them as they are when this returns.

        As in `ProcessFunction`. There is no current key, and keyed states are already up to date.
        """

    def close(self) -> None:
        """Release what `open` took. Not called when the process is killed."""


class CoProcessFunction(FunctionOfRecords, ABC):
    """A function of two streams' records that share the state and the timers of their key.

    One instance serves one subtask on one thread. Records of one key and one split come in the
    order of the split. Records of the two streams interleave in order of arrival.
    """

    @abstractmethod
    def output_schema(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return the schema of the returned records. Runs on the driver."""

    def open(self, state: StateAccess) -> None:
        """Open every state, as in `KeyedFunction`."""

    @abstractmethod
    def process_1(self, record: Record) -> Record | Iterable[Record] | None:
        """Return the output for a record of the first stream, or None for no output."""

    @abstractmethod
    def process_2(self, record: Record) -> Record | Iterable[Record] | None:
        """Return the output for a record of the second stream, or None for no output."""


class BroadcastAccess(StateAccess, Protocol):
    """Gives a function its broadcast states, and the keyed states if the stream is keyed."""

    def broadcast_state(self, descriptor: MapStateDescriptor[Any, Any]) -> MapState[Any, Any]:
        """Return a state that was declared with `broadcast(descriptor)`."""
        ...


class BroadcastProcessFunction(FunctionOfRecords, ABC):
    """A function of one stream's records and of a state that a broadcast stream updates.

    Every subtask gets each record of the broadcast stream. One subtask gets each record of the
    other stream. All subtasks have equal broadcast state if `process_broadcast` does the same in
    each.
    """

    @abstractmethod
    def output_schema(self, records: pa.Schema, broadcast: pa.Schema) -> pa.Schema:
        """Return the schema of the returned records. Runs on the driver."""

    def open(self, state: BroadcastAccess) -> None:
        """Open every state, as in `KeyedFunction`."""

    @abstractmethod
    def process(self, record: Record) -> Record | Iterable[Record] | None:
        """Return the output for a record. May read broadcast states."""

    @abstractmethod
    def process_broadcast(self, record: Record) -> Record | Iterable[Record] | None:
        """Return the output for a broadcast record. May change broadcast states.

        Every subtask emits the returned records. There is no current key and no keyed state.
        """


class ProcessFunction(ABC):
    """A function of one record at a time, with state of its subtask and side outputs.

    One instance serves one subtask on one thread. The source determines which subtask gets a
    record. This may differ after a restart.
    """

    @abstractmethod
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns. Runs on the driver."""

    def open(self, state: OperatorAccess) -> None:  # noqa: B027 - optional hook
        """Open every state; its content is restored. Called once, before all other methods."""

    @abstractmethod
    def process(self, record: Record) -> Record | Iterable[Record] | None:
        """Return the output records for `record`, or None for no output."""

    def on_end(self) -> Record | Iterable[Record] | None:
        """Return the last output records after all input of this subtask has ended.

        Called once, before the last snapshot, when all rows of bounded input are decided or when a
        stop drains the job. Not called when a job stops in another way. The returned records are
        committed exactly once, even if processes are killed. If the attempt fails before the
        commit, it is repeated from the last checkpoint.
        """
        return None

    def snapshot_state(self, checkpoint: int) -> None:  # noqa: B027 - optional hook
        """Update the states. `checkpoint` stores them as they are when this returns.

        Called after the records before the checkpoint's barrier and before those after it. The
        checkpoint may never complete.
        """

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took. Not called when the process is killed."""
