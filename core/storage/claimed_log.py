"""The decision log in the hands of the attempt that owns it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from onceflow.core.errors import CheckpointCorrupt, Fenced, StorageError
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log import (
    AppendFenced,
    AppendStands,
    AttemptClaimed,
    CheckpointDecided,
    LogEntry,
    LogView,
    apply,
    claim_again,
    next_decision,
    owner_of,
    prunable,
)
from onceflow.core.protocol.snapshots import CompletedCheckpoint

if TYPE_CHECKING:
    from onceflow.core.storage.decision_log import DecisionLog

_TWO_DRIVERS = "Two drivers ran one job: stop the one that is not wanted"


class ClaimedLog:
    """The log in the hands of its owner. `append` from one thread; `prune` from any."""

    def __init__(self, log: DecisionLog, view: LogView) -> None:
        self._log = log
        self._view = view
        self._lock = threading.Lock()
        self._fenced = ""

    @property
    def attempt(self) -> AttemptId:
        """The number under which the owner runs."""
        return self._view.attempt

    @property
    def view(self) -> LogView:
        """The log as the owner knows it: as of the claim, and its own appends and prunes since."""
        with self._lock:
            return self._view

    def claim_again(self) -> ClaimedLog:
        """Return the log claimed anew by the same driver, after an attempt of its own has failed.

        Raises:
            Fenced: Another driver has claimed the job since, and goes on.
            StorageError: The log cannot be read or written.
            DecisionUnknown: The claim may or may not be in the log; claiming again is safe.
        """
        return self._log.claim_by(self._next_claim)

    def check_owned(self) -> None:
        """Return while no other driver has claimed the job since; changes nothing.

        Raises:
            Fenced: Another has, and goes on.
            StorageError: The log cannot be read.
        """
        self._next_claim(self._log.read())

    def append(self, completed: CompletedCheckpoint) -> None:
        """Make `completed` the log's last decision, durably: the commit point of the whole job.

        Called again with the same value, it only makes sure: a try that raised `StorageError` or
        `DecisionUnknown` may be repeated. A crash leaves the whole decision in the log, or none.

        Raises:
            Fenced: A newer attempt owns the job. This one commits nothing more; whether its
                decision counts is for the newer one to read.
            StorageError: The decision is not in the log and never will be.
            DecisionUnknown: Nobody knows; the attempt must end.
        """
        if self._fenced:
            raise Fenced(self._fenced)
        view = self.view
        if view.decided and view.decided[-1].completed == completed:
            return
        record = next_decision(view, completed)
        digest, verdict = self._log.put(record)
        match verdict:
            case AppendFenced(reason):
                self._fenced = self._explain(record, reason)
                raise Fenced(self._fenced)
            case AppendStands():
                with self._lock:
                    self._view = apply(self._view, LogEntry(record, digest))

    def settle(self, sinks: Iterable[str]) -> None:
        """Forget `sinks`, under which nothing is or will be in doubt, from the next decision on."""
        with self._lock:
            self._view = replace(self._view, memory=self._view.memory.settled(sinks))

    def prune(self, keep_from: CheckpointId) -> None:
        """Delete every record older than the decision of checkpoint `keep_from`. Idempotent.

        The last decision always stays. Delete the files that pruned checkpoints name afterwards:
        a crash in between leaves files that nothing names, and `sweep` finds them.

        Raises:
            StorageError: Some are still there; the next call deletes them.
        """
        view = self.view
        if not view.decided:
            return
        kept = sum(record.completed.checkpoint >= keep_from for record in view.decided)
        retained = max(1, kept)
        first = view.decided[-retained].sequence
        self._log.remove(replace(view, first_sequence=first), prunable(view, retained))
        with self._lock:
            self._view = replace(
                self._view,
                decided=tuple(r for r in self._view.decided if r.sequence >= first),
                first_sequence=first,
                orphans=(),
            )

    def _next_claim(self, view: LogView) -> AttemptClaimed:
        mine = self.view
        try:
            return claim_again(view, owner=mine.owner, attempt=mine.attempt)
        except Fenced as error:
            raise Fenced(f"job {self._log.job}: {error}. {_TWO_DRIVERS}") from None

    def _explain(self, record: CheckpointDecided, reason: str) -> str:
        """Say who owns the job now, and remove the record if it is an orphan."""
        said = f"job {self._log.job}: attempt {record.attempt} is fenced: {reason}"
        try:
            view = self._log.read()
            if record.sequence in view.orphans:
                # Below a chain that only grows upwards: it can never count, whoever deletes it.
                self._log.remove(view, (record.sequence,))
        except (StorageError, CheckpointCorrupt) as error:
            return f"{said}. Who owns the job cannot be read: {error}"
        counts = record in view.decided
        return (
            f"{said}. Attempt {view.attempt} ({owner_of(view)}) owns the job; its decision log ends"
            f" at record {view.last_sequence}, and this decision is {'' if counts else 'not '}part"
            f" of it. {_TWO_DRIVERS}"
        )
