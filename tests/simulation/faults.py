"""The faults of a schedule: how often things break, what is done from outside, and when.

    FaultRates    the odds of processes, servers and the network; `clock.py` throws the dice at each
                  request (`Server`), each message (`Network`) and each step of a process
    StandStill    for how long nothing goes from one slot to another
    Moments       when the user and the administrator act; drawn at the beginning
    Faults        what they do, looked at every tenth of a second of virtual time

A new fault draws from a generator of its own (see `draw_stand_stills`): one more draw from
`world.rng` would change what every recorded seed does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.rewinds import may_go_back, put_targets_back

from onceflow.core.protocol.log.rules import replay

if TYPE_CHECKING:
    from tests.simulation.world import World


def draw_loss(rng: random.Random) -> float:
    """Return which part of the messages is lost: drawn first, for timeouts depend on it."""
    return rng.choice([0.0, 0.0, 0.02, 0.1])


@dataclass(frozen=True)
class FaultRates:
    """The rates of faults, each as a part of one."""

    crash_rate: float
    """The part of the steps of a process at which it dies."""
    loss: float
    """The part of the messages between drivers and slots, as `doubling`."""
    doubling: float
    database_faults: float
    """The part of the requests to a target, as `slow_commits`."""
    storage_faults: float
    """The part of the requests to the log and to state files."""
    slow_commits: float
    overtaken_commits: float
    """The part of the commits at which another committer does the same meanwhile."""
    slow_uploads: float

    @classmethod
    def draw(cls, rng: random.Random, loss: float) -> FaultRates:
        return cls(
            crash_rate=rng.choice([0.0, 0.005, 0.02, 0.05]),
            loss=loss,
            doubling=rng.choice([0.0, 0.1]),
            database_faults=rng.choice([0.0, 0.0, 0.03, 0.1]),
            storage_faults=rng.choice([0.0, 0.0, 0.03]),
            slow_commits=rng.choice([0.0, 0.0, 0.3]),
            overtaken_commits=rng.choice([0.0, 0.2]),
            slow_uploads=rng.choice([0.0, 0.3, 0.6]),
        )


@dataclass(frozen=True)
class StandStill:
    """The time for which nothing arrives that one slot sends another."""

    sender: int
    receiver: int
    begins_s: float
    ends_s: float


def draw_stand_stills(seed: int, now_s: float) -> tuple[StandStill, ...]:
    """Drawn apart, as savepoints are."""
    rng = random.Random(f"stand-stills {seed}")
    if rng.random() >= 0.15:
        return ()
    drawn: list[StandStill] = []
    for _ in range(rng.randint(1, 4)):
        begins_s = now_s + rng.uniform(0.1, 3.0)
        ends_s = begins_s + rng.choice([0.3, 1.2, 2.5])
        drawn.append(StandStill(rng.randrange(2), rng.randrange(2), begins_s, ends_s))
    return tuple(drawn)


@dataclass(frozen=True)
class Moments:
    """The times of actions from outside, in virtual seconds. None: never."""

    roll_back_at: float | None
    stop_at: float | None
    manual_at: float | None
    set_clock_at: float | None
    copy_at: float | None
    grow_at: tuple[float, ...]

    @classmethod
    def draw(cls, world: World) -> Moments:
        """Draw all of them, in this order: it is what recorded seeds rest on."""
        rng, now_s, shape = world.rng, world.now_s, world.shape
        roll_back_at = now_s + rng.uniform(0.3, 2.0) if shape.rolled_back_by_somebody else None
        stop_at = now_s + rng.uniform(0.1, 1.5) if shape.stops else None
        manual_at = now_s + rng.uniform(0.1, 1.5) if shape.manual else None
        set_clock_at = now_s + rng.uniform(0.1, 1.5) if shape.sets_clock else None
        copy_at = now_s + rng.uniform(0.3, 2.5) if shape.goes_back else None
        grow_at = [now_s + rng.uniform(0.1, 2.5)] if shape.grows else []
        grow_at += (now_s + at for at in world.rarities.partitions_at_s)
        return cls(roll_back_at, stop_at, manual_at, set_clock_at, copy_at, tuple(sorted(grow_at)))


class Faults:
    """The faults of a schedule, each of which happens once, at its moment."""

    def __init__(self, world: World, moments: Moments, kill_all: Callable[[str], None]) -> None:
        self._world = world
        self._kill_all = kill_all
        self._roll_back_at = moments.roll_back_at
        self._set_clock_at = moments.set_clock_at
        self._copy_at = moments.copy_at
        self._grow_at = list(moments.grow_at)
        self._back_at: float | None = None
        """When an older copy of a target takes its place while the job is not done."""

    def inject(self) -> None:
        """Do what is due now."""
        world = self._world
        if self._set_clock_at is not None and world.now_s >= self._set_clock_at:
            world.clock.set_wall(world.rng.choice([-3600.0, 3600.0, -86400.0 * 365]))
            self._set_clock_at = None
        if self._grow_at and world.now_s >= self._grow_at[0] and not world.finished:
            world.sources["source"].append(f"p{len(world.sources['source'])}")
            world.clock.say("a partition appears")
            del self._grow_at[0]
        if self._copy_at is not None and world.now_s >= self._copy_at:
            self._copy()
        if self._back_at is not None and world.now_s >= self._back_at and not world.finished:
            self._kill_all("the targets are restored")
            self.put_copies_back()
            self._back_at = None
        if self._roll_back_at is not None and world.now_s >= self._roll_back_at:
            self._roll_back_one()
        self._go_back()

    def end_growth(self) -> None:
        """Let no more partitions appear: one at the end of the input is read at the next start."""
        self._grow_at.clear()

    def put_copies_back(self) -> None:
        """Restore the targets of which the log knows from the copies that there are of them."""
        world = self._world
        known = replay(world.log.entries()).sinks
        for target in world.targets.values():
            if target.sink_id in known and target.go_back():
                world.clock.say(f"{target.sink_id} goes back to an older copy of itself")
                world.oracle.went_back(target.sink_id)
                world.went_back = True

    def _go_back(self) -> None:
        """Kill the job, put the targets back to its savepoint, and have it start from that."""
        world, point = self._world, self._world.rewind_point
        if world.rewinds is None or world.rewinds.once_done or world.finished or not point:
            return
        if world.now_s >= point.at_s and may_go_back(world, point):
            self._kill_all("the targets are put back")
            put_targets_back(world, point)

    def _copy(self) -> None:
        """Copy a target; where much is to be in doubt then, wait for it for a while."""
        world = self._world
        target = world.rng.choice(list(world.targets.values()))
        waited_s = world.now_s - (self._copy_at or 0.0)
        if len(target.in_doubt) < world.restoring.copied_in_doubt and waited_s < 2.0:
            return
        target.back_up()
        world.clock.say(f"{target.sink_id} is copied")
        self._copy_at = None
        if world.restoring.goes_back_after_s is not None:
            self._back_at = world.now_s + world.restoring.goes_back_after_s

    def _roll_back_one(self) -> None:
        """Somebody else rolls a prepared transaction back, behind everybody's back."""
        world = self._world
        target = world.rng.choice(list(world.targets.values()))
        if target.in_doubt:
            transaction = world.rng.choice(sorted(target.in_doubt))
            target.roll_back_by_hand(transaction)
            world.rolled_back.add(transaction)
            world.clock.say(f"somebody rolls back {transaction}")
            self._roll_back_at = None
