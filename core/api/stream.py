"""Streams: the methods by which a user builds the dataflow, one operator a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import pyarrow as pa

from onceflow.core.api.broadcast_stream import BroadcastStream
from onceflow.core.api.connected_streams import KeyedConnectedStreams, check_pipeline
from onceflow.core.api.function_checks import (
    require_aggregates,
    require_function,
    require_function_object,
)
from onceflow.core.api.functions import (
    Aggregate,
    ArrowIteratorFunction,
    BatchFunction,
    KeyedBatchFunction,
    KeyedFunction,
    OutputTag,
    PandasIteratorFunction,
    Record,
    check_running_ttl,
    running_schema,
    takes_iterator,
)
from onceflow.core.api.graph import (
    AggregateWindows,
    Feed,
    FilterRecords,
    FlatMapRecords,
    GraphBuilder,
    JoinConnected,
    JoinTable,
    MapBatches,
    MapInArrow,
    MapInPandas,
    MapRecords,
    ProcessBatches,
    ProcessBroadcast,
    ProcessConnected,
    ProcessKeyed,
    ProcessRecords,
    RunAggregates,
    SelectSql,
    Work,
    WriteTo,
)
from onceflow.core.api.join_functions import JoinKind, JoinSide
from onceflow.core.api.joined_streams import (
    IntervalJoin,
    JoinedStreams,
    JoinTtl,
    join_side,
    mark_outer_sides,
    regular_join,
)
from onceflow.core.api.lookup_tables import LOOKUP_BYTES_MAX, JoinType, LookupTable
from onceflow.core.api.process_functions import (
    BroadcastProcessFunction,
    ProcessFunction,
)
from onceflow.core.api.stream_sql import StreamSql
from onceflow.core.api.windowed_stream import WindowedStream, lateness_ms_of, window_input
from onceflow.core.api.windows import WindowAssigner
from onceflow.core.arrow.schema_text import SchemaLike, columns_difference, schema_of
from onceflow.core.compiled import load_kernel, translate_function
from onceflow.core.errors import ConfigError
from onceflow.core.spi import OnBadRow, Sink
from onceflow.core.spi.bad_rows import bad_row_policy
from onceflow.core.state import MapStateDescriptor, StateTtlConfig
from onceflow.core.state.keys.key_columns import check_key_type, check_rows_can_be_divided

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_WITH_SIDE_OUTPUTS = (
    AggregateWindows,
    ProcessBatches,
    ProcessKeyed,
    ProcessConnected,
    JoinConnected,
    ProcessBroadcast,
    ProcessRecords,
)


class Stream:
    """Records of one schema on their way; each method adds an operator and returns what follows.

    Nothing runs before `Pipeline.start`. A stream may be used more than once: each use gets all of
    its records.
    """

    def __init__(self, graph: GraphBuilder, *feeds: Feed) -> None:
        """`feeds` have one schema."""
        self._graph = graph
        self._feeds = feeds

    @property
    def schema(self) -> pa.Schema:
        """The schema of the records."""
        return self._feeds[0].schema

    def union(self, *others: Stream) -> Stream:
        """Return the records of this stream and of `others` as one stream.

        All have the same columns. The records of each come in their order, those of several
        interleave as they come. Event time is that of the slowest among those that have any. A
        stream that is in it twice gives its records twice.

        Raises:
            ConfigError: There is no other one, it is of another pipeline, or its columns differ.
        """
        if not others:
            raise ConfigError("union() needs another stream")
        for number, other in enumerate(others, 1):
            check_pipeline(self._graph, other._graph, "union")
            if not self.schema.equals(other.schema):
                raise ConfigError(columns_difference(self.schema, other.schema, number))
        return Stream(self._graph, *self._feeds, *(f for other in others for f in other._feeds))

    def side_output(self, tag: OutputTag) -> Stream:
        """Return the records that the function of this stream's operator emits to `tag`.

        Raises:
            ConfigError: The stream is not the output of an operator that has side outputs.
        """
        feed = self._feeds[0]
        work = self._graph.graph().operator(feed.uid).work
        if len(self._feeds) > 1 or feed.tag is not None or not isinstance(work, _WITH_SIDE_OUTPUTS):
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
        """Apply `function` to Arrow record batches: the fast way.

        It takes a batch and returns one; or it is what Spark's `mapInArrow` takes, an iterator of
        batches in and one out, which is known by its `yield` or its annotations. `schema` is that
        of the result (default: unchanged).

        Batches have no fixed size, so the result for a row must not depend on its neighbours. A
        function of an iterator is called anew after each barrier, and its iterator ends before the
        next one.
        """
        require_function(function, "map_batches")
        if takes_iterator(function):
            work: Work = MapInArrow(cast("ArrowIteratorFunction", function))
        else:
            work = MapBatches(cast("BatchFunction", function))
        return self._then(work, "map_batches", uid, schema)

    def map_pandas(
        self,
        function: PandasIteratorFunction,
        schema: SchemaLike | None = None,
        *,
        uid: str | None = None,
    ) -> Stream:
        """Apply a function of Spark's `mapInPandas`: an iterator of DataFrames in, one out.

        `schema` is that of the result (default: unchanged). The function is called anew after each
        barrier, and its iterator ends before the next one. Needs pandas where the slots run.
        """
        require_function(function, "map_pandas")
        return self._then(MapInPandas(function), "map_pandas", uid, schema)

    def map(
        self,
        function: Callable[[Record], Record],
        *,
        schema: SchemaLike | None = None,
        uid: str | None = None,
    ) -> Stream:
        """Apply `function` to each record, a dict; `schema` is that of the result."""
        require_function(function, "map")
        return self._then(MapRecords(function), "map", uid, schema)

    def flat_map(
        self,
        function: Callable[[Record], Iterable[Record]],
        *,
        schema: SchemaLike | None = None,
        uid: str | None = None,
    ) -> Stream:
        """Replace each record by those that `function` returns, in that order."""
        require_function(function, "flat_map")
        return self._then(FlatMapRecords(function), "flat_map", uid, schema)

    def join(
        self,
        table: DataFrame | pa.Table,
        on: str | Sequence[str],
        how: JoinType = "inner",
        *,
        bytes_max: int = LOOKUP_BYTES_MAX,
        uid: str | None = None,
    ) -> Stream:
        """Add the columns of a small table to the records with equal values of the columns `on`.

        `table` is a bounded Spark DataFrame, or an Arrow table. It is evaluated at each start of
        the pipeline and is the same for all subtasks and all attempts of that start. A record with
        several rows in the table comes out several times; one with none, or with a null in its key,
        is left out (`how="inner"`) or gets nulls (`"left"`).

        Raises:
            ConfigError: A key is not in both or cannot be one, or a column's name is in both. At
                the start: the table has more than `bytes_max` bytes in Arrow.
        """
        if how not in ("inner", "left"):
            raise ConfigError(f"join(how={how!r}): choose one of inner, left")
        keys = (on,) if isinstance(on, str) else tuple(on)
        lookup = LookupTable(table, self.schema, keys, bytes_max)
        work = JoinTable(lookup, how)
        return self._then(work, "join", uid, lookup.to_joined_schema(self.schema, how))

    def sql(self, query: str, *, uid: str | None = None) -> Stream:
        """Replace the records by what `query`, a SELECT from the table `stream`, makes of them.

        Columns, expressions, WHERE and unnest(): what looks at one record at a time. Aggregates,
        DISTINCT, ORDER BY, LIMIT, joins, windows and subqueries are refused, for which records are
        in one batch is chance. The dialect and the functions are DataFusion's; names of columns
        keep their letters. Needs `onceflow[sql]`, here and where the slots run.

        Raises:
            ConfigError: It is no such query; says which part of its plan, or which word, it is.
        """
        sql = StreamSql(query, self.schema)
        return self._then(SelectSql(sql), "sql", uid, sql.resolve_schema())

    def filter(self, function: Callable[[Record], Any], *, uid: str | None = None) -> Stream:
        """Keep the records for which `function` returns something true."""
        require_function(function, "filter")
        return self._then(FilterRecords(function), "filter", uid, None)

    def key_by(self, *columns: str) -> KeyedStream:
        """Bring all records of one key to one subtask.

        Raises:
            ConfigError: No column is named, or one is not there or of a type that has no keys.
        """
        _check_key(columns, self.schema)
        return KeyedStream(self._graph, self._feeds, columns)

    def process(self, function: ProcessFunction, *, uid: str) -> Stream:
        """Apply `function` to each record, with state of its subtask.

        `uid` names the state in checkpoints: keep it, and the state is found again.
        """
        require_function_object(function, ProcessFunction, "process")
        work = ProcessRecords(function)
        return self._then(work, "process", uid, function.output_schema(self.schema))

    def broadcast(self, *states: MapStateDescriptor[Any, Any]) -> BroadcastStream:
        """Have every record come to every subtask of what is connected with this stream.

        `states` are the broadcast states that the records are to make there.

        Raises:
            ConfigError: There is none, two have one name, or one has a time to live.
        """
        return BroadcastStream(self._graph, self._feeds, states)

    @overload
    def connect(self, other: Stream) -> ConnectedStreams: ...

    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStream: ...

    def connect(
        self, other: Stream | BroadcastStream
    ) -> ConnectedStreams | BroadcastConnectedStream:
        """Put this stream and another one, whatever its columns, into one function.

        Two streams need a key next; one that is connected with a broadcast stream may have none.

        Raises:
            ConfigError: It is of another pipeline.
        """
        if isinstance(other, Stream):
            return ConnectedStreams(self, other)
        return BroadcastConnectedStream(self._graph, self._feeds, (), other)

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

        `uid` names the operator and, with the job's name, the sink id under which transactions are
        prepared, unless `sink_id` does. A job that is started without a sink id that it has written
        under is refused: see `Pipeline(retired_sinks=…)`. Rows that the target can never take fail
        the job (`on_bad_row="fail"`), are left out, counted and logged (`"drop"`), or go to the
        sink `dead_letters` as rows of `DEAD_LETTERS`, in the same checkpoint.

        Raises:
            ConfigError: The uid is in use, a column that the sink routes by is missing, or
                `on_bad_row` does not go with `dead_letters`.
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
            WriteTo(sink, name, policy), self._feeds, verb="write", uid=uid, schema=self.schema
        )
        if dead_letters is not None:
            self._graph.add_dead_letters(written, dead_letters)

    def _then(self, work: Work, verb: str, uid: str | None, schema: SchemaLike | None) -> Stream:
        made = self.schema if schema is None else schema_of(schema)
        operator = self._graph.add(work, self._feeds, verb=verb, uid=uid, schema=made)
        return Stream(self._graph, Feed(operator.uid, made))


class KeyedStream:
    """Records grouped by key; what follows has state for each key."""

    def __init__(self, graph: GraphBuilder, feeds: tuple[Feed, ...], key: tuple[str, ...]) -> None:
        self._graph = graph
        self._feeds = feeds
        self._key = key

    @property
    def schema(self) -> pa.Schema:
        """The schema of the records."""
        return self._feeds[0].schema

    def process(self, function: KeyedFunction, *, uid: str, compiled: bool = False) -> Stream:
        """Apply `function` to each record with the state of its key.

        `uid` names the state in checkpoints: keep it, and the state is found again. With `compiled`
        it runs as machine code, which needs the extra `compiled`, gives the same results, and keeps
        its state as functions of batches do.

        Raises:
            ConfigError: It cannot be compiled; names the line and the reason.
        """
        require_function_object(function, KeyedFunction, "key_by(…).process")
        schema = function.output_schema(self.schema)
        program = translate_function(function, self.schema, schema) if compiled else None
        if program is not None:
            # What numba does not take is known now, and slots here find it on disk.
            load_kernel(program)
        return self._then(ProcessKeyed(self._key, function, program), uid, schema)

    @overload
    def connect(self, other: KeyedStream) -> KeyedConnectedStreams[Stream]: ...

    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStream: ...

    def connect(
        self, other: KeyedStream | BroadcastStream
    ) -> KeyedConnectedStreams[Stream] | BroadcastConnectedStream:
        """Put this stream and another one, keyed by the same or broadcast, into one function.

        Raises:
            ConfigError: It is of another pipeline, or the types of the keys differ.
        """
        if isinstance(other, BroadcastStream):
            return BroadcastConnectedStream(self._graph, self._feeds, self._key, other)
        return self._connect(other, "connect")

    def interval_join(
        self,
        other: KeyedStream,
        *,
        left_time: str | None = None,
        right_time: str | None = None,
        late_left: OutputTag | None = None,
        late_right: OutputTag | None = None,
        how: JoinKind = "inner",
    ) -> IntervalJoin[Stream]:
        """Join this stream, the left one, with another by key and by how far apart in time.

        The times are the columns of event time (default: those of the sources' watermarks). A
        record that comes when event time has passed it is joined with nothing: it goes to the side
        output of its side, or is left out and counted. In a `"left"`, `"right"` or `"full"` join
        records of that side, or of both, that find no partner come out when none can come any more.

        Raises:
            ConfigError: It is of another pipeline, the types of the keys differ, there is no such
                column, a stream's sources have no watermarks, a column's values cannot be kept, or
                a tag has other columns than its stream.
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
        """Join each record of this stream, the left one, with all of its key that are kept.

        A record is kept for `ttl`, by the clock of the slot: seconds or a text such as `"1 d"`;
        None: for ever. Two values are those of the left and the right stream. In a `"left"`,
        `"right"` or `"full"` join records of that side, or of both, that have found no partner come
        out once, when their `ttl` or the input ends.

        Raises:
            ConfigError: It is of another pipeline, the types of the keys differ, a column's values
                cannot be kept, or an option is none of these.
        """
        connected = self._connect(other, "join")
        sides = (
            JoinSide("left", self.schema, None, None),
            JoinSide("right", other.schema, None, None),
        )
        return regular_join(connected.add, mark_outer_sides(sides, how), connected.keys, ttl)

    def process_batches(self, function: KeyedBatchFunction, *, uid: str) -> Stream:
        """Apply `function` to each Arrow batch with the states of all its keys at once.

        Vectorised: as fast as what it does with columns. `uid` names the state in checkpoints.
        """
        require_function_object(function, KeyedBatchFunction, "process_batches")
        work = ProcessBatches(self._key, function)
        return self._then(work, uid, function.output_schema(self.schema))

    def running(
        self, *, uid: str, ttl: StateTtlConfig | None = None, **aggregates: Aggregate
    ) -> Stream:
        """Add a column for each aggregate: its value over the key's records up to this one.

        Vectorised: many times as fast as `process` with a function that does the same. With `ttl`,
        a key that has had no record for so long, by the clock of the slot, begins anew.

        Raises:
            ConfigError: There is no aggregate, a name is taken, a column cannot be aggregated, or
                `ttl` asks for what has expired to be handed out.
        """
        require_aggregates(aggregates, "running")
        check_running_ttl(ttl)
        schema = running_schema(self.schema, aggregates)
        return self._then(RunAggregates(self._key, dict(aggregates), ttl), uid, schema)

    def window(
        self,
        windows: WindowAssigner,
        *,
        time: str | None = None,
        allowed_lateness: float | str = 0,
        late: OutputTag | None = None,
    ) -> WindowedStream[Stream]:
        """Cut the records of each key into windows.

        `time` is the column of event time (default: that of the source's watermarks). Windows in
        event time are due when the watermark has come to their end. A record that comes later, by
        no more than `allowed_lateness`, has its window emitted anew; a later one goes to the side
        output `late`, or is left out.

        Raises:
            ConfigError: There is no such column, the sources have no watermarks, or `late` has
                other columns than the stream.
        """
        stream = window_input(self._graph, self._feeds, self._key, windows, time, late)
        lateness_ms = lateness_ms_of(windows, allowed_lateness)
        return WindowedStream(self._then, self.schema, windows, lateness_ms, stream)

    def _connect(self, other: KeyedStream, verb: str) -> KeyedConnectedStreams[Stream]:
        check_pipeline(self._graph, other._graph, verb)
        inputs = (self._feeds, self._key), (other._feeds, other._key)
        return KeyedConnectedStreams(Stream, self._graph, inputs, verb=verb)

    def _join_side(self, name: str, time: str | None, late: OutputTag | None) -> JoinSide:
        return join_side(name, self.schema, self._graph.event_time_of(self._feeds), time, late)

    def _then(self, work: Work, uid: str, schema: pa.Schema) -> Stream:
        operator = self._graph.add(work, self._feeds, verb="keyed", uid=uid, schema=schema)
        return Stream(self._graph, Feed(operator.uid, schema))


class ConnectedStreams:
    """Two streams whose records are to meet by key."""

    def __init__(self, first: Stream, second: Stream) -> None:
        self._first = first
        self._second = second

    def key_by(
        self, first: str | Sequence[str], second: str | Sequence[str]
    ) -> KeyedConnectedStreams[Stream]:
        """Bring the records of both to one subtask where `first` of one is `second` of the other.

        Each is a column, or several.

        Raises:
            ConfigError: A column is not there, or their numbers or types differ.
        """
        keys = [(key,) if isinstance(key, str) else tuple(key) for key in (first, second)]
        return self._first.key_by(*keys[0]).connect(self._second.key_by(*keys[1]))


class BroadcastConnectedStream:
    """A stream, keyed or not, with one whose records come to every subtask."""

    def __init__(
        self,
        graph: GraphBuilder,
        feeds: tuple[Feed, ...],
        key: tuple[str, ...],
        broadcast: BroadcastStream,
    ) -> None:
        check_pipeline(graph, broadcast.graph, "connect")
        self._graph = graph
        self._feeds = feeds
        self._key = key
        self._broadcast = broadcast

    def process(self, function: BroadcastProcessFunction, *, uid: str) -> Stream:
        """Apply `function` to each record, and to each broadcast record in every subtask.

        `uid` names the state in checkpoints: keep it, and the state is found again.
        """
        require_function_object(function, BroadcastProcessFunction, "connect(broadcast).process")
        schema = function.output_schema(self._feeds[0].schema, self._broadcast.feeds[0].schema)
        work = ProcessBroadcast(self._key, function, self._broadcast.states)
        operator = self._graph.add(
            work, self._feeds, self._broadcast.feeds, verb="connect", uid=uid, schema=schema
        )
        return Stream(self._graph, Feed(operator.uid, schema))


def _check_key(columns: Sequence[str], schema: pa.Schema) -> None:
    if not columns:
        raise ConfigError("key_by() needs at least one column")
    for column in columns:
        if column not in schema.names:
            raise ConfigError(
                f"key_by({column!r}): no such column; there are {', '.join(schema.names)}"
                f"{_advise_on_nested_key(column, schema)}"
            )
        check_key_type(schema.field(column).type, column)
    check_rows_can_be_divided(schema)


def _advise_on_nested_key(column: str, schema: pa.Schema) -> str:
    """Return how to key by a field of a struct, if `column` names one as "column.field"."""
    outer, dot, field = column.partition(".")
    if not dot or outer not in schema.names or not pa.types.is_struct(schema.field(outer).type):
        return ""
    path = "".join(f"[{part!r}]" for part in field.split("."))
    name = column.replace(".", "_")
    select = f"SELECT *, {outer}{path} AS {name} FROM stream"  # noqa: S608 - only shown
    return (
        f". A key is a column, and {field!r} is a field of column {outer!r}: make it a column"
        f' before, such as .sql("{select}").key_by({name!r})'
    )
