"""The source of a Postgres table's changes that users describe."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession, endpoint_of
from onceflow.clients.sql.tables import TableName
from onceflow.core.argument_types import check_fields
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError, OffsetOutOfRange
from onceflow.core.setting_values import accept_durations, choice_of
from onceflow.core.spi import ReaderContext, Source, SourceProgress, SourceReader, Split
from onceflow.core.spi.options import document_options
from onceflow.formats.debezium.changes import schema_of_changes
from onceflow.sources.postgres import slot as slots
from onceflow.sources.postgres.access import check_replication, find_missing_privileges
from onceflow.sources.postgres.first_copy import CopiedChunks
from onceflow.sources.postgres.position import SlotPosition, TablePosition
from onceflow.sources.postgres.reader import PostgresReader
from onceflow.sources.postgres.settings import ChangesOptions, FirstCopy, ReaderSettings
from onceflow.sources.postgres.slot_progress import measure_position
from onceflow.sources.postgres.table import SourceTable, describe_table

_SESSION_NAME = "onceflow changes"


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PostgresChanges(ChangesOptions, Source):
    """A source that copies a table of Postgres and follows its changes, each exactly once.

    Rows have the table's columns and `_op`: `r` for a copied row, `c` for an insert, `u` for an
    update and `d` for a delete. The sinks take it as `operation_column="_op"`. An update that
    changes the key is a `d` of the old key and a `u`.

    It uses logical replication with the plugin `pgoutput`, which is part of Postgres. The slot
    moves only to positions of decided checkpoints. Creating a source opens no connection.

    Raises:
        ConfigError: A setting is wrong. The message names it and the value to give instead.
    """

    _columns: pa.Schema | None = field(init=False)
    """The value of the option `schema`.

    The property `schema` returns the columns of the rows instead.
    """
    _table_name: TableName = field(init=False)
    _slot_name: str | None = field(init=False)
    _described: SourceTable | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        endpoint_of(self, lock_timeout_s=self.statement_timeout_s)
        try:
            name = TableName.parse(self.table)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        choice_of(FirstCopy, self.first_copy, setting="first_copy")
        for setting in ("chunk_rows", "batch_rows", "transaction_rows_max"):
            if getattr(self, setting) < 1:
                raise ConfigError(f"{setting}={getattr(self, setting)} is not 1 or more")
        if self.status_interval <= 0:
            raise ConfigError(f"status_interval={self.status_interval} is not positive")
        object.__setattr__(self, "_table_name", name)
        object.__setattr__(self, "_slot_name", self.slot)

    def __repr__(self) -> str:
        return f"PostgresChanges(table={self.table!r}, {self.endpoint})"

    @property
    def endpoint(self) -> PostgresEndpoint:
        """The database and the way to reach it."""
        return endpoint_of(self, lock_timeout_s=self.statement_timeout_s)

    @property
    def slot_name(self) -> str:
        """The name of the slot.

        Raises:
            ConfigError: The source belongs to no job yet, and has no name for its slot.
        """
        if self._slot_name is None:
            raise ConfigError("the source belongs to no job, which names its slot: give slot=")
        return self._slot_name

    @property
    def has_slot_name(self) -> bool:
        """True if the source names its slot, or belongs to a job that does."""
        return self._slot_name is not None

    @property
    def copies_rows(self) -> bool:
        """True if the rows are read that the table has before its first change."""
        return choice_of(FirstCopy, self.first_copy, setting="first_copy") is FirstCopy.ALL

    @property
    def publication_name(self) -> str:
        """The name of the publication. Raises the errors of `slot_name`."""
        return self.publication or self.slot_name

    @property
    def described_table(self) -> SourceTable:
        """The table as the server describes it. The first access asks the server.

        Raises:
            ConfigError: The table cannot be read; the message says what to do.
            SourceUnavailable: The server does not answer.
        """
        if self._described is None:
            with slots.connect(self.endpoint, _SESSION_NAME) as session:
                object.__setattr__(self, "_described", self._describe(session))
        assert self._described is not None
        return self._described

    @property  # type: ignore[misc]
    def schema(self) -> pa.Schema:
        """The columns of every batch. Raises the errors of `described_table`."""
        return schema_of_changes(self.described_table.schema)

    @schema.setter
    def schema(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, columns: SchemaLike | None
    ) -> None:
        # The dataclass's __init__ sets the option of this name; readers ask for the columns of the
        # rows.
        given = None if columns is None else schema_of(columns)
        object.__setattr__(self, "_columns", given)

    @property
    def bounded(self) -> bool:
        """False: changes have no end."""
        return False

    def bind(self, job: str, uid: str) -> PostgresChanges:
        """Return this source with a slot of its own for the job and the uid, if it names none."""
        bound = copy.copy(self)
        object.__setattr__(bound, "_slot_name", self.slot or slots.name_slot(job, uid))
        return bound

    def validate(self) -> None:
        """Raise ConfigError unless the server sends the changes of the table to this user.

        Raises:
            SourceUnavailable: The server does not answer.
        """
        with slots.connect(self.endpoint, _SESSION_NAME) as session:
            slots.check_server(session)
            table = self._describe(session)
            slots.check_publication(session, self.publication_name, table)
        if table.unsent_columns:
            slots.logger.warning(
                "table %s: an update that leaves a large value of %s as it was ends the job,"
                " because Postgres does not send the value. Run: ALTER TABLE %s REPLICA IDENTITY"
                " FULL",
                table.name,
                ", ".join(table.unsent_columns),
                table.name,
            )

    def splits(self) -> Sequence[Split]:
        """Create publication and slot if there are none. Return one split: the slot's position.

        Raises:
            ConfigError: The table, the publication or the slot cannot be used.
            SourceUnavailable: The server does not answer.
        """
        name = self.slot_name
        with slots.connect(self.endpoint, _SESSION_NAME) as session:
            cluster = slots.check_server(session)
            table = self.described_table
            lsn, published = self._prepare_slot(session, name, table)
        position = SlotPosition(
            slot=name,
            system=cluster.system,
            timeline=cluster.timeline,
            lsn=lsn,
            table=TablePosition(
                str(table.name), table.oid, CopiedChunks() if self.copies_rows else None, published
            ),
        )
        return [position.to_split()]

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Return `known`, after checking that the slot still has everything that follows.

        Raises:
            OffsetOutOfRange: The slot is gone or past the position, or the table was replaced.
            StateIncompatible: `known` belongs to another source.
            SourceUnavailable: The server does not answer.
        """
        positions = [SlotPosition.from_split(split) for split in known]
        with slots.connect(self.endpoint, _SESSION_NAME) as session:
            table = self._describe(session)
            for position in positions:
                _check_table(position, table)
                slots.check_position(session, position, self.publication_name, table)
        return known

    def measure(self, splits: Sequence[Split]) -> SourceProgress | None:
        """Return the distance of the slot from the end of the WAL, and the first copy's progress.

        None before there is a split.
        """
        if not splits:
            return None
        table = self.described_table
        with slots.connect(self.endpoint, _SESSION_NAME) as session:
            return measure_position(
                session,
                SlotPosition.from_split(splits[0]),
                chunk_rows=self.chunk_rows,
                in_chunks={str(table.name)} if table.has_chunks else (),
            )

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader of `splits`. It connects with the first poll."""
        settings = ReaderSettings(
            endpoint=self.endpoint,
            table=self.described_table,
            publication=self.publication_name,
            chunk_rows=self.chunk_rows,
            batch_rows=self.batch_rows,
            transaction_rows_max=self.transaction_rows_max,
            status_interval_s=self.status_interval,
            connect_timeout_s=self.connect_timeout_s,
            silence_max_s=self.statement_timeout_s,
        )
        return PostgresReader(settings, splits, context)

    def describe_tables(self, session: PostgresSession) -> Sequence[SourceTable]:
        """Return the tables as the server describes them now. Raises those of `described_table`."""
        return [self._describe(session)]

    def _describe(self, session: PostgresSession) -> SourceTable:
        return describe_table(session, self._table_name, self._columns)

    def _prepare_slot(
        self, session: PostgresSession, name: str, table: SourceTable
    ) -> tuple[int, str]:
        """Return the position of the slot, and the publication's version.

        A new slot is behind its publication.

        pgoutput looks for the publication as of each change, so it must exist before the slot.
        """
        publication = self.publication_name
        published = slots.check_publication(session, publication, table)
        state = slots.find_slot(session, name)
        if state is not None:
            if state.is_active:
                raise ConfigError(
                    f"slot {name} is in use by another reader: stop that reader, or give slot="
                    " another name"
                )
            if published is None:
                raise ConfigError(
                    f"slot {name} exists, and publication {publication} does not: changes before"
                    " the publication cannot be read. Drop the slot (SELECT"
                    f" pg_drop_replication_slot('{name}')), or give publication= the right name"
                )
            slots.logger.info("slot %s exists, and is read from its position", name)
            return state.confirmed, published
        self._check_access(session, table, creates_publication=published is None)
        is_own = published is None
        if published is None:
            published = slots.create_publication(session, publication, table)
        try:
            return slots.create_slot(session, name), published
        except BaseException:
            if is_own and session.is_open:
                slots.drop_publication(session, publication)
            raise

    def _check_access(
        self, session: PostgresSession, table: SourceTable, *, creates_publication: bool
    ) -> None:
        """Raise ConfigError if the user cannot read changes, before anything is created."""
        check_replication(self.endpoint, _SESSION_NAME)
        missing = find_missing_privileges(
            session,
            table.name,
            table.oid,
            [column.name for column in table.columns],
            copies_rows=self.copies_rows,
            creates_publication=creates_publication,
        )
        for privilege in missing:
            raise ConfigError(str(privilege))


def _check_table(position: SlotPosition, table: SourceTable) -> None:
    known = position.table
    if known.oid != table.oid:
        raise OffsetOutOfRange(
            f"table {table.name} was dropped and created again (oid {known.oid}, now {table.oid}),"
            f" or the checkpoint is about table {known.name}. If it is about that one, correct"
            f" table=. If not: {position.copy_anew}"
        )
