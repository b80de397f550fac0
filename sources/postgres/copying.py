"""The threads that read the first copies of tables, chunk by chunk, ahead of the reader.

A coordinator divides each large table into ranges of its key. Workers then read the ranges of all
tables, each on a connection of its own. A range is read by one worker, in the order of its key.

Each chunk is one transaction with one snapshot. The table is locked against other columns before
REPEATABLE READ takes the snapshot, because a rewritten table is empty for an older snapshot. A
table whose keys cannot be ordered here is one chunk without an end. So is a table whose keys no
index has in the order of this process, but its rows are sorted, and its copy can continue.

Every chunk checks that the table still has the described columns. A new column's values would be
lost otherwise: the chunk would have the update that sets them, but not the column.

A copy without a stream has one snapshot for all tables, which the coordinator exports. Each worker
reads all of its ranges in one transaction, which locks every table and partition.

Every transaction that a snapshot sees is flushed to the server's disk before rows are passed on.

Before the first chunk of a table that is followed, the coordinator waits until every transaction
has ended that was running after the slot was created and the table was published. A transaction
writes its commit to the WAL before snapshots see it, and with synchronous replication long before.
So without the wait a transaction could be missing in both the slot and the chunks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from onceflow.clients.postgres.binary_rows import BinaryColumn, RowBuffer, split_copy_rows
from onceflow.clients.postgres.catalog import identifier, literal, quote
from onceflow.clients.postgres.connection import GATHERED_BYTES, PostgresSession
from onceflow.clients.postgres.replication import format_lsn, parse_lsn
from onceflow.core.errors import BadRecord, SourceUnavailable
from onceflow.sources.postgres.copy_alone import require_same_snapshot
from onceflow.sources.postgres.first_copy import CopiedChunks, Key, Snapshot
from onceflow.sources.postgres.keys import key_literals, key_of
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.row_builder import RowBuilder
from onceflow.sources.postgres.settings import ReaderSettings
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
_END = b"\xff\xff"
_BEGIN = """
    BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
    {first}
    LOCK TABLE {tables} IN ACCESS SHARE MODE;
    SET LOCAL row_security = off;
    SET LOCAL statement_timeout = 0;
    SET LOCAL idle_in_transaction_session_timeout = 0;
    SELECT pg_catalog.set_config('transaction_timeout', '0', true)
    WHERE pg_catalog.current_setting('transaction_timeout', true) <> '0';
    {text_settings}
"""
SET_TEXT_FORM = "; ".join(
    f"SET LOCAL {name} = {literal(value)}" for name, value in TEXT_SETTINGS.items()
)
_SNAPSHOT = """
    SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_current_wal_insert_lsn()::text,
           pg_catalog.pg_current_wal_flush_lsn() < pg_catalog.pg_current_wal_insert_lsn()
"""
# The message changes no row, and takes no transaction id, which would change later snapshots. Only
# readers that ask for messages get it.
_MESSAGE = "SELECT pg_catalog.pg_logical_emit_message(false, 'onceflow', ''{flush})"
_FLUSHED = "SELECT pg_catalog.pg_current_wal_flush_lsn()::text"
_FLUSH_VERSION_MIN = 170000
"""PostgreSQL 17, the first that flushes a message at once. Others do it in a few seconds."""
_EXPORT = """
    SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_export_snapshot()
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

# A table that was never analyzed has no count of rows.
_ROWS = """
    SELECT coalesce(sum(CASE WHEN c.reltuples > 0 THEN c.reltuples
                             ELSE pg_catalog.pg_relation_size(c.oid) / 100 END), 0)::bigint
    FROM pg_catalog.pg_class AS c
    WHERE c.relkind = 'r'
        AND (c.oid = {oid} OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree({oid})))
"""
_SAMPLED_ROWS = 20_000
_COMPARED_ROWS = 1_000
"""The number of sampled rows whose keys are compared. A key takes about 2 µs, a page has many."""


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Some rows of a table, and the copied part of the table after them."""

    table: int
    """The OID of the table."""
    rows: pa.RecordBatch | None
    """The rows, or None if there is no row."""
    copied: CopiedChunks


class TableCopy:
    """The copy of one table: its copied part, which several workers extend."""

    def __init__(self, table: SourceTable, copied: CopiedChunks) -> None:
        self.table = table
        self.copied = copied


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a range that is read in one transaction."""

    copy: TableCopy
    at: int
    """The number of the range."""
    snapshot: str
    lsn: int
    """A position in the WAL after the commit of every transaction that the snapshot sees."""

    @property
    def range_end(self) -> Key | None:
        """The upper key of the range; None if it ends with the table."""
        return self.copy.copied.ranges[self.at].upper


