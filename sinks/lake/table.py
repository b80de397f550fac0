"""The interface that a table format implements, and the values that it stores: changes and records.

A version of a table is read, and a change is made on top of exactly that version or not at all. A
committer that is overtaken reads the next version and checks again. So if two drivers commit the
same checkpoint, one finds the other's record.

To add a format, add a folder next to sinks/delta:

    table.py        its `LakeTable` and `TableVersion`
    data_files.py   its `DataFiles`, over `lake.data_files`
    layout.py       columns and partitions of a table: checked, created and evolved
    sink.py         the user's class: a `LakeSink` with its options; `CONNECTOR`

Files outside of the folder:

    pyproject.toml              an entry point in `onceflow.sinks`; an extra with the library, named
                                in `all` too; the library in the contract "The engine knows no
                                technology"
    sinks/__init__.py           the sink's public name, three times
    core/imports.py      which extra installs the library
    docs/sinks/                 its page, and a line in README.md
    tests/integration/lake_sink_kit.py      its `LakeJob`: what tests of all formats ask of a format
    tests/support/lake_faults.py            faults of its commits
    tests/conformance/          test_NAME_sink_conforms.py, and its lines in conftest.py

It needs no Spark format, because lake tables have their own.

Staged changes of rows by key:

    part    JSON: the id of the table, and the columns of its key
    rows    the table's columns, then `onceflow_deletes`: whether the key of the row is deleted

A put replaces the whole row of its key. For a delete only the key has a meaning.

The record of a sink id changes in the same atomic step that makes rows visible, so it is their
proof.

Catalogs and stores raise the errors of their clients (HTTP, SQL, Thrift, AWS), and the libraries'
own errors have no common base class. So every exception is caught at the calls into them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError, OnceflowError, SinkError, TargetRefused
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import ATTEMPTS_MAX, Decided
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommitterContext
from onceflow.sinks.base.checks import FenceOwner, check_fence, check_owner


@contextmanager
def library_errors(what: str) -> Generator[None, None, None]:
    """Raise SinkError, whose text begins with `what`, for any exception of a library."""
    try:
        yield
    except OnceflowError:
        raise
    except Exception as error:
        raise SinkError(f"{what}: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """Return the name of a library's error, and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 16
_SLOW_S = 0.001


