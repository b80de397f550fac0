"""What may be computed for each key and window of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pyarrow as pa

from onceflow.core.api.event_time import event_time_column
from onceflow.core.api.function_checks import require_aggregates, require_function_object
from onceflow.core.api.functions import Aggregate, OutputTag, Record
from onceflow.core.api.graph import AggregateWindows, Feed, GraphBuilder, ProcessKeyed, Work
from onceflow.core.api.late_records import check_late
from onceflow.core.api.window_functions import (
    KeptAccumulators,
    KeptRecords,
    ProcessWindowFunction,
    WindowContent,
    WindowedFunction,
    WindowInput,
)
from onceflow.core.api.windows import (
    TumblingProcessingTimeWindows,
    WindowAssigner,
    window_schema,
)
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import seconds_of
from onceflow.core.state import AggregateFunction
from onceflow.core.state.api.descriptors import TypeSpec

StreamT = TypeVar("StreamT")


def lateness_ms_of(windows: WindowAssigner, allowed_lateness: float | str) -> int:
    """Return the allowed lateness in milliseconds.

    Raises:
        ConfigError: It is no duration, or not for such windows.
    """
    lateness_ms = round(seconds_of(allowed_lateness, setting="allowed_lateness") * 1000)
    if lateness_ms and isinstance(windows, TumblingProcessingTimeWindows):
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
    """Return what `feeds` are to windows; `parameters` name those of `time` and `late`.

    Raises:
        ConfigError: There is no such column of event time, or `late` has other columns.
    """
    schema = feeds[0].schema
    check_late(late, schema, parameters[1])
    if isinstance(windows, TumblingProcessingTimeWindows):
        if time is not None or late is not None:
            raise ConfigError(_BY_THE_CLOCK)
        return WindowInput(key, None)
    known = graph.event_time_of(feeds)
    return WindowInput(key, event_time_column(time, known, schema, parameter=parameters[0]), late)


_BY_THE_CLOCK = (
    "windows in processing time go by the clock: they take neither time= nor allowed_lateness= nor"
    " late="
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
        """`then` adds an operator with a uid and a schema to the keyed stream, and returns it."""
        self._then = then
        self._schema = schema
        self._windows: WindowAssigner = windows
        self._lateness_ms = lateness_ms
        self._input = stream
        self._key = stream.key

    def aggregate(self, *, uid: str, **aggregates: Aggregate) -> StreamT:
        """Return a record for each key and window that has any: key, window and aggregates.

        Its columns are the key's, `window_start` and `window_end` (exclusive), and one for each
        aggregate. Vectorised, as `running` is. `uid` names the state in checkpoints.
        """
        schema = self._schema
        if not aggregates:
            raise ConfigError("aggregate() needs at least one, such as total=sum_('amount')")
        require_aggregates(aggregates, "aggregate")
        results = {name: one.result_type(schema) for name, one in aggregates.items()}
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
        """Return a record for each key and window: key, window and what `function` makes of it.

        `function` is given each record, and its result is a dict with the columns of `schema`. Of
        a window its accumulator alone is kept, as `accumulator_type`: without one, decimals and
        times may come back as text. Sessions need its `merge`.
        """
        require_function_object(function, AggregateFunction, "aggregate_by")
        results = {field.name: field.type for field in schema_of(schema)}
        made = window_schema(self._schema, self._key, self._input.time, results)
        content = KeptAccumulators(function, self._key, made, accumulator_type)
        return self._each_record(content, uid)

    def process(self, function: ProcessWindowFunction, *, uid: str) -> StreamT:
        """Return what `function` makes of all records of each key and window, which are kept."""
        require_function_object(function, ProcessWindowFunction, "window(…).process")
        return self._each_record(KeptRecords(function, self._schema), uid)

    def _each_record(self, content: WindowContent, uid: str) -> StreamT:
        function = WindowedFunction(self._windows, self._lateness_ms, content, self._input)
        schema = function.output_schema(self._schema)
        return self._then(ProcessKeyed(self._key, function), uid, schema)
