"""Commit records: what is left in checkpoint storage of a transaction that Kafka has committed.

Kafka forgets a group's offsets (`offsets.retention.minutes`, a week by default) and so the commit
offset that proves a commit. A job that was stopped in good order must start again after a month,
and its last checkpoint lists transactions for which nothing is staged any more. Therefore a
committer that knows of a commit seals an empty staged file beside the rows before it deletes them:
the commit record, as durable as the decision log that asks for it.

    staged  recorded  the transaction is
    yes     no        open: the commit offset in Kafka says whether it is committed
    yes     yes       committed; somebody died before the rows were deleted
    no      yes       committed
    no      no        aborted, or lost, or committed and pruned

A commit record carries the name of its transaction with the sequence raised by 9000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from onceflow.core.errors import StorageError
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.staging import StagingArea

_RAISED_BY = 9000
_NOTHING = pa.RecordBatch.from_arrays([], schema=pa.schema([]))


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in a staging area at one moment."""

    staged: Sequence[TransactionId]
    committed: frozenset[TransactionId]
    """The transactions that are known to be committed."""

    @property
    def leftovers(self) -> list[TransactionId]:
        """Return what is committed and still staged."""
        return [transaction for transaction in self.staged if transaction in self.committed]

    @property
    def open(self) -> list[TransactionId]:
        """Return what is staged and not known to be committed."""
        return [transaction for transaction in self.staged if transaction not in self.committed]


class CommitRecords:
    """The commit records of one sink id. Every call may be repeated, also by another process."""

    def __init__(self, area: StagingArea) -> None:
        self._area = area
        self._written: set[TransactionId] | None = None
        """Those not pruned yet, as far as this process knows; None before it has looked."""

    def listed(self) -> Listing:
        """Return what is there now.

        Raises:
            StorageError: Storage cannot be read.
        """
        staged: list[TransactionId] = []
        committed: list[TransactionId] = []
        for name in self._area.transactions():
            if name.sequence < _RAISED_BY:
                staged.append(name)
            else:
                committed.append(replace(name, sequence=name.sequence - _RAISED_BY))
        return Listing(staged, frozenset(committed))

    def has(self, transaction: TransactionId) -> bool:
        """Return whether `transaction` is known to be committed."""
        return self._area.contains(_name_of_record(transaction))

    def settle(self, transaction: TransactionId) -> None:
        """Record that `transaction` is committed, then delete its rows.

        Raises:
            StorageError: It is not recorded, or the rows are still there.
        """
        rows = self._area.open()
        try:
            rows.write(_NOTHING, part="receipt")
            rows.seal(_name_of_record(transaction))
        except StorageError:
            # Somebody else may have sealed the same one.
            if not self.has(transaction):
                raise
        finally:
            rows.close()
        self._area.discard(transaction)
        if self._written is not None:
            self._written.add(transaction)

    def prune(self, before: CheckpointId) -> None:
        """Delete the commit records of checkpoints before `before`.

        The first call looks for those of all attempts and subtasks; further ones know what was
        written here since.

        Raises:
            StorageError: Some are still there.
        """
        known = self.listed().committed if self._written is None else self._written
        old = [transaction for transaction in known if transaction.checkpoint < before]
        for transaction in old:
            self._forget(transaction)
        self._written = set(known).difference(old)

    def _forget(self, transaction: TransactionId) -> None:
        """Delete the rows of `transaction`, then its commit record, which nobody will ask for.

        In this order: rows without their commit record would look as if they were open.
        """
        self._area.discard(transaction)
        self._area.discard(_name_of_record(transaction))


def _name_of_record(transaction: TransactionId) -> TransactionId:
    return replace(transaction, sequence=transaction.sequence + _RAISED_BY)
