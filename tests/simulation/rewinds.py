"""Jobs that go back to a savepoint in their own storage, with their targets put back to it.

Somebody copies every target when a savepoint is taken. Later the job is killed, or is done; the
copies take the targets' places, and the user starts from the savepoint with leave to go back. What
starts the driver again does so by the same words: it begins from the savepoint once a time.

A target that does not tell what it has committed is not put back: what it has had comes twice.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.targets import Row, Staged, Versioned

from onceflow.core.errors import SavepointRefused
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.rules import replay
from onceflow.core.protocol.savepoints.savepoint import check_savepoint, is_staged_for

if TYPE_CHECKING:
    from tests.simulation.savepoints import Kept
    from tests.simulation.world import World


@dataclass(frozen=True)
class Rewinds:
    """The number of rewinds in one schedule, and their times."""

    times: int
    after_s: float
    """How long after the savepoint, and after the time before, the job goes back."""
    once_done: bool
    """True if the job goes back when it is done, and not before."""
    has_silent: bool
    """True if the second sink, if there is one, does not tell what its target has committed."""

    @classmethod
    def draw(cls, seed: int) -> Rewinds | None:
        """Return those of the schedule of `seed`; None: it never goes back."""
        rng = random.Random(f"rewinds 7 {seed}")
        if rng.random() >= 0.06:
            return None
        return cls(
            times=rng.choice([1, 1, 2, 3]),
            after_s=rng.choice([0.0, 0.2, 0.8, 2.0]),
            once_done=rng.random() < 0.3,
            has_silent=rng.random() < 0.3,
        )


@dataclass
class RewindPoint:
    """A savepoint of the user, with the copies that a rewind to it needs."""

    kept: Kept
    states: dict[str, tuple[Any, ...]]
    """A copy of the target, by sink."""
    staged: dict[str, dict[TransactionId, list[Row]]]
    """By sink: the savepoint's own copies of what waits in checkpoint storage."""
    times_left: int
    at_s: float
    """The time when the job goes back."""


def note_savepoint(world: World, kept: Kept) -> None:
    """Copy the targets when the first savepoint is written; none has more than it knows of."""
    rewinds = world.rewinds
    if rewinds is None or world.rewind_point is not None:
        return
    if kept.savepoint.kind is CheckpointKind.BOOTSTRAP:
        return
    taken = kept.savepoint.completed
    cut = (taken.attempt, taken.checkpoint)
    targets = [target for target in world.targets.values() if target.sink_id not in world.silent]
    if any((t.attempt, t.checkpoint) > cut for target in targets for t in target.proofs):
        return
    world.rewind_point = RewindPoint(
        kept,
        {target.sink_id: target.copy_state() for target in targets},
        {
            target.sink_id: {
                one: list(rows) for one, rows in target.staged.items() if is_staged_for(one, taken)
            }
            for target in targets
            if isinstance(target, Staged)
        },
        rewinds.times,
        world.now_s + rewinds.after_s,
    )


def may_go_back(world: World, point: RewindPoint) -> bool:
    """Return whether the user goes back again: not to what a later attempt has rolled back."""
    view = replay(world.log.entries())
    try:
        check_savepoint(
            point.kept.savepoint,
            view,
            job=point.kept.savepoint.job,
            log_id=point.kept.savepoint.log_id,
            last_attempt=view.attempt,
            allow_rewind=True,
        )
    except SavepointRefused:
        point.times_left = 0
    return bool(point.times_left)


def put_targets_back(world: World, point: RewindPoint) -> None:
    """Put the copies in the targets' places; the user starts from the savepoint from now on."""
    assert world.rewinds is not None
    for sink_id, state in point.states.items():
        world.targets[sink_id].become(deepcopy(state))
        world.oracle.put_back(world.targets[sink_id])
    world.clock.say(f"the targets are put back to savepoint {point.kept.savepoint.id}")
    point.times_left -= 1
    point.at_s = world.now_s + world.rewinds.after_s
    world.rewound = world.kept = point.kept
    world.has_gone_back = world.begins_from_savepoint = True


def import_staged(world: World, sinks: frozenset[str]) -> None:
    """Copy what the savepoint holds of staged rows into the job's storage."""
    if world.rewind_point is None or world.rewound is None:
        return
    for sink_id in sinks & world.rewind_point.staged.keys():
        target = world.targets[sink_id]
        assert isinstance(target, Staged)
        target.staged.update(deepcopy(world.rewind_point.staged[sink_id]))


def draw_silent(world: World) -> frozenset[str]:
    """Return the sinks whose targets do not tell what they have committed."""
    if world.rewinds is None or not world.rewinds.has_silent:
        return frozenset()
    silent = [target for target in world.targets.values() if not isinstance(target, Versioned)]
    return frozenset({silent[-1].sink_id}) if len(world.targets) > 1 and silent else frozenset()
