"""The worlds in which the specification is checked, and the mistakes that must fail in each.

A world is a set of constants of `protocol.pml`. With larger constants the checker visits more
orders of steps, and takes minutes instead of seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODEL: Final = Path(__file__).with_name("protocol.pml")


@dataclass(frozen=True, slots=True)
class World:
    """A small world, and the mistakes that are tried in it."""

    name: str
    description: str
    constants: Mapping[str, int]
    mistakes: tuple[str, ...]
    """The names of mistakes for which the checker must find a violation."""
    is_of_progress: bool = False
    """True if the checker looks for runs in which the job never ends; otherwise for broken laws."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A broken variant of the protocol, as `protocol.pml` defines it."""

    name: str
    number: int
    description: str


_MISTAKE = re.compile(r"^#define ([A-Z_]+) +(\d+) +/\* (.*) \*/$", re.MULTILINE)


def read_mistakes() -> dict[str, Mistake]:
    """Return the mistakes of the model by name, in the order of their numbers."""
    lines = _MISTAKE.findall(MODEL.read_text(encoding="utf-8"))
    return {name: Mistake(name, int(number), text) for name, number, text in lines}


def _constants(**changes: int) -> Mapping[str, int]:
    smallest = {
        "DRIVERS": 1, "SLOTS": 1, "TARGETS": 1, "STORAGES": 1,
        "FAULTS": 0, "RECORDS": 1, "PERIODIC": 0,
    }  # fmt: skip
    return smallest | changes


WORLDS: Final = (
    World(
        "one driver",
        "one driver, two slots, one fault; a periodic and a final checkpoint",
        _constants(SLOTS=2, FAULTS=1, PERIODIC=1),
        (
            "MISSES_AN_ACK",
            "COMMITS_AT_PRE_COMMIT",
            "ACKS_BEFORE_PREPARE",
            "POSITION_TOO_LATE",
            "POSITION_TOO_EARLY",
            "CONFIRMS_UNCOMMITTED",
            "FINISHES_AT_DECISION",
            "NOTIFIES_BEFORE_DECISION",
            "COMMITS_WHAT_IS_PENDING",
            "WRITES_AGAIN_AFTER_LOST_REPLY",
            "OMITS_ABORTED",
            "ROLLS_BACK_ABORTED",
            "OMITS_DECIDED",
            "TAKES_OLDER_ACKS",
            "COMMITS_NOTHING",
            "ABORTS_DECIDED",
            "STARTS_FROM_NOTHING",
        ),
    ),
    World(
        "two faults",
        "one driver, one slot, two faults",
        _constants(FAULTS=2, PERIODIC=1),
        ("TAKES_UNKNOWN_FOR_DECIDED", "ABORTS_NOTHING", "ABORTS_LIVE"),
    ),
    World(
        "two drivers",
        "two drivers that both claim the job, two slots with a target each",
        _constants(DRIVERS=2, SLOTS=2, TARGETS=2),
        (
            "OVERWRITES",
            "TAKES_WHAT_EXISTS",
            "APPENDS_BEHIND_OTHERS",
            "CLAIMS_BACK",
            "RECOVERS_BEFORE_CLAIM",
            "SWEEPS_NOTHING",
        ),
    ),
    World(
        "two drivers and a fault",
        "two drivers that both claim the job, one slot, one fault",
        _constants(DRIVERS=2, FAULTS=1),
        (),
    ),
    World(
        "exchange",
        "two sources that send records to both sink subtasks, so barriers are aligned",
        _constants(SLOTS=2, RECORDS=2, PERIODIC=1, EXCHANGE=1),
        ("READS_BLOCKED_CHANNELS",),
    ),
    World(
        "other storage",
        "a job stops with a savepoint and starts from it in other storage; two faults",
        _constants(DRIVERS=2, STORAGES=2, FAULTS=2),
        ("ASKS_NO_TARGET", "ASKS_BEFORE_IT_LISTS", "LISTS_NOTHING_OF_SAVEPOINT"),
    ),
    World(
        "progress",
        "two drivers, one slot, one fault; the job must come to its end",
        _constants(DRIVERS=2, FAULTS=1, PROGRESS=1),
        ("NOTICES_NO_LOST_SLOT",),
        is_of_progress=True,
    ),
)
