"""Windows that a user function computes, one record at a time.

Windows are built on value states, map states and timers, and are restored with them. For each key,
state holds the open windows. For each window it holds the records or an accumulator. If two
sessions merge, their contents stay in two parts of the merged window. Parts of the first stream
have the numbers 1, 2, …; parts of the second have -1, -2, ….

Invariants, for an open window and its key's event time w, which never decreases:
    a timer is set for end - 1 and for end - 1 + lateness, for each of the two that is after w. So
        adding a record to a known window needs no new timer
    in processing time, w is the last millisecond that is over, and the timer is set for end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

import pyarrow as pa

from onceflow.core.plan import functions
from onceflow.core.plan.event_time import LateRecords, record_time_ms
from onceflow.core.plan.functions import Record, copy_records
from onceflow.core.plan.process_functions import CoProcessFunction, FunctionOfKeys
from onceflow.core.plan.windows import (
    WINDOW_COLUMNS,
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    WindowAssigner,
    WindowNames,
    pane_windows,
)
from onceflow.core.protocol.watermarks import PaneWindows
from onceflow.core.state import (
    AggregateFunction,
    MapState,
    MapStateDescriptor,
    Timer,
    Timers,
    ValueState,
    ValueStateDescriptor,
)
from onceflow.core.state.api.descriptors import TypeSpec
from onceflow.core.state.types.record_types import record_type, restore_zones


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A window: `start_ms` <= time < `end_ms`, in milliseconds since 1970."""

    start_ms: int
    end_ms: int


class ProcessWindowFunction(FunctionOfKeys, ABC):
    """A function of all records of a key and window, called when the window is due.

    Pickled to the slots, like a `KeyedFunction`.
    """

    @abstractmethod
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns. Runs on the driver."""

    @abstractmethod
    def process(
        self, key: Any, window: TimeWindow, records: list[Record]
    ) -> Record | Iterable[Record] | None:
        """Return the output records for the window, or None for no output.

        `key` is the value of the key column, or a tuple if there are several key columns. Called
        once when the window is due, and again for each late record within the allowed lateness.
        """


class CoGroupFunction(FunctionOfKeys, ABC):
    """A function of all records of two streams in one key and window.

    Called when the window is due. Pickled to the slots, like a `KeyedFunction`.
    """

    @abstractmethod
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns. Runs on the driver."""

    @abstractmethod
    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Record | Iterable[Record] | None:
        """Return the output records for the window, or None for no output.

        One of the sides may be empty. As in `ProcessWindowFunction`.
        """


class WindowContent(ABC):
    """The stored content of windows, and the computation of their results."""

    @abstractmethod
    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the schema of the records that windows emit."""

    @abstractmethod
    def open(self, state: functions.StateAccess) -> None:
        """Open the states."""

    @abstractmethod
    def add(self, part: int, count: int, record: Record) -> None:
        """Add the record with number `count` to a part of a window of the current key."""

    @abstractmethod
    def result(
        self, key: Any, window: TimeWindow, parts: Mapping[int, int]
    ) -> Record | Iterable[Record] | None:
        """Return the result of the parts' records. `parts` maps a part to its number of records."""

    @abstractmethod
    def forget(self, parts: Mapping[int, int]) -> None:
        """Remove the parts from the state."""

    def snapshot_state(self, checkpoint: int) -> None:  # noqa: B027 - optional hook
        """Update the operator states."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took."""


WindowFunctionT = TypeVar("WindowFunctionT", bound="ProcessWindowFunction | CoGroupFunction")


