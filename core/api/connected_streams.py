"""Two streams that one function processes: both keyed, or one that every subtask receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar, cast

from onceflow.core.api.joined_streams import AddsOperator, JoinedStreams, Sides, mark_outer_sides
from onceflow.core.api.users_mistakes import require_function_object
from onceflow.core.api.windowed_stream import (
    SAME_WINDOW,
    lateness_ms_of,
    window_again,
    window_input,
)
from onceflow.core.errors import ConfigError
from onceflow.core.plan import join_functions
from onceflow.core.plan.functions import OutputTag
from onceflow.core.plan.graph import Feed, GraphBuilder
from onceflow.core.plan.process_functions import BroadcastProcessFunction, CoProcessFunction
from onceflow.core.plan.window_batches import ChosenLeft, CoGroupBatchFunction, WindowBatches
from onceflow.core.plan.window_functions import (
    CoGroupFunction,
    CoWindowedFunction,
    KeptRecords,
    WindowInput,
)
from onceflow.core.plan.windows import WINDOW_COLUMNS, WindowAssigner, WindowNames
from onceflow.core.plan.work import JoinConnected, ProcessBroadcast, ProcessConnected, Work
from onceflow.core.state import MapStateDescriptor


class BroadcastStream:
    """A stream that sends every record to every subtask, and the states that its records update."""

    def __init__(
        self,
        graph: GraphBuilder,
        feeds: tuple[Feed, ...],
        states: tuple[MapStateDescriptor[Any, Any], ...],
    ) -> None:
        if not states:
            raise ConfigError("broadcast() needs the descriptor of a state, a MapStateDescriptor")
        seen: set[str] = set()
        for state in states:
            if not isinstance(cast("object", state), MapStateDescriptor):
                raise ConfigError(
                    f"broadcast({state!r}): a broadcast state is a MapStateDescriptor"
                )
            if state.name in seen:
                raise ConfigError(f"broadcast(): two states are named {state.name!r}")
            if state.ttl is not None:
                raise ConfigError(
                    f"broadcast(): state {state.name!r} has a time to live: what has expired would"
                    " differ between subtasks; remove keys in process_broadcast() instead"
                )
            seen.add(state.name)
        self.graph = graph
        self.feeds = feeds
        self.states = states


StreamT = TypeVar("StreamT")
KeyedFeeds: TypeAlias = tuple[tuple[Feed, ...], tuple[str, ...]]
"""The feeds of one input, and its key columns."""


def check_pipeline(graph: GraphBuilder, other: GraphBuilder, verb: str) -> None:
    """Raise ConfigError if the streams belong to different pipelines."""
    if other is not graph:
        raise ConfigError(
            f"{verb}() of streams of two pipelines: read both sources in the same Pipeline"
        )


class KeyedConnectedStreams(Generic[StreamT]):
    """Two streams with a common key, for one function with keyed state."""

    def __init__(
        self,
        stream: Callable[[GraphBuilder, Feed], StreamT],
        graph: GraphBuilder,
        inputs: tuple[KeyedFeeds, KeyedFeeds],
        *,
        verb: str = "connect",
    ) -> None:
        """`stream` builds the stream of an operator's output."""
        types = [[feeds[0].schema.field(name).type for name in key] for feeds, key in inputs]
        if types[0] != types[1]:
            descriptions = [
                ", ".join(f"{n} {t}" for n, t in zip(key, ts, strict=True))
                for (_, key), ts in zip(inputs, types, strict=True)
            ]
            raise ConfigError(
                f"{verb}(): the first stream is keyed by {descriptions[0]}, and the second by"
                f" {descriptions[1]}: equal keys would be in different subtasks; cast the columns"
                " to the same types before"
            )
        self._stream = stream
        self._graph = graph
        self._feeds = inputs[0][0], inputs[1][0]
        self.keys = inputs[0][1], inputs[1][1]

    def process(self, function: CoProcessFunction, *, uid: str) -> StreamT:
        """Apply `function` to each record of both with the state of its key.

        `uid` names the state in checkpoints. If you change it, the job no longer finds its state.
        """
        require_function_object(function, CoProcessFunction, "connect(…).process")
        return self.add(function, uid=uid)

    def add(self, function: CoProcessFunction | join_functions.TimedJoin, *, uid: str) -> StreamT:
        """Add an operator that applies a function to both streams, or that joins them."""
        if isinstance(function, join_functions.TimedJoin):
            schema = function.output_schema()
            work: Work = JoinConnected(self.keys, function)
        else:
            schema = function.output_schema(self._feeds[0][0].schema, self._feeds[1][0].schema)
            work = ProcessConnected(self.keys, function)
        operator = self._graph.add(work, *self._feeds, uid=uid, schema=schema)
        return self._stream(self._graph, Feed(operator.uid, schema))

    def window(
        self,
        windows: WindowAssigner,
        *,
        left_time: str | None = None,
        right_time: str | None = None,
        allowed_lateness: float | str = 0,
        late_left: OutputTag | None = None,
        late_right: OutputTag | None = None,
    ) -> WindowedConnectedStreams[StreamT]:
        """Cut the records of each key into windows. Both streams use the same windows.

        Works like `KeyedStream.window`. Each stream has its own event-time column and its own side
        output for late records. The first stream is the left one.

        Raises:
            ConfigError: A time column does not exist, a stream's sources have no watermarks, or a
                tag has other columns than its stream.
        """
        given = ("left", left_time, late_left), ("right", right_time, late_right)
        left, right = (
            window_input(
                self._graph, feeds, key, windows, time, late, (f"{side}_time", f"late_{side}")
            )
            for feeds, key, (side, time, late) in zip(self._feeds, self.keys, given, strict=True)
        )
        sides = (
            join_functions.JoinSide("left", self._feeds[0][0].schema, left.time, left.late),
            join_functions.JoinSide("right", self._feeds[1][0].schema, right.time, right.late),
        )
        lateness_ms = lateness_ms_of(windows, allowed_lateness)
        return WindowedConnectedStreams(self.add, sides, windows, lateness_ms, (left, right))

    def per_window(
        self, *, left_names: WindowNames = WINDOW_COLUMNS, right_names: WindowNames = WINDOW_COLUMNS
    ) -> WindowedConnectedStreams[StreamT]:
        """Group results of windows of both streams by the window that they came from.

        Works like `Stream.per_window`: the start and the end of the window become part of the key.

        Raises:
            ConfigError: See `Stream.per_window`.
        """
        names = left_names, right_names
        left, right = (
            (feeds, window_again(self._graph, feeds, key, of_side, "per_window").key)
            for feeds, key, of_side in zip(self._feeds, self.keys, names, strict=True)
        )
        streams = KeyedConnectedStreams(self._stream, self._graph, (left, right), verb="per_window")
        return streams.window(SAME_WINDOW, left_time=left_names[1], right_time=right_names[1])


