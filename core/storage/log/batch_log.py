"""The decisions of batches in a decision log, for targets that have no tables.

    <directory>/batches-<sink id>/log/<sequence>.json      claims and decisions, like those of a job
    <directory>/batches-<sink id>/fenced                   another log has claimed the target

Each sink id has its own log, so any number of queries and jobs may share one directory.

The target may have been claimed by attempts that are not in the log: the directory was cleaned, or
another directory was used before. Then `claim` raises ConfigError and claims nothing, so that no
later retry can claim a higher attempt than those.

A batch is stored as a checkpoint of one operator, whose state holds the batch's number, source,
fingerprint and run. `protocol.log` orders claims and decisions: only one record can follow another.

A target may also note each batch.

The log holds the transactions of a decision and is stored next to the staged rows. The target
itself records the written batches: if the log is another one, or was cleaned, no batch is written
twice.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

import msgspec
from typing_extensions import override

from onceflow.core import errors
from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError, Fenced, SinkError
from onceflow.core.protocol import batches
from onceflow.core.protocol.batches import BatchClaim, BatchDecision, BatchId
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.ids import AttemptId, SubtaskRef
from onceflow.core.protocol.log.rules import NO_ATTEMPT, LogView
from onceflow.core.spi.batch_decisions import NOTED_MAX, BatchDecisions, BatchNotes, Claimant
from onceflow.core.storage.filesystems.filesystem import CreatesAtomically
from onceflow.core.storage.layout import JobPaths, safe_name
from onceflow.core.storage.log.decision_log import ClaimedLog, DecisionLog, DecisionUnknown

RETAINED = 16
"""The number of decisions that are kept; each claim reads all of them."""
_UID = "batch"
_SINCE = ", since "


class _State(msgspec.Struct, frozen=True):
    source: str
    number: int
    fingerprint: str
    run: str


def decision_directory(sink_id: str) -> str:
    """Return the name of the directory with the decisions of `sink_id`."""
    return f"batches-{safe_name(sink_id).replace('+', '-')}"


class LoggedBatchDecisions(BatchDecisions):
    """The decisions of one sink id in one directory. Keeps nothing open."""

    def __init__(
        self,
        files: CreatesAtomically,
        sink_id: str,
        name: str = "",
        newest_in_target: Callable[[], AttemptId] | None = None,
    ) -> None:
        """Store the arguments; `name` is the claimant's. Reads and writes nothing yet.

        `newest_in_target` returns the newest attempt that has claimed the sink id in the target.
        None if the target does not store it.
        """
        self._files = files
        self._newest_in_target = newest_in_target
        self._is_known = False
        """True once all claims in the target are known to be in this log."""
        self._name = name or f"process {os.getpid()} on {socket.gethostname()}"
        self._log = DecisionLog.open(files, JobPaths(decision_directory(sink_id)))
        self._sink_id = sink_id

    def __str__(self) -> str:
        return str(self._log)

    @override
    def claim(
        self, open_sink: Callable[[AttemptId], None], *, after: AttemptId | None = None
    ) -> batches.BatchClaim:
        self._require_not_fenced()
        newest = NO_ATTEMPT
        if self._newest_in_target is not None and not self._is_known:
            # Query the target before reading the log, so that a claim made between the two reads is
            # in the log.
            newest = self._newest_in_target()

        def check(view: LogView) -> None:
            if after is not None and view.attempt != after:
                self.check_newest(after)
            if newest > view.attempt and after is not None:
                raise errors.Fenced(
                    f"sink id {self._sink_id!r}: attempt {after} is fenced: another run, with"
                    f" another stagingLocation, has claimed attempt {newest} in the target and"
                    " continues. Wait for that run to end; then repeat this write"
                )
            if newest > view.attempt:
                self._meet_newer_target(view, newest)

        now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
        try:
            claimed = self._log.claim(f"{self._name}{_SINCE}{now}", [self._sink_id], check=check)
            if newest >= claimed.attempt:
                # The target refuses an attempt that is not newer than the newest that it has seen.
                claimed = claimed.claim_above(newest)
        except DecisionUnknown as error:
            raise errors.StorageError(str(error)) from error
        self._open(open_sink, claimed.attempt)
        # From now on each claim is in the log before it is in the target: no need to query it
        # again.
        self._is_known = True
        return batches.BatchClaim(claimed.attempt, _decisions(claimed.view))

    @override
    def read_claim(self) -> batches.BatchClaim:
        view = self._log.read()
        return batches.BatchClaim(view.attempt, _decisions(view))

    @override
    def claimant(self) -> Claimant:
        view = self._log.read()
        name, _, since = view.owner.partition(_SINCE)
        # The owner ends with a random word that tells two claims apart: remove it.
        return Claimant(view.attempt, name, since.rpartition(" ")[0])

    @override
    def fence(self) -> None:
        self.claim(lambda _: None)

    @override
    def decide(self, decision: batches.BatchDecision) -> batches.BatchDecision:
        view = self._log.read()
        existing = next(
            (known for known in _decisions(view) if known.batch == decision.batch), None
        )
        match batches.check_decision(decision, owner=view.attempt, existing=existing):
            case batches.Stands(standing):
                return standing
            case batches.Overtaken(reason):
                raise errors.Fenced(f"sink id {self._sink_id!r}: {reason}: {self.claimant()}")
            case batches.Decide():
                pass
        try:
            ClaimedLog(self._log, view).append(_to_completed_checkpoint(decision))
        except DecisionUnknown as error:
            raise errors.CommitOutcomeUnknown(f"{decision.batch}: {error}") from error
        return decision

    @override
    def mark_committed(self, decision: batches.BatchDecision) -> None:
        """Prune the log.

        No commit is recorded: the next decision implies that this batch is committed.
        """
        try:
            view = self._log.read()
            if len(view.decided) > RETAINED:
                keep_from = view.decided[-RETAINED].completed.checkpoint
                ClaimedLog(self._log, view).prune(keep_from)
        except (errors.StorageError, errors.CheckpointError):
            # The next batch prunes again.
            return

    @override
    def close(self) -> None:
        """Release nothing."""

    def _open(self, open_sink: Callable[[AttemptId], None], attempt: AttemptId) -> None:
        try:
            open_sink(attempt)
        except errors.Fenced as error:
            if self._newest_in_target is None and self._log.read().attempt == attempt:
                # Each claim of this log is in the log before it is in the target, so another log
                # made this claim.
                self._files.create_if_absent(self._fenced, str(error).encode())
                raise self._another_log(str(error)) from error
            raise

    def _require_not_fenced(self) -> None:
        fenced = self._files.read(self._fenced)
        if fenced is not None:
            raise self._another_log(fenced.decode())

    def _meet_newer_target(self, view: LogView, attempt: AttemptId) -> None:
        """Raise ConfigError: the target was claimed by `attempt`, which is not in the log."""
        raise self._another_log(
            f"the last claim in the target is attempt {attempt}, but the log ends with attempt"
            f" {view.attempt}"
        )

    def _another_log(self, reason: str) -> errors.ConfigError:
        return errors.ConfigError(
            f"sink id {self._sink_id!r}: {self._log} does not hold the decisions of earlier"
            f" writes: {reason}. Either stagingLocation was changed, or its files were deleted."
            " Nothing was written, because it is not known what the earlier writes have written."
            " Give the stagingLocation of the earlier writes. If it is gone for good, look into"
            " the target for the rows that it has, and write only the missing rows, with a new"
            " name in option sinkId"
        )

    @property
    def _fenced(self) -> str:
        return f"{decision_directory(self._sink_id)}/fenced"


def _decisions(view: LogView) -> tuple[batches.BatchDecision, ...]:
    """Return the log's decisions. All but the last are committed, as a new batch requires."""
    last = len(view.decided) - 1
    return tuple(
        _decision(record.completed, is_committed=index < last)
        for index, record in enumerate(view.decided)
    )