class KeptRecords(WindowContent, Generic[WindowFunctionT]):
    """The stored records of windows, for a user function of one stream or two."""

    def __init__(self, function: WindowFunctionT, *schemas: pa.Schema) -> None:
        """`schemas` are the record schemas, one for each stream.

        Raises:
            ConfigError: State cannot hold the values of a column. The message names the column.
        """
        self.function = function
        self.schemas = schemas
        for schema in schemas:
            _type_of_records(schema)

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the output schema of the function."""
        return self.function.output_schema(*inputs)

    def open(self, state: functions.StateAccess) -> None:
        """Open the states."""
        self._records: list[MapState[tuple[int, int], Record]] = [
            state.map_state(
                MapStateDescriptor[Any, Any](name, tuple[int, int], _type_of_records(schema))
            )
            for name, schema in zip(_RECORDS, self.schemas, strict=False)
        ]
        # A column may have been added after a record was stored.
        self._nulls: list[Record] = [dict.fromkeys(schema.names) for schema in self.schemas]
        self._zones = [restore_zones(schema) for schema in self.schemas]
        self.function.open(state)

    def add(self, part: int, count: int, record: Record) -> None:
        """Store the record."""
        # False indexes the left stream and True the right: left parts are positive, right parts
        # negative.
        self._records[part < 0].put((part, count), record)

    def result(
        self, key: Any, window: TimeWindow, parts: Mapping[int, int]
    ) -> Record | Iterable[Record] | None:
        """Return the function's result for the records."""
        records = [
            [
                nulls | record | {name: zone(record.get(name)) for name, zone in zones.items()}
                for record in kept
            ]
            for nulls, zones, kept in zip(
                self._nulls, self._zones, self._list_records(parts), strict=True
            )
        ]
        return self.function.process(key, window, *records)

    def _list_records(self, parts: Mapping[int, int]) -> list[list[Record]]:
        """Return the stored records of the current key's parts, one list for each stream."""
        records: list[list[Record]] = [[] for _ in self.schemas]
        for part, count in parts.items():
            kept = self._records[part < 0]
            records[part < 0] += [
                cast("Record", kept.get((part, number))) for number in range(count)
            ]
        return records

    def forget(self, parts: Mapping[int, int]) -> None:
        """Remove the records."""
        for part, count in parts.items():
            # Remove by number. Listing the map would read all windows of the key.
            for number in range(count):
                self._records[part < 0].remove((part, number))

    def snapshot_state(self, checkpoint: int) -> None:
        """Call the function's `snapshot_state`."""
        self.function.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the function."""
        self.function.close()


_RECORDS = ("onceflow.window-records", "onceflow.right-window-records")


def _type_of_records(schema: pa.Schema) -> Any:
    return record_type(schema, "a window's function of all records")


class KeptAccumulators(WindowContent):
    """The accumulators of windows, whose results are emitted with the key and the window."""

    def __init__(
        self,
        function: AggregateFunction[Record, Any, Record],
        key: Sequence[str],
        schema: pa.Schema,
        accumulator_type: TypeSpec = Any,
        names: WindowNames = WINDOW_COLUMNS,
    ) -> None:
        self._names = names
        self._function = function
        self._key = tuple(key)
        self._schema = schema
        self._type = accumulator_type

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the schema of key, window and results."""
        return self._schema

    def open(self, state: functions.StateAccess) -> None:
        """Open the states."""
        descriptor = MapStateDescriptor[Any, Any]("onceflow.window-accumulators", int, self._type)
        self._kept: MapState[int, Any] = state.map_state(descriptor)

    def add(self, part: int, count: int, record: Record) -> None:
        """Add the record to the part's accumulator."""
        # The first record of a part has no stored accumulator yet.
        before = self._kept.get(part) if count else self._function.create_accumulator()
        self._kept.put(part, self._function.add(record, before))

    def result(self, key: Any, window: TimeWindow, parts: Mapping[int, int]) -> Record:
        """Return the result of the merged accumulators of all parts."""
        first, *others = (self._kept.get(part) for part in parts)
        for other in others:
            first = self._function.merge(first, other)
        # A key of one column is its value; a key of several columns is a tuple.
        keys = key if len(self._key) > 1 else (key,)
        made: Record = dict(zip(self._key, keys, strict=True))
        made |= dict(zip(self._names, (window.start_ms, window.end_ms), strict=True))
        return made | self._function.get_result(first)

    def forget(self, parts: Mapping[int, int]) -> None:
        """Remove the accumulators."""
        for part in parts:
            self._kept.remove(part)


OpenWindow: TypeAlias = tuple[int, int, dict[int, int]]
"""The start, the end, and the number of records of each part."""
OPEN_WINDOWS = ValueStateDescriptor[Any]("onceflow.windows", list[OpenWindow])
"""The open windows of a key."""


@dataclass(frozen=True)
class WindowInput:
    """A stream that is divided into windows."""

    key: tuple[str, ...]
    time: str | None
    """The column of event time, or None for processing time."""
    late: functions.OutputTag | None = None


