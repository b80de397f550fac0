"""The job's program: records, their windows, and what the plan puts between these and the sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from tests.simulation_runtime.calls import Service
from tests.simulation_runtime.plan import DELAY_MS, WINDOW_MS, CallPlace, Plan
from tests.simulation_runtime.source import RECORDS, SimulatedSource
from tests.simulation_runtime.targets import SimulatedSink, Target

from onceflow import (
    KeyedFunction,
    ListStateDescriptor,
    MapStateDescriptor,
    OutputTag,
    Pipeline,
    ProcessFunction,
    ProcessWindowFunction,
    Stream,
    TimeWindow,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
    sum_,
)

_LATE = OutputTag("late", RECORDS)
_MOMENT = pa.timestamp("ms", "UTC")
_WINDOWS = pa.schema(
    [
        ("key", pa.int64()),
        ("window_start", _MOMENT),
        ("window_end", _MOMENT),
        ("n", pa.int64()),
        ("ids", pa.int64()),
    ]
)


def build_program(
    pipeline: Pipeline, plan: Plan, source: SimulatedSource, targets: Mapping[str, Target]
) -> None:
    """Add the operators of `plan` to `pipeline`."""

    def write(stream: Stream, name: str) -> None:
        stream.write(SimulatedSink(targets[name]), uid=name)

    watermarks = WatermarkStrategy("at", max_out_of_orderness=DELAY_MS / 1_000)
    records = pipeline.read(source, uid="records", watermarks=watermarks)
    write(records, "raw")
    timed = _call(plan, "timed", records.filter(_has_time, uid="timed"))
    windows = _add_windows(plan, timed)
    late = windows.side_output(_LATE)
    write(_call(plan, "windows", windows), "windows")
    write(late, "late")
    copies = _add_copies(plan, records)
    if plan.calls is not None and plan.calls.place == "copy and late":
        copies = copies.union(late)
    write(_call(plan, "copy", _call(plan, "copy and late", copies)), "copy")


def _call(plan: Plan, place: CallPlace, stream: Stream) -> Stream:
    """Return the answers for the rows of `stream`, if the plan calls a service at `place`."""
    calls = plan.calls
    if calls is None or calls.place != place:
        return stream
    return stream.async_map(
        Service(calls.longest_s), uid="called", capacity=calls.capacity, ordered=calls.is_ordered
    )


def _add_windows(plan: Plan, timed: Stream) -> Stream:
    """Return the windows; records that are late for theirs are in a side output."""
    keyed = timed.key_by("key")
    if plan.content == "timers":
        return keyed.process(_TimedWindows(), uid="counted")
    windows = keyed.window(TumblingEventTimeWindows(WINDOW_MS / 1_000), late=_LATE)
    if plan.content == "aggregate":
        return windows.aggregate(n=count(), ids=sum_("bit"), uid="counted")
    return windows.process(_Counted(), uid="counted")


def _add_copies(plan: Plan, records: Stream) -> Stream:
    """Return the rows for the target `copy`."""
    match plan.way:
        case "direct":
            return records
        case "timers":
            return records.key_by("key").process(_Delayed(), uid="delayed")
        case "last rows":
            return records.process(_KeptToTheEnd(), uid="kept")
        case "join":
            even = records.filter(_is_even, uid="even").key_by("key")
            odd = records.filter(_is_odd, uid="odd").key_by("key")
            return even.join(odd, ttl=None).merge("id_left", "id_right", uid="joined")


class _Counted(ProcessWindowFunction):
    """Counts the records of each window."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        del input_schema
        return _WINDOWS

    def process(self, key: Any, window: TimeWindow, records: list[dict[str, Any]]) -> Any:
        return {
            "key": key,
            "window_start": window.start_ms,
            "window_end": window.end_ms,
            "n": len(records),
            "ids": sum(record["bit"] for record in records),
        }


class _TimedWindows(KeyedFunction):
    """Counts the records of each window, and emits the window by a timer in event time."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        del input_schema
        return _WINDOWS

    def open(self, state: Any) -> None:
        self._windows = state.map_state(MapStateDescriptor("windows", int, list[int]))
        self._timers = state.timers()
        self._late = state.side_output(_LATE)

    def process(self, record: dict[str, Any]) -> None:
        last_ms = record["at"] - record["at"] % WINDOW_MS + WINDOW_MS - 1
        if last_ms <= self._timers.current_watermark():
            self._late.emit(record)
            return
        self._windows.put(last_ms, [*(self._windows.get(last_ms) or ()), record["bit"]])
        self._timers.register_event_time_timer(last_ms)

    def on_timer(self, timer: Any) -> dict[str, Any]:
        bits = self._windows.get(timer.at_ms)
        self._windows.remove(timer.at_ms)
        return {
            "key": timer.key,
            "window_start": timer.at_ms + 1 - WINDOW_MS,
            "window_end": timer.at_ms + 1,
            "n": len(bits),
            "ids": sum(bits),
        }


class _Delayed(KeyedFunction):
    """Emits each record by a timer in processing time, or when the input ends."""

    fires_at_end = True

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: Any) -> None:
        self._held = state.map_state(MapStateDescriptor("held", int, Any))
        self._timers = state.timers()

    def process(self, record: dict[str, Any]) -> None:
        at_ms = self._timers.current_processing_time() + record["id"] % 4 * 200
        self._held.put(at_ms, [*(self._held.get(at_ms) or ()), record])
        self._timers.register_processing_time_timer(at_ms)

    def on_timer(self, timer: Any) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = self._held.get(timer.at_ms)
        self._held.remove(timer.at_ms)
        return records


class _KeptToTheEnd(ProcessFunction):
    """Keeps each record until the input ends."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: Any) -> None:
        self._kept = state.list_state(ListStateDescriptor("kept", Any))

    def process(self, record: dict[str, Any]) -> None:
        self._kept.add(record)

    def on_end(self) -> list[dict[str, Any]]:
        records = list(self._kept.get())
        self._kept.clear()
        return records


def _has_time(record: Any) -> bool:
    return record["at"] is not None


def _is_even(record: Any) -> bool:
    return bool(record["id"] % 2 == 0)


def _is_odd(record: Any) -> bool:
    return bool(record["id"] % 2 == 1)
