"""The search through all states of a world, breadth first, so that traces are short."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from tests.exploration.driver import DriverProcess
from tests.exploration.servers import Target, Violation
from tests.exploration.state import DOWN, GONE, State
from tests.exploration.system import System
from tests.exploration.transitions import BROKEN

CODES_CHECKED: Final = 300
"""The number of steps that are taken again, by processes with the same code, after a search."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a search; None: no bound."""

    states: int | None = None
    seconds: float | None = None


UNLIMITED: Final = Limits()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a search."""

    states: int
    depth: int
    seconds: float
    """Seconds of processor time."""
    is_complete: bool
    """False if a limit has cut the search off."""
    violation: str = ""
    trace: tuple[str, ...] = ()
    ends: frozenset[tuple[Target, ...]] = frozenset()
    """The targets in each state in which nothing is left to do."""


def search(
    system: System, limits: Limits = UNLIMITED, tell: Callable[[int, int], None] | None = None
) -> Verdict:
    """Visit every state; stop at the first violation."""
    began, began_cpu_s = time.monotonic(), time.process_time()
    first = system.initial()
    parents: dict[State, State | None] = {first: None}
    level, depth, ends = [first], 0, set[tuple[Target, ...]]()

    def judge(violation: str = "", *path: State, is_complete: bool = True) -> Verdict:
        trace = tell_trace(system, _path_to(parents, path[0])) if path else ()
        seconds = time.process_time() - began_cpu_s
        return Verdict(len(parents), depth, seconds, is_complete, violation, trace, frozenset(ends))

    while level:
        following: list[State] = []
        for state in level:
            is_stuck = True
            for number, step in enumerate(system.steps(state)):
                is_stuck = is_stuck and step.is_fault
                try:
                    after = step.move()
                except BROKEN as error:
                    verdict = judge(_text_of(error), state)
                    system.tells = True
                    return replace(
                        verdict, trace=(*verdict.trace, system.steps(state)[number].text)
                    )
                if after not in parents:
                    parents[after] = state
                    following.append(after)
            if is_stuck:
                ends.add(tuple(map(system.codes.value, state.targets)))
                if problem := _find_problem(system, state):
                    return judge(problem, state)
            if limits.states is not None and len(parents) > limits.states:
                return judge(is_complete=False)
            if limits.seconds is not None and time.monotonic() - began > limits.seconds:
                return judge(is_complete=False)
        level, depth = following, depth + 1
        if tell is not None:
            tell(len(parents), depth)
    system.check_codes(CODES_CHECKED)
    return judge()


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"


def _path_to(parents: dict[State, State | None], last: State) -> list[State]:
    path = [last]
    while (before := parents[path[-1]]) is not None:
        path.append(before)
    return path[::-1]


def tell_trace(system: System, path: Sequence[State]) -> tuple[str, ...]:
    """Return the text of each step of `path`."""
    system.tells = True
    texts: list[str] = []
    for before, after in pairwise(path):
        for step in system.steps(before):
            with suppress(*BROKEN):
                if step.move() == after:
                    texts.append(step.text)
                    break
    system.tells = False
    return tuple(texts)


def _find_problem(system: System, state: State) -> str:
    """Return why a state in which nothing happens any more is not the end of the job."""
    if not state.is_finished:
        return "nothing can happen any more, and the job is not finished"
    for number, driver_state in enumerate(state.drivers):
        if driver_state.process == DOWN:
            continue
        process: DriverProcess = system.codes.value(driver_state.process)
        if process.phase not in {"over", "finished"}:
            return f"nothing can happen any more, and driver {number} waits"
    if any(slot_state.process != GONE for slot_state in state.slots):
        return "nothing can happen any more, and a slot waits"
    return ""