class WindowsOfRecords:
    """Assigns records of one stream or two to windows, and emits a window when it is due."""

    def __init__(
        self,
        windows: WindowAssigner,
        lateness_ms: int,
        content: WindowContent,
        *inputs: WindowInput,
    ) -> None:
        self.windows: WindowAssigner = windows
        self.lateness_ms = lateness_ms
        # Windows in processing time are emitted at the end of the input, before they are due.
        self.fires_at_end = windows.by_clock
        self._content = content
        self._inputs = inputs
        whose, why = type(windows).__name__, "all their windows have closed"
        self._late = [LateRecords(whose, why, window_input.late) for window_input in inputs]

    def open(self, state: functions.StateAccess) -> None:
        """Open the states."""
        self._panes: PaneWindows | None = None
        if isinstance(self.windows, EventTimeSessionWindows):
            self._gap_ms = self.windows.gap_ms
        else:
            self._panes = pane_windows(self.windows, self.lateness_ms)
        self._open: ValueState[list[OpenWindow] | None] = state.value_state(OPEN_WINDOWS)
        self._timers: Timers = state.timers()
        for late in self._late:
            late.open(state)
        self._content.open(state)

    def _take(self, record: Record, number: int = 0) -> list[Record]:
        """Add a record of input `number` to its windows. Return the output of windows past due."""
        window_input, now = self._inputs[number], self._now()
        before = self._open.get() or []
        windows, mine = self._assign_windows(before, self._at(record, window_input), now)
        if not mine:
            self._late[number].take(record, now)
            return []
        made: list[Record] = []
        for window in mine:
            _, end, parts = window
            # Merged sessions keep their parts, and the record goes into the newest part. Records of
            # the right stream use the negative number.
            part = next(part for part in reversed(parts) if part > 0) * (-1 if number else 1)
            count = parts.get(part, 0)
            self._content.add(part, count, record)
            parts[part] = count + 1
            # The record is within the allowed lateness: the window was emitted before and is
            # emitted again. `end - 1` is the last millisecond of the window.
            if end - 1 <= now:
                self._emit(_read_key(record, window_input), window, made)
        self._open.set(windows)
        return made

    def on_timer(self, timer: Timer) -> list[Record]:
        """Return the output of windows that are due, and remove windows that have expired."""
        made: list[Record] = []
        left: list[OpenWindow] = []
        for window in self._open.get() or []:
            # Several windows may share a timer: one may end when the lateness of another ends.
            due_ms = window[1] - 1
            # In processing time, a timer is at the end, and one that 0.1.0 has set is at end - 1.
            if due_ms == timer.at_ms or (self.by_clock and due_ms < timer.at_ms):
                self._emit(timer.key, window, made)
            if due_ms + self.lateness_ms <= timer.at_ms:
                self._content.forget(window[2])
            else:
                left.append(window)
        # None removes the state, so a key without open windows needs no space.
        self._open.set(left or None)
        return made

    def snapshot_state(self, checkpoint: int) -> None:
        """Call the content's `snapshot_state`."""
        self._content.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the content."""
        self._content.close()

    def _assign_windows(
        self, windows: list[OpenWindow], at: int, now: int
    ) -> tuple[list[OpenWindow], list[OpenWindow]]:
        """Return all windows of the key and the windows of a record at `at`. Add missing ones."""
        if self._panes is None:
            return self._merge_sessions(windows, at, at + self._gap_ms, now)
        mine: list[OpenWindow] = []
        placed = list(windows)
        for end in self._panes.ends_of((at - self._panes.offset_ms) // self._panes.pane_ms):
            # This window has expired, so the record is late for it. It may be in time for a later
            # window.
            if end - 1 + self.lateness_ms <= now:
                continue
            known = next((window for window in windows if window[1] == end), None)
            if known is None:
                known = (end - self._panes.size_ms, end, {_new_part(placed): 0})
                placed.append(known)
                self._register(end, now)
            mine.append(known)
        return placed, mine

    def _merge_sessions(
        self, windows: list[OpenWindow], start: int, end: int, now: int
    ) -> tuple[list[OpenWindow], list[OpenWindow]]:
        """Return the key's sessions after adding a record, and the record's session."""
        # Sessions also merge if one ends where the other starts, like in Flink.
        joined = [window for window in windows if window[0] <= end and start <= window[1]]
        others = [window for window in windows if window not in joined]
        first = min([start, *(window[0] for window in joined)])
        last = max([end, *(window[1] for window in joined)])
        # Test for lateness after merging: a late record that extends an open session is not too
        # late.
        if last - 1 + self.lateness_ms <= now:
            return windows, []
        # Only the part numbers are merged. The stored records are not moved.
        parts = {part: count for window in joined for part, count in window[2].items()}
        session = (first, last, parts or {_new_part(windows): 0})
        if last not in (window[1] for window in joined):
            self._register(last, now)
        for window in joined:
            if window[1] != last:
                self._unregister(window[1], [*others, session])
        return [*others, session], [session]

    def _register(self, end: int, now: int) -> None:
        # The first timer emits the window, the second removes it. Without lateness both are the
        # same.
        for moment in {end - 1, end - 1 + self.lateness_ms}:
            if moment > now:
                self._register_at(moment)

    @property
    def by_clock(self) -> bool:
        """True if the windows are in processing time."""
        return self.windows.by_clock

    def _register_at(self, moment: int) -> None:
        if self.by_clock:
            # A window still gets records in its last millisecond.
            self._timers.register_processing_time_timer(moment + 1)
        else:
            self._timers.register_event_time_timer(moment)

    def _unregister(self, end: int, others: Sequence[OpenWindow]) -> None:
        """Delete the timers of an extended session, except those that other sessions need."""
        # Windows that register a timer for the same moment share the timer.
        needed = {window[1] - 1 + more for window in others for more in (0, self.lateness_ms)}
        for moment in {end - 1, end - 1 + self.lateness_ms} - needed:
            self._timers.delete_event_time_timer(moment)

    def _now(self) -> int:
        if self.by_clock:
            # As a watermark, the last millisecond that is over.
            return self._timers.current_processing_time() - 1
        return self._timers.current_watermark()

    def _at(self, record: Record, window_input: WindowInput) -> int:
        if window_input.time is None:
            return self._timers.current_processing_time()
        return record_time_ms(record, window_input.time, "is in no window")

    def _emit(self, key: Any, window: OpenWindow, made: list[Record]) -> None:
        start, end, parts = window
        result = self._content.result(key, TimeWindow(start, end), parts)
        made.extend(copy_records(result))


class WindowedFunction(WindowsOfRecords, functions.KeyedFunction):
    """The windows of one stream."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the output schema of the content."""
        return self._content.output_schema(input_schema)

    def process(self, record: Record) -> list[Record]:
        """Add the record to its windows. Return the output of windows that were already due."""
        return self._take(record)


