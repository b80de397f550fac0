"""The statements that put rows into tables and delete them, over whole batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import Target
from onceflow.sinks.sql.write_mode import WriteMode


class InsertStream(ABC):
    """Inserts into one table that go to the server as they come. Errors of it are `SqlError`s.

    The server may tell of a refused row one or more calls later, at `finish` at the latest.
    """

    @abstractmethod
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        """Take `rows`, which are converted, and send what is due now.

        `begin` returns the session with the transaction open, and is called only to send: the
        server need not keep a transaction open for rows that wait here.
        """

    @abstractmethod
    def finish(self, session: Session) -> None:
        """Return when the server has taken all rows since the last call as they are."""

    @abstractmethod
    def give_up(self) -> None:
        """Send and await nothing more. Raises nothing; safe to call twice."""


class DmlExecutor(ABC):
    """Puts converted rows by the write mode, and deletes keys. Errors are `SqlError`s."""

    def __init__(self, mode: WriteMode, key: Sequence[str]) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        self.mode = mode
        self.key = tuple(key)

    @abstractmethod
    def inserts(self, target: Target) -> InsertStream:
        """Return what inserts rows into `target`."""

    @abstractmethod
    def change(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Put `rows` by their key, of which each comes once, as the write mode says."""

    @abstractmethod
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Delete the rows of the keys of `rows`, which may have further columns."""

    def put(self, session: Session, target: Target, batches: Iterable[pa.RecordBatch]) -> None:
        """Insert `batches`, or put them by key; the server has taken all when it returns."""
        if self.mode is not WriteMode.INSERT:
            for rows in batches:
                self.change(session, target, rows)
            return
        stream = self.inserts(target)
        try:
            for rows in batches:
                stream.write(lambda: session, rows)
            stream.finish(session)
        except BaseException:
            stream.give_up()
            raise
