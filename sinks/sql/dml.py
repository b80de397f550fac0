"""Puts and deletes whole batches of rows in an open transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

import pyarrow as pa

from onceflow.core.bad_rows import BadRows
from onceflow.sinks.sql.connection import ConnectionT
from onceflow.sinks.sql.failures import ErrorT, Failures

_TargetT = TypeVar("_TargetT")


class DmlExecutor(ABC, Generic[ConnectionT, _TargetT]):
    """What is done with rows, by their write mode. Errors are the driver's own."""

    @abstractmethod
    def put(self, connection: ConnectionT, target: _TargetT, rows: pa.RecordBatch) -> None:
        """Put `rows`, of which each key comes once unless they are inserted."""

    def put_all(
        self, connection: ConnectionT, target: _TargetT, batches: Iterable[pa.RecordBatch]
    ) -> None:
        """Put one batch after another, by one statement where there is one for all."""
        for rows in batches:
            self.put(connection, target, rows)

    @abstractmethod
    def delete(self, connection: ConnectionT, target: _TargetT, rows: pa.RecordBatch) -> None:
        """Delete the keys of `rows`."""

    @abstractmethod
    def savepoint(self, connection: ConnectionT) -> AbstractContextManager[object]:
        """Take back what was done in a block, and only that, when a refused row is its end."""


def apply_without_refused(
    rows: pa.RecordBatch,
    apply: Callable[[pa.RecordBatch], None],
    savepoint: Callable[[], AbstractContextManager[object]],
    failures: Failures[ConnectionT, ErrorT],
    bad_rows: BadRows,
) -> Iterator[pa.RecordBatch]:
    """Apply `rows` but those that the server refuses, and yield what it took.

    A refused batch is taken back to a savepoint and halved until the row is alone, so each bad row
    costs about twice the logarithm of the batch in statements.
    """
    try:
        with savepoint():
            apply(rows)
    except failures.errors as error:
        if not failures.is_row_refused(error):
            raise
        if rows.num_rows == 1:
            bad_rows.reject(rows, [failures.described(error)])
            return
    else:
        yield rows
        return
    half = rows.num_rows // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from apply_without_refused(part, apply, savepoint, failures, bad_rows)
