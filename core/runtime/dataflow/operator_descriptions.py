"""Settings of stateful operators that determine the meaning of their state.

Each checkpoint records these settings for each such operator, by name and as text
(`OperatorSnapshot.described`). A start compares them with the pipeline before any slot begins:

    key                 the kinds of the key's values: with another kind, no key would be found
    windows, time, size, slide, offset, gap     another value cuts kept rows into other windows
    lower, upper        of joins by time: rows were kept for these limits
    how                 of joins by time: an outer side may become inner. The opposite is refused:
                        rows kept by an inner side do not record whether they had a partner.
    allowed lateness    may become shorter: a window that has expired with the longer lateness has
                        also expired with the shorter one. A longer lateness would start expired
                        windows anew.

A setting that one of the two lacks is not compared: the states themselves differ in that case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from typing_extensions import assert_never

from onceflow.core.plan import graph
from onceflow.core.plan.join_functions import TimedJoin
from onceflow.core.plan.window_functions import WindowsOfRecords
from onceflow.core.plan.windows import EventTimeSessionWindows, WindowAssigner, pane_windows
from onceflow.core.state.aggregates.accumulator_shape import key_kind

LATENESS = "allowed lateness"
_WITH_ZONE, _WITHOUT_ZONE = " with a zone", " without a zone"
_OUTER_SIDES = {
    "inner": frozenset[str](),
    "left": frozenset({"left"}),
    "right": frozenset({"right"}),
    "full": frozenset({"left", "right"}),
}
"""The sides of a join whose records are also emitted without a partner, by the value of `how`."""


def describe_operator(operator: graph.Operator) -> dict[str, str]:
    """Return the settings of `operator` by name; empty if its state depends on none."""
    key = _key_of(operator.work)
    if not key:
        return {}
    schema = operator.input_schema
    return {"key": _key_text([schema.field(name).type for name in key])} | _times_of(operator.work)


def find_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changes, with both values, with which `now` would misread state of `before`."""
    return [
        f"{name} was {before[name]} and is now {now[name]}"
        for name in now
        if name in before and not _is_kept(name, before[name], now[name])
    ]


def _is_kept(name: str, before: str, now: str) -> bool:
    if name == LATENESS:
        return int(now.removesuffix(" ms")) <= int(before.removesuffix(" ms"))
    if name == "how":
        return _OUTER_SIDES[now] <= _OUTER_SIDES[before]
    return before == now


def _key_of(work: graph.Work) -> Sequence[str]:
    if isinstance(work, graph.StatelessWork | graph.ProcessRecords | graph.WriteTo):
        return ()
    match work:
        case (
            graph.ProcessKeyed()
            | graph.ProcessBatches()
            | graph.ProcessBroadcast()
            | graph.RunAggregates()
        ) | graph.AggregateWindows():
            return work.key
        case graph.ProcessConnected() | graph.JoinConnected():
            return work.keys[0]
        case _:
            assert_never(work)


def _key_text(types: Sequence[pa.DataType]) -> str:
    kinds: list[str] = []
    for key_type in types:
        kind = key_kind(key_type)
        plain = key_type.value_type if pa.types.is_dictionary(key_type) else key_type
        # In memory and in snapshots, a key with a time zone differs from a key without.
        if pa.types.is_timestamp(plain):
            kind += _WITHOUT_ZONE if plain.tz is None else _WITH_ZONE
        kinds.append(kind)
    return ", ".join(kinds)


def _times_of(work: graph.Work) -> dict[str, str]:
    match work:
        case graph.AggregateWindows():
            return _windows_of(work.windows, work.lateness_ms, by_clock=work.time is None)
        case graph.ProcessKeyed(function=function) | graph.ProcessConnected(function=function) if (
            isinstance(function, WindowsOfRecords)
        ):
            windows, lateness_ms = function.windows, function.lateness_ms
            return _windows_of(windows, lateness_ms, by_clock=function.by_clock)
        case graph.JoinConnected(join=join):
            return _reach_of(join)
        case _:
            return {}


def _windows_of(windows: WindowAssigner, lateness_ms: int, *, by_clock: bool) -> dict[str, str]:
    of_all = {"time": _time_text(by_clock), LATENESS: f"{lateness_ms} ms"}
    if isinstance(windows, EventTimeSessionWindows):
        return {"windows": "sessions", "gap": f"{windows.gap_ms} ms"} | of_all
    panes = pane_windows(windows, lateness_ms)
    return {
        "windows": "of one size",
        "size": f"{panes.size_ms} ms",
        "slide": f"{panes.slide_ms} ms",
        "offset": f"{panes.offset_ms} ms",
    } | of_all


def _reach_of(join: TimedJoin) -> dict[str, str]:
    names = zip(("left", "right"), join.sides, strict=True)
    outer = frozenset(name for name, side in names if side.outer)
    return {
        "how": next(how for how, sides in _OUTER_SIDES.items() if sides == outer),
        "time": _time_text(join.by_clock),
        "lower": f"{join.lower_ms} ms",
        "upper": f"{join.upper_ms} ms",
    }


def _time_text(by_clock: bool) -> str:
    return "processing time" if by_clock else "event time"