class CoWindowedFunction(WindowsOfRecords, CoProcessFunction):
    """The windows of two streams with one key.

    This class computes sessions and windows in processing time. Tumbling and sliding windows in
    event time have bounds that do not depend on records, so the runtime computes them in batches.
    See `window_joins`.
    """

    def __init__(
        self,
        windows: WindowAssigner,
        lateness_ms: int,
        content: KeptRecords[CoGroupFunction],
        left: WindowInput,
        right: WindowInput,
    ) -> None:
        super().__init__(windows, lateness_ms, content, left, right)
        self.records = content
        self.inputs = (left, right)

    @property
    def takes_batches(self) -> bool:
        """True if the windows are computed in batches."""
        return isinstance(self.windows, (TumblingEventTimeWindows, SlidingEventTimeWindows))

    def output_schema(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return the output schema of the content."""
        return self._content.output_schema(first, second)

    def process_1(self, record: Record) -> list[Record]:
        """Add a record of the left stream to its windows, like `WindowedFunction.process`."""
        return self._take(record)

    def process_2(self, record: Record) -> list[Record]:
        """Add a record of the right stream to its windows."""
        return self._take(record, 1)


def _read_key(record: Record, window_input: WindowInput) -> Any:
    first, *others = (record[name] for name in window_input.key)
    return (first, *others) if others else first


def _new_part(windows: Sequence[OpenWindow]) -> int:
    return 1 + max((part for window in windows for part in window[2]), default=0)
