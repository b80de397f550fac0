"""The decisions of batches in a decision log, with a note of each batch in the target.

The log holds the transactions of a decision and is stored next to the staged rows. The target
itself records the written batches: if the log is another one, or was cleaned, no batch is written
twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from onceflow.core.errors import ConfigError, Fenced, SinkError
from onceflow.core.protocol.batches import BatchClaim, BatchDecision, BatchId
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import NO_ATTEMPT, LogView
from onceflow.core.spi.batch_notes import NOTED_MAX, BatchNotes
from onceflow.core.storage.filesystems.filesystem import CreatesAtomically
from onceflow.core.storage.log.batch_log import LoggedBatchDecisions

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
            _log.warning("%s: that it is written is not noted: %s", decision.batch, error)
        super().mark_committed(decision)

    @override
    def _meet_newer_target(self, view: LogView, attempt: AttemptId) -> None:
        """Raise ConfigError if a begun batch is not recorded as written in the target.

        Otherwise each begun batch is recorded, and the other transactions were rolled back.
        """
        begun = self._notes.read().begun
        if begun is not None:
            raise ConfigError(
                f"sink id {self._sink_id!r}: batch {begun} of {self._source} was begun with another"
                f" stagingLocation than {self._log}, and it is not noted to be written: it may be"
                " decided there, and its rows wait there. Nothing was written. Run that batch once"
                " more with the stagingLocation that it had; after that any other one will do"
            )

    def _with_noted(self, claim: BatchClaim) -> BatchClaim:
        known = {decision.batch.number for decision in claim.decisions}
        noted = tuple(
            BatchDecision(BatchId(self._source, number), NO_ATTEMPT, is_committed=True)
            for number in self._notes.read().written
            if number not in known
        )
        return replace(claim, decisions=(*noted, *claim.decisions))
