"""The plan of a schedule, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from tests.simulation_runtime.source import Record, SplitRecords

WINDOW_MS = 1_000
DELAY_MS = 50
"""By how much a record may be older than one before it in its split, and is in time."""
BEGIN_S = 1_000.0

RunEnd: TypeAlias = Literal["none", "kill", "stop", "savepoint", "drain"]
RequestKind: TypeAlias = Literal["checkpoint", "savepoint", "stop"]
Way: TypeAlias = Literal["direct", "timers", "last rows", "join"]
CallPlace: TypeAlias = Literal["timed", "windows", "copy", "copy and late"]
_DIRECT: Sequence[Way] = ("direct",) * 6
_WAYS: Sequence[Way] = (*_DIRECT, "timers", "last rows", "join")


@dataclass(frozen=True, slots=True)
class Run:
    """One driver process, from its start to its end."""

    parallelism: int
    end: RunEnd
    """How it ends, unless the job has finished before."""
    end_step: int
    kills: tuple[int, ...] = ()
    """The steps at which a slot is killed."""
    requests: tuple[tuple[int, RequestKind], ...] = ()
    """The requests of the user, and the step of each."""
    final_request: RequestKind | None = None
    """The request of the user once the last checkpoint of the job is triggered."""
    begins_from_savepoint: bool = False
    """True if the run begins from the savepoint with which the one before has stopped."""
    backup_step: int | None = None
    """The step at which a target is copied; it becomes that copy at the end of the run."""
    rewinds: bool = False
    """True if the run begins from the first savepoint of all, to whose time the targets are put
    back."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a service by `async_map`."""

    place: CallPlace
    """The stream whose rows wait for an answer."""
    capacity: int
    is_ordered: bool
    longest_s: float
    """The longest time of a call."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a schedule."""

    seed: int
    splits: dict[str, SplitRecords]
    discovery_s: float | None
    """How often the source is asked for new splits; None: it is bounded, and has them all."""
    runs: tuple[Run, ...]
    max_parallelism: int
    content: Literal["aggregate", "process", "timers"]
    """Which operator has the windows."""
    way: Way
    """Which operator is between the records and the target `copy`."""
    calls: Calls | None
    interval_s: float
    retained: int
    unaligned: bool
    channel_batches: int
    """How many batches may wait in a channel."""
    inline_threshold_bytes: int
    slowness_s: tuple[float, ...]
    """The longest time of a call of each target."""
    failure_rate: float
    declines: int
    """How many state files cannot be written, so that a subtask declines the checkpoint."""
    pause_rate: float

    @property
    def records(self) -> list[Record]:
        """All records of all splits."""
        return [record for split in self.splits.values() for record in split.records]


def draw_plan(seed: int) -> Plan:
    """Return the plan of `seed`."""
    rng = random.Random(seed)
    more = random.Random(f"more {seed}")
    discovery_s = rng.choice((None, None, 0.2))
    declines = more.choice((0, 0, 0, 0, 0, 3))
    return Plan(
        seed=seed,
        splits=_draw_splits(rng, grows=discovery_s is not None),
        discovery_s=discovery_s,
        runs=_draw_rewind(more, _draw_runs(rng, is_bounded=discovery_s is None)),
        max_parallelism=rng.choice((3, 8, 128, 32_768)),
        content=rng.choice(("aggregate", "timers", "process")),
        way=(way := more.choice(_WAYS)),
        calls=_draw_calls(more, way),
        interval_s=rng.choice((0.05, 0.2, 0.5)),
        retained=rng.randint(1, 2),
        unaligned=rng.random() < 0.3,
        # Only files can fail to be written.
        inline_threshold_bytes=0 if declines else rng.choice((0, 20_000)),
        slowness_s=tuple(rng.choice((0.0, 0.0, 0.02, 0.3)) for _ in range(4)),
        failure_rate=rng.choice((0.0, 0.0, 0.1, 0.7)),
        declines=declines,
        channel_batches=more.choice((1, 2, 16)),
        pause_rate=rng.choice((0.0, 0.05, 0.3)),
    )


def _draw_splits(rng: random.Random, *, grows: bool) -> dict[str, SplitRecords]:
    splits: dict[str, SplitRecords] = {}
    number = 0
    for name in range(rng.randint(1, 4)):
        split_appears_s = appears_s = BEGIN_S + (rng.choice((0.0, 0.4, 0.9)) if grows else 0.0)
        at = rng.randint(0, 500)
        records: list[Record] = []
        for _ in range(rng.randint(0, 12)):
            at += rng.choice((0, 1, 100, 400, 1_000 - at % 1_000, 999 - at % 1_000))
            appears_s += rng.choice((0.0, 0.01, 0.1, 0.3))
            age = rng.choice((0, 0, 0, 0, 0, DELAY_MS, 2_000))
            time = None if rng.random() < 0.1 else at - age
            # Event time may have gone on before a split appears.
            may_be_late = age > DELAY_MS or split_appears_s > BEGIN_S
            records.append(Record(number, rng.randint(0, 3), time, appears_s, may_be_late))
            number += 1
        splits[f"split-{name}"] = SplitRecords(split_appears_s, records)
    return splits


def _draw_runs(rng: random.Random, *, is_bounded: bool) -> tuple[Run, ...]:
    count = rng.choice((1, 2, 2, 3))
    runs: list[Run] = []
    for number in range(count):
        is_last = number == count - 1
        end: RunEnd = "none" if is_bounded else "drain"
        if not is_last:
            end = rng.choice(("kill", "kill", "stop", "savepoint", "drain"))
        requests: list[tuple[int, RequestKind]] = []
        if rng.random() < 0.2:
            requests.append((_draw_step(rng), rng.choice(("checkpoint", "savepoint"))))
        runs.append(
            Run(
                parallelism=rng.randint(1, 3),
                end=end,
                end_step=_draw_step(rng),
                kills=tuple(_draw_step(rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))),
                requests=tuple(requests),
                final_request=rng.choice((None, None, "checkpoint", "savepoint", "stop")),
                begins_from_savepoint=rng.random() < 0.5,
                backup_step=_draw_step(rng) if end == "kill" and rng.random() < 0.2 else None,
            )
        )
    return tuple(runs)


def _draw_rewind(rng: random.Random, runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Return `runs`; in some schedules one of them goes back to a savepoint of the first one."""
    going_back = rng.randint(1, 2)
    if rng.random() >= 0.12 or going_back >= len(runs):
        return runs
    # A target that alone is put back would end the schedule.
    changed = [replace(run, backup_step=None) for run in runs]
    request: tuple[int, RequestKind] = (rng.randint(1, 600), "savepoint")
    changed[0] = replace(changed[0], requests=(*changed[0].requests, request))
    changed[going_back] = replace(changed[going_back], rewinds=True)
    return tuple(changed)


def _draw_calls(rng: random.Random, way: Way) -> Calls | None:
    # Pairs and late records have different columns.
    places: tuple[CallPlace, ...] = ("timed", "windows", "copy", "copy and late")
    calls = Calls(
        place=rng.choice(places[: 3 if way == "join" else 4]),
        capacity=rng.choice((1, 2, 10)),
        is_ordered=rng.random() < 0.5,
        longest_s=rng.choice((0.01, 0.3, 3.0)),
    )
    return calls if rng.random() < 0.2 else None


def _draw_step(rng: random.Random) -> int:
    return rng.randint(1, rng.choice((300, 1_500, 3_000)))
