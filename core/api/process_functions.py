"""Functions of two streams, of a broadcast one, and of records without a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import pyarrow as pa

from onceflow.core.api.functions import FunctionOfRecords, OperatorAccess, Record, StateAccess
from onceflow.core.state import MapState, MapStateDescriptor


class FunctionOfKeys:
    """What functions share that the engine's own functions of keys call: of windows, of pairs."""

    def open(self, state: StateAccess) -> None:
        """Take hold of states and side outputs: what is the key's is shared by all its windows."""

    def snapshot_state(self, checkpoint: int) -> None:
        """Bring states up to date that are not kept by key; `checkpoint` takes them as they are.

        As in `ProcessFunction`. There is no key here: keyed states are up to date already.
        """

    def close(self) -> None:
        """Release what `open` took. Not called when the process is killed."""


class CoProcessFunction(FunctionOfRecords, ABC):
    """A function of two streams' records that share the state and the timers of their key.

    One instance serves one subtask, on one thread. The records of one key and one split come in
    their order; those of the two streams interleave as they come.
    """

    fires_at_end: bool = False
    """Whether timers in processing time fire at the end of bounded inputs that are not due then."""

    @abstractmethod
    def output_schema(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return the schema of what is returned, from that of the streams. Runs on the driver."""

    def open(self, state: StateAccess) -> None:
        """Take hold of every state; as in `KeyedFunction`."""

    @abstractmethod
    def process_1(self, record: Record) -> Record | Iterable[Record] | None:
        """Return what follows from a record of the first stream, or None for nothing."""

    @abstractmethod
    def process_2(self, record: Record) -> Record | Iterable[Record] | None:
        """Return what follows from a record of the second stream, or None for nothing."""


class BroadcastAccess(StateAccess, Protocol):
    """Hands a function its broadcast states besides those of its records' key.

    Where the stream is not keyed there are no others.
    """

    def broadcast_state(self, descriptor: MapStateDescriptor[Any, Any]) -> MapState[Any, Any]:
        """Return a state that `broadcast(descriptor)` has named."""
        ...


class BroadcastProcessFunction(FunctionOfRecords, ABC):
    """A function of one stream's records and of a state that another stream's records make.

    Each record of the broadcast stream comes to every subtask, each record of the other to one. All
    subtasks hold the same broadcast state as long as `process_broadcast` does the same on each.
    """

    @abstractmethod
    def output_schema(self, records: pa.Schema, broadcast: pa.Schema) -> pa.Schema:
        """Return the schema of what is returned, from that of the streams. Runs on the driver."""

    def open(self, state: BroadcastAccess) -> None:
        """Take hold of every state; as in `KeyedFunction`."""

    @abstractmethod
    def process(self, record: Record) -> Record | Iterable[Record] | None:
        """Return what follows from a record; broadcast states may be read."""

    @abstractmethod
    def process_broadcast(self, record: Record) -> Record | Iterable[Record] | None:
        """Return what follows from a broadcast record; broadcast states may be changed.

        What it returns is emitted by every subtask. There is no key, and no state of one.
        """


class ProcessFunction(ABC):
    """A function of one record at a time, with state of its subtask and side outputs.

    One instance serves one subtask, on one thread. Which records come to which subtask follows from
    the source; it may differ after a restart.
    """

    @abstractmethod
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns. Runs on the driver."""

    def open(self, state: OperatorAccess) -> None:  # noqa: B027 - optional hook
        """Take hold of every state, which holds what was restored. Called once, before all else."""

    @abstractmethod
    def process(self, record: Record) -> Record | Iterable[Record] | None:
        """Return the record or records that follow from `record`, or None for none of them."""

    def on_end(self) -> Record | Iterable[Record] | None:
        """Return the last record or records, now that all input of this subtask has ended.

        Called once, with all rows of bounded input decided or by a stop that drains, before the
        last snapshot; not when a job stops otherwise. What it returns is committed once, whatever
        is killed: an attempt that fails before is repeated with the state of the last checkpoint.
        """
        return None

    def snapshot_state(self, checkpoint: int) -> None:  # noqa: B027 - optional hook
        """Bring the states up to date: `checkpoint` takes them as they are when this returns.

        Called between the records before its barrier and those behind it. It may never complete.
        """

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took. Not called when the process is killed."""
