"""The kinds of work that an operator of a graph may have. Each kind describes itself.

The graph, the start of a job and the web page ask a work for its description, and do not list the
kinds. So a new kind of work touches four places:

    1. its class here
    2. the method of a stream that adds the work to the graph, in `core/api`
    3. its running operator, in `core/runtime/dataflow`
    4. its line in the table `BUILDERS` of `core/runtime/slot/operator_builders.py`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, ClassVar

import pyarrow as pa

from onceflow.core.plan import functions, process_functions
from onceflow.core.plan.aggregates import Aggregate
from onceflow.core.plan.async_functions import Call, CallLimits
from onceflow.core.plan.compiled_function import CompiledFunction
from onceflow.core.plan.event_time import WatermarkStrategy
from onceflow.core.plan.join_functions import TimedJoin
from onceflow.core.plan.lookup_tables import JoinedColumns, JoinType, LookupTable
from onceflow.core.plan.stream_sql import StreamSql
from onceflow.core.plan.window_functions import WindowsOfRecords
from onceflow.core.plan.windows import (
    WINDOW_COLUMNS,
    EarlyResults,
    PaneAssigner,
    UsedWindows,
    WindowAssigner,
    WindowNames,
    describe_windows,
)
from onceflow.core.spi import OnBadRow, Sink, Source
from onceflow.core.spi.lookups import LookupSource
from onceflow.core.state import MapStateDescriptor, StateTtlConfig


class OwnedState(Flag):
    """The parts of an operator's snapshot, and the parts that a work takes back in a restore."""

    NOTHING = 0
    OF_KEYS = auto()
    """The state of keys."""
    OF_SUBTASK = auto()
    """The state without a key."""
    EVENT_TIME = auto()
    """The event time that each key group has reached."""
    SPLITS = auto()
    """The positions of a source's splits."""
    OF_KEYED_FUNCTION = OF_KEYS | OF_SUBTASK | EVENT_TIME
    """All that a function of a keyed stream may own."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an operator: the base of classes that say what the operator needs.

    The defaults describe a work without key, without state and without side outputs.
    """

    uid_prefix: ClassVar[str]
    """The beginning of the default uid, which names the operator's state. Must never change."""
    has_side_outputs: ClassVar[bool] = False
    """True if a function of this work may emit to side outputs."""
    starts_chain: ClassVar[bool] = False
    """True if the operator is always the first one of its chain."""
    absorbs_rows: ClassVar[bool] = False
    """True if the operator can hold rows without emitting any, and writes them to its snapshot."""

    @property
    def kind(self) -> str:
        """The kind of operator, as the web page shows it."""
        return type(self).__name__

    @property
    def label(self) -> str:
        """The name of the operator's work, as the web page shows it."""
        return type(self).__name__

    @property
    def owned_state(self) -> OwnedState:
        """The parts of a snapshot that the operator takes back."""
        return OwnedState.NOTHING

    def input_key(self, number: int) -> tuple[str, ...]:
        """Return the columns by which rows of input `number` are exchanged.

        Empty if the rows stay in their subtask. `number` is 0 for the first input.
        """
        del number
        return ()

    def is_broadcast(self, number: int) -> bool:
        """Return True if every subtask gets all rows of input `number`."""
        del number
        return False

    @property
    def output_key(self) -> tuple[str, ...]:
        """The columns whose equal values leave from one subtask; empty if that is not known."""
        return ()

    @property
    def makes_last_rows(self) -> bool:
        """True if a function may emit rows at the end of its input."""
        return False

    @property
    def used_windows(self) -> UsedWindows | None:
        """The windows and their allowed lateness; None if it emits no windows."""
        return None

    def time_settings(self) -> dict[str, str]:
        """Return the settings, by name, on which the meaning of the state depends besides the key.

        Checkpoints record these texts. A start compares them with the pipeline: see
        `operator_descriptions`.
        """
        return {}


