"""Joins of two keyed streams by how far apart two records are, one record at a time.

A function of two streams like any other, over map states and timers, so it survives what they do.
A record is kept, by its time, until no record of the other stream can come any more that it is to
be joined with. Whichever of two comes second makes the pair. In an interval join the time is that
of the event. In a regular join it is that of the slot's clock when the record comes, and the
interval is how long each side is kept.

Invariants, at a time w (the watermark, or the clock), for records of the left stream; those of the
right are their mirror:
    a pair  <=>  lower <= right's time - left's time <= upper
    late  <=>  event time <= w;  a late record is joined with nothing
    kept as long as  time + upper > w, and no more than the step of the timers longer
    alone  <=>  kept, on an outer side, and in no pair so far;  emitted alone when it is let go
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import GenericAlias
from typing import Any, Literal, TypeAlias, cast

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.event_time import record_time_ms
from onceflow.core.functions import OutputTag, Record, StateAccess
from onceflow.core.late_records import LateRecords, check_late
from onceflow.core.process_functions import CoProcessFunction, FunctionOfKeys
from onceflow.core.state import MapState, MapStateDescriptor, Timer, Timers
from onceflow.core.state.record_types import record_type
from onceflow.core.window_functions import CoGroupFunction, TimeWindow

STEP_MS = 1_000
"""Timers that let records go are this far apart at least: a key has few of them at a time."""
STEPS_AN_INTERVAL = 8
FOREVER_MS = 1 << 60
"""How long a side of a regular join is kept that has no time to live."""

Results: TypeAlias = Record | Iterable[Record] | None
JoinKind: TypeAlias = Literal["inner", "left", "right", "full"]


class ProcessJoinFunction(FunctionOfKeys, ABC):
    """A function of a pair of records of two streams. Pickled to the slots."""

    @abstractmethod
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema of what `process` returns, from that of the streams.

        Runs on the driver.
        """

    @abstractmethod
    def process(self, left: Record, right: Record) -> Record | Iterable[Record] | None:
        """Return the record or records that follow from a pair, or None for none of them."""

    def process_left(self, left: Record) -> Record | Iterable[Record] | None:
        """Return what follows from a left record without a partner, or None for nothing.

        Called in left and full outer joins, once it can have none any more.
        """
        raise NotImplementedError

    def process_right(self, right: Record) -> Record | Iterable[Record] | None:
        """Return what follows from a right record without a partner, as `process_left` does."""
        raise NotImplementedError


class MergedColumns(ProcessJoinFunction):
    """Makes one record of a pair: the columns of the left one, then those of the right one.

    Key columns of one name come once. Of other columns of one name each gets its side's suffix.
    """

    def __init__(
        self,
        left: pa.Schema,
        right: pa.Schema,
        keys: tuple[Sequence[str], Sequence[str]],
        suffixes: tuple[str, str],
        outer: tuple[bool, bool] = (False, False),
    ) -> None:
        """`outer` says of each side whether its records come out without a partner, too."""
        self._shared = shared = {one for one, other in zip(*keys, strict=True) if one == other}
        twice = (set(left.names) & set(right.names)) - shared
        self._columns: list[tuple[int, str, str]] = []
        fields: list[pa.Field] = []
        for side, schema in enumerate((left, right)):
            for field in schema:
                if side and field.name in shared:
                    continue
                name = field.name + (suffixes[side] if field.name in twice else "")
                self._columns.append((side, field.name, name))
                may_lack = outer[1 - side] and field.name not in shared
                fields.append(field.with_name(name).with_nullable(field.nullable or may_lack))
        names = [name for _, _, name in self._columns]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ConfigError(
                f"merge(suffixes={suffixes!r}): two columns would be named {double!r}; choose other"
                " suffixes, or rename a column before"
            )
        self._schema = pa.schema(fields)

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the columns of both."""
        return self._schema

    def process(self, left: Record, right: Record) -> Record:
        """Return the columns of both; one that a record was kept without is null."""
        pair = (left, right)
        return {name: pair[side].get(column) for side, column, name in self._columns}

    def process_left(self, left: Record) -> Record:
        """Return the record's columns, with nulls for those of the other side."""
        return self.process(left, {})

    def process_right(self, right: Record) -> Record:
        """Return the record's columns and key, with nulls for those of the other side."""
        return self.process({name: right[name] for name in self._shared}, right)


@dataclass(frozen=True)
class JoinSide:
    """One of two streams that are joined: its columns, and what becomes of its late records."""

    name: str
    schema: pa.Schema
    time: str | None
    """The column of event time; None: the clock says it when a record comes."""
    late: OutputTag | None
    outer: bool = False
    """Whether a record that finds no partner comes out without one."""

    def __post_init__(self) -> None:
        record_type(self.schema, f"the {self.name} side of a join")
        check_late(self.late, self.schema, f"late_{self.name}")

    def records(self, state: StateAccess, kind: str) -> MapState[int, list[Record]]:
        """Return the state of a kind of this side's records, by their time."""
        records = GenericAlias(list, (record_type(self.schema, f"the {self.name} side of a join"),))
        name = f"onceflow.{self.name}-{kind}"
        return state.map_state(MapStateDescriptor[Any, Any](name, int, records))


