"""The methods of a windowed stream, which compute results for each key and window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pyarrow as pa

from onceflow.core.api.users_mistakes import require_aggregates, require_function_object
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.plan.aggregates import Aggregate
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
    WindowAssigner,
    count_window_schema,
    window_schema,
)
from onceflow.core.plan.work import AggregateCounts, AggregateWindows, ProcessKeyed, Work
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
    ) -> None:
        """`then` adds an operator to the keyed stream and returns the stream of its output."""
        self._then = then
        self._schema = schema
        self._windows: WindowAssigner = windows
        self._lateness_ms = lateness_ms
        self._input = stream
        self._key = stream.key

    def aggregate(self, *, uid: str, **aggregates: Aggregate) -> StreamT:
        """Emit one record for each key and window that has records: key, window and aggregates.

        The columns are the key columns, `window_start`, `window_end` (exclusive), and one column
        for each aggregate. Vectorised, like `running`. `uid` names the state in checkpoints.
        """
        schema = self._schema
        require_aggregates(aggregates, "aggregate")
        results = {name: aggregate.result_type(schema) for name, aggregate in aggregates.items()}
        made = window_schema(schema, self._key, self._input.time, results)
        work = AggregateWindows(
            self._key,
            self._windows,
            self._input.time,
            self._lateness_ms,
            dict(aggregates),
            self._input.late,
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
        made = window_schema(self._schema, self._key, self._input.time, results)
        content = KeptAccumulators(function, self._key, made, accumulator_type)
        return self._each_record(content, uid)

    def process(self, function: ProcessWindowFunction, *, uid: str) -> StreamT:
        """Apply `function` to all records of each key and window. The state holds all records."""
        require_function_object(function, ProcessWindowFunction, "window(…).process")
        return self._each_record(KeptRecords(function, self._schema), uid)

    def _each_record(self, content: WindowContent, uid: str) -> StreamT:
        function = WindowedFunction(self._windows, self._lateness_ms, content, self._input)
        schema = function.output_schema(self._schema)
        return self._then(ProcessKeyed(self._key, function), uid, schema)


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
        made = count_window_schema(self._schema, self._key, results)
        work = AggregateCounts(self._key, self._size, dict(aggregates))
        return self._then(work, uid, made)