@dataclass(frozen=True, slots=True)
class ReadFrom(Work):
    """Reads a source."""

    uid_prefix: ClassVar[str] = "read"
    source: Source
    watermarks: Mapping[str | None, WatermarkStrategy] = field(
        default_factory=dict[str | None, WatermarkStrategy]
    )
    """The strategy of each stream with event time, by the tag of its feed: the name of the output,
    or None if the source has only one stream."""

    @property
    def kind(self) -> str:
        """The kind of operator, as the web page shows it."""
        return "source"

    @property
    def label(self) -> str:
        """The class of the source."""
        return type(self.source).__name__

    @property
    def owned_state(self) -> OwnedState:
        """The positions of the splits."""
        return OwnedState.SPLITS


@dataclass(frozen=True, slots=True)
class MapBatches(Work):
    """Applies a function to whole Arrow record batches."""

    uid_prefix: ClassVar[str] = "map_batches"
    function: Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class MapInArrow(Work):
    """Applies a function of an iterator of Arrow record batches."""

    uid_prefix: ClassVar[str] = "map_batches"
    function: functions.ArrowIteratorFunction


@dataclass(frozen=True, slots=True)
class MapInPandas(Work):
    """Applies a function of an iterator of pandas DataFrames."""

    uid_prefix: ClassVar[str] = "map_pandas"
    function: functions.PandasIteratorFunction


@dataclass(frozen=True, slots=True)
class JoinTable(Work):
    """Adds the columns of a table in memory to each record."""

    uid_prefix: ClassVar[str] = "join"
    table: LookupTable
    how: JoinType


@dataclass(frozen=True, slots=True)
class JoinLookup(Work):
    """Adds the columns of a table that changes to each record: its rows are looked up by key."""

    uid_prefix: ClassVar[str] = "lookup_join"
    source: LookupSource
    columns: JoinedColumns
    ttl_s: float
    """The time for which a row that was read is used."""
    keys_max: int
    """The number of keys whose rows are kept."""


@dataclass(frozen=True, slots=True)
class SelectSql(Work):
    """Replaces each batch by the result of a query that computes row by row."""

    uid_prefix: ClassVar[str] = "sql"
    sql: StreamSql


@dataclass(frozen=True, slots=True)
class MapRecords(Work):
    """Applies a function to one record at a time: one in, one out."""

    uid_prefix: ClassVar[str] = "map"
    function: Callable[[functions.Record], functions.Record]


@dataclass(frozen=True, slots=True)
class FlatMapRecords(Work):
    """Applies a function to one record at a time: one in, any number out."""

    uid_prefix: ClassVar[str] = "flat_map"
    function: Callable[[functions.Record], Iterable[functions.Record]]


@dataclass(frozen=True, slots=True)
class MapAsync(Work):
    """Calls a service for each record, or for each part of a batch."""

    uid_prefix: ClassVar[str] = "async_map"
    starts_chain: ClassVar[bool] = True
    absorbs_rows: ClassVar[bool] = True
    function: Call
    limits: CallLimits
    idempotency_key: tuple[str, ...] = ()
    """The columns that identify a record, if the function gets an idempotency key."""
    rows_max: int | None = None
    """The number of rows of a batch for one call, or None for a call for each record."""
    on_bad_row: OnBadRow = OnBadRow.FAIL

    @property
    def owned_state(self) -> OwnedState:
        """The records in flight."""
        return OwnedState.OF_SUBTASK


@dataclass(frozen=True, slots=True)
class FilterRecords(Work):
    """Keeps the records for which a function returns a true value."""

    uid_prefix: ClassVar[str] = "filter"
    function: Callable[[functions.Record], Any]


@dataclass(frozen=True, slots=True)
class _KeyedWork(Work):
    """A work of one stream with a key and with state of the key."""

    uid_prefix: ClassVar[str] = "keyed"
    key: tuple[str, ...]

    def input_key(self, number: int) -> tuple[str, ...]:
        """Return the key."""
        del number
        return self.key