class WindowedConnectedStreams(Generic[StreamT]):
    """Records of two streams grouped by key and window."""

    def __init__(
        self,
        process: AddsOperator[StreamT],
        sides: Sides,
        windows: WindowAssigner,
        lateness_ms: int,
        inputs: tuple[WindowInput, WindowInput],
    ) -> None:
        self._process = process
        self._sides = sides
        self._windows: WindowAssigner = windows
        self._lateness_ms = lateness_ms
        self._inputs = inputs

    def co_group(self, function: CoGroupFunction, *, uid: str) -> StreamT:
        """Apply `function` to all records of each key and window. Their state holds all records.

        `uid` names the state in checkpoints. If you change it, the job no longer finds its state.
        """
        require_function_object(function, CoGroupFunction, "co_group")
        return self._process(self._to_windowed(function), uid=uid)

    def co_group_batches(self, function: CoGroupBatchFunction, *, uid: str) -> StreamT:
        """Apply `function` to the records of many windows at once. Their state holds all records.

        `uid` names the state in checkpoints. If you change it, the job no longer finds its state.
        The state is compatible with that of `co_group`.

        Raises:
            ConfigError: The windows are sessions, or in processing time.
        """
        require_function_object(function, CoGroupBatchFunction, "co_group_batches")
        windowed = self._to_windowed(WindowBatches(function))
        if not windowed.takes_batches:
            raise ConfigError(
                f"co_group_batches() of {type(self._windows).__name__}: these take one record at a"
                " time; use co_group(), or tumbling or sliding windows in event time"
            )
        return self._process(windowed, uid=uid)

    def join(self, how: join_functions.JoinKind = "inner") -> JoinedStreams[StreamT]:
        """Join each left record with each right one of its key and window.

        If a window has no records of one side, a `"left"`, `"right"` or `"full"` join emits the
        records of its outer side without a partner. The outer side of a `"full"` join is both
        sides.

        Raises:
            ConfigError: `how` is not a kind of join.
        """
        sides = mark_outer_sides(self._sides, how)
        outer = sides[0].outer, sides[1].outer

        def function(pairs: join_functions.ProcessJoinFunction) -> CoProcessFunction:
            return self._to_windowed(join_functions.WindowPairs(outer, pairs))

        keys = self._inputs[0].key, self._inputs[1].key
        return JoinedStreams(self._process, function, sides, keys)

    def semi_join(self, *, uid: str) -> StreamT:
        """Emit each left record whose key and window has at least one right record, once.

        `uid` names the state in checkpoints.

        Raises:
            ConfigError: The windows have an allowed lateness.
        """
        return self._choose_left(ChosenLeft(with_partner=True), "semi_join", uid)

    def anti_join(self, *, uid: str) -> StreamT:
        """Emit each left record whose key and window has no right record.

        `uid` names the state in checkpoints.

        Raises:
            ConfigError: The windows have an allowed lateness.
        """
        return self._choose_left(ChosenLeft(with_partner=False), "anti_join", uid)

    def _choose_left(self, function: ChosenLeft, method: str, uid: str) -> StreamT:
        if self._lateness_ms:
            raise ConfigError(
                f"{method}() of windows with an allowed lateness of {self._lateness_ms} ms: for"
                " each late record the window would be emitted again, and its left records a second"
                " time, or in spite of a late right record. Omit allowed_lateness, and give the"
                " watermarks a greater max_out_of_orderness instead"
            )
        return self._process(self._to_windowed(function), uid=uid)

    def _to_windowed(self, function: CoGroupFunction) -> CoWindowedFunction:
        content = KeptRecords(function, *(side.schema for side in self._sides))
        return CoWindowedFunction(self._windows, self._lateness_ms, content, *self._inputs)


