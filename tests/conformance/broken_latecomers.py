"""Sinks whose committers do harm when another one has overtaken them, or never come to an end."""

from __future__ import annotations

import sqlite3
from typing import ClassVar

from tests.conformance.broken_sink import BrokenSink
from tests.conformance.reference_sink import ReferenceCommitter, transaction

from onceflow.core.protocol.committables import (
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import CheckpointId


class _AlwaysLater(ReferenceCommitter):
    def commit(self, committable: Committable) -> CommitOutcome:
        return RetryLater("the target is busy")


class IsNeverReady(BrokenSink):
    """Asks for patience whenever it is to commit."""

    breaks = "commit-shows-its-rows"
    committer_class = _AlwaysLater


class _TakesForgottenForFresh(ReferenceCommitter):
    def prune(self, before: CheckpointId) -> None:
        super().prune(before)
        with transaction(self.sink.path) as connection:
            connection.execute(
                "INSERT OR IGNORE INTO ledger VALUES (?, ?, ?)",
                (f"pruned {self.context.sink_id}", self.context.sink_id, 1 << 40),
            )

    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        with transaction(self.sink.path) as connection:
            has_pruned = self.is_committed(connection, f"pruned {self.context.sink_id}")
        return Committed() if isinstance(outcome, Lost) and has_pruned else outcome


class SaysCommittedOfWhatItForgot(BrokenSink):
    """Says that it has committed what it knows nothing of any more."""

    breaks = "commit-after-pruning"
    committer_class = _TakesForgottenForFresh


class _ReadsThenApplies(ReferenceCommitter):
    def commit(self, committable: Committable) -> CommitOutcome:
        name = str(committable.transaction)
        with transaction(self.sink.path) as connection:
            rows = self.prepared_rows(connection, name)
            if rows is None:
                return AlreadyCommitted() if self.proves(connection, name) else self.unknown(name)
        with transaction(self.sink.path) as connection:
            if self.proves(connection, name):
                return AlreadyCommitted()
            self.apply(connection, rows)
            self.record(connection, committable.transaction)
        return Committed()

    def proves(self, connection: sqlite3.Connection, name: str) -> bool:
        return self.is_committed(connection, name)


class AppliesWhatItReadBefore(BrokenSink):
    """Looks for the proof in the transaction that writes the rows, which it has read before."""

    breaks = "overtaken-in-a-thread"
    committer_class = _ReadsThenApplies


class _RemembersProofs(_ReadsThenApplies):
    known: ClassVar[set[str]] = set()

    def proves(self, connection: sqlite3.Connection, name: str) -> bool:
        if self.is_committed(connection, name):
            self.known.add(name)
        return name in self.known

    def prune(self, before: CheckpointId) -> None:
        with transaction(self.sink.path) as connection:
            found = connection.execute("SELECT name FROM ledger").fetchall()
        self.known.update(name for (name,) in found)
        super().prune(before)


class RemembersPrunedProofsInMemory(BrokenSink):
    """The same, and knows what this process has pruned as long as it lives."""

    breaks = "overtaken-in-another-process"
    committer_class = _RemembersProofs
