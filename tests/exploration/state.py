"""The states of a world, and the steps between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

DOWN = GONE = -1
"""In place of the code of a process that does not exist."""


class DriverState(NamedTuple):
    """A driver: the code of its process, and how often it was started."""

    process: int = DOWN
    starts: int = 0


class SlotState(NamedTuple):
    """A slot: the code of its process, its streams, and the driver that it talks to."""

    attempt: int
    number: int
    driver: int
    """-1 if its driver is dead."""
    process: int
    inbox: tuple[int, ...] = ()
    outbox: tuple[int, ...] = ()
    channels: tuple[tuple[int, ...], ...] = ()
    """The elements on their way to the sink of this slot, by sender."""

    @property
    def name(self) -> str:
        """The name of the slot in traces."""
        return f"slot {self.number} of attempt {self.attempt}"


class State(NamedTuple):
    """A state of the world. `log` and `targets` are codes."""

    drivers: tuple[DriverState, ...]
    slots: tuple[SlotState, ...]
    log: int
    targets: tuple[int, ...]
    faults: int
    """The number of faults that may still happen."""
    is_finished: bool = False
    asked_in: int = 0
    """The attempt in which the user has requested what is requested once; 0: not yet."""
    begins: int = 0
    """The number of times that a driver was started from the savepoint."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that a state allows."""

    text: str
    move: Callable[[], State]
    """Returns the state after the step; raises if the step breaks a law."""
    is_fault: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """A way in which a server acts on a request."""

    text: str
    move: Callable[[], tuple[State, int]]
    """Returns the state after it, and the code of the answer."""
    is_fault: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """The facts that the explorer uses about a process."""

    value: Any
    choices: tuple[int, ...]
    """The codes of the steps that the process may take by itself."""
    requests: tuple[tuple[str, int, Any], ...]
    """Each request with its thread and its code."""


def with_slot(state: State, index: int, slot_state: SlotState) -> State:
    """Return `state` with another slot; one that is gone and has said all is dropped."""
    slots = (*state.slots[:index], slot_state, *state.slots[index + 1 :])
    return without_gone(state._replace(slots=slots))


def without_gone(state: State) -> State:
    if all(slot_state.process != GONE or slot_state.outbox for slot_state in state.slots):
        return state
    kept = tuple(
        slot_state for slot_state in state.slots if slot_state.process != GONE or slot_state.outbox
    )
    return state._replace(slots=kept)


def with_driver(state: State, number: int, driver_state: DriverState) -> State:
    drivers = (*state.drivers[:number], driver_state, *state.drivers[number + 1 :])
    return state._replace(drivers=drivers)