@dataclass(frozen=True, slots=True)
class _ConnectedWork(Work):
    """A work of two streams with a common key, and with state of the key."""

    uid_prefix: ClassVar[str] = "connect"
    has_side_outputs: ClassVar[bool] = True
    keys: tuple[tuple[str, ...], tuple[str, ...]]

    def input_key(self, number: int) -> tuple[str, ...]:
        """Return the key of the first or of the second stream."""
        return self.keys[number]

    @property
    def owned_state(self) -> OwnedState:
        """The state of keys, of the subtask, and event time."""
        return OwnedState.OF_KEYED_FUNCTION


@dataclass(frozen=True, slots=True)
class ProcessKeyed(_KeyedWork):
    """Applies a keyed function with state."""

    has_side_outputs: ClassVar[bool] = True
    function: functions.KeyedFunction
    compiled: CompiledFunction | None = None
    """The function in the form that slots compile, or None to run it as Python."""

    @property
    def owned_state(self) -> OwnedState:
        """The state of keys, of the subtask, and event time."""
        return OwnedState.OF_KEYED_FUNCTION

    @property
    def makes_last_rows(self) -> bool:
        """True if the function has an `on_end`."""
        return _has_on_end(self.function)

    @property
    def used_windows(self) -> UsedWindows | None:
        """The windows and their allowed lateness, if the function divides records so."""
        return _find_windows(self.function)

    def time_settings(self) -> dict[str, str]:
        """Return the settings of the windows, if the function divides records into windows."""
        return _window_settings(self.function)


@dataclass(frozen=True, slots=True)
class ProcessConnected(_ConnectedWork):
    """Applies a function of two streams with the state of their key."""

    function: process_functions.CoProcessFunction

    @property
    def makes_last_rows(self) -> bool:
        """True if the function has an `on_end`."""
        return _has_on_end(self.function)

    @property
    def used_windows(self) -> UsedWindows | None:
        """The windows and their allowed lateness, if the function divides records so."""
        return _find_windows(self.function)

    def time_settings(self) -> dict[str, str]:
        """Return the settings of the windows, if the function divides records into windows."""
        return _window_settings(self.function)


@dataclass(frozen=True, slots=True)
class JoinConnected(_ConnectedWork):
    """Joins two streams by key and by distance in time."""

    join: TimedJoin

    def time_settings(self) -> dict[str, str]:
        """Return the kind of the join and its limits."""
        return self.join.time_settings()


@dataclass(frozen=True, slots=True)
class ProcessBroadcast(Work):
    """Applies a function of a stream and a broadcast stream."""

    uid_prefix: ClassVar[str] = "connect"
    has_side_outputs: ClassVar[bool] = True
    key: tuple[str, ...]
    """The key of the first stream; empty if the stream is not keyed."""
    function: process_functions.BroadcastProcessFunction
    states: tuple[MapStateDescriptor[Any, Any], ...]

    def input_key(self, number: int) -> tuple[str, ...]:
        """Return the key of the first stream; the broadcast stream has none."""
        return () if number else self.key

    def is_broadcast(self, number: int) -> bool:
        """Return True for the second input."""
        return number == 1

    @property
    def owned_state(self) -> OwnedState:
        """The state of the subtask; with a key, also the state of keys and event time."""
        return OwnedState.OF_KEYED_FUNCTION if self.key else OwnedState.OF_SUBTASK

    @property
    def makes_last_rows(self) -> bool:
        """True if the function has an `on_end`."""
        return _has_on_end(self.function)


@dataclass(frozen=True, slots=True)
class ProcessRecords(Work):
    """Applies a function with state of its subtask."""

    uid_prefix: ClassVar[str] = "process"
    has_side_outputs: ClassVar[bool] = True
    function: process_functions.ProcessFunction

    @property
    def owned_state(self) -> OwnedState:
        """The state of the subtask."""
        return OwnedState.OF_SUBTASK

    @property
    def makes_last_rows(self) -> bool:
        """True if the function has an `on_end`."""
        return _has_on_end(self.function)