class Requests:
    """A set of threads for requests, started when they are needed. Used by one thread."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._threads: ThreadPoolExecutor | None = None

    def ask(self, question: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the answers to `items`, in order; raise the exception of the first failed one.

        While answers are faster than a thread would be, the requests stay on the calling thread.
        """
        answers: list[R] = []
        for number, item in enumerate(items):
            began = time.perf_counter()
            answers.append(question(item))
            if time.perf_counter() - began > _SLOW_S:
                return answers + self._ask_at_once(question, items[number + 1 :])
        return answers

    def _ask_at_once(self, question: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(AT_ONCE, "onceflow-lake")
        return list(self._threads.map(question, items))

    def close(self) -> None:
        """End the threads. May be called twice; a further request starts them again."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


DELETES = "onceflow_deletes"
"""The name of the last column of staged rows."""
_NUMBER = "onceflow_number"


class ChangesLabel(msgspec.Struct, frozen=True):
    """The label that is staged with each batch of changes."""

    table_id: str
    """The id of the table for which the changes were written."""
    key: tuple[str, ...]

    def to_part(self) -> str:
        """Return the text that is staged."""
        return msgspec.json.encode(self).decode()


def parse_label(part: str) -> ChangesLabel:
    """Return the label that `to_part` encoded.

    Raises:
        TargetRefused: The text is another one: the rows were staged in another write mode.
    """
    try:
        return json_decoder(ChangesLabel).decode(part)
    except msgspec.DecodeError:
        raise TargetRefused(
            "rows wait for their commit that were written with write_mode='append'; start the job"
            " once with that setting, stop it, and change the setting then"
        ) from None


@dataclass(frozen=True, slots=True)
class RowChanges:
    """The changes of one version, at most one for each key."""

    rows: pa.Table
    """The table's columns, and `DELETES`."""
    key: tuple[str, ...]

    @property
    def puts(self) -> pa.Table:
        """The rows to write: they replace the rows of their keys, or are new."""
        kept = self.rows.filter(pc.invert(self.rows[DELETES]))
        return kept.drop_columns([DELETES])


def merge_changes(staged: Iterable[pa.RecordBatch], key: Sequence[str]) -> RowChanges:
    """Return the last change of each key in `staged`, which is in the order of the changes.

    Holds all of them in memory. Columns that a batch lacks and others have are null.
    """
    tables = [pa.Table.from_batches([batch]) for batch in staged]
    rows = pa.concat_tables(tables, promote_options="permissive")
    numbered = rows.select(key).append_column(_NUMBER, pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(list(key)).aggregate([(_NUMBER, "max")])
    return RowChanges(rows.take(last[f"{_NUMBER}_max"]), tuple(key))


PREFIX = "onceflow."
"""The prefix of the names under which a table, or a version of it, stores facts about a sink id."""


class SinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one sink id of one table, stored as JSON."""

    log_id: str
    job: str
    attempt: int
    """The newest attempt that has claimed the sink id."""
    through: int = 0
    """The last committed checkpoint; 0 before the first."""
    claims: tuple[tuple[int, int], ...] = ()
    """The last checkpoint that was committed when each attempt claimed, by rising attempt."""

    @property
    def owner(self) -> FenceOwner:
        """The decision log that may write, and its newest attempt."""
        return FenceOwner(self.log_id, self.attempt, self.job)

    def advance(self, checkpoint: CheckpointId) -> SinkRecord:
        """Return the record for the time when `checkpoint` is committed."""
        return msgspec.structs.replace(self, through=int(checkpoint))

    def to_json(self) -> str:
        """Return the text that the table stores."""
        return msgspec.json.encode(self).decode()


def parse_record(text: str | None, location: str) -> SinkRecord | None:
    """Return the record that the table stores at `location`, or None if it stores nothing.

    Raises:
        ConfigError: The text is not a record of onceflow.
    """
    if text is None:
        return None
    try:
        return json_decoder(SinkRecord).decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{location} is {text[:200]!r}, which does not read as onceflow's record of what it has"
            f" committed there: {error}. Another program wrote it: set it to the value that the"
            " newest commit of onceflow gave it, or write to another table"
        ) from error


def describe_commit(
    sink_id: str, record: SinkRecord, before: int, transactions: Sequence[TransactionId]
) -> dict[str, str]:
    """Return the facts that a version stores about its commit.

    `before` is the checkpoint before it.
    """
    return {
        f"{PREFIX}sink-id": sink_id,
        f"{PREFIX}log-id": record.log_id,
        f"{PREFIX}attempt": str(record.attempt),
        f"{PREFIX}checkpoint": str(record.through),
        f"{PREFIX}checkpoint-before": str(before),
        f"{PREFIX}attempts": ",".join(
            sorted({str(transaction.attempt) for transaction in transactions})
        ),
    }


def has_committed(described: Mapping[str, Any], sink_id: str, transaction: TransactionId) -> bool:
    """Return True if a version with the facts `described` has committed `transaction`."""
    if described.get(f"{PREFIX}sink-id") != sink_id:
        return False
    attempts = str(described.get(f"{PREFIX}attempts") or "").split(",")
    before = int(described.get(f"{PREFIX}checkpoint-before") or 0)
    last = int(described.get(f"{PREFIX}checkpoint") or 0)
    return before < transaction.checkpoint <= last and str(transaction.attempt) in attempts


def claim_record(record: SinkRecord | None, context: CommitterContext) -> SinkRecord:
    """Return the record after the attempt of `context` has claimed the sink id.

    Raises:
        ConfigError: Another decision log owns the sink id.
        Fenced: This attempt or a newer one has claimed it.
    """
    if record is not None:
        take_over = _take_over(context.sink_id)
        check_fence(context.sink_id, record.owner, _make_owner(context), take_over=take_over)
    through = record.through if record else 0
    claims = (*(record.claims if record else ()), (int(context.attempt), through))
    return SinkRecord(
        log_id=context.log_id,
        job=context.job,
        attempt=context.attempt,
        through=through,
        claims=claims[-ATTEMPTS_MAX:],
    )


def to_target_record(record: SinkRecord | None, context: CommitterContext) -> TargetRecord:
    """Return `record` as the decision log compares it; an empty one if there is no record.

    Raises:
        ConfigError: Another decision log owns the sink id.
    """
    if record is None:
        return TargetRecord(context.sink_id)
    take_over = _take_over(context.sink_id)
    check_owner(context.sink_id, record.owner, _make_owner(context), take_over=take_over)
    return TargetRecord(
        context.sink_id,
        AttemptId(record.attempt),
        through=CheckpointId(record.through),
        claims=tuple(Decided(AttemptId(a), CheckpointId(c)) for a, c in record.claims),
    )


def _make_owner(context: CommitterContext) -> FenceOwner:
    return FenceOwner(context.log_id, context.attempt, context.job)


def _take_over(sink_id: str) -> str:
    """Return the action by which an operator deletes the claim of the sink id from the table."""
    return f"removing the table property 'onceflow.sink.{sink_id}'"


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
        """Return why data files of `staged` cannot become part of the table; empty if they can."""

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
        """Return the data files among `names` that no version which readers may use refers to.

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
            SinkError: The files cannot be made durable.
        """

    @abstractmethod
    def drop(self) -> None:
        """Delete the files that were not ended. May be called twice."""
