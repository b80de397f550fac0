"""Windows that a function of the user's computes: one record at a time.

A function of one stream or of two like any other, over value and map states and timers, so it
survives what they do. Of each key it keeps its open windows, and for each of these what its records
came to: the records, or an accumulator. What two sessions have kept stays in two parts when they
become one. A window's parts of the first stream have numbers from 1, those of the second from -1
down.

Invariants, for a window that is kept, and event time w of its key, which never goes back:
    a timer is set for end - 1, and for end - 1 + lateness, where that is after w;  so a record that
    is added to a known window needs no other
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

import pyarrow as pa

from onceflow.core.api.event_time import record_time_ms
from onceflow.core.api.functions import (
    KeyedFunction,
    OutputTag,
    Record,
    StateAccess,
)
from onceflow.core.api.late_records import LateRecords
from onceflow.core.api.process_functions import CoProcessFunction, FunctionOfKeys
from onceflow.core.api.record_copies import copy_records
from onceflow.core.api.windows import (
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WindowAssigner,
    pane_windows,
)
from onceflow.core.protocol.windows import PaneWindows
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

    Pickled to the slots, as a `KeyedFunction` is.
    """

    @abstractmethod
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns. Runs on the driver."""

    @abstractmethod
    def process(
        self, key: Any, window: TimeWindow, records: list[Record]
    ) -> Record | Iterable[Record] | None:
        """Return the record or records that follow from the window, or None.

        `key` is the value of the key column, or a tuple of several. Called once when the window is
        due, and again for each record that comes within the allowed lateness.
        """


class CoGroupFunction(FunctionOfKeys, ABC):
    """A function of all records of two streams that have one key and window.

    Called when the window is due. Pickled to the slots, as a `KeyedFunction` is.
    """

    @abstractmethod
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns. Runs on the driver."""

    @abstractmethod
    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Record | Iterable[Record] | None:
        """Return the record or records that follow from the window, or None.

        One of the sides may be empty. As in `ProcessWindowFunction`.
        """


class WindowContent(ABC):
    """What is kept of a window's records, and what they come to."""

    @abstractmethod
    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the schema of what windows emit."""

    @abstractmethod
    def open(self, state: StateAccess) -> None:
        """Take hold of the states."""

    @abstractmethod
    def add(self, part: int, count: int, record: Record) -> None:
        """Keep the record number `count` of a part of the current key."""

    @abstractmethod
    def result(
        self, key: Any, window: TimeWindow, parts: Mapping[int, int]
    ) -> Record | Iterable[Record] | None:
        """Return what the records of the parts come to; `parts` has the count of each."""

    @abstractmethod
    def forget(self, parts: Mapping[int, int]) -> None:
        """Keep nothing of the parts."""

    def snapshot_state(self, checkpoint: int) -> None:  # noqa: B027 - optional hook
        """Bring up to date what is not kept by key."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took."""


WindowFunctionT = TypeVar("WindowFunctionT", bound="ProcessWindowFunction | CoGroupFunction")


