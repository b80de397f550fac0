"""Puts and deletes whole batches of rows in an open transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from onceflow.core.bad_rows import BadRows
from onceflow.sinks.sql.errors import RowRefused
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import Target


class DmlExecutor(ABC):
    """What is done with rows, by their write mode. Errors of the server are `SqlError`s."""

    @abstractmethod
    def put(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Put `rows`, of which each key comes once unless they are inserted."""

    def put_all(self, session: Session, target: Target, batches: Iterable[pa.RecordBatch]) -> None:
        """Put one batch after another, by one statement where there is one for all."""
        for rows in batches:
            self.put(session, target, rows)

    @abstractmethod
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Delete the keys of `rows`."""


def apply_without_refused(
    rows: pa.RecordBatch,
    apply: Callable[[pa.RecordBatch], None],
    session: Session,
    bad_rows: BadRows,
) -> Iterator[pa.RecordBatch]:
    """Apply `rows` but those that the server refuses, and yield what it took.

    A refused batch is taken back to a savepoint and halved until the row is alone, so each bad row
    costs about twice the logarithm of the batch in statements.
    """
    try:
        with session.savepoint():
            apply(rows)
    except RowRefused as error:
        if rows.num_rows == 1:
            bad_rows.reject(rows, [str(error)])
            return
    else:
        yield rows
        return
    half = rows.num_rows // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from apply_without_refused(part, apply, session, bad_rows)