class IntervalJoinFunction(CoProcessFunction):
    """Hands a function the pairs of records whose times are within an interval of each other.

    Of both sides the times are in event time, or of both by the clock.
    """

    def __init__(
        self,
        lower_ms: int,
        upper_ms: int,
        sides: tuple[JoinSide, JoinSide],
        function: ProcessJoinFunction,
    ) -> None:
        self._sides = sides
        self._function = function
        self._reach = ((lower_ms, upper_ms), (-upper_ms, -lower_ms))
        """Of each side: between which distances in time a record of the other one is a partner."""
        self._by_clock = sides[0].time is None
        self.fires_at_end = self._by_clock
        self._steps_ms = [
            max(STEP_MS, (last if self._by_clock else last - first) // STEPS_AN_INTERVAL)
            for first, last in self._reach
        ]
        self._late = [
            LateRecords(f"the {one.name} side of an interval join", "it has passed them", one.late)
            for one in sides
        ]

    def output_schema(self, first: pa.Schema, second: pa.Schema) -> pa.Schema:
        """Return that of the function."""
        return self._function.output_schema(first, second)

    def open(self, state: StateAccess) -> None:
        """Take hold of the states."""
        self._timers: Timers = state.timers()
        self.kept = [side.records(state, "records") for side in self._sides]
        self.alone = [side.records(state, "alone") if side.outer else None for side in self._sides]
        """Of what is kept on an outer side, that which has found no partner yet."""
        for late in self._late:
            late.open(state)
        self._function.open(state)

    def process_1(self, record: Record) -> list[Record]:
        """Return what follows from the pairs of a record of the left stream."""
        process = self._function.process
        return self._joined(0, record, lambda other: process(record, other))

    def process_2(self, record: Record) -> list[Record]:
        """Return what follows from the pairs of a record of the right stream."""
        process = self._function.process
        return self._joined(1, record, lambda other: process(other, record))

    def on_timer(self, timer: Timer) -> list[Record]:
        """Let go the records that nothing can come for; return what follows from those alone."""
        made: list[Record] = []
        for side, (_, last) in enumerate(self._reach):
            alone = self.alone[side]
            for kept in (self.kept[side], alone):
                if kept is None:
                    continue
                for at in sorted(at for at in kept.keys() if at + last <= timer.at_ms):  # noqa: SIM118
                    if kept is alone:
                        made += self._without_partner(side, kept.get(at) or ())
                    kept.remove(at)
        return made

    def snapshot_state(self, checkpoint: int) -> None:
        """Have the function do it."""
        self._function.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the function."""
        self._function.close()

    def _joined(
        self, side: int, record: Record, process: Callable[[Record], Results]
    ) -> list[Record]:
        """Keep a record; return what `process` makes of each record that it makes a pair with."""
        now, at = self._now_and_time(side, record)
        if at <= now and not self._by_clock:
            self._late[side].take(record, now)
            return []
        others = self._partners(1 - side, at, self._reach[side])
        alone = None if others else self.alone[side]
        last = self._reach[side][1]
        if at + last > now:
            kept = self.kept[side] if alone is None else alone
            kept.put(at, [*(kept.get(at) or ()), record])
            if alone is not None or last < FOREVER_MS:
                self._register(side, at + last)
        elif alone is not None:
            return self._without_partner(side, (record,))
        return _all(map(process, others))

    def _partners(self, side: int, at: int, reach: tuple[int, int]) -> list[Record]:
        """Return what is kept of a side within reach of a time, by time; it is alone no more."""
        first, last = reach
        kept, alone = self.kept[side], self.alone[side]
        found = [one for one in kept.items() if first <= one[0] - at <= last]
        if alone is not None:
            for then, records in alone.items():
                if first <= then - at <= last:
                    found.append((then, records))
                    kept.put(then, [*(kept.get(then) or ()), *records])
                    alone.remove(then)
        found.sort(key=itemgetter(0))
        return [record for _, records in found for record in records]

    def _now_and_time(self, side: int, record: Record) -> tuple[int, int]:
        column = self._sides[side].time
        if column is None:
            now = self._timers.current_processing_time()
            return now, now
        at = record_time_ms(record, column, "is joined with nothing")
        return self._timers.current_watermark(), at

    def _register(self, side: int, over: int) -> None:
        """Have a record let go when it is over, and not much later."""
        step_ms = self._steps_ms[side]
        moment = -(-over // step_ms) * step_ms
        if self._by_clock:
            self._timers.register_processing_time_timer(moment)
        else:
            self._timers.register_event_time_timer(moment)

    def _without_partner(self, side: int, records: Iterable[Record]) -> list[Record]:
        function = self._function
        return _all(map((function.process_left, function.process_right)[side], records))


class WindowPairs(CoGroupFunction):
    """Hands a function the pairs of records that are in one window."""

    def __init__(self, outer: tuple[bool, bool], function: ProcessJoinFunction) -> None:
        self._outer = outer
        self._function = function

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return that of the function."""
        return self._function.output_schema(left, right)

    def open(self, state: StateAccess) -> None:
        """Open the function."""
        self._function.open(state)

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> list[Record]:
        """Return what follows from each left record with each right one, or from those alone."""
        function = self._function
        if left and right:
            return _all(function.process(one, other) for one in left for other in right)
        made = _all(map(function.process_left, left if self._outer[0] else ()))
        return made + _all(map(function.process_right, right if self._outer[1] else ()))

    def snapshot_state(self, checkpoint: int) -> None:
        """Have the function do it."""
        self._function.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the function."""
        self._function.close()


def _all(results: Iterable[Results]) -> list[Record]:
    made: list[Record] = []
    for result in results:
        if isinstance(result, Mapping):
            made.append(cast("Record", result))
        elif result is not None:
            made.extend(result)
    return made