def _decision(
    completed: snapshots.CompletedCheckpoint, *, is_committed: bool
) -> batches.BatchDecision:
    ((_, operator),) = completed.operator(_UID)
    state = json_decoder(_State).decode(operator.lists[_UID][0])
    return batches.BatchDecision(
        batches.BatchId(state.source, state.number),
        completed.attempt,
        state.fingerprint,
        state.run,
        operator.committables,
        is_committed=is_committed,
    )


def _to_completed_checkpoint(decision: batches.BatchDecision) -> snapshots.CompletedCheckpoint:
    batch = decision.batch
    state = _State(batch.source, batch.number, decision.fingerprint, decision.run)
    operator = snapshots.OperatorSnapshot(
        _UID, lists={_UID: (msgspec.json.encode(state),)}, committables=decision.committables
    )
    now_ms = time.time_ns() // 1_000_000
    return snapshots.CompletedCheckpoint(
        batches.batch_checkpoint(decision.attempt),
        decision.attempt,
        parallelism=1,
        max_parallelism=1,
        snapshots=(snapshots.SubtaskSnapshot(SubtaskRef(_UID, 0), (operator,)),),
        triggered_at_ms=now_ms,
        completed_at_ms=now_ms,
    )


_log = logging.getLogger("onceflow.spark")