class KeptRecords(WindowContent, Generic[WindowFunctionT]):
    """All records of a window, for a function of the user's: of one stream, or of each of two."""

    def __init__(self, function: WindowFunctionT, *schemas: pa.Schema) -> None:
        """`schemas` are those of the records, one a stream.

        Raises:
            ConfigError: Values of a column cannot be kept; names it.
        """
        self.function = function
        self.schemas = schemas
        for schema in schemas:
            _type_of_records(schema)

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return that of the function."""
        return self.function.output_schema(*inputs)

    def open(self, state: StateAccess) -> None:
        """Take hold of the states."""
        self.open_records(state)
        # A column may be newer than the records that were kept.
        self._nulls: list[Record] = [dict.fromkeys(schema.names) for schema in self.schemas]
        self._zones = [restore_zones(schema) for schema in self.schemas]
        self.function.open(state)

    def open_records(self, state: StateAccess) -> None:
        """Take hold of the records alone, to read them by `list_records` and `forget` them."""
        self._records: list[MapState[tuple[int, int], Record]] = [
            state.map_state(
                MapStateDescriptor[Any, Any](name, tuple[int, int], _type_of_records(schema))
            )
            for name, schema in zip(_RECORDS, self.schemas, strict=False)
        ]

    def add(self, part: int, count: int, record: Record) -> None:
        """Keep the record."""
        # False and True are 0 and 1: parts of the left stream are positive, those of the right
        # negative.
        self._records[part < 0].put((part, count), record)

    def result(
        self, key: Any, window: TimeWindow, parts: Mapping[int, int]
    ) -> Record | Iterable[Record] | None:
        """Return what the function makes of the records."""
        records = [
            [
                nulls | record | {name: zone(record.get(name)) for name, zone in zones.items()}
                for record in kept
            ]
            for nulls, zones, kept in zip(
                self._nulls, self._zones, self.list_records(parts), strict=True
            )
        ]
        return self.function.process(key, window, *records)

    def list_records(self, parts: Mapping[int, int]) -> list[list[Record]]:
        """Return the records of the current key's parts, by stream, as they were kept."""
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
            # By number and not by listing the map: a listing reads all windows of the key.
            for number in range(count):
                self._records[part < 0].remove((part, number))

    def snapshot_state(self, checkpoint: int) -> None:
        """Have the function do it."""
        self.function.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the function."""
        self.function.close()


_RECORDS = ("onceflow.window-records", "onceflow.right-window-records")


def _type_of_records(schema: pa.Schema) -> Any:
    return record_type(schema, "a window's function of all records")


class KeptAccumulators(WindowContent):
    """An accumulator of a window's records; emitted with the key and the window."""

    def __init__(
        self,
        function: AggregateFunction[Record, Any, Record],
        key: Sequence[str],
        schema: pa.Schema,
        accumulator_type: TypeSpec = Any,
    ) -> None:
        self._function = function
        self._key = tuple(key)
        self._schema = schema
        self._type = accumulator_type

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return key, window and results."""
        return self._schema

    def open(self, state: StateAccess) -> None:
        """Take hold of the states."""
        descriptor = MapStateDescriptor[Any, Any]("onceflow.window-accumulators", int, self._type)
        self._kept: MapState[int, Any] = state.map_state(descriptor)

    def add(self, part: int, count: int, record: Record) -> None:
        """Add the record to the part's accumulator."""
        # The first record of a part: nothing is kept under its number yet.
        before = self._kept.get(part) if count else self._function.create_accumulator()
        self._kept.put(part, self._function.add(record, before))

    def result(self, key: Any, window: TimeWindow, parts: Mapping[int, int]) -> Record:
        """Return the result of all parts' accumulators as one."""
        first, *others = (self._kept.get(part) for part in parts)
        for other in others:
            first = self._function.merge(first, other)
        # A key of one column comes as its value, of several as a tuple.
        keys = key if len(self._key) > 1 else (key,)
        made: Record = dict(zip(self._key, keys, strict=True))
        made |= {"window_start": window.start_ms, "window_end": window.end_ms}
        return made | self._function.get_result(first)

    def forget(self, parts: Mapping[int, int]) -> None:
        """Remove the accumulators."""
        for part in parts:
            self._kept.remove(part)


OpenWindow: TypeAlias = tuple[int, int, dict[int, int]]
"""Start, end, and how many records each part has."""
OPEN_WINDOWS = ValueStateDescriptor[Any]("onceflow.windows", list[OpenWindow])
"""The windows of a key that are not over."""


