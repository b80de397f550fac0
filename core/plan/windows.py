"""Window assigners, which divide the records of a key by time. The names are those of Flink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.watermarks import PaneWindows
from onceflow.core.setting_values import seconds_of


def _ms(duration: float | str, setting: str) -> int:
    return round(seconds_of(duration, setting=setting) * 1000)


def _offset_ms(offset: float | str) -> int:
    """Return an offset in ms. It is negative for zones east of Greenwich, such as -8 h."""
    if isinstance(offset, str):
        if offset.lstrip().startswith("-"):
            return -_ms(offset.strip()[1:], "offset")
    elif offset < 0:
        return -_ms(-offset, "offset")
    return _ms(offset, "offset")


def _length_ms(duration: float | str, setting: str) -> int:
    length_ms = _ms(duration, setting)
    if length_ms < 1:
        raise ConfigError(f"{setting}={duration!r} must be 1 ms or more")
    return length_ms


@dataclass(frozen=True, slots=True)
class _TumblingWindows:
    """Adjacent windows of equal size, in either kind of time."""

    size: float | str
    offset: float | str = 0

    def __post_init__(self) -> None:
        _length_ms(self.size, "size")
        _offset_ms(self.offset)


@check_fields
@dataclass(frozen=True, slots=True)
class TumblingEventTimeWindows(_TumblingWindows):
    """Adjacent windows of equal size: `TumblingEventTimeWindows("1 min")`.

    They start at whole multiples of `size` since 1970 (UTC), shifted by `offset`. `offset` may be
    negative: for days in China use `offset="-8 h"`.
    """

    by_clock: ClassVar[bool] = False


@check_fields
@dataclass(frozen=True, slots=True)
class SlidingEventTimeWindows:
    """Overlapping windows of length `size`. One starts every `slide`, shifted by `offset`."""

    by_clock: ClassVar[bool] = False
    size: float | str
    slide: float | str
    offset: float | str = 0

    def __post_init__(self) -> None:
        size_ms, slide_ms = _length_ms(self.size, "size"), _length_ms(self.slide, "slide")
        _offset_ms(self.offset)
        if slide_ms > size_ms:
            raise ConfigError(
                f"slide={self.slide!r} is more than size={self.size!r}: records between two"
                " windows would belong to no window"
            )


@check_fields
@dataclass(frozen=True, slots=True)
class TumblingProcessingTimeWindows(_TumblingWindows):
    """Adjacent windows in processing time, by the slot's clock when it processes a record."""

    by_clock: ClassVar[bool] = True


@check_fields
@dataclass(frozen=True, slots=True)
class EventTimeSessionWindows:
    """Session windows. A session ends when its key has had no record for `gap`."""

    by_clock: ClassVar[bool] = False
    gap: float | str

    def __post_init__(self) -> None:
        _length_ms(self.gap, "gap")

    @property
    def gap_ms(self) -> int:
        """The gap in milliseconds."""
        return _ms(self.gap, "gap")


PaneAssigner: TypeAlias = (
    TumblingEventTimeWindows | SlidingEventTimeWindows | TumblingProcessingTimeWindows
)
"""The assigners whose window bounds do not depend on the records."""
WindowAssigner: TypeAlias = PaneAssigner | EventTimeSessionWindows
LATENESS = "allowed lateness"
"""The name under which checkpoints record the allowed lateness of windows."""


def pane_windows(windows: PaneAssigner, lateness_ms: int) -> PaneWindows:
    """Return the windows divided into panes."""
    size_ms, offset_ms = _ms(windows.size, "size"), _offset_ms(windows.offset)
    slide_ms = size_ms
    if isinstance(windows, SlidingEventTimeWindows):
        slide_ms = _ms(windows.slide, "slide")
    return PaneWindows(size_ms, slide_ms, offset_ms % slide_ms, lateness_ms)


def describe_windows(windows: WindowAssigner, lateness_ms: int) -> dict[str, str]:
    """Return the settings of the windows by name, as checkpoints record them."""
    of_all = {"time": describe_time(windows.by_clock), LATENESS: f"{lateness_ms} ms"}
    if isinstance(windows, EventTimeSessionWindows):
        return {"windows": "sessions", "gap": f"{windows.gap_ms} ms"} | of_all
    panes = pane_windows(windows, lateness_ms)
    return {
        "windows": "of one size",
        "size": f"{panes.size_ms} ms",
        "slide": f"{panes.slide_ms} ms",
        "offset": f"{panes.offset_ms} ms",
    } | of_all


def describe_time(by_clock: bool) -> str:
    """Return the name of the kind of time, as checkpoints record it."""
    return "processing time" if by_clock else "event time"


@dataclass(frozen=True, slots=True)
class EarlyResults:
    """The moments at which windows emit results before they are due."""

    records: int | None
    """The number of records of a key and window from one result to the next, or None for any."""
    interval_ms: int | None
    """The time from a change of a window to its result, or None for no such result."""


class UsedWindows(NamedTuple):
    """The windows of an operator, and what makes it emit a window more than once."""

    windows: WindowAssigner
    lateness_ms: int
    has_early_results: bool = False


WindowNames: TypeAlias = tuple[str, str]
"""The names of the columns with the start and the end of a window."""
WINDOW_COLUMNS: WindowNames = ("window_start", "window_end")


def window_schema(
    schema: pa.Schema,
    key: Sequence[str],
    time: str | None,
    results: Mapping[str, pa.DataType],
    names: WindowNames = WINDOW_COLUMNS,
) -> pa.Schema:
    """Return the schema of emitted windows: the key, the start, the end, and the results.

    Start and end have the time zone of the event-time column, or UTC if it is not a timestamp.

    Raises:
        ConfigError: Two columns have the same name.
    """
    _check_columns(key, (*names, *results))
    kind = schema.field(time).type if time is not None else None
    zone = kind.tz if kind is not None and pa.types.is_timestamp(kind) else "UTC"
    moments = [pa.field(name, pa.timestamp("ms", zone)) for name in names]
    keys = [pa.field(name, schema.field(name).type) for name in key]
    return pa.schema([*keys, *moments, *(pa.field(n, kind) for n, kind in results.items())])


def make_keyed_schema(
    schema: pa.Schema, key: Sequence[str], results: Mapping[str, pa.DataType]
) -> pa.Schema:
    """Return the schema of results without a start and end of their own: the key and the results.

    Raises:
        ConfigError: Two columns have the same name.
    """
    _check_columns(key, tuple(results))
    keys = [pa.field(name, schema.field(name).type) for name in key]
    return pa.schema([*keys, *(pa.field(name, kind) for name, kind in results.items())])


def _check_columns(key: Sequence[str], others: Sequence[str]) -> None:
    names = [*key, *others]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"windows would have two columns {twice[0]!r}; rename the column of the key or the"
            " aggregate, or name start and end by window(…, names=(…, …))"
        )