@dataclass(frozen=True, slots=True)
class ProcessBatches(_KeyedWork):
    """Applies a function of whole batches and the states of their keys."""

    has_side_outputs: ClassVar[bool] = True
    function: functions.KeyedBatchFunction

    @property
    def owned_state(self) -> OwnedState:
        """The state of keys, of the subtask, and event time."""
        return OwnedState.OF_KEYED_FUNCTION

    @property
    def makes_last_rows(self) -> bool:
        """True if the function has an `on_end`."""
        return _has_on_end(self.function)


@dataclass(frozen=True, slots=True)
class _KeyColumnsWork(_KeyedWork):
    """A work whose only state is that of keys, and whose output has the key's columns unchanged."""

    @property
    def owned_state(self) -> OwnedState:
        """The state of keys."""
        return OwnedState.OF_KEYS

    @property
    def output_key(self) -> tuple[str, ...]:
        """The key."""
        return self.key


class Emission(Enum):
    """The records for which `running` emits its aggregates."""

    RECORD = "record"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class RunAggregates(_KeyColumnsWork):
    """Adds running aggregates of each key as columns, batch by batch."""

    aggregates: Mapping[str, Aggregate]
    ttl: StateTtlConfig | None = None
    """The time without records after which a key's aggregates start again, or None for never."""
    emit: Emission = Emission.RECORD
    """All records, or the last one of each key and batch."""


class Keep(Enum):
    """The record of a key that `deduplicate` keeps."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Deduplicate(_KeyColumnsWork):
    """Keeps one record of each key, batch by batch."""

    keep: Keep
    by: str | None
    """The column whose order decides, or None for the order of arrival."""
    ttl: StateTtlConfig | None = None
    """The time without records after which a key is forgotten, or None for never."""

    def time_settings(self) -> dict[str, str]:
        """Return the record that is kept: the stored value is the first or the last one."""
        return {"keep": self.keep.value, "by": self.by or "arrival"}


@dataclass(frozen=True, slots=True)
class Order:
    """A column that records are ordered by."""

    column: str
    descending: bool = False


def desc(column: str) -> Order:
    """Return the order by `column` with the greatest value first."""
    return Order(column, descending=True)


@dataclass(frozen=True, slots=True)
class KeepTop(_KeyColumnsWork):
    """Keeps the first n records of each key, batch by batch."""

    n: int
    by: tuple[Order, ...]

    def time_settings(self) -> dict[str, str]:
        """Return the number and order of the records: stored ranks follow from them."""
        return {"n": f"{self.n} records", "by": _describe_orders(self.by)}


@dataclass(frozen=True, slots=True)
class AggregateLastRows(_KeyColumnsWork):
    """Adds aggregates over the last rows of each key as columns, batch by batch."""

    rows: int
    by: tuple[Order, ...]
    """The order that says which rows are the last ones; empty for the order of arrival."""
    aggregates: Mapping[str, Aggregate]
    ttl: StateTtlConfig | None = None
    """The time without records after which a key starts again, or None for never."""
    emit: Emission = Emission.RECORD
    """All records, or the last one of each key and batch."""

    def time_settings(self) -> dict[str, str]:
        """Return the number and order of the rows, and the values of them that are stored."""
        arguments = {aggregate.argument or "" for aggregate in self.aggregates.values()} - {""}
        return {
            "rows": f"{self.rows} records",
            "by": _describe_orders(self.by) or "arrival",
            "values": ", ".join(sorted(arguments)) or "none",
        }


def _describe_orders(orders: tuple[Order, ...]) -> str:
    return ", ".join(order.column + " desc" * order.descending for order in orders)


@dataclass(frozen=True, slots=True)
class AggregateWindows(_KeyedWork):
    """Replaces the records of each key and window by aggregates, batch by batch."""

    has_side_outputs: ClassVar[bool] = True
    windows: WindowAssigner
    time: str | None
    """The column of event time, or None for processing time."""
    lateness_ms: int
    aggregates: Mapping[str, Aggregate]
    late: functions.OutputTag | None = None
    """The side output for records that are too late, or None to drop them."""
    names: WindowNames = WINDOW_COLUMNS
    """The output columns with start and end. A column of the key takes precedence."""
    early: EarlyResults | None = None
    """The moments of early results, or None for none."""

    @property
    def owned_state(self) -> OwnedState:
        """The aggregates of each key and window, and event time."""
        return OwnedState.OF_KEYS | OwnedState.EVENT_TIME

    @property
    def used_windows(self) -> UsedWindows | None:
        """The windows, their allowed lateness, and whether they have early results."""
        return UsedWindows(self.windows, self.lateness_ms, self.early is not None)

    def time_settings(self) -> dict[str, str]:
        """Return the settings of the windows."""
        return describe_windows(self.windows, self.lateness_ms)


@dataclass(frozen=True, slots=True)
class GatherRows(Work):
    """Adds the column `ALL` to each row, for windows whose rows all go to one subtask."""

    uid_prefix: ClassVar[str] = "gather"


@dataclass(frozen=True, slots=True)
class PreAggregateWindows(Work):
    """Replaces each batch by one row for each part of a window, with the totals of its rows."""

    uid_prefix: ClassVar[str] = "preaggregate"
    uid: str
    """The uid of the windows, for errors."""
    windows: PaneAssigner
    time: str
    aggregates: Mapping[str, Aggregate]


@dataclass(frozen=True, slots=True)
class MergeWindows(AggregateWindows):
    """Merges the rows of `PreAggregateWindows` to the aggregates of windows without a key."""

    has_side_outputs: ClassVar[bool] = False
    records: pa.Schema = field(default_factory=lambda: pa.schema([]))
    """The schema of the records that were aggregated."""


@dataclass(frozen=True, slots=True)
class AggregateCounts(_KeyedWork):
    """Replaces each `size` records of a key by aggregates, batch by batch."""

    size: int
    aggregates: Mapping[str, Aggregate]

    @property
    def owned_state(self) -> OwnedState:
        """The aggregates of each key's open window."""
        return OwnedState.OF_KEYS

    def time_settings(self) -> dict[str, str]:
        """Return the size: a stored window may have more records than a smaller size."""
        return {"size": f"{self.size} records"}


