"""Streams, whose methods build the dataflow. Each call adds one operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, overload

import pyarrow as pa

from onceflow.core.api import users_mistakes
from onceflow.core.api.connected_streams import (
    BroadcastConnectedStream,
    BroadcastStream,
    KeyedConnectedStreams,
    check_pipeline,
)
from onceflow.core.api.joined_streams import (
    IntervalJoin,
    JoinedStreams,
    JoinTtl,
    join_side,
    mark_outer_sides,
    regular_join,
)
from onceflow.core.api.ranked_records import RankedRecords
from onceflow.core.api.service_calls import ServiceCalls
from onceflow.core.api.table_joins import TableJoins
from onceflow.core.api.windowed_stream import (
    AllWindowedStream,
    CountWindowedStream,
    PerWindowStream,
    WindowedStream,
    early_results_of,
    lateness_ms_of,
    window_again,
    window_input,
)
from onceflow.core.argument_types import check_arguments
from onceflow.core.arrow.schema_text import SchemaLike, columns_difference, schema_of
from onceflow.core.compiled import load_kernel, translate_function
from onceflow.core.errors import ConfigError
from onceflow.core.plan import functions
from onceflow.core.plan.aggregates import (
    Aggregate,
    check_running_ttl,
    running_schema,
)
from onceflow.core.plan.functions import ArrowIteratorFunction, BatchFunction
from onceflow.core.plan.graph import Feed, GraphBuilder
from onceflow.core.plan.join_functions import JoinKind, JoinSide
from onceflow.core.plan.process_functions import ProcessFunction
from onceflow.core.plan.projection import plan_projection
from onceflow.core.plan.sql_functions import NO_FUNCTIONS, QueryFunction, name_functions, quote
from onceflow.core.plan.stream_sql import StreamSql
from onceflow.core.plan.windows import WINDOW_COLUMNS, WindowAssigner, WindowNames
from onceflow.core.plan.work import (
    Emission,
    FilterRecords,
    FlatMapRecords,
    MapBatches,
    MapInArrow,
    MapInPandas,
    MapRecords,
    ProcessBatches,
    ProcessKeyed,
    ProcessRecords,
    RunAggregates,
    SelectSql,
    Work,
    WriteTo,
)
from onceflow.core.setting_values import choice_of
from onceflow.core.spi import OnBadRow, Sink
from onceflow.core.spi.bad_rows import bad_row_policy
from onceflow.core.state import MapStateDescriptor, StateTtlConfig


class Stream(ServiceCalls["Stream"], TableJoins["Stream"]):
    """A stream of records with one schema. Each method adds an operator and returns its output.

    No records flow before `Pipeline.start`. A stream may be used several times, and each use gets
    all of its records.
    """

    @property
    def schema(self) -> pa.Schema:
        """The schema of the records."""
        return self._feeds[0].schema

    @check_arguments
    def union(self, *others: Stream) -> Stream:
        """Return the records of this stream and of `others` as one stream.

        All streams must have the same columns. Records of one stream keep their order. Records of
        several streams interleave in order of arrival. The watermark is the lowest watermark of the
        streams that have one. A stream that is passed twice contributes its records twice.

        Raises:
            ConfigError: No other stream is given, a stream belongs to another pipeline, or its
                columns differ.
        """
        if not others:
            raise ConfigError("union() needs another stream")
        for number, other in enumerate(others, 1):
            check_pipeline(self._graph, other._graph, "union")
            if not self.schema.equals(other.schema):
                raise ConfigError(columns_difference(self.schema, other.schema, number))
        return Stream(self._graph, *self._feeds, *(f for other in others for f in other._feeds))

    @check_arguments
    def side_output(self, tag: functions.OutputTag) -> Stream:
        """Return the stream of records that this operator's function emits to side output `tag`.

        Raises:
            ConfigError: The stream is not the output of an operator that has side outputs.
        """
        feed = self._feeds[0]
        work = self._graph.graph().operator(feed.uid).work
        if len(self._feeds) > 1 or feed.tag is not None or not work.has_side_outputs:
            raise ConfigError(
                f"side_output({tag.name!r}): this stream is not the output of process() or"
                " process_batches(), which alone have side outputs. Call side_output() on the"
                " stream that they return, before any other method"
            )
        return Stream(self._graph, Feed(feed.uid, tag.schema, tag.name))

    def map_batches(
        self,
        function: BatchFunction | ArrowIteratorFunction,
        *,
        schema: SchemaLike | None = None,
        uid: str | None = None,
    ) -> Stream:
        """Apply `function` to Arrow record batches. This is the fastest way to process records.

        `function` takes a batch and returns a batch. Or it is a function for Spark's `mapInArrow`,
        which takes and returns an iterator of batches; it is recognized by its `yield` or its
        annotations. `schema` is the schema of the result (default: unchanged).

        Batches have no fixed size, so the result for a row must not depend on other rows in the
        batch. A function of an iterator is called again after each checkpoint barrier, and its
        iterator ends before the next barrier.
        """
        users_mistakes.require_function(function, "map_batches")
        if functions.takes_iterator(function):
            work: Work = MapInArrow(cast("ArrowIteratorFunction", function))
        else:
            work = MapBatches(cast("BatchFunction", function))
        return self._then(work, uid, schema)

    def map_pandas(
        self,
        function: functions.PandasIteratorFunction,
        schema: SchemaLike | None = None,
        *,
        uid: str | None = None,
    ) -> Stream:
        """Apply a function for Spark's `mapInPandas`, from an iterator of DataFrames to another.

        `schema` is the schema of the result (default: unchanged). The function is called again
        after each checkpoint barrier, and its iterator ends before the next barrier. The slots need
        pandas.
        """
        users_mistakes.require_function(function, "map_pandas")
        return self._then(MapInPandas(function), uid, schema)

    def map(
        self,
        function: Callable[[functions.Record], functions.Record],
        *,
        schema: SchemaLike | None = None,
        uid: str | None = None,
    ) -> Stream:
        """Apply `function` to each record, a dict. `schema` is the schema of the result."""
        users_mistakes.require_function(function, "map")
        return self._then(MapRecords(function), uid, schema)

    def flat_map(
        self,
        function: Callable[[functions.Record], Iterable[functions.Record]],
        *,
        schema: SchemaLike | None = None,
        uid: str | None = None,
    ) -> Stream:
        """Replace each record by the records that `function` returns, in the same order."""
        users_mistakes.require_function(function, "flat_map")
        return self._then(FlatMapRecords(function), uid, schema)

    @check_arguments
    def sql(
        self,
        query: str,
        *,
        functions: Mapping[str, QueryFunction] = NO_FUNCTIONS,
        uid: str | None = None,
    ) -> Stream:
        """Replace the records by the result of `query`, a SELECT from the table `stream`.

        A query may use what needs only one record at a time: columns, expressions, WHERE and
        unnest(). Aggregates, DISTINCT, ORDER BY, LIMIT, joins, windows and subqueries are refused,
        because the grouping of records into batches is arbitrary. The dialect and the functions are
        those of DataFusion. `functions` are further ones by name: Python functions of values, with
        annotations, or `SqlFunction` objects of whole arrays. Column names are case-sensitive.
        Needs `onceflow[sql]` on the driver and in the slots.

        Raises:
            ConfigError: The query is invalid or refused. The message names the part of its plan, or
                the word. Or a function does not declare its types.
        """
        sql = StreamSql(query, self.schema, name_functions(functions))
        return self._then(SelectSql(sql), uid, sql.resolve_schema())

    @check_arguments
    def project(
        self,
        *columns: str,
        functions: Mapping[str, QueryFunction] = NO_FUNCTIONS,
        uid: str | None = None,
    ) -> Stream:
        """Keep, rename or compute `columns`: `"id"`, `"price AS bid"`, `"price * 2 AS twice"`.

        `"*"` stands for all columns. Expressions are written as in `sql`, and need `onceflow[sql]`.
        Columns that are only kept or renamed do not need it.

        Raises:
            ConfigError: A column does not exist, two get the same name, or an expression is
                invalid.
        """
        work, schema = plan_projection(columns, self.schema, functions, "project()")
        return self._then(work, uid, schema)

    def filter(
        self, function: Callable[[functions.Record], Any], *, uid: str | None = None
    ) -> Stream:
        """Keep the records for which `function` returns a true value."""
        users_mistakes.require_function(function, "filter")
        return self._then(FilterRecords(function), uid, None)

    @check_arguments
    def key_by(self, *columns: str, **expressions: str) -> KeyedStream:
        """Group the records by key: one subtask gets all records of a key.

        `expressions` are further columns of the key, computed by SQL as in `sql`, which records get
        in addition: `key_by("channel", day="CAST(at AS DATE)")`.

        Raises:
            ConfigError: No column is named, a column does not exist, its type cannot be a key, or
                an expression is invalid or gets the name of a column.
        """
        stream = self._with_expressions(expressions) if expressions else self
        key = (*columns, *expressions)
        users_mistakes.require_key(key, stream.schema)
        return KeyedStream(self._graph, stream._feeds, key)

    def _with_expressions(self, expressions: Mapping[str, str]) -> Stream:
        """Return the stream with a further column for each expression."""
        columns = [f"{text}\n AS {quote(name)}" for name, text in expressions.items()]
        work, schema = plan_projection(["*", *columns], self.schema, NO_FUNCTIONS, "key_by()")
        expected = [*self.schema.names, *expressions]
        if schema.names != expected:
            raise ConfigError(
                f"key_by({', '.join(expressions)}) makes the columns {schema.names}: give one"
                " expression for each name"
            )
        return self._then(work, None, schema)

    def window_all(
        self,
        windows: WindowAssigner,
        *,
        time: str | None = None,
        allowed_lateness: float | str = 0,
        late: functions.OutputTag | None = None,
        names: WindowNames = WINDOW_COLUMNS,
    ) -> AllWindowedStream[Stream]:
        """Cut all records into windows. Has the parameters and errors of `KeyedStream.window`."""
        settings = (windows, time, allowed_lateness, late, names)
        return AllWindowedStream(self._graph, self._feeds, Stream, *settings)

    @check_arguments
    def per_window(self, *, names: WindowNames = WINDOW_COLUMNS) -> PerWindowStream[Stream]:
        """Group results of windows by the window that they came from.

        `names` are the columns with the start and the end of the window. A group is complete when
        event time has reached its end.

        Raises:
            ConfigError: The stream lacks the columns or does not come from windows, or its windows
                are in processing time or have an allowed lateness.
        """
        return KeyedStream(self._graph, self._feeds, ()).per_window(names=names)

    def process(self, function: ProcessFunction, *, uid: str) -> Stream:
        """Apply `function` to each record, with state of its subtask.

        `uid` names the state in checkpoints. If you change it, the job no longer finds its state.
        """
        users_mistakes.require_function_object(function, ProcessFunction, "process")
        work = ProcessRecords(function)
        return self._then(work, uid, function.output_schema(self.schema))

    @check_arguments
    def broadcast(self, *states: MapStateDescriptor[Any, Any]) -> BroadcastStream:
        """Send every record to every subtask of the operator that this stream is connected with.

        `states` are the broadcast states that the records update there.

        Raises:
            ConfigError: No state is given, two states have the same name, or a state has a time to
                live.
        """
        return BroadcastStream(self._graph, self._feeds, states)

    @overload
    def connect(self, other: Stream) -> ConnectedStreams: ...

    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStream[Stream]: ...

    @check_arguments
    def connect(
        self, other: Stream | BroadcastStream
    ) -> ConnectedStreams | BroadcastConnectedStream[Stream]:
        """Connect this stream with another, which may have other columns, for one function.

        Two streams need `key_by` next. A stream that is connected with a broadcast stream needs no
        key.

        Raises:
            ConfigError: `other` belongs to another pipeline.
        """
        if isinstance(other, Stream):
            return ConnectedStreams(self, other)
        return BroadcastConnectedStream(Stream, self._graph, self._feeds, (), other)

    @check_arguments
    def write(
        self,
        sink: Sink,
        *,
        uid: str,
        sink_id: str | None = None,
        on_bad_row: OnBadRow | str = OnBadRow.FAIL,
        dead_letters: Sink | None = None,
    ) -> None:
        """Write every record to `sink`, exactly once.

        `uid` names the operator. The sink id identifies the prepared transactions; it is `sink_id`,
        or by default built from the job's name and `uid`. If a job has written under a sink id and
        is started without it, the start fails: see `Pipeline(retired_sinks=…)`. A row that the
        target can never accept fails the job (`on_bad_row="fail"`), is dropped, counted and logged
        (`"drop"`), or goes to the sink `dead_letters` as a row of `DEAD_LETTERS` in the same
        checkpoint.

        Raises:
            ConfigError: The uid is in use, a column that the sink routes by is missing, or
                `on_bad_row` and `dead_letters` do not match.
        """
        policy = bad_row_policy(on_bad_row, dead_letters is not None)
        for column in sink.routing_key():
            if column not in self.schema.names:
                raise ConfigError(
                    f"write(uid={uid!r}): the sink brings rows together by {column!r}, and the rows"
                    f" have no such column; there are {', '.join(self.schema.names)}"
                )
        name = sink_id or self._graph.sink_id(uid)
        written = self._graph.add(
            WriteTo(sink, name, policy), self._feeds, uid=uid, schema=self.schema
        )
        if dead_letters is not None:
            self._graph.add_dead_letters(written, dead_letters)

    def _make_stream(self, feed: Feed) -> Stream:
        return Stream(self._graph, feed)

    def _then(self, work: Work, uid: str | None, schema: SchemaLike | None) -> Stream:
        made = self.schema if schema is None else schema_of(schema)
        operator = self._graph.add(work, self._feeds, uid=uid, schema=made)
        return Stream(self._graph, Feed(operator.uid, made))


class KeyedStream(RankedRecords["Stream"]):
    """A stream that is grouped by key. Its operators have state for each key."""

    def __init__(self, graph: GraphBuilder, feeds: tuple[Feed, ...], key: tuple[str, ...]) -> None:
        self._graph = graph
        self._feeds = feeds
        self._key = key

    @property
    def schema(self) -> pa.Schema:
        """The schema of the records."""
        return self._feeds[0].schema

    def process(
        self, function: functions.KeyedFunction, *, uid: str, compiled: bool = False
    ) -> Stream:
        """Apply `function` to each record with the state of its key.

        `uid` names the state in checkpoints. If you change it, the job no longer finds its state.
        With `compiled`, the function runs as machine code with the same results. This needs the
        extra `compiled`, and the state is stored like that of functions of batches.

        Raises:
            ConfigError: The function cannot be compiled. The message has the line and the reason.
        """
        users_mistakes.require_function_object(
            function, functions.KeyedFunction, "key_by(…).process"
        )
        schema = function.output_schema(self.schema)
        program = translate_function(function, self.schema, schema) if compiled else None
        if program is not None:
            # Compile now, so that code that numba cannot compile fails here. Slots on this machine
            # find the result on disk.
            load_kernel(program)
        return self._then(ProcessKeyed(self._key, function, program), uid, schema)

    @overload
    def connect(self, other: KeyedStream) -> KeyedConnectedStreams[Stream]: ...

    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStream[Stream]: ...

    @check_arguments
    def connect(
        self, other: KeyedStream | BroadcastStream
    ) -> KeyedConnectedStreams[Stream] | BroadcastConnectedStream[Stream]:
        """Connect this stream with a stream of the same key, or with a broadcast stream.

        Raises:
            ConfigError: `other` belongs to another pipeline, or the types of the keys differ.
        """
        if isinstance(other, BroadcastStream):
            return BroadcastConnectedStream(Stream, self._graph, self._feeds, self._key, other)
        return self._connect(other, "connect")

    def interval_join(
        self,
        other: KeyedStream,
        *,
        left_time: str | None = None,
        right_time: str | None = None,
        late_left: functions.OutputTag | None = None,
        late_right: functions.OutputTag | None = None,
        how: JoinKind = "inner",
    ) -> IntervalJoin[Stream]:
        """Join this stream, the left one, with another by key and by distance in time.

        `left_time` and `right_time` are event-time columns (default: the column of the sources'
        watermarks). A late record is not joined. It goes to the side output of its side, or is
        dropped and counted. A `"left"`, `"right"` or `"full"` join also emits records of that side,
        or of both sides, without a partner, when no partner can arrive any more.

        Raises:
            ConfigError: `other` belongs to another pipeline, the types of the keys differ, a time
                column does not exist, a stream's sources have no watermarks, state cannot hold a
                column's values, or a tag has other columns than its stream.
        """
        connected = self._connect(other, "interval_join")
        sides = (
            self._join_side("left", left_time, late_left),
            other._join_side("right", right_time, late_right),
        )
        return IntervalJoin(connected.add, mark_outer_sides(sides, how), connected.keys)

    def join(
        self,
        other: KeyedStream,
        *,
        ttl: JoinTtl | tuple[JoinTtl, JoinTtl],
        how: JoinKind = "inner",
    ) -> JoinedStreams[Stream]:
        """Join this stream, the left one, with another by key, within a time to live.

        Each record is joined with all stored records of the other side that have its key. A record
        is stored for `ttl` by the slot's clock: seconds, a text such as `"1 d"`, or None for no
        limit. A pair of values sets `ttl` for the left and the right stream. A `"left"`, `"right"`
        or `"full"` join emits records of that side, or of both sides, that have found no partner
        once, when their `ttl` or the input ends.

        Raises:
            ConfigError: `other` belongs to another pipeline, the types of the keys differ, state
                cannot hold a column's values, or an argument is invalid.
        """
        connected = self._connect(other, "join")
        sides = (
            JoinSide("left", self.schema, None, None),
            JoinSide("right", other.schema, None, None),
        )
        return regular_join(connected.add, mark_outer_sides(sides, how), connected.keys, ttl)

    def process_batches(self, function: functions.KeyedBatchFunction, *, uid: str) -> Stream:
        """Apply `function` to each Arrow batch with the states of all its keys at once.

        Vectorised: its speed is that of the function's column operations. `uid` names the state in
        checkpoints.
        """
        users_mistakes.require_function_object(
            function, functions.KeyedBatchFunction, "process_batches"
        )
        work = ProcessBatches(self._key, function)
        return self._then(work, uid, function.output_schema(self.schema))

    def running(
        self,
        *,
        uid: str,
        ttl: StateTtlConfig | None = None,
        emit: str = "record",
        **aggregates: Aggregate,
    ) -> Stream:
        """Add a column for each aggregate: its value over the key's records so far.

        Vectorised: many times as fast as `process`. The current record is included. If a key has
        had no record for `ttl` by the slot's clock, its aggregates start again. `emit="batch"`
        emits only the last record of each key and batch.

        Raises:
            ConfigError: There is no aggregate, a name is in use, a column cannot be aggregated, or
                `ttl` or `emit` is not allowed.
        """
        users_mistakes.require_aggregates(aggregates, "running")
        check_running_ttl(ttl)
        emission = choice_of(Emission, emit, setting="emit")
        schema = running_schema(self.schema, aggregates)
        return self._then(RunAggregates(self._key, dict(aggregates), ttl, emission), uid, schema)

    def window(
        self,
        windows: WindowAssigner,
        *,
        time: str | None = None,
        allowed_lateness: float | str = 0,
        late: functions.OutputTag | None = None,
        names: WindowNames = WINDOW_COLUMNS,
        early_records: int | None = None,
        early_interval: float | str | None = None,
    ) -> WindowedStream[Stream]:
        """Cut the records of each key into windows.

        `time` is the event-time column (default: the column of the source's watermarks). An
        event-time window is due when the watermark reaches its end. For a record up to
        `allowed_lateness` later, its window is emitted again. A record that is later still goes to
        the side output `late`, or is dropped. `names` are the output columns with the start and the
        end of a window.

        A window is also emitted before it is due: after each `early_records` of its records, and
        `early_interval` after a change. Each result replaces the one before.

        Raises:
            ConfigError: The time column does not exist, the sources have no watermarks, `late` has
                other columns than the stream, or these windows have no such early results.
        """
        stream = window_input(self._graph, self._feeds, self._key, windows, time, late)
        lateness_ms = lateness_ms_of(windows, allowed_lateness)
        early = early_results_of(windows, early_records, early_interval)
        return WindowedStream(self._then, self.schema, windows, lateness_ms, stream, names, early)

    @check_arguments
    def per_window(self, *, names: WindowNames = WINDOW_COLUMNS) -> PerWindowStream[Stream]:
        """Group results of windows by key and window, like `Stream.per_window`."""
        stream = window_again(self._graph, self._feeds, self._key, names, "per_window")
        return PerWindowStream(self._then, self.schema, stream)

    @check_arguments
    def count_window(self, size: int) -> CountWindowedStream[Stream]:
        """Cut the records of each key into windows of `size` records, in their order.

        Raises:
            ConfigError: `size` is below 1, or above 2**63 - 1.
        """
        if size < 1:
            raise ConfigError(f"count_window({size}): a window has 1 record or more")
        if size >= 1 << 63:
            raise ConfigError(f"count_window({size}): a window has at most {(1 << 63) - 1} records")
        return CountWindowedStream(self._then, self.schema, self._key, size)

    def _connect(self, other: KeyedStream, verb: str) -> KeyedConnectedStreams[Stream]:
        check_pipeline(self._graph, other._graph, verb)
        inputs = (self._feeds, self._key), (other._feeds, other._key)
        return KeyedConnectedStreams(Stream, self._graph, inputs, verb=verb)

    def _join_side(self, name: str, time: str | None, late: functions.OutputTag | None) -> JoinSide:
        return join_side(name, self.schema, self._graph.event_time_of(self._feeds), time, late)

    def _then(self, work: Work, uid: str, schema: pa.Schema) -> Stream:
        operator = self._graph.add(work, self._feeds, uid=uid, schema=schema)
        return Stream(self._graph, Feed(operator.uid, schema))


class ConnectedStreams:
    """Two connected streams that still need a key."""

    def __init__(self, first: Stream, second: Stream) -> None:
        self._first = first
        self._second = second

    @check_arguments
    def key_by(
        self, first: str | Sequence[str], second: str | Sequence[str]
    ) -> KeyedConnectedStreams[Stream]:
        """Group both streams by key: columns `first` of one equal columns `second` of the other.

        Each is one column name, or several.

        Raises:
            ConfigError: A column does not exist, or the numbers or types of the columns differ.
        """
        keys = [(key,) if isinstance(key, str) else tuple(key) for key in (first, second)]
        return self._first.key_by(*keys[0]).connect(self._second.key_by(*keys[1]))