@dataclass(frozen=True)
class WindowInput:
    """A stream whose records come into windows."""

    key: tuple[str, ...]
    time: str | None
    """The column of event time; None: by the clock."""
    late: OutputTag | None = None


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
        self._content = content
        self._inputs = inputs
        whose, why = type(windows).__name__, "all their windows are over"
        self._late = [LateRecords(whose, why, one.late) for one in inputs]

    def open(self, state: StateAccess) -> None:
        """Take hold of the states."""
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
        """Add a record of input `number` to its windows; return what those due before emit."""
        one, now = self._inputs[number], self._now()
        before = self._open.get() or []
        windows, mine = self._assign_windows(before, self._at(record, one), now)
        if not mine:
            self._late[number].take(record, now)
            return []
        made: list[Record] = []
        for window in mine:
            _, end, parts = window
            # Sessions that were joined keep their parts; the record goes into the newest. Records
            # of the right stream are under the negative number.
            part = next(part for part in reversed(parts) if part > 0) * (-1 if number else 1)
            count = parts.get(part, 0)
            self._content.add(part, count, record)
            parts[part] = count + 1
            # Within the allowed lateness: the window was emitted before, and is emitted again with
            # this record. `end - 1` is the last millisecond that belongs to it.
            if end - 1 <= now:
                self._emit(_key_of(record, one), window, made)
        self._open.set(windows)
        return made

    def on_timer(self, timer: Timer) -> list[Record]:
        """Return what the windows emit that are due; forget those that are over."""
        made: list[Record] = []
        left: list[OpenWindow] = []
        for window in self._open.get() or []:
            # One timer may be that of several windows: the end of one may be the end of another's
            # lateness.
            due_ms = window[1] - 1
            if due_ms == timer.at_ms:
                self._emit(timer.key, window, made)
            if due_ms + self.lateness_ms <= timer.at_ms:
                self._content.forget(window[2])
            else:
                left.append(window)
        # None removes the state: a key without open windows takes no room.
        self._open.set(left or None)
        return made

    def snapshot_state(self, checkpoint: int) -> None:
        """Have the content do it."""
        self._content.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the content."""
        self._content.close()

    def _assign_windows(
        self, windows: list[OpenWindow], at: int, now: int
    ) -> tuple[list[OpenWindow], list[OpenWindow]]:
        """Return the key's windows with those of a record at `at`, and the latter alone."""
        if self._panes is None:
            return self._merge_sessions(windows, at, at + self._gap_ms, now)
        mine: list[OpenWindow] = []
        placed = list(windows)
        for end in self._panes.ends_of((at - self._panes.offset_ms) // self._panes.pane_ms):
            # Over: its records are forgotten, and the record is late for this window, if perhaps
            # not for the next.
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
        """Return the key's sessions with the one of a record, which may join several."""
        # Those that only touch are joined too: as in Flink, windows meet when the end of one is the
        # start of the other.
        joined = [one for one in windows if one[0] <= end and start <= one[1]]
        others = [one for one in windows if one not in joined]
        first = min([start, *(one[0] for one in joined)])
        last = max([end, *(one[1] for one in joined)])
        # Judged after joining: a late record that extends an open session is not too late.
        if last - 1 + self.lateness_ms <= now:
            return windows, []
        # Only the numbers of parts are merged. Their records stay where they are: nothing is moved.
        parts = {part: count for one in joined for part, count in one[2].items()}
        session = (first, last, parts or {_new_part(windows): 0})
        if last not in (one[1] for one in joined):
            self._register(last, now)
        for one in joined:
            if one[1] != last:
                self._unregister(one[1], [*others, session])
        return [*others, session], [session]

    def _register(self, end: int, now: int) -> None:
        # The first timer emits the window, the second forgets it; without lateness they are one.
        for moment in {end - 1, end - 1 + self.lateness_ms}:
            if moment > now:
                self._register_at(moment)

    @property
    def by_clock(self) -> bool:
        """Whether the windows are in processing time."""
        return isinstance(self.windows, TumblingProcessingTimeWindows)

    def _register_at(self, moment: int) -> None:
        if self.by_clock:
            self._timers.register_processing_time_timer(moment)
        else:
            self._timers.register_event_time_timer(moment)

    def _unregister(self, end: int, others: Sequence[OpenWindow]) -> None:
        """Forget the timers of a session that has become longer, unless another needs them."""
        # Timers of one moment are one timer, whichever window has registered it.
        needed = {one[1] - 1 + more for one in others for more in (0, self.lateness_ms)}
        for moment in {end - 1, end - 1 + self.lateness_ms} - needed:
            self._timers.delete_event_time_timer(moment)

    def _now(self) -> int:
        if self.by_clock:
            return self._timers.current_processing_time()
        return self._timers.current_watermark()

    def _at(self, record: Record, one: WindowInput) -> int:
        if one.time is None:
            return self._timers.current_processing_time()
        return record_time_ms(record, one.time, "is in no window")

    def _emit(self, key: Any, window: OpenWindow, made: list[Record]) -> None:
        start, end, parts = window
        result = self._content.result(key, TimeWindow(start, end), parts)
        made.extend(copy_records(result))


class WindowedFunction(WindowsOfRecords, KeyedFunction):
    """The windows of one stream."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        """Return that of the content."""
        return self._content.output_schema(input_schema)

    def process(self, record: Record) -> list[Record]:
        """Add the record to its windows; return what those emit that were due before."""
        return self._take(record)


class CoWindowedFunction(WindowsOfRecords, CoProcessFunction):
    """The windows of two streams with one key.

    This class computes sessions and windows by the clock. Those of one size in event time are known
    before any record: the runtime computes them a batch at a time, see `window_joins`.
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
        """Whether the windows are computed a batch at a time."""
        return isinstance(self.windows, (TumblingEventTimeWindows, SlidingEventTimeWindows))

    def output_schema(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return that of the content."""
        return self._content.output_schema(first, second)

    def process_1(self, record: Record) -> list[Record]:
        """Add a record of the left stream to its windows, as `WindowedFunction.process` does."""
        return self._take(record)

    def process_2(self, record: Record) -> list[Record]:
        """Add a record of the right stream."""
        return self._take(record, 1)


def _key_of(record: Record, one: WindowInput) -> Any:
    first, *others = (record[name] for name in one.key)
    return (first, *others) if others else first


def _new_part(windows: Sequence[OpenWindow]) -> int:
    return 1 + max((part for window in windows for part in window[2]), default=0)
