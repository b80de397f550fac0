"""What may be computed for each key and window of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.functions import Aggregate, OutputTag, Record
from onceflow.core.graph import AggregateWindows, ProcessKeyed, Work
from onceflow.core.schema_text import SchemaLike, schema_of
from onceflow.core.state import AggregateFunction
from onceflow.core.state.descriptors import TypeSpec
from onceflow.core.window_functions import (
    KeptAccumulators,
    KeptRecords,
    ProcessWindowFunction,
    WindowContent,
    WindowedFunction,
)
from onceflow.core.windows import WindowAssigner, window_schema

StreamT = TypeVar("StreamT")


class WindowedStream(Generic[StreamT]):
    """Records grouped by key and window."""

    def __init__(
        self,
        then: Callable[[Work, str, pa.Schema], StreamT],
        schema: pa.Schema,
        key: tuple[str, ...],
        windows: WindowAssigner,
        time: str | None,
        lateness_ms: int,
        late: OutputTag | None,
    ) -> None:
        """`then` adds an operator with a uid and a schema to the keyed stream, and returns it."""
        self._then = then
        self._schema = schema
        self._key = key
        self._windows: WindowAssigner = windows
        self._time = time
        self._lateness_ms = lateness_ms
        self._late = late

    def aggregate(self, *, uid: str, **aggregates: Aggregate) -> StreamT:
        """Return a record for each key and window that has any: key, window and aggregates.

        Its columns are the key's, `window_start` and `window_end` (exclusive), and one for each
        aggregate. Vectorised, as `running` is. `uid` names the state in checkpoints.
        """
        schema = self._schema
        if not aggregates:
            raise ConfigError("aggregate() needs at least one, such as total=sum_('amount')")
        results = {name: one.result_type(schema) for name, one in aggregates.items()}
        made = window_schema(schema, self._key, self._time, results)
        work = AggregateWindows(
            self._key,
            self._windows,
            self._time,
            self._lateness_ms,
            dict(aggregates),
            self._late,
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
        results = {field.name: field.type for field in schema_of(schema)}
        made = window_schema(self._schema, self._key, self._time, results)
        content = KeptAccumulators(function, self._key, made, accumulator_type)
        return self._each_record(content, uid)

    def process(self, function: ProcessWindowFunction, *, uid: str) -> StreamT:
        """Return what `function` makes of all records of each key and window, which are kept."""
        return self._each_record(KeptRecords(function, self._schema), uid)

    def _each_record(self, content: WindowContent, uid: str) -> StreamT:
        function = WindowedFunction(
            self._windows, self._key, self._time, self._lateness_ms, content, self._late
        )
        schema = function.output_schema(self._schema)
        return self._then(ProcessKeyed(self._key, function), uid, schema)
