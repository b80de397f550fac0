"""The owner of the decision log for one attempt. Mirrors ClaimedLog."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.clock import Gone, Steps, Violation
from tests.simulation.storage import Look, digest_of

from onceflow.core.errors import CheckpointCorrupt, ConfigError, Fenced, StorageError
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log import rules
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.protocol.savepoints.savepoint import Savepoint, is_restored, seed_view
from onceflow.core.storage.log.decision_log import DecisionUnknown

if TYPE_CHECKING:
    from tests.simulation.world import Pipeline, World


CREATE_TRIES_MAX = 3
CLAIM_TRIES_MAX = 3


class LogOwner:
    """Appends to the log that it has claimed, until a newer attempt does."""

    def __init__(self, world: World, view: rules.LogView) -> None:
        self._world = world
        self._settled: set[str] = set()
        self.view = view

    @classmethod
    def claims(
        cls, world: World, owner: str, before: AttemptId | None, pipeline: Pipeline
    ) -> Steps[LogOwner]:
        """Read the log and claim it; `before` is what the same driver has claimed.

        Raises ConfigError when the pipeline leaves a sink behind.
        """
        for _ in range(CLAIM_TRIES_MAX):
            try:
                entries: list[rules.LogEntry] = yield world.log.ask(world.log.entries)
            except Gone:
                raise StorageError("the log cannot be read") from None
            view = rules.replay(entries)
            kept = world.kept if world.begins_from_savepoint else None
            if kept is not None and not is_restored(view, "", kept.savepoint):
                view = seed_view(view, kept.savepoint)
            if before is None:
                left = view.sinks.difference(pipeline.sinks, pipeline.retired)
                if left and world.variant.checks_sinks:
                    raise ConfigError(f"nobody settles {', '.join(sorted(left))}")
                claim = rules.next_claim(view, owner, pipeline.sinks)
            else:
                claim = rules.claim_again(view, owner=owner, attempt=before)
            stands, digest = yield from _put(world, claim)
            if stands:
                return cls(world, rules.apply(view, rules.LogEntry(claim, digest)))
        raise Fenced(f"{CLAIM_TRIES_MAX} times another driver has claimed first")

    @property
    def attempt(self) -> AttemptId:
        return self.view.attempt

    def append(self, completed: CompletedCheckpoint) -> Steps[None]:
        """Decide `completed`; raises Fenced, StorageError when it is not in the log, or Unknown."""
        try:
            record = self._world.variant.next_decision(self.view, completed)
        except CheckpointCorrupt as error:
            # The log's rules refuse it, so nothing is lost; but nobody may ever ask for it.
            raise Violation(f"I5 a decision that cannot stand: {error}") from None
        stands, digest = yield from _put(self._world, record)
        if not stands:
            self._world.oracle.check_fenced(record.attempt)
            raise Fenced(f"record {record.sequence} of attempt {record.attempt}")
        view = rules.apply(self.view, rules.LogEntry(record, digest))
        self.view = replace(view, memory=view.memory.without_sinks(self._settled))
        self._world.clock.say(f"attempt {completed.attempt} decides {completed.checkpoint}")

    def begins_from(
        self,
        savepoint: Savepoint,
        location: str,
        records: Iterable[TargetRecord],
        *,
        lacks_own: bool,
    ) -> None:
        view = self._world.variant.view_before(savepoint, self.view, records, lacks_own=lacks_own)
        memory = replace(view.memory, savepoint=f"{savepoint.id} {location}")
        self.view = replace(view, memory=memory)

    def settle(self, sinks: Iterable[str]) -> None:
        self._settled.update(sinks)
        self.view = replace(self.view, memory=self.view.memory.without_sinks(self._settled))

    def prune(self, oldest: CheckpointId) -> None:
        kept = max(1, sum(c.checkpoint >= oldest for c in self.view.completed))
        first = self.view.decided[-kept].sequence
        for sequence in rules.prunable(self.view, kept):
            if self._world.log_fails():
                return
            self._world.log.prune(sequence)
        self.view = replace(
            self.view, decided=self.view.decided[-kept:], first_sequence=first, orphans=()
        )


def _put(world: World, record: rules.LogRecord) -> Steps[tuple[bool, str]]:
    """Return whether `record` is the log's last one, and its digest. Mirrors DecisionLog.put."""
    log, digest = world.log, digest_of(record)
    if world.log_fails():
        raise StorageError("no space for the record")
    standing = yield from _created(world, record, digest)
    if world.variant.takes_what_exists:
        standing = digest
    try:
        look: Look = yield log.ask(lambda: log.look(record))
    except Gone:
        raise DecisionUnknown("the log cannot be looked at") from None
    if standing == digest and not look.follows and world.variant.judged:
        standing = None
    if not world.variant.judged:
        return standing == digest, digest
    verdict = rules.check_append(
        record, digest, standing_digest=standing, highest_sequence=look.highest
    )
    return isinstance(verdict, rules.AppendStands), digest


def _created(world: World, record: rules.LogRecord, digest: str) -> Steps[str | None]:
    """Return the digest of what stands at the record's number after trying to create it."""
    log = world.log
    for number in range(CREATE_TRIES_MAX):
        try:
            standing: str = yield log.ask(lambda: log.create(record, digest))
        except Gone:
            if world.variant.lost_reply_is_refusal:
                raise StorageError("the reply never came") from None
            world.clock.say(f"nobody knows whether record {record.sequence} is created")
        else:
            again = number and world.variant.exists_is_anothers
            return None if again else standing
    raise DecisionUnknown("the reply never came")
