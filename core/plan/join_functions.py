"""The functions that process the pairs of a join, by time or by windows.

In an interval join, the time of a record is its event time. In a regular join, it is the slot's
clock when the record arrives, and the interval is the time for which each side is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.plan.event_time import check_late
from onceflow.core.plan.functions import OutputTag, Record, StateAccess, copy_records
from onceflow.core.plan.process_functions import FunctionOfKeys
from onceflow.core.plan.window_functions import CoGroupFunction, TimeWindow
from onceflow.core.plan.windows import describe_time
from onceflow.core.state.states.kept_rows import check_rows_can_be_kept

STEP_MS = 1_000
"""The minimum time between two moments at which records are dropped."""
STEPS_AN_INTERVAL = 8
"""The number of steps in the reach of a join. A row is kept too long by at most one step."""
FOREVER_MS = 1 << 60
"""The retention of a side of a regular join that has no time to live."""

Results: TypeAlias = Record | Iterable[Record] | None
JoinKind: TypeAlias = Literal["inner", "left", "right", "full"]
OUTER_SIDES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "inner": frozenset[str](),
        "left": frozenset({"left"}),
        "right": frozenset({"right"}),
        "full": frozenset({"left", "right"}),
    }
)
"""The sides of a join whose records are also emitted without a partner, by the kind of join."""


class ProcessJoinFunction(FunctionOfKeys, ABC):
    """A function of a pair of records from two streams. Pickled to the slots."""

    @abstractmethod
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema of the records that `process` returns.

        Runs on the driver.
        """

    @abstractmethod
    def process(self, left: Record, right: Record) -> Record | Iterable[Record] | None:
        """Return the output records for a pair, or None for no output."""

    def process_left(self, left: Record) -> Record | Iterable[Record] | None:
        """Return the output for a left record without a partner, or None for no output.

        Called in left and full outer joins, when no partner can arrive any more.
        """
        raise NotImplementedError

    def process_right(self, right: Record) -> Record | Iterable[Record] | None:
        """Return the output for a right record without a partner, like `process_left`."""
        raise NotImplementedError


class MergedColumns(ProcessJoinFunction):
    """Merges a pair into one record: the columns of the left record, then those of the right.

    Key columns with equal names appear once. Other columns with equal names get the suffix of their
    side.
    """

    def __init__(
        self,
        left: pa.Schema,
        right: pa.Schema,
        keys: tuple[Sequence[str], Sequence[str]],
        suffixes: tuple[str, str],
        outer: tuple[bool, bool] = (False, False),
    ) -> None:
        """`outer` is True for a side whose records are emitted without a partner, too."""
        self._shared = shared = {key for key, other in zip(*keys, strict=True) if key == other}
        twice = (set(left.names) & set(right.names)) - shared
        self._columns: list[tuple[int, str, str]] = []
        fields: list[pa.Field] = []
        for side, schema in enumerate((left, right)):
            for field in schema:
                if side and field.name in shared:
                    continue
                name = field.name + (suffixes[side] if field.name in twice else "")
                self._columns.append((side, field.name, name))
                # The other side's records without a partner are null in this side's columns, except
                # for a shared key.
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

    def select(self, columns: Sequence[tuple[str, str]]) -> None:
        """Keep only these merged columns, given by their names and new names."""
        by_name = {name: (side, column) for side, column, name in self._columns}
        fields = [self._schema.field(name).with_name(new) for name, new in columns]
        self._columns = [(*by_name[name], new) for name, new in columns]
        self._schema = pa.schema(fields)

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the merged schema."""
        return self._schema

    def process(self, left: Record, right: Record) -> Record:
        """Return the columns of both records. A column that a stored record lacks is null."""
        pair = (left, right)
        return {name: pair[side].get(column) for side, column, name in self._columns}

    def process_left(self, left: Record) -> Record:
        """Return the left record's columns, with nulls for the right side."""
        return self.process(left, {})

    def merge(
        self, left: pa.RecordBatch | None, right: pa.RecordBatch | None, count: int
    ) -> pa.RecordBatch:
        """Return the merged batch of `count` pairs. A side that is None has no records."""
        pair = (left, right)
        arrays: list[pa.Array] = []
        for (side, column, _), field in zip(self._columns, self._schema, strict=True):
            # A shared key comes from the left side, or from the right side if there are no left
            # records.
            mine = pair[1] if left is None and column in self._shared else pair[side]
            if mine is None:
                arrays.append(pa.nulls(count, field.type))
            else:
                arrays.append(mine.column(column))
        return pa.record_batch(arrays, schema=self._schema)

    def process_right(self, right: Record) -> Record:
        """Return the right record's columns and key, with nulls for the left side."""
        return self.process({name: right[name] for name in self._shared}, right)