class CopyThreads:
    """Threads that read tables from where their copies end."""

    def __init__(
        self,
        settings: ReaderSettings,
        name: str,
        copies: Sequence[TableCopy],
        position: SlotPosition,
        builders: Mapping[int, RowBuilder],
    ) -> None:
        """Start the threads. `name` names their connections. `builders` has a builder for each OID.

        The threads build batches in parallel, so that the reader's thread has time for the sink.
        """
        self._settings, self._name = settings, name
        self._builders = builders
        self._copies = copies
        self._position = position
        self._copy_anew = position.copy_anew
        self._imported = threading.Semaphore(0)
        """Released by each worker that has the one snapshot of a copy without a stream."""
        self._ranges: deque[tuple[TableCopy, int]] = deque()
        """The ranges that no worker has begun."""
        self._queue: queue.Queue[CopiedRows | Exception] = queue.Queue(
            _QUEUED_MAX * settings.copy_parallelism
        )
        self._lock = threading.Lock()
        """Held while a part is queued, so that the copied part grows in the order of the queue."""
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="first copy", daemon=True).start()

    def poll(self, timeout_s: float) -> CopiedRows | None:
        """Return the next rows, or None if no rows arrived within `timeout_s`.

        Raises:
            Exception: A thread has failed.
        """
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Ask the threads to end. They may wait for the server a little longer."""
        self._closed.set()

    def _put(self, item: CopiedRows | Exception) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=_WAIT_S)
            except queue.Full:
                continue
            return

    def _run(self) -> None:
        """Plan the ranges, and start the workers that read them."""
        try:
            with connect(self._settings.endpoint, self._name) as session:
                new = [copy for copy in self._copies if not copy.copied.is_begun]
                if new and self._settings.follows:
                    await_running(session, new, self._closed)
                for copy in new:
                    if not self._closed.is_set():
                        copy.copied = copy.copied.divide(
                            self._plan(session, copy.table), copy.table.ordered_key
                        )
                        if not self._settings.copies_rows:
                            self._skip_rows(session, copy)
                count = self._queue_ranges()
                if self._settings.follows:
                    # This thread is a worker, too, and keeps its connection.
                    self._start_workers(count - 1, "")
                    self._copy_ranges(session)
                else:
                    self._share_snapshot(session, count)
        except Exception as error:
            self._put(error)

    def _queue_ranges(self) -> int:
        """Queue the ranges that are not copied, and return the number of workers for them."""
        for copy in self._copies:
            for at, part in enumerate(copy.copied.ranges):
                if not part.is_finished:
                    self._ranges.append((copy, at))
        return min(self._settings.copy_parallelism, len(self._ranges))

    def _start_workers(self, count: int, exported: str) -> None:
        """Start threads that read the ranges.

        `exported` is the name of the snapshot for all of them, or empty.
        """
        for _ in range(count):
            threading.Thread(
                target=self._work, args=(exported,), name="first copy", daemon=True
            ).start()

    def _share_snapshot(self, session: PostgresSession, count: int) -> None:
        """Export a snapshot and start `count` workers that import it.

        Keeps the exporting transaction open until every worker has imported the snapshot.
        """
        session.execute(self._begin_shared(""))
        ((snapshot, exported),) = session.query(_EXPORT)
        require_same_snapshot(self._position, str(snapshot))
        self._start_workers(count, str(exported))
        for _ in range(count):
            while not self._imported.acquire(timeout=_WAIT_S):
                if self._closed.is_set():
                    return

    def _begin_shared(self, exported: str) -> str:
        """Return the statement that begins a transaction of a copy without a stream.

        It locks every table and partition until the worker ends. Otherwise a table that is
        truncated or rewritten in between would be empty for the older snapshot. A worker may wait
        behind a session that waits for the coordinator's lock, so the wait has a limit.
        """
        first = f"SET LOCAL lock_timeout = {round(self._settings.silence_max_s * 1000)};"
        if exported:
            first += f" SET TRANSACTION SNAPSHOT {literal(exported)};"
        return _BEGIN.format(
            first=first,
            tables=", ".join(identifier(table.name) for table in self._settings.tables),
            text_settings=SET_TEXT_FORM,
        )

    def _skip_rows(self, session: PostgresSession, copy: TableCopy) -> None:
        """Record the table as completely copied in the present snapshot, without reading rows.

        So the reader returns exactly the changes that this snapshot does not contain.
        """
        ((snapshot, lsn, _),) = session.query(_SNAPSHOT)
        copy.copied = copy.copied.extend(0, None, str(snapshot), parse_lsn(lsn))
        self._put(CopiedRows(copy.table.oid, None, copy.copied))

    def _plan(self, session: PostgresSession, table: SourceTable) -> Sequence[Key]:
        """Return the upper keys of all ranges but the last one."""
        ranges_max = self._settings.copy_parallelism
        if not table.has_small_chunks or ranges_max < 2 or not self._settings.copies_rows:
            return ()
        return plan_ranges(
            session,
            table,
            ranges_max=ranges_max,
            range_rows_min=self._settings.chunk_rows,
            copy_anew=self._copy_anew,
        )

    def _work(self, exported: str) -> None:
        """Connect and read ranges, all in the snapshot `exported` if it is not empty."""
        try:
            with connect(self._settings.endpoint, self._name) as session:
                if exported:
                    session.execute(self._begin_shared(exported))
                    self._imported.release()
                self._copy_ranges(session)
        except Exception as error:
            self._put(error)

    def _copy_ranges(self, session: PostgresSession) -> None:
        """Copy ranges from the queue until the queue is empty or the threads are closed."""
        while not self._closed.is_set():
            try:
                copy, at = self._ranges.popleft()
            except IndexError:
                return
            while not self._closed.is_set() and not copy.copied.ranges[at].is_finished:
                self._copy_chunk(session, copy, at)

    def _copy_chunk(self, session: PostgresSession, copy: TableCopy, at: int) -> None:
        if self._settings.follows:
            tables = f"ONLY {identifier(copy.table.name)}"
            session.execute(_BEGIN.format(first="", tables=tables, text_settings=SET_TEXT_FORM))
        ((snapshot, lsn, is_ahead_of_disk),) = session.query(_SNAPSHOT)
        if is_ahead_of_disk:
            self._flush(parse_lsn(lsn))
        self._require_columns(session, copy.table)
        chunk = _Chunk(copy, at, str(snapshot), parse_lsn(lsn))
        rows, is_last = self._read_rows(session, chunk)
        if self._settings.follows:
            # Before the last rows: with a full queue, the table would stay locked against ALTER.
            session.commit()
        if len(rows) or is_last:
            self._pass_on(chunk, rows, is_last=is_last)

    def _flush(self, lsn: int) -> None:
        """Wait until the server has its WAL before `lsn` on its disk.

        With synchronous_commit off, a crash of the server would undo rows that are visible.

        Raises:
            SourceUnavailable: The server has not done so within `silence_max_s`.
        """
        deadline = time.monotonic() + self._settings.silence_max_s
        with connect(self._settings.endpoint, self._name) as session:
            can_flush = session.server_version >= _FLUSH_VERSION_MIN
            session.query(_MESSAGE.format(flush=", true" if can_flush else ""))
            while not self._closed.is_set():
                ((flushed,),) = session.query(_FLUSHED)
                if parse_lsn(flushed) >= lsn:
                    return
                if time.monotonic() > deadline:
                    raise SourceUnavailable(
                        f"the server has not written its WAL before {format_lsn(lsn)} to its disk"
                    )
                time.sleep(_WAIT_S)

    def _require_columns(self, session: PostgresSession, table: SourceTable) -> None:
        """Raise BadRecord if the locked table has other columns than the described one."""
        present = find_columns(session, table)
        is_same = all(present.get(c.name) == c.type_number for c in table.columns)
        added = set(present) - {c.name for c in table.columns} - table.ignored_columns
        if not is_same or (table.stops_at_new_columns and added):
            raise BadRecord(
                f"the columns of table {table.name} were changed during its first copy, which"
                f" cannot continue with the rows that were copied before. {self._copy_anew}"
            )

    def _read_rows(self, session: PostgresSession, chunk: _Chunk) -> tuple[RowBuffer, bool]:
        """Queue the rows of `chunk`, except for the last rows.

        Returns:
            The last rows, and True if the range ends with them.
        """
        table, chunk_rows = chunk.copy.table, self._settings.chunk_rows
        batch_rows, copied = self._settings.batch_rows, chunk.copy.copied
        statement = select_chunk(table, copied.lower(chunk.at), chunk.range_end, chunk_rows)
        count = 0
        batch = RowBuffer()
        for rows in read_rows(session.copy_out(statement, batch_rows)):
            count += len(rows)
            is_large = table.has_chunks and len(batch.data) > GATHERED_BYTES
            if len(batch) + len(rows) <= batch_rows and not is_large:
                batch = batch.join(rows)
            else:
                self._pass_on(chunk, batch, is_last=False)
                batch = rows
            if self._closed.is_set():
                return RowBuffer(), False
        return batch, not table.has_small_chunks or count < chunk_rows

    def _pass_on(self, chunk: _Chunk, rows: RowBuffer, *, is_last: bool) -> None:
        """Queue `rows` of `chunk`. `is_last` is True if the range ends with them."""
        copy, table = chunk.copy, chunk.copy.table
        columns = split_rows(table, rows) if len(rows) else ()
        if is_last:
            upper = chunk.range_end
        elif table.has_chunks:
            upper = key_of(table, [column[-1] for column in columns], copy_anew=self._copy_anew)
        else:
            upper = UNORDERED
        built = self._builders[table.oid].build_copied(columns, len(rows)) if columns else None
        with self._lock:
            copy.copied = copy.copied.extend(chunk.at, upper, chunk.snapshot, chunk.lsn, len(rows))
            self._put(CopiedRows(table.oid, built, copy.copied))


def find_columns(session: PostgresSession, table: SourceTable) -> Mapping[str, int]:
    """Return the OID of each column's type by its name; empty if another table has the name."""
    name = literal(identifier(table.name))
    return dict(session.query(_COLUMNS.format(name=name, oid=table.oid)))


