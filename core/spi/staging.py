"""The staging of rows in checkpoint storage between pre-commit and commit.

It is for sinks that prepare nothing. Some targets cannot hold a transaction open for another
process to finish: a managed database, a pooler, Kafka. They still get two phases: the writer stages
rows here at the barrier. After the decision, the committer applies them in one ordinary transaction
that also leaves a proof.

A staged transaction moves one way: absent → sealed → discarded. Sealing is whole or nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import datetime

import pyarrow as pa

from onceflow.core.crash_points import reach
from onceflow.core.errors import StagingMissing
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId

# This text is in the decision log of every job with staged rows: another text would make them
# unreadable.
_MARK = b"staged"


class StagedRows(ABC):
    """The rows of one transaction on their way into storage; used by one thread.

    After a crash before `seal` returns, no process lists the transaction.
    """

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of rows that were written."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch, *, part: str = "") -> None:
        """Add `batch`, labelled `part` for `read`.

        `part` is the sink's own text, such as a table or an operation. Batches of one transaction
        may differ in schema. Large ones wait in a local file.
        """

    @abstractmethod
    def seal(self, transaction: TransactionId) -> Committable:
        """Make the rows durable under `transaction`; any process can read them from then on.

        Raises:
            StorageError: The rows are not durable, or the name is taken.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop unsealed rows. May be called twice."""


class StagingArea(ABC):
    """The staged transactions of one sink id in one job's storage. Used by any thread and process.

    It can be pickled and holds no open resource.
    """

    @abstractmethod
    def open(self) -> StagedRows:
        """Return an empty transaction to write into."""

    @abstractmethod
    def read(self, transaction: TransactionId) -> Iterator[tuple[str, pa.RecordBatch]] | None:
        """Return (part, batch) in the order written, or None if `transaction` is not staged.

        Every byte is verified before the first batch is returned.

        Raises:
            StateCorrupt: The file differs from the sealed one.
            StorageError: The file cannot be read.
        """

    @abstractmethod
    def contains(self, transaction: TransactionId) -> bool:
        """Return True if `transaction` is staged."""

    @abstractmethod
    def transactions(self) -> Sequence[TransactionId]:
        """Return every staged transaction of this sink id, of all attempts, oldest first."""

    def find_seal_time(self, transaction: TransactionId) -> datetime | None:
        """Return the time at which `transaction` was sealed; None if not staged, or unknown."""
        return None

    def is_imported(self, transaction: TransactionId) -> bool:
        """Return True if `transaction` was imported with a savepoint from another storage.

        The job that took the savepoint may have committed it since, from that other storage.

        Raises:
            StorageError: Storage cannot be read.
        """
        del transaction
        return False

    @abstractmethod
    def discard(self, transaction: TransactionId) -> None:
        """Delete the rows staged under `transaction`. Idempotent.

        Raises:
            StorageError: The rows are still there.
        """


class RowStager:
    """A stager of one subtask's rows, one transaction per checkpoint; used by one thread."""

    def __init__(
        self, area: StagingArea, *, sink_id: str, attempt: AttemptId, subtask: int
    ) -> None:
        """Begin without rows."""
        self._area = area
        self._sink_id = sink_id
        self._attempt = attempt
        self._subtask = subtask
        self._rows = area.open()

    def write(self, batch: pa.RecordBatch, *, part: str = "") -> None:
        """Add `batch` to the next transaction, as `StagedRows.write` does."""
        self._rows.write(batch, part=part)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """Make the rows since the last call durable; return no committable if there are none.

        Raises:
            StorageError: The rows are not durable.
        """
        # Write no file without rows. A quiet sink would otherwise write one per checkpoint, and
        # each start would list them all.
        if not self._rows.rows:
            return ()
        # The file has no name yet. Tests kill the process here, and afterwards no transaction may
        # be listed.
        reach("flushed")
        committable = self._rows.seal(
            TransactionId(self._sink_id, self._attempt, checkpoint, self._subtask)
        )
        self._rows = self._area.open()
        return (committable,)

    def close(self) -> None:
        """Drop rows that are not pre-committed. May be called twice."""
        self._rows.close()


def make_staged_committable(transaction: TransactionId, rows: int = 0) -> Committable:
    """Return the handle of rows staged under `transaction`."""
    return Committable(transaction, rows, payload=_MARK)


def is_staged(committable: Committable) -> bool:
    """Return True if `committable` names staged rows, and not rows prepared in the target."""
    return committable.payload == _MARK


def require_staging(staging: StagingArea | None, sink_id: str, what_waits: str) -> StagingArea:
    """Raise StagingMissing if `staging` is None; return it otherwise.

    `what_waits` is the beginning of the error text: the rows that are to wait there, and the
    reason.
    """
    if staging is None:
        raise StagingMissing(
            f"sink {sink_id}: {what_waits} in checkpoint storage, and there is none here"
        )
    return staging