@dataclass(frozen=True)
class JoinSide:
    """A side of a join: its columns and the side output for its late records."""

    name: str
    schema: pa.Schema
    time: str | None
    """The column of event time, or None for the clock when the record arrives."""
    late: OutputTag | None
    outer: bool = False
    """True if records without a partner are emitted, too."""

    def __post_init__(self) -> None:
        check_rows_can_be_kept(self.schema, f"the {self.name} side of a join")
        check_late(self.late, self.schema, f"late_{self.name}")


@dataclass(frozen=True)
class TimedJoin:
    """A join of records whose times are at most a given distance apart.

    The distance is the right record's time minus the left record's time. Both sides use event time,
    or both use the clock. If `upper` names a column of the left records, its value takes the place
    of the left record's time for the upper limit.
    """

    lower_ms: int
    upper_ms: int
    sides: tuple[JoinSide, JoinSide]
    function: ProcessJoinFunction
    upper: str | None = None

    @property
    def reach_ms(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The least and the greatest distance in time to a partner, for each side.

        With `upper`, the greatest distance of the left side and the least one of the right side are
        those to the column.
        """
        return (self.lower_ms, self.upper_ms), (-self.upper_ms, -self.lower_ms)

    @property
    def by_clock(self) -> bool:
        """True if the time of a record is the clock when it arrives."""
        return self.sides[0].time is None

    @property
    def steps_ms(self) -> tuple[int, int]:
        """The time between two moments at which records of a side are dropped, in ms."""
        if self.upper is not None:
            return STEP_MS, max(STEP_MS, -self.lower_ms // STEPS_AN_INTERVAL)
        left, right = (
            max(STEP_MS, (last if self.by_clock else last - first) // STEPS_AN_INTERVAL)
            for first, last in self.reach_ms
        )
        return left, right

    def output_schema(self) -> pa.Schema:
        """Return the output schema of the function."""
        return self.function.output_schema(*(side.schema for side in self.sides))

    def time_settings(self) -> dict[str, str]:
        """Return the kind of the join and its limits by name, as checkpoints record them."""
        names = zip(("left", "right"), self.sides, strict=True)
        outer = frozenset(name for name, side in names if side.outer)
        return {
            "how": next(how for how, sides in OUTER_SIDES.items() if sides == outer),
            "time": describe_time(self.by_clock),
            "lower": f"{self.lower_ms} ms",
            "upper": f"{self.upper_ms} ms" + (f" after {self.upper!r}" if self.upper else ""),
        }


class WindowPairs(CoGroupFunction):
    """Calls a join function for the pairs of records in one window."""

    def __init__(self, outer: tuple[bool, bool], function: ProcessJoinFunction) -> None:
        """`outer` is True for a side whose records are emitted without a partner, too."""
        self.outer = outer
        self.function = function

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the output schema of the function."""
        return self.function.output_schema(left, right)

    def open(self, state: StateAccess) -> None:
        """Open the function."""
        self.function.open(state)

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> list[Record]:
        """Return the output for all pairs, or for records of an outer side without a partner."""
        function = self.function
        if left and right:
            return all_of(function.process(record, other) for record in left for other in right)
        made = all_of(map(function.process_left, left if self.outer[0] else ()))
        return made + all_of(map(function.process_right, right if self.outer[1] else ()))

    def snapshot_state(self, checkpoint: int) -> None:
        """Call the function's `snapshot_state`."""
        self.function.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the function."""
        self.function.close()


def all_of(results: Iterable[Results]) -> list[Record]:
    """Return copies of the records of all results, as one list."""
    return [record for result in results for record in copy_records(result)]
