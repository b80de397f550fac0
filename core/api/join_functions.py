"""What two streams are joined into, and by what: their times, or windows.

In an interval join the time is that of the event. In a regular join it is that of the slot's clock
when the record comes, and the interval is how long each side is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from onceflow.core.api.functions import OutputTag, Record, StateAccess
from onceflow.core.api.late_records import check_late
from onceflow.core.api.process_functions import FunctionOfKeys
from onceflow.core.api.record_copies import copy_records
from onceflow.core.api.window_functions import CoGroupFunction, TimeWindow
from onceflow.core.errors import ConfigError
from onceflow.core.state.kept_rows import check_rows_can_be_kept

STEP_MS = 1_000
"""The moments at which records are dropped are this far apart at least."""
STEPS_AN_INTERVAL = 8
"""Steps in the reach of a join: a row is kept an eighth of it too long at the most."""
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
                # The other side's outer records have nothing in this side's columns; a shared key
                # they have themselves.
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

    def merge(
        self, left: pa.RecordBatch | None, right: pa.RecordBatch | None, count: int
    ) -> pa.RecordBatch:
        """Return `process` of `count` pairs; None is a side of records without a partner."""
        pair = (left, right)
        arrays: list[pa.Array] = []
        for (side, column, name), field in zip(self._columns, self._schema, strict=True):
            # Shared keys stand on the left, and are taken from the right where there is no left
            # record.
            mine = pair[1] if left is None and name in self._shared else pair[side]
            if mine is None:
                arrays.append(pa.nulls(count, field.type))
            else:
                arrays.append(mine.column(column))
        return pa.record_batch(arrays, schema=self._schema)

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
        check_rows_can_be_kept(self.schema, f"the {self.name} side of a join")
        check_late(self.late, self.schema, f"late_{self.name}")


@dataclass(frozen=True)
class TimedJoin:
    """Which records of two streams are joined, by how far apart they are in time, and into what.

    The distance is the right record's time less the left one's. Of both sides the times are in
    event time, or of both by the clock.
    """

    lower_ms: int
    upper_ms: int
    sides: tuple[JoinSide, JoinSide]
    function: ProcessJoinFunction

    @property
    def reach_ms(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The least and the greatest distance in time of a partner, for each side."""
        return (self.lower_ms, self.upper_ms), (-self.upper_ms, -self.lower_ms)

    @property
    def by_clock(self) -> bool:
        """Whether a record's time is when it comes."""
        return self.sides[0].time is None

    @property
    def steps_ms(self) -> tuple[int, int]:
        """How far apart the moments are at which records are dropped, for each side."""
        left, right = (
            max(STEP_MS, (last if self.by_clock else last - first) // STEPS_AN_INTERVAL)
            for first, last in self.reach_ms
        )
        return left, right

    def output_schema(self) -> pa.Schema:
        """Return that of the function."""
        return self.function.output_schema(*(side.schema for side in self.sides))


class WindowPairs(CoGroupFunction):
    """Hands a function the pairs of records that are in one window."""

    def __init__(self, outer: tuple[bool, bool], function: ProcessJoinFunction) -> None:
        """`outer` says of each side whether its records come out without a partner, too."""
        self.outer = outer
        self.function = function

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return that of the function."""
        return self.function.output_schema(left, right)

    def open(self, state: StateAccess) -> None:
        """Open the function."""
        self.function.open(state)

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> list[Record]:
        """Return what follows from each left record with each right one, or from those alone."""
        function = self.function
        if left and right:
            return all_of(function.process(one, other) for one in left for other in right)
        made = all_of(map(function.process_left, left if self.outer[0] else ()))
        return made + all_of(map(function.process_right, right if self.outer[1] else ()))

    def snapshot_state(self, checkpoint: int) -> None:
        """Have the function do it."""
        self.function.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the function."""
        self.function.close()


def all_of(results: Iterable[Results]) -> list[Record]:
    """Return copies of the records of several results."""
    return [record for result in results for record in copy_records(result)]