class BroadcastConnectedStream(Generic[StreamT]):
    """A stream, keyed or not, that is connected with a broadcast stream."""

    def __init__(
        self,
        stream: Callable[[GraphBuilder, Feed], StreamT],
        graph: GraphBuilder,
        feeds: tuple[Feed, ...],
        key: tuple[str, ...],
        broadcast: BroadcastStream,
    ) -> None:
        """`stream` builds the stream of an operator's output."""
        check_pipeline(graph, broadcast.graph, "connect")
        self._stream = stream
        self._graph = graph
        self._feeds = feeds
        self._key = key
        self._broadcast = broadcast

    def process(self, function: BroadcastProcessFunction, *, uid: str) -> StreamT:
        """Apply `function` to each record, and to each broadcast record in every subtask.

        `uid` names the state in checkpoints. If you change it, the job no longer finds its state.
        """
        require_function_object(function, BroadcastProcessFunction, "connect(broadcast).process")
        schema = function.output_schema(self._feeds[0].schema, self._broadcast.feeds[0].schema)
        work = ProcessBroadcast(self._key, function, self._broadcast.states)
        operator = self._graph.add(work, self._feeds, self._broadcast.feeds, uid=uid, schema=schema)
        return self._stream(self._graph, Feed(operator.uid, schema))
