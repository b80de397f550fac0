"""The reader of one slot: first the copy of the tables, then their changes in commit order.

    copying     no table is followed: only copied rows are returned
    catching up tables that were added to the job are copied, and the changes of the others are
                returned. The slot does not move meanwhile, and each followed table has a position
                of its own, after that of the slot. After the copy, the reader reads from the
                slot's position again, and skips changes before each table's own position
    following   the changes of all tables are returned

All rows of one transaction are returned by one `poll`, so that no checkpoint divides them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from onceflow.clients.postgres.replication import (
    Changes,
    Keepalive,
    ReplicationStream,
    StreamRefused,
    to_unix_ms,
)
from onceflow.core.errors import (
    OffsetOutOfRange,
    OnceflowError,
    SinkError,
    SourceUnavailable,
)
from onceflow.core.spi import EndOfInput, OutputBatch, ReaderContext, SourceReader, Split
from onceflow.sources.postgres.copy_alone import check_copy
from onceflow.sources.postgres.copying import UNORDERED, CopyThreads, TableCopy
from onceflow.sources.postgres.metadata import Metadata, MetadataColumns
from onceflow.sources.postgres.position import SlotPosition, StreamPosition
from onceflow.sources.postgres.queued_changes import ChangedRows
from onceflow.sources.postgres.refusals import Refusal, classify_refusal, to_stream_error
from onceflow.sources.postgres.rewrites import TableForm, read_forms, require_no_rewrite
from onceflow.sources.postgres.row_builder import RowBuilder
from onceflow.sources.postgres.settings import ReaderSettings
from onceflow.sources.postgres.slot import check_position, connect
from onceflow.sources.postgres.table import SourceTable, require_all_columns
from onceflow.sources.postgres.text_values import TEXT_SETTINGS
from onceflow.sources.postgres.transactions import ChangeReader

_RETRY_S = 0.2
_GATHERED_S = 0.02
"""The time for which changes are gathered: a batch costs as much as about a hundred changes."""
_TURN_S = 0.05
"""The longest wait for the copy or for the stream while the other one may have rows."""
PUBLICATION_CHECK_S = 60.0
"""The interval at which an open stream's publication and the forms of its tables are checked."""


