"""What a table format gives to the common committer and writer.

A version of a table is read, and a change is made on top of exactly that version or not at all:
whoever is overtaken reads the next version and looks again. So of two drivers that commit the same
checkpoint one finds the other's record.

To add a format, a folder beside sinks/delta:

    table.py        its `LakeTable` and `TableVersion`
    data_files.py   its `DataFiles`, over `lake.rolling_files`
    layout.py       columns and partitions of a table: checked, created and evolved
    sink.py         the user's class: a `LakeSink` with its options; `CONNECTOR`

Outside of the folder:

    pyproject.toml              an entry point in `onceflow.sinks`; an extra with the library, named
                                in `all` too; the library in the contract "The engine knows no
                                technology"
    sinks/__init__.py           the sink's public name, three times
    core/imports/extras.py      which extra installs the library
    docs/sinks/                 its page, and a line in README.md
    tests/integration/lake_sink_kit.py      its `LakeJob`: what tests of all formats ask of one
    tests/support/lake_faults.py            faults of its commits
    tests/conformance/          test_NAME_sink_conforms.py, and its lines in conftest.py

There is no format of Spark for it: lakes bring their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime

import pyarrow as pa

from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks.lake.changes import RowChanges
from onceflow.sinks.lake.requests import Requests
from onceflow.sinks.lake.sink_record import SinkRecord


class CommitConflict(Exception):
    """Raised when another commit came first: nothing of this one is in the table."""


class CommitUnknown(SinkError):
    """Raised when the reply to a commit is lost: it is in the table, or will be, or never is."""


class TableVersion(ABC):
    """One version of the table. Used by one thread."""

    @property
    @abstractmethod
    def record(self) -> SinkRecord | None:
        """What it records of the sink id; None: nothing was written, or the table is another."""

    @property
    @abstractmethod
    def damage(self) -> str:
        """Why the last commit of the sink id is not part of it any more; empty when it is."""

    @property
    def refusal(self) -> str:
        """Why rows cannot be committed to it before somebody changes it; empty when they can."""
        return ""

    @abstractmethod
    def find_loss(self, staged: Sequence[pa.RecordBatch]) -> str:
        """Return why data files of `staged` cannot become part of it; empty when they can."""

    @abstractmethod
    def append(
        self,
        staged: Sequence[pa.RecordBatch],
        record: SinkRecord,
        transactions: Sequence[TransactionId],
    ) -> int:
        """Make the next version, with all data files of `staged` and `record`, in one step.

        Returns how many files these are.

        Raises:
            CommitConflict: Another version came first.
            CommitUnknown: Nobody knows whether it was made.
            SinkError: It was not made.
        """

    @property
    @abstractmethod
    def table_id(self) -> str:
        """The id of the table, which another one in its place does not have."""

    @abstractmethod
    def describe_replaced(self, table_id: str) -> str:
        """Return why rows that were written for the table `table_id` cannot go into this one."""

    @abstractmethod
    def replace_rows(
        self, changes: RowChanges, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> int:
        """Make the next version, in which `changes` are applied, with `record`, in one step.

        Returns how many files were added.

        Raises:
            CommitConflict: Another version came first.
            CommitUnknown: Nobody knows whether it was made.
            SinkError: It was not made.
        """

    @abstractmethod
    def is_committed(self, transaction: TransactionId) -> bool:
        """Return whether the table's history says that `transaction` was committed."""

    @abstractmethod
    def refers_to(self, staged: pa.RecordBatch) -> bool:
        """Return whether any version that is kept has a data file of `staged`."""

    @abstractmethod
    def find_unnamed(self, names: Collection[str]) -> Collection[str]:
        """Return those of `names`, of data files, that no version needs which readers may ask for.

        Raises:
            SinkError: It cannot be told now.
        """


class LakeTable(ABC):
    """One table, for one sink id. Connects when it is first asked; used by one thread."""

    def __init__(self) -> None:
        self.requests = Requests()
        """For what is asked of a store many times in a commit."""

    @abstractmethod
    def load(self) -> TableVersion:
        """Return the newest version.

        Raises:
            SinkError: The table cannot be asked now, or is not there.
        """

    @abstractmethod
    def list_paths(self, staged: pa.RecordBatch) -> Sequence[str]:
        """Return the paths of the data files of `staged`."""

    @abstractmethod
    def list_files(self) -> Iterator[tuple[str, datetime]]:
        """Yield every file where data files are, with the time at which it was written last.

        Raises:
            SinkError: They cannot be listed.
        """

    @abstractmethod
    def delete_files(self, paths: Sequence[str]) -> None:
        """Delete data files; those that are gone are no error.

        Raises:
            SinkError: One is still there.
        """

    def close(self) -> None:
        """Release every connection and thread. Safe to call twice."""
        self.requests.close()


class DataFiles(ABC):
    """Writes the data files of one subtask; one thread."""

    @abstractmethod
    def write(self, rows: pa.RecordBatch) -> int:
        """Add `rows`, which have the sink's schema; return how many of them were not rejected.

        Raises:
            BadRow: The table can never take one, and bad rows fail the job.
            SinkError: They cannot be written.
        """

    @abstractmethod
    def end(self, checkpoint: CheckpointId) -> pa.RecordBatch:
        """Make all files durable and begin anew; return what describes them, for `TableVersion`.

        Raises:
            SinkError: They are not durable.
        """

    @abstractmethod
    def drop(self) -> None:
        """Delete what was not ended. Safe to call twice."""
