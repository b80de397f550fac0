"""The thread that reads the first copy of a table, chunk by chunk, ahead of the reader.

Each chunk is one transaction with one snapshot. The table is locked against other columns before
REPEATABLE READ takes the snapshot, because a rewritten table is empty for an older snapshot. A
table whose keys cannot be ordered here is one chunk without an end. So is a table whose keys no
index has in the order of this process, but its rows are sorted, and its copy can continue.

Every chunk checks that the table still has the described columns. A new column's values would be
lost otherwise: the chunk would have the update that sets them, but not the column.

Before the first chunk the thread waits until every transaction has ended that was running after the
slot was created. A transaction writes its commit to the WAL before snapshots see it, and with
synchronous replication long before. So without the wait a transaction could be missing in both the
slot and the chunks.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.clients.postgres.catalog import identifier, literal, quote
from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession
from onceflow.clients.postgres.replication import parse_lsn
from onceflow.core.errors import BadRecord, SourceUnavailable
from onceflow.sources.postgres.first_copy import CopiedChunks, Key, Snapshot
from onceflow.sources.postgres.keys import key_literals, key_of
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.slot import connect, logger
from onceflow.sources.postgres.table import SourceColumn, SourceTable
from onceflow.sources.postgres.text_values import TEXT_SETTINGS

UNORDERED: Key = ()
"""The upper key of a part of a table that is copied as a whole: the copy cannot continue there."""

_QUEUED_MAX = 2
_WAIT_S = 0.05
REPORTED_AFTER_S = 10.0
"""The time after which a wait for running transactions is reported."""
_REPORTED_EVERY_S = 60.0
_HEADER_SIZE = 19
"""The signature, the flags, and the length of an extension that no server sends."""
_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_COUNT = struct.Struct("!h")
_LENGTH = struct.Struct("!i")
_BEGIN = """
    BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
    LOCK TABLE ONLY {table} IN ACCESS SHARE MODE;
    SET LOCAL row_security = off;
    SET LOCAL statement_timeout = 0;
    SET LOCAL idle_in_transaction_session_timeout = 0;
    SELECT pg_catalog.set_config(name, '0', true) FROM pg_catalog.pg_settings
    WHERE name = 'transaction_timeout' AND setting <> '0';
    {text_settings}
"""
_TEXT_SETTINGS = "; ".join(
    f"SET LOCAL {name} = {literal(value)}" for name, value in TEXT_SETTINGS.items()
)
_SNAPSHOT = """
    SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_current_wal_insert_lsn()::text
"""
_COLUMNS = """
    SELECT a.attname::text, a.atttypid::bigint FROM pg_catalog.pg_attribute AS a
    WHERE a.attrelid = pg_catalog.to_regclass({name}) AND a.attrelid = {oid}
      AND a.attnum > 0 AND NOT a.attisdropped
"""
_RUNNING = """
    SELECT 'session ' || pid || ' of ' || coalesce(usename, '?') || ' since ' || xact_start
    FROM pg_catalog.pg_stat_activity
    WHERE backend_xid IS NOT NULL AND pid <> pg_catalog.pg_backend_pid()
    UNION ALL
    SELECT 'prepared transaction ' || pg_catalog.quote_literal(gid) || ' since ' || prepared
    FROM pg_catalog.pg_prepared_xacts
    ORDER BY 1 LIMIT 5
"""

CopiedRow: TypeAlias = tuple[bytes | None, ...]


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Some rows of the table, and the copied chunks after them."""

    rows: Sequence[CopiedRow]
    copied: CopiedChunks


