"""The model of one key's states, with which `state_programs` compares a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onceflow.core.state import AggregateFunction
from onceflow.core.state.states.timers import TimeDomain

TTL_MS = 1000

Reading: TypeAlias = "tuple[int, list[str], dict[str, int], int | None, float | None]"
"""The values of a key's states: value, list, map, reduced and mean."""


class Mean(AggregateFunction[int, "tuple[int, int]", float]):
    """The mean of all numbers added."""

    def create_accumulator(self) -> tuple[int, int]:
        """Return the accumulator of no numbers."""
        return 0, 0

    def add(self, value: int, accumulator: tuple[int, int]) -> tuple[int, int]:
        """Return count and sum including `value`."""
        count, total = accumulator
        return count + 1, total + value

    def get_result(self, accumulator: tuple[int, int]) -> float:
        """Return the mean."""
        count, total = accumulator
        return total / count


@dataclass
class Item:
    """A value, an element or an entry. `used_ms` is the time of its last use if it expires."""

    held: Any
    used_ms: int | None = None

    def has_expired(self, now_ms: int) -> bool:
        """Return True if the item has expired at `now_ms`."""
        return self.used_ms is not None and self.used_ms + TTL_MS <= now_ms


@dataclass
class KeyModel:
    """The model of the states of one key, or of one key and namespace.

    Items have the names "value", "reduced", "added", "mapped KEY" and "elements NUMBER".
    """

    items: dict[str, Item] = field(default_factory=dict[str, Item])
    expired: dict[str, Item] = field(default_factory=dict[str, Item])
    """The expired items, which this process no longer returns. They may not be deleted yet."""
    unsure: set[str] = field(default_factory=set[str])
    """The names of expired items that may be alive again for a clock that is behind the previous
    one."""
    timers: set[tuple[TimeDomain, int]] = field(default_factory=set[tuple[TimeDomain, int]])

    def get(self, name: str) -> Any:
        """Return the value of `name`, or None."""
        return self.items[name].held if name in self.items else None

    def use(self, name: str, held: Any, now_ms: int | None) -> None:
        """Set `name` to `held`. `now_ms` is None if the state does not expire."""
        self.drop(lambda other: other == name)
        self.items[name] = Item(held, now_ms)

    def clear(self, kind: str) -> None:
        """Remove a state."""
        self.drop(lambda name: name.partition(" ")[0] == kind)

    def drop(self, meant: Callable[[str], bool]) -> None:
        """Remove the items whose names match."""
        for name in filter(meant, [*self.items, *self.expired]):
            self.items.pop(name, None)
            self.expired.pop(name, None)
            self.unsure.discard(name)

    def expire(self, now_ms: int) -> None:
        """Move items that have expired at `now_ms` to `expired`."""
        for name in [name for name, item in self.items.items() if item.has_expired(now_ms)]:
            self.expired[name] = self.items.pop(name)

    def was_read(self, now_ms: int) -> None:
        """Count a read as a use of all items."""
        for item in self.items.values():
            item.used_ms = max(item.used_ms or 0, now_ms)

    def move(self) -> None:
        """Continue in another process, whose clock may be behind."""
        self.unsure = set(self.expired)

    def settle(self, read: Reading, now_ms: int) -> None:
        """Move expired items back to `items` if the backend returned them after a move.

        The new process's clock may be behind. Items that have expired by this clock stay expired.
        """
        value, elements, mapped, reduced, mean = read
        for name in self.unsure:
            if self.expired[name].has_expired(now_ms):
                continue
            item = self.expired.pop(name)
            kind, _, key = name.partition(" ")
            shown = {
                "value": value == item.held,
                "elements": item.held in elements,
                "mapped": mapped.get(key) == item.held,
                "reduced": reduced is not None,
                "added": mean is not None,
            }
            if shown[kind]:
                self.items[name] = item
        self.unsure = set()

    def says(self) -> Reading:
        """Return the values that a backend must read."""
        numbers = sorted(int(name[9:]) for name in self.items if name.startswith("elements "))
        added: list[int] = self.get("added") or []
        return (
            self.get("value") or 0,
            [self.get(f"elements {number}") for number in numbers],
            {n[7:]: item.held for n, item in self.items.items() if n.startswith("mapped ")},
            self.get("reduced"),
            sum(added) / len(added) if added else None,
        )
