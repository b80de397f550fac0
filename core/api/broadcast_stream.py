"""A stream that sends every record to every subtask."""

from __future__ import annotations

from typing import Any, cast

from onceflow.core.errors import ConfigError
from onceflow.core.plan.graph import Feed, GraphBuilder
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
