"""The statements that write the rows of a batch, each prepared once and run for every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import Target
from onceflow.clients.sqlite.catalog import quote
from onceflow.clients.sqlite.connection import own
from onceflow.sinks.sql.dialect import DmlExecutor, InsertStream
from onceflow.sinks.sql.write_mode import WriteMode


class SQLiteDmlExecutor(DmlExecutor):
    """The executor of SQLite: INSERT, ON CONFLICT for changes by key, UPDATE and DELETE by key."""

    @override
    def inserts(self, target: Target) -> InsertStream:
        return _Inserts(_insert(target))

    @override
    def change(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        names = [fit.name for fit in target.fits]
        others = [name for name in names if name not in self.key]
        if self.mode is WriteMode.UPDATE:
            if others:
                assigned = ", ".join(f"{quote(name)} = ?" for name in others)
                statement = (
                    f"UPDATE {quote(target.name.name)} SET {assigned} WHERE {self._match_key()}"
                )
                own(session).execute_many(statement, _values(rows, [*others, *self.key]))
            return
        put = "DO NOTHING"
        if self.mode is WriteMode.UPSERT and others:
            put = "DO UPDATE SET " + ", ".join(
                f"{quote(name)} = excluded.{quote(name)}" for name in others
            )
        conflict = f"ON CONFLICT ({', '.join(map(quote, self.key))}) {put}"
        own(session).execute_many(f"{_insert(target)} {conflict}", _values(rows, names))

    @override
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        statement = f"DELETE FROM {quote(target.name.name)} WHERE {self._match_key()}"
        own(session).execute_many(statement, _values(rows, self.key))

    def _match_key(self) -> str:
        # The unique index compares every byte, but the column itself may ignore case.
        return " AND ".join(f"{quote(name)} = ? COLLATE BINARY" for name in self.key)


class _Inserts(InsertStream):
    def __init__(self, statement: str) -> None:
        self._statement = statement

    @override
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        own(begin()).execute_many(self._statement, _values(rows, rows.schema.names))

    @override
    def finish(self, session: Session) -> None:
        """Do nothing: every row was accepted when `write` returned."""

    @override
    def give_up(self) -> None:
        """Do nothing: no row is unsent."""


def _insert(target: Target) -> str:
    names = ", ".join(quote(fit.name) for fit in target.fits)
    marks = ", ".join("?" * len(target.fits))
    return f"INSERT INTO {quote(target.name.name)} ({names}) VALUES ({marks})"


def _values(rows: pa.RecordBatch, names: Sequence[str]) -> Iterable[Sequence[object]]:
    return zip(*(rows.column(name).to_pylist() for name in names), strict=True)
