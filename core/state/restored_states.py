"""What a snapshot holds, by state, against what the operator asks for when it opens.

Nothing is dropped in silence: a state that nobody asks for, or that is asked for as something else,
is refused by name. Where the user allows it, exactly that is dropped, and told; the rest stays.
"""

from __future__ import annotations

from collections.abc import Iterable

from onceflow.core.errors import StateIncompatible
from onceflow.core.state.api import StateContext
from onceflow.core.state.canonical import StateMeta

_WAY_OUT = (
    "start with Pipeline(…, allow_non_restored_state=True), which drops it and keeps offsets, sink"
    " ids and all other state"
)


class RestoredStates:
    """The states of one store's snapshot. Used by the store's thread."""

    def __init__(self, context: StateContext, metas: Iterable[StateMeta] = ()) -> None:
        self._label = str(context)
        self._allowed = context.allow_non_restored_state
        self._left = {meta.name: meta for meta in metas}
        self._asked: list[str] = []
        self.dropped: list[str] = []
        """What the snapshot held and the operator does not take, for people."""

    def add(self, meta: StateMeta) -> None:
        """Take note of a state in one more part of the snapshot.

        Raises:
            StateIncompatible: Another part holds it as something else.
        """
        self._left.setdefault(meta.name, meta).check(meta, self._label)

    def left(self) -> tuple[StateMeta, ...]:
        """Return the states that nobody has asked for yet."""
        return tuple(self._left.values())

    def claim(self, asked: StateMeta) -> StateMeta | None:
        """Return what the snapshot holds under the name that is `asked` for, None when nothing.

        May return running aggregates of which only some are asked for.

        Raises:
            StateIncompatible: It is something else, and may not be dropped.
        """
        found = self._left.get(asked.name)
        if found is not None and found != asked:
            return self._partly(found, asked)
        self._taken(asked)
        return found

    def opened(self) -> tuple[StateMeta, ...]:
        """Return the states that nobody has asked for when the operator has opened, to be dropped.

        Raises:
            StateIncompatible: They may not be dropped.
        """
        left = self.left()
        if left and not self._allowed:
            names = ", ".join(f"{meta.name!r} ({meta.kind} {meta.signature})" for meta in left)
            asked = ", ".join(map(repr, sorted(self._asked))) or "none"
            raise StateIncompatible(
                f"the checkpoint holds state {names} of {self._label}, and the operator does not"
                f" ask for it when it opens (it asks for {asked}): a renamed state would start"
                f" empty. Take the old name or function back; or {_WAY_OUT}"
            )
        self._left.clear()
        uid = self._label.partition("[")[0]
        self.dropped += [f"state {meta.name!r} of {uid}" for meta in left]
        return left

    def _taken(self, asked: StateMeta) -> None:
        self._asked.append(asked.name)
        self._left.pop(asked.name, None)

    def _partly(self, found: StateMeta, asked: StateMeta) -> StateMeta | None:
        kept, gone, new = _compared(found, asked)
        if (gone or new) and not self._allowed:
            started = f" {', '.join(new)} would start empty." if new else ""
            if found.kind == asked.kind != "accumulators":
                started += " A class that was only renamed is found by New.__qualname__ = 'Old'."
            raise StateIncompatible(
                f"state {asked.name!r} of {self._label} was written as {found.kind}"
                f" {found.signature} and is now asked for as {asked.kind} {asked.signature}."
                f"{started} Take it back as it was; or {_WAY_OUT}"
            )
        self._taken(asked)
        self.dropped += [f"{one} of {self._label.partition('[')[0]}" for one in gone]
        return found if kept else None


def aggregates_of(meta: StateMeta) -> tuple[str, dict[str, str]]:
    """Return the key part of a table's signature, and what each aggregate is, in order."""
    keys, bracket, listed = meta.signature.partition("]")
    pieces = listed.removesuffix(")").split("),") if listed else []
    return keys + bracket, dict(piece.split("=", 1) for piece in pieces)


def _compared(found: StateMeta, asked: StateMeta) -> tuple[list[str], list[str], list[str]]:
    """Return which parts of `found` are taken, which are not, and which of `asked` are new."""
    if found.kind == asked.kind == "accumulators":
        old_keys, old = aggregates_of(found)
        new_keys, new = aggregates_of(asked)
        if old_keys == new_keys:
            kept = [name for name, what in old.items() if new.get(name) == what]
            gone = [f"aggregate {name!r}" for name in old if name not in kept]
            return kept, gone, [f"aggregate {name!r}" for name in new if name not in kept]
    return [], [f"state {found.name!r}"], [f"state {asked.name!r}"]