class PostgresReader(SourceReader):
    """A reader of one slot. A subtask without a split reads nothing."""

    def __init__(
        self, settings: ReaderSettings, splits: Sequence[Split], context: ReaderContext
    ) -> None:
        self._settings = settings
        self._name = f"onceflow {context.job}/{context.attempt}/{context.subtask} {context.uid}"
        self._tables = {table.oid: table for table in settings.tables}
        self._builders = {table.oid: RowBuilder(table) for table in settings.tables}
        self._metadata = {
            table.oid: MetadataColumns(table, settings.metadata) for table in settings.tables
        }
        self._closed = threading.Event()
        self._changes: ChangeReader | None = None
        self._copying: CopyThreads | None = None
        self._stream: ReplicationStream | None = None
        self._record_times: Sequence[tuple[int, int]] = ()
        self._copy_is_next = True
        """True if the next poll asks the copy first, if tables are followed, too."""
        self._check_at = 0.0
        """The time of the next check of the publication and the tables."""
        self._forms: Mapping[int, TableForm] = {}
        """The forms of the tables at the last check; empty before the first one."""
        self._position: SlotPosition | None = None
        self._decided = StreamPosition(0)
        """The furthest position that is known to be decided."""
        self._acknowledged = 0
        """The LSN up to which everything is known to be decided."""
        for split in splits:
            self._position = SlotPosition.from_split(split)
            self._decided = self._position.furthest
            self._acknowledged = self._position.lsn

    def poll(
        self, timeout_s: float
    ) -> pa.RecordBatch | tuple[OutputBatch, ...] | EndOfInput | None:
        """Return the next rows of the copy or of the stream.

        Raises:
            BadRecord: A change cannot be passed on exactly, or a table's columns were changed.
            ConfigError: The server refuses the user or an option.
            OffsetOutOfRange: The slot no longer has the changes that follow.
            SourceUnavailable: The server did not answer, or another reader uses the slot.
        """
        position = self._position
        is_last = position is None or not position.is_copying
        if is_last and not self._settings.follows:
            return EndOfInput()
        if position is None:
            self._closed.wait(timeout_s)
            return None
        if not position.is_copying:
            return self._poll_stream(position, timeout_s)
        if not self._list_followed(position):
            return self._poll_copy(position, timeout_s)
        self._copy_is_next = not self._copy_is_next
        wait_s = min(timeout_s, _TURN_S)
        polls = (self._poll_copy, self._poll_stream)
        first, second = polls if self._copy_is_next else reversed(polls)
        rows = first(position, 0.0)
        # The first call may have moved the position without a row, for example to the end of a
        # copy.
        return rows or second(self._position or position, wait_s)

    def snapshot(self) -> Sequence[Split]:
        """Return the split at the position after the returned rows."""
        return [] if self._position is None else [self._position.to_split()]

    @property
    def waits_for_decision(self) -> bool:
        """True if the columns were changed after the position.

        `poll` raises the error about them as soon as the position is decided.
        """
        return self._changes is not None and self._changes.stop is not None

    def take_record_times(self) -> Sequence[tuple[int, int]]:
        """Return the times of the commits whose changes were returned since the last call."""
        times, self._record_times = self._record_times, ()
        return times

    def commit(self, splits: Sequence[Split]) -> None:
        """Take the decided positions. The stream then acknowledges them, so that the slot moves."""
        for split in splits:
            position = SlotPosition.from_split(split)
            self._acknowledged = max(self._acknowledged, position.lsn)
            if self._decided.is_before(position.furthest):
                self._decided = position.furthest
        if self._stream is not None and splits:
            self._stream.acknowledge(self._acknowledged)

    def close(self) -> None:
        """Close the connections. The slot stays."""
        self._closed.set()
        if self._copying is not None:
            self._copying.close()
        if self._stream is not None:
            self._stream.close()

    def _list_followed(self, position: SlotPosition) -> Sequence[SourceTable]:
        """Return the tables whose changes are read now: all, or those ahead of a copy."""
        return [
            self._tables[table.oid]
            for table in position.tables
            if not position.is_copying or table.ahead is not None
        ]

    def _emit(
        self, batches: Sequence[tuple[int, pa.RecordBatch]]
    ) -> pa.RecordBatch | tuple[OutputBatch, ...] | None:
        """Return the batches of tables as rows of the source's one stream, or of its outputs."""
        full = [(table, batch) for table, batch in batches if batch.num_rows]
        if not full:
            return None
        outputs = self._settings.outputs
        if outputs:
            return tuple(OutputBatch(outputs[table], batch) for table, batch in full)
        ((_, batch),) = full
        return batch

    def _poll_copy(
        self, position: SlotPosition, timeout_s: float
    ) -> pa.RecordBatch | tuple[OutputBatch, ...] | None:
        if self._copying is None:
            self._copying = self._begin_copy(position)
        copied = self._copying.poll(timeout_s)
        if copied is None:
            return None
        batches: list[tuple[int, pa.RecordBatch]] = []
        if copied.rows is not None:
            rows = self._metadata[copied.table].extend_copy(copied.rows)
            batches.append((copied.table, rows))
        self._position = replace(
            position,
            tables=tuple(
                replace(table, copied=copied.copied) if table.oid == copied.table else table
                for table in position.tables
            ),
        )
        if not self._position.is_copying:
            self._copying.close()
            self._copying = None
            self._close_stream()
        return self._emit(batches)

    def _begin_copy(self, position: SlotPosition) -> CopyThreads:
        self._check_copied_keys(position)
        copies: list[TableCopy] = []
        for known in position.tables:
            table, copied = self._tables[known.oid], known.copied
            if copied is None or copied.is_finished:
                continue
            if self._settings.copies_rows and not copied.is_begun:
                require_all_columns(table)
            copies.append(TableCopy(table, copied))
        self._check_position(position)
        return CopyThreads(self._settings, self._name, copies, position, self._builders)

    def _check_copied_keys(self, position: SlotPosition) -> None:
        """Raise OffsetOutOfRange unless each copied table has the key by which it was divided."""
        for known in position.tables:
            table, copied = self._tables[known.oid], known.copied
            if copied is None or not copied.bounds:
                continue
            if UNORDERED in copied.bounds:
                raise OffsetOutOfRange(
                    f"the first copy of table {table.name} was interrupted, and it cannot"
                    " continue: the order of the table's key is not known here, so the table is"
                    f" copied in one transaction. {position.copy_anew}"
                )
            if copied.key != table.ordered_key:
                now = ", ".join(table.ordered_key) or "one whose order is not known here"
                raise OffsetOutOfRange(
                    f"the first copy of table {table.name} was divided by the key"
                    f" {', '.join(copied.key)}, and the key is {now} now, so no change can be"
                    f" assigned to a part of the copy. {position.copy_anew}"
                )

    def _close_stream(self) -> None:
        """End the stream of the tables that were followed during a copy."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self._changes = None

    def _poll_stream(
        self, position: SlotPosition, timeout_s: float
    ) -> pa.RecordBatch | tuple[OutputBatch, ...] | None:
        if self._stream is None or self._changes is None:
            self._check_copied_keys(position)
            self._changes = ChangeReader(
                self._list_followed(position),
                position,
                cut_changes=self._settings.transaction_rows_max,
                keeps_transactions=bool(self._settings.metadata),
                names_unchanged=Metadata.UNCHANGED in self._settings.metadata,
            )
            self._stream = self._open_stream(position, self._changes)
            self._check_at = time.monotonic() + PUBLICATION_CHECK_S
        elif time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + PUBLICATION_CHECK_S
            # The stream itself tells if the server is gone.
            with suppress(SourceUnavailable):
                self._check_position(position)
        changes = self._changes
        try:
            self._receive(self._stream, changes, timeout_s)
        except StreamRefused as error:
            raise self._to_error(error) from None
        taken = changes.take()
        # Convert before the position moves: a value that is refused stays to be read.
        batches = [(changed.table, self._build_changes(changed)) for changed in taken.tables]
        self._position = changes.move(position)
        self._record_times = taken.times
        if (
            not batches
            and changes.stop is not None
            and not self._decided.is_before(self._position.furthest)
        ):
            # Everything before the change of the columns is decided, so the next start is after it.
            raise changes.stop
        return self._emit(batches)

    def _build_changes(self, changed: ChangedRows) -> pa.RecordBatch:
        batch = self._builders[changed.table].build_changes(changed)
        return self._metadata[changed.table].extend_changes(batch, changed)

    def _receive(self, stream: ReplicationStream, changes: ChangeReader, timeout_s: float) -> None:
        """Process messages until a batch is full, no more arrive, or the timeout has expired.

        Raises:
            StreamRefused: The server has ended the stream with an error.
        """
        deadline = time.monotonic() + timeout_s
        is_gathering = False
        while changes.ready_count < self._settings.batch_rows:
            if changes.ready_count and not is_gathering:
                is_gathering = True
                deadline = min(deadline, time.monotonic() + _GATHERED_S)
            left_s = max(0.0, deadline - time.monotonic())
            message = stream.receive(left_s)
            if isinstance(message, Changes):
                changes.add_message(message.data)
            elif isinstance(message, Keepalive):
                changes.advance(message.end_lsn, to_unix_ms(message.sent_us))
            elif self._is_silent(stream):
                raise SourceUnavailable(
                    f"{self._settings.endpoint} has sent nothing for {stream.silent_s:.0f} s"
                )
            if message is None or time.monotonic() > deadline:
                return
            for arrived in stream.receive_available(self._settings.batch_rows):
                if isinstance(arrived, bytes):
                    changes.add_message(arrived)
                else:
                    changes.advance(arrived.end_lsn, to_unix_ms(arrived.sent_us))

    def _is_silent(self, stream: ReplicationStream) -> bool:
        return stream.silent_s > self._settings.silence_max_s and not self._closed.is_set()

    def _open_stream(self, position: SlotPosition, changes: ChangeReader) -> ReplicationStream:
        """Return the stream that `changes` reads. Wait while the last attempt's connection ends.

        Raises:
            OffsetOutOfRange: The slot cannot continue there.
            SourceUnavailable: Another reader uses the slot, or the server does not answer.
        """
        settings = self._settings
        self._check_position(position)
        deadline = time.monotonic() + settings.connect_timeout_s
        while True:
            try:
                stream = ReplicationStream.open(
                    settings.endpoint, self._name, status_interval_s=settings.status_interval_s
                )
                stream.start(
                    position.slot,
                    settings.publication,
                    changes.start.lsn,
                    texts=TEXT_SETTINGS if changes.are_sent_as_text else None,
                    timeout_s=settings.connect_timeout_s,
                )
            except SinkError as error:
                raise SourceUnavailable(str(error)) from None
            except StreamRefused as error:
                is_in_use = classify_refusal(error.code) is Refusal.IN_USE
                if not is_in_use or time.monotonic() > deadline:
                    raise self._to_error(error) from None
                self._closed.wait(_RETRY_S)
            else:
                return stream

    def _check_position(self, position: SlotPosition) -> None:
        settings = self._settings
        with connect(settings.endpoint, self._name) as session:
            if settings.follows:
                check_position(session, position, settings.publication, settings.tables)
                forms = read_forms(session, settings.tables)
                require_no_rewrite(position, self._forms, forms)
                self._forms = forms
            else:
                check_copy(session, position, settings.tables)

    def _to_error(self, refused: StreamRefused) -> OnceflowError:
        assert self._position is not None
        return to_stream_error(refused, self._position, str(self._settings.endpoint))
