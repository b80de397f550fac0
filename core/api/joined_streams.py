"""The joins of two keyed streams: by event time, by retention time, or by windows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar, get_args

import pyarrow as pa

from onceflow.core.api.users_mistakes import require_function_object
from onceflow.core.errors import ConfigError
from onceflow.core.plan.event_time import check_time_type, event_time_column
from onceflow.core.plan.functions import OutputTag
from onceflow.core.plan.join_functions import (
    FOREVER_MS,
    JoinKind,
    JoinSide,
    MergedColumns,
    ProcessJoinFunction,
    TimedJoin,
)
from onceflow.core.plan.process_functions import CoProcessFunction
from onceflow.core.plan.projection import rename_columns, require_different
from onceflow.core.setting_values import seconds_of

StreamT = TypeVar("StreamT")
StreamT_co = TypeVar("StreamT_co", covariant=True)
Keys = tuple[tuple[str, ...], tuple[str, ...]]
Sides: TypeAlias = tuple[JoinSide, JoinSide]
JoinTtl: TypeAlias = float | str | None
"""The time for which the records of a side are kept, or None for no limit."""
SUFFIXES = ("_left", "_right")


class AddsOperator(Protocol[StreamT_co]):
    """A callable that adds an operator for two streams and returns the stream of its output."""

    def __call__(self, function: CoProcessFunction | TimedJoin, *, uid: str) -> StreamT_co:
        """Add the operator under this uid."""
        ...


def join_side(
    name: str, schema: pa.Schema, known: Collection[str], time: str | None, late: OutputTag | None
) -> JoinSide:
    """Return the side of an interval join. `known` are the event-time columns of its sources.

    Raises:
        ConfigError: The stream has no event time, `time` is not an event-time column, or state
            cannot hold a column.
    """
    parameter = f"{name}_time"
    column = event_time_column(time, known, schema, verb="interval_join", parameter=parameter)
    return JoinSide(name, schema, column, late)


def mark_outer_sides(sides: Sides, how: JoinKind) -> Sides:
    """Return the sides, marked as outer or not for this kind of join.

    Raises:
        ConfigError: `how` is not a kind of join.
    """
    if how not in get_args(JoinKind):
        raise ConfigError(f"how={how!r}: choose one of {', '.join(get_args(JoinKind))}")
    left, right = sides
    return (
        replace(left, outer=how in ("left", "full")),
        replace(right, outer=how in ("right", "full")),
    )


class IntervalJoin(Generic[StreamT]):
    """Two streams with one key. `between` sets how far apart the times of a pair may be."""

    def __init__(self, process: AddsOperator[StreamT], sides: Sides, keys: Keys) -> None:
        self._process = process
        self._sides = sides
        self._keys = keys

    def between(
        self,
        lower: float | str,
        upper: float | str,
        *,
        lower_inclusive: bool = True,
        upper_inclusive: bool = True,
    ) -> JoinedStreams[StreamT]:
        """Join a left record with the right records whose time is `lower` to `upper` after it.

        Both are seconds or texts such as `"10 min"`. A minus sign means before the left record, as
        in between `"-5 min"` and `"1 h"`. Both are rounded to milliseconds. `upper` may also name a
        column of the left stream that holds the latest time of a partner, as in
        `between(0, "expires")`. If `lower_inclusive` is False, a record at exactly `lower` is not
        joined. `upper_inclusive` does the same for `upper`.

        Raises:
            ConfigError: An argument is not a duration, no time is between them, or the column
                cannot hold event times.
        """
        left = self._sides[0].schema
        if isinstance(lower, str) and lower in left.names:
            raise ConfigError(
                f"between(lower={lower!r}): only upper may be a column. With a column as lower"
                " bound, right records would be kept for ever. Give a duration"
            )
        lower_ms = _to_signed_ms(lower, "lower")
        if isinstance(upper, str) and upper in left.names:
            check_time_type(left.field(upper).type, f"between(upper={upper!r})")
            function = partial(
                TimedJoin,
                lower_ms + (not lower_inclusive),
                -(not upper_inclusive),
                self._sides,
                upper=upper,
            )
            return JoinedStreams(self._process, function, self._sides, self._keys)
        upper_ms = _to_signed_ms(upper, "upper")
        first, last = lower_ms + (not lower_inclusive), upper_ms - (not upper_inclusive)
        if first > last:
            open_ends = (
                "" if lower_inclusive and upper_inclusive else ", of which not both are included"
            )
            raise ConfigError(
                f"between(lower={lower!r}, upper={upper!r}): no time is between {lower_ms} ms and"
                f" {upper_ms} ms{open_ends}; the first must be less than the second"
            )
        function = partial(TimedJoin, first, last, self._sides)
        return JoinedStreams(self._process, function, self._sides, self._keys)


def regular_join(
    process: AddsOperator[StreamT],
    sides: Sides,
    keys: Keys,
    ttl: JoinTtl | tuple[JoinTtl, JoinTtl],
) -> JoinedStreams[StreamT]:
    """Return the join of two sides whose records are kept for `ttl` of processing time.

    Raises:
        ConfigError: `ttl` is not a duration, or is less than a millisecond.
    """
    left_ms, right_ms = map(_ttl_ms, ttl if isinstance(ttl, tuple) else (ttl, ttl))
    function = partial(TimedJoin, 1 - right_ms, left_ms - 1, sides)
    return JoinedStreams(process, function, sides, keys)


class JoinedStreams(Generic[StreamT]):
    """Pairs of records of two streams with one key."""

    def __init__(
        self,
        process: AddsOperator[StreamT],
        function: Callable[[ProcessJoinFunction], CoProcessFunction | TimedJoin],
        sides: Sides,
        keys: Keys,
    ) -> None:
        """`function` converts a function of pairs to the function of the two streams."""
        self._process = process
        self._function = function
        self._sides = sides
        self._keys = keys

    def process(self, function: ProcessJoinFunction, *, uid: str) -> StreamT:
        """Apply `function` to each pair.

        `uid` names the state in checkpoints. If you change it, the job no longer finds its state.

        Raises:
            ConfigError: The join is outer, and `function` lacks the method for records without a
                partner.
        """
        require_function_object(function, ProcessJoinFunction, "join(…).process")
        for side in self._sides:
            method = f"process_{side.name}"
            if side.outer and getattr(type(function), method) is getattr(
                ProcessJoinFunction, method
            ):
                raise ConfigError(
                    f"{type(function).__name__} has no {method}(), which takes the records of an"
                    f" outer join's {side.name} side that have no partner"
                )
        return self._process(self._function(function), uid=uid)

    def merge(self, *columns: str, uid: str, suffixes: tuple[str, str] = SUFFIXES) -> StreamT:
        """Merge each pair into one record: the columns of the left record, then those of the right.

        Key columns with equal names appear once. Other columns with equal names get a suffix each.
        A record without a partner has nulls in the columns of the other side. `columns` are the
        merged columns to keep, with their new names (`"price_right AS bid"`). Default: all.

        Raises:
            ConfigError: Two columns still have the same name, or a column does not exist.
        """
        left, right = self._sides
        outer = (left.outer, right.outer)
        merged = MergedColumns(left.schema, right.schema, self._keys, suffixes, outer)
        if columns:
            merged.select(_parse_columns(columns, merged.output_schema(left.schema, right.schema)))
        return self.process(merged, uid=uid)


def _parse_columns(columns: Sequence[str], merged: pa.Schema) -> list[tuple[str, str]]:
    """Return pairs of a merged column and its new name."""
    pairs = rename_columns(columns, merged)
    if pairs is None:
        raise ConfigError(
            f"merge({', '.join(map(repr, columns))}) keeps and renames columns, as 'a' or 'a AS b';"
            f" there are {', '.join(merged.names)}. Compute others with project() behind the join"
        )
    require_different([name for _, name in pairs], "merge()")
    return pairs


def _to_signed_ms(duration: float | str, setting: str) -> int:
    if isinstance(duration, str):
        text = duration.strip()
        sign, size = (-1, text[1:]) if text.startswith("-") else (1, text)
        return sign * round(seconds_of(size, setting=setting) * 1000)
    seconds = seconds_of(abs(duration), setting=setting)
    return round(seconds * 1000) * (-1 if duration < 0 else 1)


def _ttl_ms(ttl: JoinTtl) -> int:
    if ttl is None:
        return FOREVER_MS + 1
    ttl_ms = round(seconds_of(ttl, setting="ttl") * 1000)
    if ttl_ms < 1:
        raise ConfigError(f"join(ttl={ttl!r}) must be 1 ms or more; None: for ever")
    return ttl_ms