@dataclass(frozen=True, slots=True)
class WriteTo(Work):
    """Writes to a two-phase sink."""

    uid_prefix: ClassVar[str] = "write"
    sink: Sink
    sink_id: str
    on_bad_row: OnBadRow = OnBadRow.FAIL
    takes_dead_letters: bool = False
    """True if the sink gets the dead letters of its input instead of its output."""

    @property
    def kind(self) -> str:
        """The kind of operator, as the web page shows it."""
        return "sink"

    @property
    def label(self) -> str:
        """The class of the sink."""
        return type(self.sink).__name__

    @property
    def key(self) -> tuple[str, ...]:
        """The columns by which rows are routed; empty if any subtask may write any row."""
        return self.sink.routing_key()

    def input_key(self, number: int) -> tuple[str, ...]:
        """Return the columns by which rows are routed."""
        del number
        return self.key


_FUNCTIONS = (
    functions.KeyedFunction,
    functions.KeyedBatchFunction,
    process_functions.ProcessFunction,
    process_functions.CoProcessFunction,
    process_functions.BroadcastProcessFunction,
)


def _has_on_end(
    function: functions.KeyedFunction
    | functions.KeyedBatchFunction
    | process_functions.ProcessFunction
    | process_functions.CoProcessFunction
    | process_functions.BroadcastProcessFunction,
) -> bool:
    # Test whether the user has overridden `on_end`: an inherited method is the same object as that
    # of its base class.
    return all(type(function).on_end is not base.on_end for base in _FUNCTIONS)


def _find_windows(function: object) -> UsedWindows | None:
    """Return the windows to which `function` assigns records, or None if it has no windows."""
    if isinstance(function, WindowsOfRecords):
        return UsedWindows(function.windows, function.lateness_ms)
    return None


def _window_settings(function: object) -> dict[str, str]:
    if isinstance(function, WindowsOfRecords):
        return describe_windows(function.windows, function.lateness_ms)
    return {}
