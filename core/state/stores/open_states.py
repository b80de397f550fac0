"""The states that an operator has asked its store for, by name; the same for both backends."""

from __future__ import annotations

from typing import Any

from onceflow.core.errors import ConfigError
from onceflow.core.state.api.context import StateContext
from onceflow.core.state.snapshots.state_meta import StateMeta


class OpenStates:
    """The states of a store by name. A name means one state for the life of the store."""

    def __init__(self, context: StateContext) -> None:
        self._label = str(context)
        self._claimed: dict[str, tuple[StateMeta, Any]] = {}
        self._complete = False

    def find(self, asked: StateMeta) -> Any | None:
        """Return the state object of this name, or None if it was not asked for before.

        Raises:
            ConfigError: It was asked for with another kind or type, or it is asked for too late.
        """
        if asked.name not in self._claimed:
            if self._complete:
                raise ConfigError(
                    f"state {asked.name!r} of {self._label} is asked for while records are"
                    " processed: ask for every state in open(), which is when a restored one is"
                    " looked for"
                )
            return None
        meta, state = self._claimed[asked.name]
        if meta != asked:
            raise ConfigError(
                f"state {asked.name!r} of {self._label} is used as {meta.kind} {meta.signature} and"
                f" as {asked.kind} {asked.signature}; give each state a name of its own"
            )
        return state

    def complete(self) -> None:
        """Refuse new names from here on."""
        self._complete = True

    def add(self, meta: StateMeta, state: Any) -> None:
        """Register `state` under its name."""
        self._claimed[meta.name] = (meta, state)
