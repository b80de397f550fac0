"""The methods of a windowed stream, which compute results for each key and window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pyarrow as pa

from onceflow.core.api.users_mistakes import require_aggregates, require_function_object
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.plan.aggregates import Aggregate
from onceflow.core.plan.all_windows import ALL, can_merge, make_gathered_schema, make_panes_schema
from onceflow.core.plan.event_time import check_late, event_time_column
from onceflow.core.plan.functions import OutputTag, Record
from onceflow.core.plan.graph import Feed, GraphBuilder
from onceflow.core.plan.window_functions import (
    KeptAccumulators,
    KeptRecords,
    ProcessWindowFunction,
    WindowContent,
    WindowedFunction,
    WindowInput,
)
from onceflow.core.plan.windows import (
    WINDOW_COLUMNS,
    EarlyResults,
    EventTimeSessionWindows,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    UsedWindows,
    WindowAssigner,
    WindowNames,
    make_keyed_schema,
    window_schema,
)
from onceflow.core.plan.work import (
    AggregateCounts,
    AggregateWindows,
    GatherRows,
    MergeWindows,
    PreAggregateWindows,
    ProcessKeyed,
    Work,
)
from onceflow.core.setting_values import seconds_of
from onceflow.core.state import AggregateFunction
from onceflow.core.state.api.descriptors import TypeSpec

StreamT = TypeVar("StreamT")


def lateness_ms_of(windows: WindowAssigner, allowed_lateness: float | str) -> int:
    """Return the allowed lateness in milliseconds.

    Raises:
        ConfigError: It is not a duration, or these windows do not allow lateness.
    """
    lateness_ms = round(seconds_of(allowed_lateness, setting="allowed_lateness") * 1000)
    if lateness_ms and windows.by_clock:
        raise ConfigError(_BY_THE_CLOCK)
    return lateness_ms


def window_input(
    graph: GraphBuilder,
    feeds: tuple[Feed, ...],
    key: tuple[str, ...],
    windows: WindowAssigner,
    time: str | None,
    late: OutputTag | None,
    parameters: tuple[str, str] = ("time", "late"),
) -> WindowInput:
    """Return the window input of `feeds`. `parameters` name `time` and `late` in errors.

    Raises:
        ConfigError: The event-time column does not exist, or `late` has other columns than the
            stream.
    """
    schema = feeds[0].schema
    check_late(late, schema, parameters[1])
    if windows.by_clock:
        if time is not None or late is not None:
            raise ConfigError(_BY_THE_CLOCK)
        return WindowInput(key, None)
    known = graph.event_time_of(feeds)
    return WindowInput(key, event_time_column(time, known, schema, parameter=parameters[0]), late)


def check_names(names: object) -> WindowNames:
    """Return the names of the columns with start and end.

    Raises:
        ConfigError: They are not two texts.
    """
    match names:
        case (str() as start, str() as end):
            return start, end
        case _:
            raise ConfigError(
                f"names={names!r}: give the names of the columns with the start and the end of a"
                f" window, as in names={WINDOW_COLUMNS}"
            )


SAME_WINDOW = TumblingEventTimeWindows(0.001)
"""The windows of `per_window`. The key has the start and the end of a window, and all its results
have the same event time, its end. So one millisecond contains all of them, and no others."""


def window_again(
    graph: GraphBuilder,
    feeds: tuple[Feed, ...],
    key: tuple[str, ...],
    names: WindowNames,
    parameter: str,
) -> WindowInput:
    """Return the input of `SAME_WINDOW` for results of windows. `parameter` names it in errors.

    Raises:
        ConfigError: A column does not exist or is no timestamp, or the results do not come from
            windows in event time without allowed lateness.
    """
    schema = feeds[0].schema
    for name in check_names(names):
        if name not in schema.names or not pa.types.is_timestamp(schema.field(name).type):
            raise ConfigError(
                f"{parameter}(): the stream has no timestamp {name!r}; there are"
                f" {', '.join(schema.names)}. Name the columns with the start and the end of the"
                " window by names=(…, …)"
            )
    # Each stream of a union needs windows: the others have rows of any time in these columns.
    if not all(graph.windows_of((feed,)) for feed in feeds):
        raise ConfigError(
            f"{parameter}(): the stream does not come from windows, so a row may arrive after event"
            f" time has passed its {names[1]!r}, and would be dropped. Call window(…) or"
            " window_all(…) before, or group by the columns with key_by(…)"
        )
    for used in graph.windows_of(feeds):
        if why := _why_again(used):
            raise ConfigError(
                f"{parameter}(): the windows {why}, so that more results of a window may follow at"
                " any time. Use windows in event time without allowed_lateness and early results"
            )
    known = graph.event_time_of(feeds)
    time = event_time_column(names[1], known, schema, verb=parameter, parameter="names")
    return WindowInput((*key, *(name for name in names if name not in key)), time)


def _why_again(used: UsedWindows) -> str:
    """Return why the operator may emit a window more than once, or "" if it does not."""
    if used.windows.by_clock:
        return "are in processing time"
    if used.lateness_ms:
        return "have an allowed lateness"
    return "have early results" if used.has_early_results else ""


def early_results_of(
    windows: WindowAssigner, records: int | None, interval: float | str | None
) -> EarlyResults | None:
    """Return the moments of early results, or None if the user wants none.

    Raises:
        ConfigError: A value is too small, or these windows have no such results.
    """
    if records is None and interval is None:
        return None
    if isinstance(windows, EventTimeSessionWindows):
        raise ConfigError(
            "sessions have no early results, because a record may change their start and end: omit"
            " early_records= and early_interval="
        )
    if records is not None and records < 1:
        raise ConfigError(f"early_records={records}: give 1 or more")
    if records is not None and isinstance(windows, SlidingEventTimeWindows):
        raise ConfigError(
            "early_records= is not for sliding windows, which do not count the records of each"
            " window: give early_interval="
        )
    interval_ms = None
    if interval is not None:
        interval_ms = round(seconds_of(interval, setting="early_interval") * 1000)
        if interval_ms < 1:
            raise ConfigError(f"early_interval={interval!r} must be 1 ms or more")
    return EarlyResults(records, interval_ms)


_BY_THE_CLOCK = (
    "windows in processing time follow the clock: omit time=, allowed_lateness= and late="
)


class WindowedStream(Generic[StreamT]):
    """Records grouped by key and window."""

    def __init__(
        self,
        then: Callable[[Work, str, pa.Schema], StreamT],
        schema: pa.Schema,
        windows: WindowAssigner,
        lateness_ms: int,
        stream: WindowInput,
        names: WindowNames = WINDOW_COLUMNS,
        early: EarlyResults | None = None,
    ) -> None:
        """`then` adds an operator to the keyed stream and returns the stream of its output.

        Raises:
            ConfigError: `names` are not two texts.
        """
        self._early = early
        self._then = then
        self._schema = schema
        self._windows: WindowAssigner = windows
        self._lateness_ms = lateness_ms
        self._input = stream
        self._key = stream.key
        self._names = check_names(names)

    def aggregate(self, *, uid: str, **aggregates: Aggregate) -> StreamT:
        """Emit one record for each key and window that has records: key, window and aggregates.

        The columns are the key columns, `window_start`, `window_end` (exclusive), and one column
        for each aggregate. Vectorised, like `running`. `uid` names the state in checkpoints.
        """
        schema, time = self._schema, self._input.time
        require_aggregates(aggregates, "aggregate")
        results = {name: aggregate.result_type(schema) for name, aggregate in aggregates.items()}
        made = window_schema(schema, self._key, time, results, self._names)
        work = AggregateWindows(
            self._key,
            self._windows,
            self._input.time,
            self._lateness_ms,
            dict(aggregates),
            self._input.late,
            self._names,
            self._early,
        )
        return self._then(work, uid, made)

    def aggregate_by(
        self,
        function: AggregateFunction[Record, Any, Record],
        *,
        schema: SchemaLike,
        uid: str,
        accumulator_type: TypeSpec = Any,
    ) -> StreamT:
        """Emit one record for each key and window: key, window and the result of `function`.

        `function` gets each record, and its result is a dict with the columns of `schema`. State
        holds only the accumulator of a window, as `accumulator_type`. Without `accumulator_type`,
        decimals and times may be restored as text. Session windows call `function.merge`.
        """
        require_function_object(function, AggregateFunction, "aggregate_by")
        results = {field.name: field.type for field in schema_of(schema)}
        made = window_schema(self._schema, self._key, self._input.time, results, self._names)
        content = KeptAccumulators(function, self._key, made, accumulator_type, self._names)
        return self._each_record(content, uid)

    def process(self, function: ProcessWindowFunction, *, uid: str) -> StreamT:
        """Apply `function` to all records of each key and window. The state holds all records."""
        require_function_object(function, ProcessWindowFunction, "window(…).process")
        return self._each_record(KeptRecords(function, self._schema), uid)

    def _each_record(self, content: WindowContent, uid: str) -> StreamT:
        if self._early is not None:
            raise ConfigError(
                "early_records= and early_interval= are for aggregate(): a function of windows gets"
                " each window once its records are there"
            )
        function = WindowedFunction(self._windows, self._lateness_ms, content, self._input)
        schema = function.output_schema(self._schema)
        return self._then(ProcessKeyed(self._key, function), uid, schema)


class AllWindowedStream(Generic[StreamT]):
    """Records grouped by window, without a key."""

    def __init__(
        self,
        graph: GraphBuilder,
        feeds: tuple[Feed, ...],
        stream: Callable[[GraphBuilder, Feed], StreamT],
        windows: WindowAssigner,
        time: str | None,
        allowed_lateness: float | str,
        late: OutputTag | None,
        names: WindowNames,
    ) -> None:
        """`stream` builds the stream of an operator's output.

        Raises:
            ConfigError: A parameter does not fit the stream or the windows.
        """
        window = window_input(graph, feeds, (), windows, time, late)
        self._graph = graph
        self._feeds = feeds
        self._stream = stream
        self._windows: WindowAssigner = windows
        self._time, self._late = window.time, window.late
        self._lateness_ms = lateness_ms_of(windows, allowed_lateness)
        self._names = check_names(names)

    def aggregate(self, *, uid: str, **aggregates: Aggregate) -> StreamT:
        """Emit one record for each window that has records: its start, its end, the aggregates.

        Each subtask of the stream aggregates its records first. One subtask merges the results. If
        the windows are sessions or in processing time, or late records have a side output, that
        subtask gets the records themselves. `uid` names the state in checkpoints.
        """
        schema = self._feeds[0].schema
        require_aggregates(aggregates, "aggregate")
        results = {name: aggregate.result_type(schema) for name, aggregate in aggregates.items()}
        made = window_schema(schema, (), self._time, results, self._names)
        settings = (
            (ALL,), self._windows, self._time, self._lateness_ms, dict(aggregates), self._late,
            self._names,
        )  # fmt: skip
        windows = self._windows
        if (
            isinstance(windows, EventTimeSessionWindows)
            or self._time is None
            or self._late is not None
            or not can_merge(aggregates, schema)
        ):
            first: Work = GatherRows()
            between, work = make_gathered_schema(schema), AggregateWindows(*settings)
        else:
            first = PreAggregateWindows(uid, windows, self._time, dict(aggregates))
            between = make_panes_schema(aggregates, schema)
            work = MergeWindows(*settings, records=schema)
        before = self._graph.add(first, self._feeds, uid=f"{uid}-parts", schema=between)
        feeds = (Feed(before.uid, between),)
        operator = self._graph.add(work, feeds, uid=uid, schema=made)
        return self._stream(self._graph, Feed(operator.uid, made))


class PerWindowStream(Generic[StreamT]):
    """Results of windows, grouped by their key and by the window that they came from."""

    def __init__(
        self,
        then: Callable[[Work, str, pa.Schema], StreamT],
        schema: pa.Schema,
        stream: WindowInput,
    ) -> None:
        """`then` adds an operator to the stream and returns the stream of its output."""
        self._then = then
        self._schema = schema
        self._input = stream

    def aggregate(self, *, uid: str, **aggregates: Aggregate) -> StreamT:
        """Emit one record for each window and key: the key, the window and the aggregates.

        Vectorised, like `running`. `uid` names the state in checkpoints.
        """
        require_aggregates(aggregates, "aggregate")
        schema, key = self._schema, self._input.key
        results = {name: aggregate.result_type(schema) for name, aggregate in aggregates.items()}
        made = make_keyed_schema(schema, key, results)
        work = AggregateWindows(key, SAME_WINDOW, self._input.time, 0, dict(aggregates))
        return self._then(work, uid, made)


class CountWindowedStream(Generic[StreamT]):
    """Records grouped by key and by their number within the key."""

    def __init__(
        self,
        then: Callable[[Work, str, pa.Schema], StreamT],
        schema: pa.Schema,
        key: tuple[str, ...],
        size: int,
    ) -> None:
        """`then` adds an operator to the keyed stream and returns the stream of its output."""
        self._then = then
        self._schema = schema
        self._key = key
        self._size = size

    def aggregate(self, *, uid: str, **aggregates: Aggregate) -> StreamT:
        """Emit one record for each full window of a key: the key columns and the aggregates.

        At the end of the input, the last window of each key is emitted as it is. Vectorised, like
        `running`. `uid` names the state in checkpoints.
        """
        require_aggregates(aggregates, "aggregate")
        results = {
            name: aggregate.result_type(self._schema) for name, aggregate in aggregates.items()
        }
        made = make_keyed_schema(self._schema, self._key, results)
        work = AggregateCounts(self._key, self._size, dict(aggregates))
        return self._then(work, uid, made)
