"""Joins of two keyed streams by an interval of event time, one record at a time.

A function of two streams like any other, over map states and timers, so it survives what they do.
A record is kept, by its time, until no record of the other stream can come any more that it is to
be joined with. Whichever of two comes second makes the pair.

Invariants, at a watermark w, for records of the left stream; those of the right are their mirror:
    a pair  <=>  lower <= right's time - left's time <= upper
    late  <=>  time <= w;  a late record is joined with nothing
    kept as long as  time + upper > w, and no more than the step of the timers longer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import GenericAlias
from typing import Any, cast

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.event_time import record_time_ms
from onceflow.core.functions import OutputTag, Record, StateAccess
from onceflow.core.late_records import LateRecords
from onceflow.core.process_functions import CoProcessFunction
from onceflow.core.state import MapState, MapStateDescriptor, Timer, Timers
from onceflow.core.state.record_types import record_type

STEP_MS = 1_000
"""Timers that let records go are this far apart at least: a key has few of them at a time."""
STEPS_AN_INTERVAL = 8


class ProcessJoinFunction(ABC):
    """A function of a pair of records of two streams. Pickled to the slots."""

    @abstractmethod
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema of what `process` returns, from that of the streams.

        Runs on the driver.
        """

    def open(self, state: StateAccess) -> None:  # noqa: B027 - optional hook
        """Take hold of states of the key and of side outputs; as in `KeyedFunction`."""

    @abstractmethod
    def process(self, left: Record, right: Record) -> Record | Iterable[Record] | None:
        """Return the record or records that follow from a pair, or None for none of them."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took. Not called when the process is killed."""


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
    ) -> None:
        shared = {one for one, other in zip(*keys, strict=True) if one == other}
        twice = (set(left.names) & set(right.names)) - shared
        self._columns: list[tuple[int, str, str]] = []
        fields: list[pa.Field] = []
        for side, schema in enumerate((left, right)):
            for field in schema:
                if side and field.name in shared:
                    continue
                name = field.name + (suffixes[side] if field.name in twice else "")
                self._columns.append((side, field.name, name))
                fields.append(field.with_name(name))
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


@dataclass(frozen=True)
class JoinSide:
    """One of two streams that are joined: its columns, and what becomes of its late records."""

    name: str
    schema: pa.Schema
    time: str
    late: OutputTag | None

    def __post_init__(self) -> None:
        record_type(self.schema, f"the {self.name} side of a join")
        if self.late is not None and self.late.schema != self.schema:
            raise ConfigError(
                f"late_{self.name}={self.late.name!r}: late records are as they came, with columns"
                f" {self.schema}, and the tag says {self.late.schema}"
            )

    def kept(self, state: StateAccess) -> MapState[int, list[Record]]:
        """Return the state of this side's records, by their time."""
        records = GenericAlias(list, (record_type(self.schema, f"the {self.name} side of a join"),))
        name = f"onceflow.{self.name}-records"
        return state.map_state(MapStateDescriptor[Any, Any](name, int, records))


class IntervalJoinFunction(CoProcessFunction):
    """Hands a function the pairs of records whose times are within an interval of each other."""

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
        self._step_ms = max(STEP_MS, (upper_ms - lower_ms) // STEPS_AN_INTERVAL)
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
        self.kept = [side.kept(state) for side in self._sides]
        for late in self._late:
            late.open(state)
        self._function.open(state)

    def process_1(self, record: Record) -> list[Record]:
        """Return what follows from the pairs of a record of the left stream."""
        process = self._function.process
        return _all(process(record, other) for other in self._partners(0, record))

    def process_2(self, record: Record) -> list[Record]:
        """Return what follows from the pairs of a record of the right stream."""
        process = self._function.process
        return _all(process(other, record) for other in self._partners(1, record))

    def on_timer(self, timer: Timer) -> None:
        """Let go the records that nothing can come for any more."""
        for (_, last), kept in zip(self._reach, self.kept, strict=True):
            for at in [at for at in kept.keys() if at + last <= timer.at_ms]:  # noqa: SIM118
                kept.remove(at)

    def close(self) -> None:
        """Close the function."""
        self._function.close()

    def _partners(self, side: int, record: Record) -> list[Record]:
        """Keep a record; return those of the other side that it makes pairs with, by time."""
        at = record_time_ms(record, self._sides[side].time, "is joined with nothing")
        now = self._timers.current_watermark()
        if at <= now:
            self._late[side].take(record, now)
            return []
        first, last = self._reach[side]
        if at + last > now:
            kept = self.kept[side]
            kept.put(at, [*(kept.get(at) or ()), record])
            over = -(-(at + last) // self._step_ms) * self._step_ms
            self._timers.register_event_time_timer(over)
        others = [one for one in self.kept[1 - side].items() if first <= one[0] - at <= last]
        others.sort(key=itemgetter(0))
        return [other for _, records in others for other in records]


def _all(results: Iterable[Record | Iterable[Record] | None]) -> list[Record]:
    made: list[Record] = []
    for result in results:
        if isinstance(result, Mapping):
            made.append(cast("Record", result))
        elif result is not None:
            made.extend(result)
    return made
