"""The interface that a table format implements for the common committer and writer.

A version of a table is read, and a change is made on top of exactly that version or not at all. A
committer that is overtaken reads the next version and checks again. So if two drivers commit the
same checkpoint, one finds the other's record.

To add a format, add a folder next to sinks/delta:

    table.py        its `LakeTable` and `TableVersion`
    data_files.py   its `DataFiles`, over `lake.rolling_files`
    layout.py       columns and partitions of a table: checked, created and evolved
    sink.py         the user's class: a `LakeSink` with its options; `CONNECTOR`

Files outside of the folder:

    pyproject.toml              an entry point in `onceflow.sinks`; an extra with the library, named
                                in `all` too; the library in the contract "The engine knows no
                                technology"
    sinks/__init__.py           the sink's public name, three times
    core/imports/extras.py      which extra installs the library
    docs/sinks/                 its page, and a line in README.md
    tests/integration/lake_sink_kit.py      its `LakeJob`: what tests of all formats ask of a format
    tests/support/lake_faults.py            faults of its commits
    tests/conformance/          test_NAME_sink_conforms.py, and its lines in conftest.py

It needs no Spark format, because lake tables have their own.
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
    """Raised if another commit came first: no part of this commit is in the table."""


class CommitUnknown(SinkError):
    """Raised if the reply to a commit is lost: it is in the table, or will be, or never will be."""


class TableVersion(ABC):
    """A version of the table. Used by one thread."""

    @property
    @abstractmethod
    def record(self) -> SinkRecord | None:
        """The version's record of the sink id.

        None if nothing was written, or the table was replaced.
        """

    @property
    @abstractmethod
    def damage(self) -> str:
        """The reason why the last commit of the sink id is no longer part of the version.

        Empty if it is.
        """

    @property
    def refusal(self) -> str:
        """The reason why rows cannot be committed before a person changes the table.

        Empty if they can.
        """
        return ""

    @abstractmethod
    def find_loss(self, staged: Sequence[pa.RecordBatch]) -> str:
        """Return why data files of `staged` cannot become part of it; empty if they can."""

    @abstractmethod
    def append(
        self,
        staged: Sequence[pa.RecordBatch],
        record: SinkRecord,
        transactions: Sequence[TransactionId],
    ) -> int:
        """Make the next version, with all data files of `staged` and `record`, in one step.

        Returns the number of these files.

        Raises:
            CommitConflict: Another version came first.
            CommitUnknown: It is unknown whether the version was made.
            SinkError: The version was not made.
        """

    @property
    @abstractmethod
    def table_id(self) -> str:
        """The unique id of the table. A table that replaces it has a different id."""

    @abstractmethod
    def describe_replaced(self, table_id: str) -> str:
        """Return why rows that were written for the table `table_id` cannot go into this one."""

    @abstractmethod
    def replace_rows(
        self, changes: RowChanges, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> int:
        """Make the next version, in which `changes` are applied, with `record`, in one step.

        Returns the number of added files.

        Raises:
            CommitConflict: Another version came first.
            CommitUnknown: It is unknown whether the version was made.
            SinkError: The version was not made.
        """

    @abstractmethod
    def is_committed(self, transaction: TransactionId) -> bool:
        """Return True if the table's history says that `transaction` was committed."""

    @abstractmethod
    def refers_to(self, staged: pa.RecordBatch) -> bool:
        """Return True if any retained version has a data file of `staged`."""

    @abstractmethod
    def find_unnamed(self, names: Collection[str]) -> Collection[str]:
        """Return those of `names`, of data files, that no version needs which readers may use.

        Raises:
            SinkError: The versions cannot be read now.
        """


class LakeTable(ABC):
    """A table for one sink id. It connects when it is first asked; used by one thread."""

    def __init__(self) -> None:
        self.requests = Requests()
        """The threads for requests that a commit sends to a store many times."""

    @abstractmethod
    def load(self) -> TableVersion:
        """Return the newest version.

        Raises:
            SinkError: The table cannot be asked now, or does not exist.
        """

    @abstractmethod
    def list_paths(self, staged: pa.RecordBatch) -> Sequence[str]:
        """Return the paths of the data files of `staged`."""

    @abstractmethod
    def list_files(self) -> Iterator[tuple[str, datetime]]:
        """Yield every file in the directories of data files, with its modification time.

        Raises:
            SinkError: The files cannot be listed.
        """

    @abstractmethod
    def delete_files(self, paths: Sequence[str]) -> None:
        """Delete data files; a file that does not exist is no error.

        Raises:
            SinkError: A file could not be deleted.
        """

    def close(self) -> None:
        """Release every connection and thread. May be called twice."""
        self.requests.close()


class DataFiles(ABC):
    """A writer of the data files of one subtask; used by one thread."""

    @abstractmethod
    def write(self, rows: pa.RecordBatch) -> int:
        """Add `rows`, which have the sink's schema.

        Return the number of rows that were not rejected.

        Raises:
            BadRow: The table can never accept a row, and bad rows fail the job.
            SinkError: The rows cannot be written.
        """

    @abstractmethod
    def end(self, checkpoint: CheckpointId) -> pa.RecordBatch:
        """Make all files durable and begin new ones; return their description, for `TableVersion`.

        Raises:
            SinkError: The files are not durable.
        """

    @abstractmethod
    def drop(self) -> None:
        """Delete the files that were not ended. May be called twice."""
