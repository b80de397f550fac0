"""Puts and deletes whole batches of rows in an open transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.sinks.postgres.arrays import array_parameters
from onceflow.sinks.postgres.connection import own
from onceflow.sinks.postgres.copying import copy_statement
from onceflow.sinks.postgres.encoder import BinaryRows
from onceflow.sinks.postgres.fitting import fits_of
from onceflow.sinks.postgres.statements import delete_statement, put_statement
from onceflow.sinks.sql.dml import DmlExecutor
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import Target
from onceflow.sinks.sql.write_mode import WriteMode

_BYTES_A_STATEMENT = 16 * 1024 * 1024


class PostgresDmlExecutor(DmlExecutor):
    """COPY for inserts, statements over arrays for changes by key."""

    def __init__(self, mode: WriteMode, key: Sequence[str]) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        self._mode = mode
        self._key = tuple(key)

    @override
    def put(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Put `rows`, of which each key comes once unless they are inserted."""
        self.put_all(session, target, [rows])

    @override
    def put_all(
        self,
        session: Session,
        target: Target,
        batches: Iterable[pa.RecordBatch],
    ) -> None:
        """Put one batch after another; inserts go in by one COPY."""
        if self._mode is WriteMode.INSERT:
            _copy(session, target, batches)
            return
        statement = put_statement(target, self._mode, self._key)
        if statement is None:
            return
        fits = fits_of(target)
        for rows in batches:
            for part in _statement_sized(rows):
                own(session).execute_arrays(statement, array_parameters(fits, part))

    @override
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Delete the keys of `rows`."""
        statement = delete_statement(target, self._key)
        fits = fits_of(target, self._key)
        for part in _statement_sized(rows):
            own(session).execute_arrays(statement, array_parameters(fits, part))


def _copy(session: Session, target: Target, batches: Iterable[pa.RecordBatch]) -> None:
    names = [fit.name for fit in target.fits]
    encoder = BinaryRows(fits_of(target))
    copy = own(session).copy_in(copy_statement(target))
    try:
        copy.write(encoder.begin())
        for rows in batches:
            copy.write(encoder.encode(rows.select(names)))
        copy.write(encoder.end())
    except BaseException:
        copy.give_up()
        raise
    copy.end()


def _statement_sized(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows that are so wide that one statement of them would be a burden."""
    parts = max(1, -(-rows.nbytes // _BYTES_A_STATEMENT))
    size = max(1, -(-rows.num_rows // parts))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)
