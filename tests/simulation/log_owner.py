"""What owns the decision log for one attempt. Mirrors ClaimedLog."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.storage import digest_of

from onceflow.core.errors import ConfigError, Fenced, StorageError
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log import (
    AppendStands,
    LogEntry,
    LogRecord,
    apply,
    check_append,
    claim_again,
    next_claim,
    next_decision,
    prunable,
    replay,
)
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.storage.decision_log import DecisionUnknown

if TYPE_CHECKING:
    from tests.simulation.world import Pipeline, World


class LogOwner:
    """Reads the log, claims it, and appends to it until a newer attempt does."""

    def __init__(
        self, world: World, owner: str, before: AttemptId | None, pipeline: Pipeline
    ) -> None:
        """Claim the log; raises ConfigError when the pipeline leaves a sink behind."""
        self._world = world
        self._settled: set[str] = set()
        self.view = replay(world.log.entries())
        if before is None:
            left = self.view.sinks.difference(pipeline.sinks, pipeline.retired)
            if left and world.variant.checks_sinks:
                raise ConfigError(f"nobody settles {', '.join(sorted(left))}")
            claim = next_claim(self.view, owner, pipeline.sinks)
        else:
            claim = claim_again(self.view, owner=owner, attempt=before)
        self._put(claim)
        world.claimed = max(world.claimed, claim.attempt)

    @property
    def attempt(self) -> AttemptId:
        return self.view.attempt

    def append(self, completed: CompletedCheckpoint) -> None:
        """Decide `completed`; raises Fenced, StorageError when it is not in the log, or Unknown."""
        record = next_decision(self.view, completed)
        self._put(record)
        self._world.clock.say(f"attempt {completed.attempt} decides {completed.checkpoint}")

    def begins_from(self, savepoint: str) -> None:
        self.view = replace(self.view, memory=replace(self.view.memory, savepoint=savepoint))

    def settle(self, sinks: Iterable[str]) -> None:
        self._settled.update(sinks)
        self.view = replace(self.view, memory=self.view.memory.settled(self._settled))

    def prune(self, oldest: CheckpointId) -> None:
        kept = max(1, sum(c.checkpoint >= oldest for c in self.view.completed))
        first = self.view.decided[-kept].sequence
        for sequence in prunable(self.view, kept):
            if self._world.log_fails():
                return
            self._world.log.records.pop(sequence, None)
        self.view = replace(
            self.view, decided=self.view.decided[-kept:], first_sequence=first, orphans=()
        )

    def _put(self, record: LogRecord) -> None:
        world, log = self._world, self._world.log
        if world.log_fails():
            raise StorageError("no space for the record")
        if world.variant.fenced:
            digest = log.create(record)
        else:
            digest = digest_of(record)
            log.records[record.sequence] = LogEntry(record, digest)
        verdict = check_append(
            record,
            digest,
            standing_digest=log.standing(record.sequence),
            highest_sequence=max(log.records),
        )
        stands = isinstance(verdict, AppendStands)
        if not world.variant.judged:
            stands = log.standing(record.sequence) == digest
        if not stands:
            raise Fenced(f"record {record.sequence}: {verdict}")
        self._world.oracle.appended(record)
        if world.log_fails():
            raise DecisionUnknown("the reply never came")
        self.view = apply(self.view, LogEntry(record, digest))
        self.settle(())