def await_running(
    session: PostgresSession, copies: Sequence[TableCopy], closed: threading.Event
) -> None:
    """Wait until every transaction has ended that was running at the call, or until `closed`.

    A snapshot lists no running transaction that is newer than all that have ended. The id that this
    function takes ends at once, so later snapshots list all older ones.
    """
    ((own,),) = session.query("SELECT pg_catalog.pg_current_xact_id()::text")
    report_at = time.monotonic() + REPORTED_AFTER_S
    while not closed.is_set():
        ((text,),) = session.query("SELECT pg_catalog.pg_current_snapshot()::text")
        if Snapshot.parse(text).has_ended_before(int(own)):
            return
        if time.monotonic() > report_at:
            _report_running(session, copies)
            report_at = time.monotonic() + _REPORTED_EVERY_S
        time.sleep(_WAIT_S)


def _report_running(session: PostgresSession, copies: Sequence[TableCopy]) -> None:
    running = [str(shown) for (shown,) in session.query(_RUNNING)]
    logger.warning(
        "the first copy of %s waits for transactions that were running when the slot was created"
        " or the table was published: %s. Commit or end them",
        ", ".join(f"table {copy.table.name}" for copy in copies),
        "; ".join(running) or "their sessions are not shown to this user",
    )


def plan_ranges(
    session: PostgresSession,
    table: SourceTable,
    *,
    ranges_max: int,
    range_rows_min: int,
    copy_anew: str,
) -> Sequence[Key]:
    """Return the upper keys of ranges with about as many rows each, without the last range's.

    The keys come from a sample of the table's pages. They decide only how the work is divided:
    every division copies each row once.
    """
    ((rows,),) = session.query(_ROWS.format(oid=table.oid))
    count = min(ranges_max, int(rows) // range_rows_min)
    if count < 2:
        return ()
    percent = min(100.0, 100.0 * _SAMPLED_ROWS / int(rows))
    keys_alone = replace(table, columns=table.key_columns)
    columns = ", ".join(map(quote, table.key))
    sample = f"SELECT {columns} FROM {identifier(table.name)} TABLESAMPLE SYSTEM ({percent:.6f})"
    session.execute("BEGIN READ ONLY; SET LOCAL row_security = off")
    statement = f"COPY ({sample} LIMIT {2 * _SAMPLED_ROWS}) TO STDOUT (FORMAT binary)"
    rows = read_all_rows(session.copy_out(statement))
    session.commit()
    if len(rows) < count:
        return ()
    sampled = split_rows(keys_alone, rows)
    keys = sorted(
        key_of(keys_alone, [column[at] for column in sampled], copy_anew=copy_anew)
        for at in range(0, len(rows), max(1, len(rows) // _COMPARED_ROWS))
    )
    return sorted({keys[len(keys) * at // count] for at in range(1, count)})


def select_chunk(table: SourceTable, lower: Key | None, upper: Key | None, rows: int) -> str:
    """Return the COPY of the next `rows` rows after `lower` and up to `upper`.

    None stands for no limit. A table without chunks is read as a whole.
    """
    query = select_rows(table)
    if table.has_chunks:
        key = ", ".join(column.order_expression for column in table.key_columns)
        limits = [
            f"({key}) {sign} ({key_literals(table, limit)})"
            for sign, limit in ((">", lower), ("<=", upper))
            if limit is not None
        ]
        if limits:
            query += f" WHERE {' AND '.join(limits)}"
        query += f" ORDER BY {key}"
        if table.has_small_chunks:
            query += f" LIMIT {rows}"
    return f"COPY ({query}) TO STDOUT (FORMAT binary)"


def select_rows(table: SourceTable) -> str:
    """Return the query of all rows of `table`."""
    columns = ", ".join(map(_select_column, table.columns))
    return f"SELECT {columns} FROM {identifier(table.name)}"


def _select_column(column: SourceColumn) -> str:
    """Return the expression of the column's values.

    `format` calls the type's output function, as the stream does; a cast to text would add blanks
    or netmasks for some types. `num_nulls` tests for null: `IS NOT NULL` is false for a composite
    value with a null field.
    """
    name = quote(column.name)
    if not column.is_text_form:
        return name
    return f"CASE WHEN pg_catalog.num_nulls({name}) = 0 THEN pg_catalog.format('%s', {name}) END"


def read_rows(arrivals: Iterator[RowBuffer]) -> Iterator[RowBuffer]:
    """Yield the rows of a binary COPY: its messages without head and end mark.

    Reads `arrivals` to their end, which would otherwise be canceled.

    Raises:
        SourceUnavailable: The COPY ended without its end mark.
    """
    is_first, is_ended = True, False
    for rows in arrivals:
        if is_first and not rows.cut_head(_SIGNATURE, _HEADER_SIZE):
            raise SourceUnavailable("a COPY does not begin with the signature of its format")
        is_first = False
        is_ended = rows.cut_last(_END) or is_ended
        if len(rows):
            yield rows
    if not is_ended:
        raise SourceUnavailable("a COPY ended without its end mark")


def read_all_rows(arrivals: Iterator[RowBuffer]) -> RowBuffer:
    """Return the rows of a binary COPY together. Raises the errors of `read_rows`."""
    together = RowBuffer()
    for rows in read_rows(arrivals):
        together = together.join(rows)
    return together


def split_rows(table: SourceTable, rows: RowBuffer) -> Sequence[BinaryColumn]:
    """Return the columns of `rows`.

    Raises:
        BadRecord: A message is not one row. Postgres sends each row as one message.
    """
    columns = split_copy_rows(rows, len(table.columns))
    if columns is None:
        raise BadRecord(
            f"the first copy of table {table.name} received a message of COPY that is not one row"
            f" of {len(table.columns)} columns, so the server or a program before it does not keep"
            " to Postgres's protocol. No row is lost: connect to the server directly, and start the"
            " job again"
        )
    return columns