class CopyThread:
    """A thread that reads the table from where the copy of `position` ends."""

    def __init__(
        self,
        endpoint: PostgresEndpoint,
        name: str,
        table: SourceTable,
        position: SlotPosition,
        *,
        chunk_rows: int,
        batch_rows: int,
    ) -> None:
        self._endpoint, self._name = endpoint, name
        self._table = table
        self._copy_anew = position.copy_anew
        self._copied = position.table.copied or CopiedChunks()
        self._chunk_rows, self._batch_rows = chunk_rows, batch_rows
        self._queue: queue.Queue[CopiedRows | Exception] = queue.Queue(_QUEUED_MAX)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="first copy", daemon=True)
        self._thread.start()

    def poll(self, timeout_s: float) -> CopiedRows | None:
        """Return the next rows, or None if none came in `timeout_s`.

        Raises:
            Exception: The thread has failed.
        """
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Ask the thread to end. It may wait for the server a little longer."""
        self._closed.set()

    def _put(self, item: CopiedRows | Exception) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_WAIT_S)
            except queue.Full:
                continue
            return

    def _run(self) -> None:
        try:
            with connect(self._endpoint, self._name) as session:
                if not self._copied.chunks:
                    self._await_running(session)
                while not self._closed.is_set() and not self._copied.is_finished:
                    self._copy_chunk(session)
        except Exception as error:
            self._put(error)

    def _await_running(self, session: PostgresSession) -> None:
        """Wait until every transaction has ended that was running at the call.

        A snapshot lists no running transaction that is newer than all that have ended. The id that
        this method takes ends at once, so later snapshots list all older ones.
        """
        ((own,),) = session.query("SELECT pg_catalog.pg_current_xact_id()::text")
        report_at = time.monotonic() + REPORTED_AFTER_S
        while not self._closed.is_set():
            ((text,),) = session.query("SELECT pg_catalog.pg_current_snapshot()::text")
            if Snapshot.parse(text).has_ended_before(int(own)):
                return
            if time.monotonic() > report_at:
                self._report_running(session)
                report_at = time.monotonic() + _REPORTED_EVERY_S
            time.sleep(_WAIT_S)

    def _report_running(self, session: PostgresSession) -> None:
        running = [str(shown) for (shown,) in session.query(_RUNNING)]
        logger.warning(
            "the first copy of table %s waits for transactions that were running when the slot was"
            " created: %s. Commit or end them",
            self._table.name,
            "; ".join(running) or "their sessions are not shown to this user",
        )

    def _copy_chunk(self, session: PostgresSession) -> None:
        begin = _BEGIN.format(table=identifier(self._table.name), text_settings=_TEXT_SETTINGS)
        session.execute(begin)
        ((snapshot, lsn),) = session.query(_SNAPSHOT)
        self._require_columns(session)
        self._read_rows(session, str(snapshot), parse_lsn(lsn))
        session.commit()

    def _require_columns(self, session: PostgresSession) -> None:
        """Raise BadRecord if the locked table has other columns than the described one."""
        table = self._table
        name = literal(identifier(table.name))
        present = dict(session.query(_COLUMNS.format(name=name, oid=table.oid)))
        is_same = all(present.get(c.name) == c.type_number for c in table.columns)
        added = set(present) - {c.name for c in table.columns} - table.ignored
        if not is_same or (table.reads_all and added):
            raise BadRecord(
                f"the columns of table {table.name} were changed during its first copy, which"
                f" cannot continue with the rows that were copied before. {self._copy_anew}"
            )

    def _read_rows(self, session: PostgresSession, snapshot: str, lsn: int) -> None:
        table = self._table
        count = 0
        batch: list[CopiedRow] = []
        statement = select_chunk(table, self._copied, self._chunk_rows)
        for row in read_rows(session.copy_out(statement)):
            batch.append(row)
            count += 1
            if len(batch) >= self._batch_rows:
                self._pass_on(batch, snapshot, lsn)
                batch = []
            if self._closed.is_set():
                return
        is_last = not table.has_small_chunks or count < self._chunk_rows
        if is_last:
            self._copied = self._copied.extend(None, snapshot, lsn, len(batch))
            self._put(CopiedRows(batch, self._copied))
        elif batch:
            self._pass_on(batch, snapshot, lsn)

    def _pass_on(self, batch: Sequence[CopiedRow], snapshot: str, lsn: int) -> None:
        upper = key_of(self._table, batch[-1]) if self._table.has_chunks else UNORDERED
        self._copied = self._copied.extend(upper, snapshot, lsn, len(batch))
        self._put(CopiedRows(batch, self._copied))


def select_chunk(table: SourceTable, copied: CopiedChunks, rows: int) -> str:
    """Return the COPY of the next `rows` rows after `copied`, or of the whole table."""
    columns = ", ".join(map(_select_column, table.columns))
    query = f"SELECT {columns} FROM {identifier(table.name)}"
    if table.has_chunks:
        key = ", ".join(column.order_expression for column in table.key_columns)
        if copied.last_key is not None:
            query += f" WHERE ({key}) > ({key_literals(table, copied.last_key)})"
        query += f" ORDER BY {key}"
        if table.has_small_chunks:
            query += f" LIMIT {rows}"
    return f"COPY ({query}) TO STDOUT (FORMAT binary)"


def _select_column(column: SourceColumn) -> str:
    """Return the expression of the column's values.

    `format` calls the type's output function, as the stream does; a cast to text would add blanks
    or netmasks for some types. A composite value with a null in it is not null.
    """
    name = quote(column.name)
    if not column.is_text_form:
        return name
    return f"CASE WHEN pg_catalog.num_nulls({name}) = 0 THEN pg_catalog.format('%s', {name}) END"


def read_rows(messages: Iterator[bytes]) -> Iterator[CopiedRow]:
    """Yield the rows in the messages of a binary COPY.

    Raises:
        SourceUnavailable: The COPY ended without its end mark.
    """
    is_first = True
    for message in messages:
        at = 0
        if is_first:
            if not message.startswith(_SIGNATURE):
                raise SourceUnavailable("a COPY does not begin with the signature of its format")
            at, is_first = _HEADER_SIZE, False
        while at < len(message):
            (count,) = _COUNT.unpack_from(message, at)
            at += _COUNT.size
            if count < 0:
                return
            values: list[bytes | None] = []
            for _ in range(count):
                (size,) = _LENGTH.unpack_from(message, at)
                at += _LENGTH.size
                if size < 0:
                    values.append(None)
                else:
                    values.append(message[at : at + size])
                    at += size
            yield tuple(values)
    raise SourceUnavailable("a COPY ended without its end mark")
