"""Operator list state: named lists of bytes that belong to a subtask and to no key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onceflow.core.errors import ConfigError, StateIncompatible


class ListOperatorState:
    """The lists of one operator's subtask, by name; owned by the subtask's thread.

    Which elements a subtask is restored with after a change of parallelism (its share of them, or
    all) is decided before it is built, by the rule of each list.
    """

    def __init__(self, restored: Mapping[str, Iterable[bytes]] | None = None) -> None:
        self._lists = {name: tuple(items) for name, items in (restored or {}).items()}

    def get(self, name: str) -> tuple[bytes, ...]:
        """Return the elements of list `name`, in order; empty when nothing was ever put there."""
        return self._lists.get(name, ())

    def replace(self, name: str, elements: Iterable[bytes]) -> None:
        """Make `elements` the whole of list `name`.

        Raises:
            ConfigError: The list has no name.
            StateIncompatible: An element is not bytes; nothing is changed.
        """
        if not name:
            raise ConfigError("an operator list needs a name")
        listed = tuple(elements)
        for element in listed:
            if not isinstance(element, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise StateIncompatible(
                    f"operator list {name!r} holds bytes; got {type(element).__name__}: encode it"
                )
        self._lists[name] = listed

    def clear(self, name: str) -> None:
        """Forget list `name`."""
        self._lists.pop(name, None)

    def snapshot(self) -> dict[str, tuple[bytes, ...]]:
        """Return every list as of now; later changes leave the result as it is."""
        return dict(self._lists)
