"""Two keyed streams for one function, with the state of their key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from onceflow.core.errors import ConfigError
from onceflow.core.graph import Feed, GraphBuilder, ProcessConnected
from onceflow.core.process_functions import CoProcessFunction

StreamT = TypeVar("StreamT")
KeyedFeeds: TypeAlias = tuple[tuple[Feed, ...], tuple[str, ...]]
"""What flows into an input, and its key."""


def check_pipeline(graph: GraphBuilder, other: GraphBuilder, verb: str) -> None:
    """Return when two streams are of one pipeline.

    Raises:
        ConfigError: They are not.
    """
    if other is not graph:
        raise ConfigError(f"{verb}() of streams of two pipelines: a job reads what is its own")


class KeyedConnectedStreams(Generic[StreamT]):
    """Two streams with one key, for one function with the state of that key."""

    def __init__(
        self,
        stream: Callable[[GraphBuilder, Feed], StreamT],
        graph: GraphBuilder,
        inputs: tuple[KeyedFeeds, KeyedFeeds],
        *,
        verb: str = "connect",
    ) -> None:
        """`stream` makes a stream of what an operator emits."""
        types = [[feeds[0].schema.field(name).type for name in key] for feeds, key in inputs]
        if types[0] != types[1]:
            told = [
                ", ".join(f"{n} {t}" for n, t in zip(key, ts, strict=True))
                for (_, key), ts in zip(inputs, types, strict=True)
            ]
            raise ConfigError(
                f"{verb}(): the first stream is keyed by {told[0]}, and the second by {told[1]}:"
                " equal keys would be in different subtasks; cast the columns to the same types"
                " before"
            )
        self._stream = stream
        self._graph = graph
        self._feeds = inputs[0][0], inputs[1][0]
        self.keys = inputs[0][1], inputs[1][1]

    def process(self, function: CoProcessFunction, *, uid: str) -> StreamT:
        """Apply `function` to each record of both with the state of its key.

        `uid` names the state in checkpoints: keep it, and the state is found again.
        """
        schema = function.output_schema(self._feeds[0][0].schema, self._feeds[1][0].schema)
        work = ProcessConnected(self.keys, function)
        operator = self._graph.add(work, *self._feeds, verb="connect", uid=uid, schema=schema)
        return self._stream(self._graph, Feed(operator.uid, schema))