class NotedBatchDecisions(LoggedBatchDecisions):
    """The decisions of one sink id in a directory and a target; `source` numbers the batches."""

    def __init__(
        self, files: CreatesAtomically, sink_id: str, name: str, *, source: str, notes: BatchNotes
    ) -> None:
        """Store the arguments. Reads and writes nothing yet."""
        super().__init__(files, sink_id, name, lambda: notes.read().attempt)
        self._source = source
        self._notes = notes
        self._attempt = NO_ATTEMPT
        """The attempt that this process has claimed; 0 if it has claimed none."""

    @override
    def claim(
        self, open_sink: Callable[[AttemptId], None], *, after: AttemptId | None = None
    ) -> BatchClaim:
        claim = super().claim(open_sink, after=after)
        self._attempt = claim.attempt
        return self._with_noted(claim)

    @override
    def read_claim(self) -> BatchClaim:
        return self._with_noted(super().read_claim())

    @override
    def decide(self, decision: BatchDecision) -> BatchDecision:
        if super().read_claim().decision(decision.batch) is None:
            # The log tells which attempt has claimed since; the target knows only its number.
            self.check_newest(decision.attempt)
            written = self._notes.read().written
            self._notes.write(decision.attempt, begun=decision.batch.number, written=written)
        return super().decide(decision)

    @override
    def mark_committed(self, decision: BatchDecision) -> None:
        number = decision.batch.number
        try:
            noted = self._notes.read()
            if number not in noted.written:
                written = (*noted.written, number)[-NOTED_MAX:]
                attempt = self._attempt or decision.attempt
                self._notes.write(attempt, begun=None, written=written)
        except (SinkError, ConfigError, Fenced) as error:
            _log.warning("%s is written, but that could not be recorded: %s", decision.batch, error)
        super().mark_committed(decision)

    @override
    def _meet_newer_target(self, view: LogView, attempt: AttemptId) -> None:
        """Raise ConfigError if a begun batch is not recorded as written in the target.

        Otherwise each begun batch is recorded, and the other transactions were rolled back.
        """
        begun = self._notes.read().begun
        if begun is not None:
            raise ConfigError(
                f"sink id {self._sink_id!r}: batch {begun} of {self._source} was started with"
                f" another stagingLocation than {self._log}, and there is no record that it was"
                " written: it may be decided there, with its rows staged there. Nothing was"
                " written. Run that batch once more with its former stagingLocation; after that,"
                " use any stagingLocation"
            )

    def _with_noted(self, claim: BatchClaim) -> BatchClaim:
        """Return `claim` with the written batches that only the target still knows."""
        known = {decision.batch.number for decision in claim.decisions}
        noted = tuple(
            BatchDecision(BatchId(self._source, number), NO_ATTEMPT, is_committed=True)
            for number in self._notes.read().written
            if number not in known
        )
        return replace(claim, decisions=(*noted, *claim.decisions))
