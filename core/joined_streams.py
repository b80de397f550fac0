"""Two keyed streams that are joined by event time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

import pyarrow as pa

from onceflow.core.durations import seconds_of
from onceflow.core.errors import ConfigError
from onceflow.core.event_time import event_time_column
from onceflow.core.functions import OutputTag
from onceflow.core.join_functions import (
    IntervalJoinFunction,
    JoinSide,
    MergedColumns,
    ProcessJoinFunction,
)
from onceflow.core.process_functions import CoProcessFunction

StreamT = TypeVar("StreamT")
Keys = tuple[tuple[str, ...], tuple[str, ...]]
SUFFIXES = ("_left", "_right")


def join_side(
    name: str, schema: pa.Schema, known: Collection[str], time: str | None, late: OutputTag | None
) -> JoinSide:
    """Return a stream as a side of an interval join; `known` is event time of its sources.

    Raises:
        ConfigError: It has no event time, `time` is no such column, or a column cannot be kept.
    """
    parameter = f"{name}_time"
    column = event_time_column(time, known, schema, verb="interval_join", parameter=parameter)
    return JoinSide(name, schema, column, late)


class IntervalJoin(Generic[StreamT]):
    """Two streams, left and right, with one key: say next how far apart pairs may be."""

    def __init__(
        self,
        process: Callable[[CoProcessFunction, str], StreamT],
        sides: tuple[JoinSide, JoinSide],
        keys: Keys,
    ) -> None:
        """`process` adds an operator of a function and a uid to the two streams."""
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
    ) -> IntervalJoined[StreamT]:
        """Join a left record with the right ones from `lower` to `upper` after it.

        Both are seconds or texts such as `"10 min"`, with a minus sign for before it: between
        `"-5 min"` and `"1 h"`. In whole milliseconds. Without `lower_inclusive` a record at just
        `lower` is not joined; likewise `upper`.

        Raises:
            ConfigError: One is no duration, or no time is between them.
        """
        lower_ms, upper_ms = _signed_ms(lower, "lower"), _signed_ms(upper, "upper")
        first, last = lower_ms + (not lower_inclusive), upper_ms - (not upper_inclusive)
        if first > last:
            open_ends = (
                "" if lower_inclusive and upper_inclusive else ", of which not both are included"
            )
            raise ConfigError(
                f"between(lower={lower!r}, upper={upper!r}): no time is between {lower_ms} ms and"
                f" {upper_ms} ms{open_ends}; the first must be less than the second"
            )
        return IntervalJoined(self._process, self._sides, self._keys, first, last)


class IntervalJoined(Generic[StreamT]):
    """Pairs of records with one key whose times are within an interval of each other."""

    def __init__(
        self,
        process: Callable[[CoProcessFunction, str], StreamT],
        sides: tuple[JoinSide, JoinSide],
        keys: Keys,
        lower_ms: int,
        upper_ms: int,
    ) -> None:
        self._process = process
        self._sides = sides
        self._keys = keys
        self._bounds_ms = lower_ms, upper_ms

    def process(self, function: ProcessJoinFunction, *, uid: str) -> StreamT:
        """Return what `function` makes of each pair.

        `uid` names the state in checkpoints: keep it, and the state is found again.
        """
        return self._process(IntervalJoinFunction(*self._bounds_ms, self._sides, function), uid)

    def merge(self, *, uid: str, suffixes: tuple[str, str] = SUFFIXES) -> StreamT:
        """Return each pair as one record: the columns of the left one, then those of the right one.

        Key columns of one name come once. Of other columns of one name each gets its suffix.

        Raises:
            ConfigError: Two columns have one name all the same.
        """
        left, right = (side.schema for side in self._sides)
        return self.process(MergedColumns(left, right, self._keys, suffixes), uid=uid)


def _signed_ms(duration: float | str, setting: str) -> int:
    if isinstance(duration, str):
        text = duration.strip()
        sign, size = (-1, text[1:]) if text.startswith("-") else (1, text)
        return sign * round(seconds_of(size, setting=setting) * 1000)
    seconds = seconds_of(abs(duration), setting=setting)
    return round(seconds * 1000) * (-1 if duration < 0 else 1)
