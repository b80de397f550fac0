"""Starts from storage that is behind its targets: they must be refused, at every try.

The storage is as it once was, beside the one that the job went on in. Nothing of it runs: what its
driver asks before it decides anything is asked here, and what should come out is counted from what
targets have committed since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.clock import Violation
from tests.simulation.targets import Target, Versioned

from onceflow.core.errors import SavepointRefused, StorageBehind
from onceflow.core.protocol.checkpoints.snapshots import committables_of
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.rules import LogEntry, LogView, apply, next_claim, replay
from onceflow.core.protocol.log.target_records import TargetRecord, to_record
from onceflow.core.protocol.savepoints.savepoint import seed_view

if TYPE_CHECKING:
    from tests.simulation.savepoints import Kept
    from tests.simulation.world import World

TRIES = 8
"""More than there are attempts in most schedules: numbers of attempts catch up."""


@dataclass(frozen=True)
class OlderCopy:
    """The decision log as it once was."""

    view: LogView
    known: frozenset[TransactionId]
    """What was committed, or decided to be, by then."""

    @classmethod
    def take(cls, world: World) -> OlderCopy:
        view = replay(world.log.entries())
        listed = committables_of(view.completed[-1]) if view.decided else ()
        return cls(view, committed_in(world) | {one.transaction for one in listed})


def committed_in(world: World) -> frozenset[TransactionId]:
    """Return what the targets that keep a proof of each transaction have committed."""
    targets = [t for t in world.targets.values() if not isinstance(t, Versioned)]
    return frozenset[TransactionId]().union(*(t.proofs | t.pruned for t in targets))


def records_of(targets: Iterable[Target]) -> tuple[TargetRecord, ...]:
    """Return what those of `targets` tell that keep a proof of each transaction."""
    return tuple(
        to_record(
            t.sink_id, max((p.attempt for p in t.proofs), default=0), t.proofs, proofs=t.proofs
        )
        for t in targets
        if not isinstance(t, Versioned)
    )


def whole_records_of(targets: Iterable[Target]) -> tuple[TargetRecord, ...]:
    """Return what those of `targets` tell that commit whole checkpoints."""
    return tuple(
        TargetRecord(t.sink_id, through=t.highest, claims=tuple(t.claims))
        for t in targets
        if isinstance(t, Versioned)
    )


def check_older_copy(world: World, copy: OlderCopy) -> None:
    """Raise Violation unless a start from `copy` is refused where it would write rows again."""
    since = committed_in(world) - copy.known
    if not since or world.went_back or world.has_gone_back:
        return
    view = copy.view
    for _ in range(TRIES):
        view = _claimed(view)
        try:
            world.variant.require_not_behind(
                view, records_of(world.targets.values()), "an older copy"
            )
        except StorageBehind:
            continue
        raise Violation(
            f"I7 attempt {view.attempt} begins from an older copy of the log, and"
            f" {min(since, key=str)} was committed since: its rows are written again"
        )


def check_kept_savepoint(world: World, kept: Kept) -> None:
    """Raise Violation unless a start in empty storage is refused after later commits."""
    taken = kept.savepoint.completed
    listed = {committable.transaction for committable in committables_of(taken)}
    targets = world.targets.values()
    whole = frozenset[TransactionId]().union(
        *(t.proofs for t in targets if isinstance(t, Versioned))
    )
    since = {
        one
        for one in committed_in(world) - kept.committed - listed
        if (one.attempt, one.checkpoint) > (taken.attempt, taken.checkpoint)
        and not (kept.savepoint.kind.ends_emission and one.attempt == taken.attempt)
    }
    since |= {one for one in whole - listed if one.attempt > taken.attempt}
    if not since or world.went_back or world.has_gone_back:
        return
    view = LogView()
    for _ in range(TRIES):
        view = _claimed(seed_view(view, kept.savepoint))
        records = (*records_of(targets), *whole_records_of(targets))
        try:
            world.variant.check_targets(
                kept.savepoint, view, records, all_tell=True, allow_rewind=False
            )
        except SavepointRefused:
            continue
        raise Violation(
            f"I7 attempt {view.attempt} begins from savepoint {taken.checkpoint} in empty storage,"
            f" and {min(since, key=str)} was committed since: its rows are written again"
        )


def _claimed(view: LogView) -> LogView:
    claim = next_claim(view, "elsewhere")
    return apply(view, LogEntry(claim, f"digest {claim.sequence} elsewhere"))
