"""The source of the changes of Postgres tables that users describe."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import pyarrow as pa

from onceflow.clients.postgres.catalog import identifier
from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession, endpoint_of
from onceflow.clients.sql.tables import TableName
from onceflow.core.argument_types import check_fields
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.setting_values import accept_durations, choice_of
from onceflow.core.spi import ReaderContext, Source, SourceProgress, Split
from onceflow.core.spi.options import document_options
from onceflow.formats.debezium.changes import schema_of_changes
from onceflow.sources.postgres import slot as slots
from onceflow.sources.postgres.access import check_replication, find_missing_privileges
from onceflow.sources.postgres.copy_alone import begin_copy, check_copy, require_same_kind
from onceflow.sources.postgres.first_copy import CopiedChunks
from onceflow.sources.postgres.metadata import (
    Metadata,
    extend_schema,
    parse_metadata,
    require_free_names,
)
from onceflow.sources.postgres.position import SlotPosition, TablePosition, drop_statement
from onceflow.sources.postgres.reader import PostgresReader
from onceflow.sources.postgres.settings import (
    ChangesOptions,
    FirstCopy,
    ReaderSettings,
    SchemaChange,
)
from onceflow.sources.postgres.slot_progress import measure_position
from onceflow.sources.postgres.table import (
    SourceTable,
    describe_table,
    format_name,
    parse_name,
    require_all_columns,
    require_key_columns,
)
from onceflow.sources.postgres.table_set import adapt_position

_SESSION_NAME = "onceflow changes"


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PostgresChanges(ChangesOptions, Source):
    """A source that copies tables of Postgres and follows their changes, each exactly once.

    With `table`, it has one stream. With `tables`, or with a `publication` alone, it has an output
    for each table: `Pipeline.read_outputs` returns their streams. Changes of one transaction are in
    one checkpoint, also those of several tables, unless there are more than `transaction_rows_max`.

    Rows have the table's columns and `_op`: `r` for a copied row, `c` for an insert, `u` for an
    update and `d` for a delete. The sinks take it as `operation_column="_op"`. An update that
    changes the key is a `d` of the old key and a `u`. The columns of `metadata` come last.

    It uses logical replication with the plugin `pgoutput`, which is part of Postgres. The slot
    moves only to positions of decided checkpoints. Creating a source opens no connection.

    Raises:
        ConfigError: A setting is wrong. The message names it and the value to give instead.
    """

    _columns: pa.Schema | None = field(init=False)
    """The value of the option `schema`.

    The property `schema` returns the columns of the rows instead.
    """
    _names: Mapping[str, TableName] = field(init=False)
    """The tables by the names that the user gave; empty if the publication names them."""
    _metadata: tuple[Metadata, ...] = field(init=False)
    """The chosen metadata columns."""
    _slot_name: str | None = field(init=False)
    _described: Mapping[str, SourceTable] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        endpoint_of(self, lock_timeout_s=self.statement_timeout_s)
        object.__setattr__(self, "_names", self._parse_names())
        choice_of(FirstCopy, self.first_copy, setting="first_copy")
        if self.on_schema_change is not None:
            choice_of(SchemaChange, self.on_schema_change, setting="on_schema_change")
        if not self.follows and self.slot is not None:
            raise ConfigError("first_copy='only' uses no slot: remove slot=")
        object.__setattr__(self, "_metadata", parse_metadata(self.metadata))
        for setting in ("chunk_rows", "batch_rows", "transaction_rows_max", "copy_parallelism"):
            if getattr(self, setting) < 1:
                raise ConfigError(f"{setting}={getattr(self, setting)} is not 1 or more")
        if self.status_interval <= 0:
            raise ConfigError(f"status_interval={self.status_interval} is not positive")
        object.__setattr__(self, "_slot_name", self.slot)

    def _parse_names(self) -> Mapping[str, TableName]:
        """Return the tables by the names that the user gave.

        Raises:
            ConfigError: The options contradict each other, or a name has another form.
        """
        if self.table is not None and self.tables is not None:
            raise ConfigError("table= and tables= are both given: give one of them")
        if self.table is None and self.tables is None and self.publication is None:
            raise ConfigError(
                "no table is named: give table= for one table, tables= for several, or"
                " publication= for all tables of a publication"
            )
        if self.tables is not None and not self.tables:
            raise ConfigError("tables= is empty: name the tables")
        if self.table is None and self._columns is not None:
            raise ConfigError("schema= is for the one table of table=: give schemas= instead")
        names = (self.table,) if self.table is not None else tuple(self.tables or ())
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"tables= names {doubled[0]!r} twice")
        for name in self.schemas or {}:
            if self.table is not None or (names and name not in names):
                raise ConfigError(
                    f"schemas= names {name!r}, which is not in tables="
                    f"{'; for table=, give schema=' if self.table is not None else ''}"
                )
        return {name: parse_name(name) for name in names}

    def __repr__(self) -> str:
        if self.table is not None:
            return f"PostgresChanges(table={self.table!r}, {self.endpoint})"
        if self.tables is not None:
            return f"PostgresChanges(tables={list(self.tables)!r}, {self.endpoint})"
        return f"PostgresChanges(publication={self.publication!r}, {self.endpoint})"

    @property
    def endpoint(self) -> PostgresEndpoint:
        """The address of the database and the settings of its connections."""
        return endpoint_of(self, lock_timeout_s=self.statement_timeout_s)

    @property
    def slot_name(self) -> str:
        """The name of the slot.

        Raises:
            ConfigError: The source belongs to no job yet, and has no name for its slot.
        """
        if self._slot_name is None:
            raise ConfigError(
                "the source has no slot name: give slot=, or read the source in a pipeline, whose"
                " name the slot then gets"
            )
        return self._slot_name

    @property
    def has_slot_name(self) -> bool:
        """True if the source names its slot, or belongs to a job that does."""
        return self._slot_name is not None

    @property
    def copies_rows(self) -> bool:
        """True if the rows are read that the table has before its first change."""
        return choice_of(FirstCopy, self.first_copy, setting="first_copy") is not FirstCopy.NONE

    @property
    def follows(self) -> bool:
        """True if changes are read, so that the source has a slot and never ends."""
        return choice_of(FirstCopy, self.first_copy, setting="first_copy") is not FirstCopy.ONLY

    @property
    def publication_name(self) -> str:
        """The name of the publication. Raises the errors of `slot_name`."""
        return self.publication or self.slot_name

    @property
    def described_tables(self) -> Mapping[str, SourceTable]:
        """The tables as the server describes them, by the names of their outputs.

        The first access asks the server.

        Raises:
            ConfigError: A table cannot be read; the message says what to do.
            SourceUnavailable: The server does not answer.
        """
        if self._described is None:
            with slots.connect(self.endpoint, _SESSION_NAME) as session:
                object.__setattr__(self, "_described", self._describe(session))
        assert self._described is not None
        return self._described

    @property  # type: ignore[misc]
    def schema(self) -> pa.Schema:
        """The columns of every batch with `table`, otherwise empty.

        Raises the errors of `described_tables`.
        """
        if self.table is None:
            return pa.schema([])
        return self._schema_of_rows(self.described_tables[self.table])

    @schema.setter
    def schema(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, columns: SchemaLike | None
    ) -> None:
        # The dataclass's __init__ sets the option of this name; readers ask for the columns of the
        # rows.
        given = None if columns is None else schema_of(columns)
        object.__setattr__(self, "_columns", given)

    @property
    def outputs(self) -> Mapping[str, pa.Schema]:
        """The columns of each table's output; empty with `table`.

        Raises the errors of `described_tables`.
        """
        if self.table is not None:
            return {}
        described = self.described_tables.items()
        return {name: self._schema_of_rows(table) for name, table in described}

    def _schema_of_rows(self, table: SourceTable) -> pa.Schema:
        return extend_schema(schema_of_changes(table.schema), self._metadata)

    @property
    def bounded(self) -> bool:
        """True with `first_copy="only"`: changes have no end."""
        return not self.follows

    def bind(self, job: str, uid: str) -> PostgresChanges:
        """Return this source with a slot of its own for the job and the uid, if it names none."""
        bound = copy.copy(self)
        object.__setattr__(bound, "_slot_name", self.slot or slots.name_slot(job, uid))
        return bound

    def validate(self) -> None:
        """Raise ConfigError unless the server sends the changes of the tables to this user.

        Raises:
            SourceUnavailable: The server does not answer.
        """
        with slots.connect(self.endpoint, _SESSION_NAME) as session:
            if not self.follows:
                begin_copy(session, tuple(self._describe(session).values()))
                return
            self.check_server(session)
            tables = tuple(self._describe(session).values())
            if self.publication is not None:
                slots.check_publication(session, self.publication, tables)
            slots.require_updates(session, self.publication, tables)
        for table in tables:
            if table.unsent_columns and Metadata.UNCHANGED not in self._metadata:
                slots.logger.warning(
                    "table %s: an update that leaves a large value of %s as it was ends the job,"
                    " because Postgres does not send the value. For a sink with the option"
                    " unchanged_column (in Spark: unchangedColumn), add '_unchanged' to metadata=."
                    " Otherwise run: ALTER TABLE %s REPLICA IDENTITY FULL",
                    table.name,
                    ", ".join(table.unsent_columns),
                    identifier(table.name),
                )

    def splits(self) -> Sequence[Split]:
        """Create publication and slot if there are none. Return one split: the slot's position.

        With `first_copy="only"` nothing is created.

        Raises:
            ConfigError: A table, the publication or the slot cannot be used.
            SourceUnavailable: The server does not answer.
        """
        if not self.follows:
            with slots.connect(self.endpoint, _SESSION_NAME) as session:
                self._require_all_columns(self.described_tables.values())
                return [begin_copy(session, tuple(self.described_tables.values())).to_split()]
        name = self.slot_name
        with slots.connect(self.endpoint, _SESSION_NAME) as session:
            cluster = self.check_server(session)
            tables = tuple(self.described_tables.values())
            lsn, versions = self._prepare_slot(session, name, tables)
        position = SlotPosition(
            slot=name,
            system=cluster.system,
            timeline=cluster.timeline,
            lsn=lsn,
            tables=tuple(
                TablePosition(
                    table.name,
                    table.oid,
                    CopiedChunks() if self.copies_rows else None,
                    versions[table.oid],
                )
                for table in tables
            ),
        )
        return [position.to_split()]

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Return `known` with the tables that are read now.

        Checks that the slot still has everything that follows. Adds new tables to the publication
        if it belongs to this source.

        Raises:
            ConfigError: The user's publication lacks a new table.
            OffsetOutOfRange: The slot is gone or past the position, or a table was replaced.
            StateIncompatible: `known` belongs to another source, or to another `slot`.
            SourceUnavailable: The server does not answer.
        """
        positions = [SlotPosition.from_split(split) for split in known]
        for position in positions:
            require_same_kind(position, follows=self.follows)
            if self.slot is not None and position.slot != self.slot:
                raise StateIncompatible(
                    f"the source of the checkpoint reads slot {position.slot}, and now slot= is"
                    f" {self.slot!r}: give slot={position.slot!r}"
                )
        with slots.connect(self.endpoint, _SESSION_NAME) as session:
            tables = tuple(self._describe(session).values())
            if not self.follows:
                for position in positions:
                    check_copy(session, position, tables)
                return known
            return [self._adapt(session, position, tables).to_split() for position in positions]

    def _adapt(
        self, session: PostgresSession, position: SlotPosition, tables: Sequence[SourceTable]
    ) -> SlotPosition:
        adapted = adapt_position(position, tables, only_same=self.table is not None)
        self._require_all_columns(adapted.added)
        if adapted.added:
            slots.identify_primary(session)
        name = self._publication_of(position)
        slots.check_position(session, position, name, adapted.kept)
        for removed in adapted.removed:
            slots.logger.warning(
                "table %s is not read any more: the options do not name it. If they name it again"
                " later, %s",
                removed.name,
                "it is copied anew"
                if self.copies_rows
                else "its changes in between are not read, because first_copy= is 'none'",
            )
        if self.publication is None:
            in_use = {table.name for table in position.tables} | {t.name for t in tables}
            slots.drop_from_publication(session, name, in_use)
        if not adapted.added:
            return adapted.position
        slots.require_updates(session, name, adapted.added)
        if self.publication is None:
            versions = slots.add_to_publication(session, name, adapted.added)
        else:
            versions = slots.require_versions(session, name, adapted.added)
        for added in adapted.added:
            slots.logger.info("table %s is read from now on: its copy begins", added.name)
        return adapted.set_versions(versions)

    def measure(self, splits: Sequence[Split]) -> SourceProgress | None:
        """Return the distance of the slot from the end of the WAL, and the first copy's progress.

        None before there is a split.
        """
        if not splits:
            return None
        tables = self.described_tables.values()
        with slots.connect(self.endpoint, _SESSION_NAME) as session:
            return measure_position(
                session,
                SlotPosition.from_split(splits[0]),
                chunk_rows=self.chunk_rows,
                in_chunks={str(table.name) for table in tables if table.has_chunks},
            )

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> PostgresReader:
        """Return a reader of `splits`. It connects with the first poll."""
        described = self.described_tables
        settings = ReaderSettings(
            endpoint=self.endpoint,
            tables=tuple(described.values()),
            outputs={}
            if self.table is not None
            else {table.oid: name for name, table in described.items()},
            publication=self._publication_of(SlotPosition.from_split(splits[0])) if splits else "",
            follows=self.follows,
            metadata=self._metadata,
            copies_rows=self.copies_rows,
            copy_parallelism=self.copy_parallelism,
            chunk_rows=self.chunk_rows,
            batch_rows=self.batch_rows,
            transaction_rows_max=self.transaction_rows_max,
            status_interval_s=self.status_interval,
            connect_timeout_s=self.connect_timeout_s,
            silence_max_s=self.statement_timeout_s,
        )
        return PostgresReader(settings, splits, context)

    def _publication_of(self, position: SlotPosition) -> str:
        """Return the name of the publication whose changes the slot of `position` sends.

        A job that continues under another name reads the slot of its old name.
        """
        return self.publication or position.slot

    def check_server(self, session: PostgresSession) -> slots.ClusterIdentity:
        """Return the identity of the cluster.

        Raises:
            ConfigError: The server cannot send what the source reads, or not to this user.
        """
        if self.copies_rows:
            slots.identify_primary(session)
        return slots.check_server(session)

    def describe_tables(self, session: PostgresSession) -> Sequence[SourceTable]:
        """Return the tables as the server describes them. Raises those of `described_tables`."""
        return tuple(self._describe(session).values())

    def _describe(self, session: PostgresSession) -> Mapping[str, SourceTable]:
        """Return the tables as the server describes them now, by the names of their outputs."""
        names = self._names or self._list_publication_tables(session)
        tables: dict[str, SourceTable] = {}
        by_oid: dict[int, str] = {}
        for output, name in names.items():
            given = (self.schemas or {}).get(output)
            columns = (
                self._columns
                if given is None
                else schema_of(cast("SchemaLike", given), setting=f"schemas[{output!r}]")
            )
            table = describe_table(
                session,
                name,
                columns,
                is_followed=self.follows,
                stops_at_new_columns=self._stops_at_new_columns(columns, name),
            )
            require_key_columns(table)
            require_free_names(table, self._metadata)
            if table.oid in by_oid:
                raise ConfigError(
                    f"tables= names table {table.name} twice: {by_oid[table.oid]!r} and {output!r}"
                )
            tables[output] = table
            by_oid[table.oid] = output
        return tables

    def _stops_at_new_columns(self, columns: pa.Schema | None, name: TableName) -> bool:
        """Return True if a column that is not read must stop the job.

        Raises:
            ConfigError: `on_schema_change` is "ignore", and the user did not name the columns. The
                next start would read a new column whose earlier values are missing.
        """
        if self.on_schema_change is None:
            return columns is None
        change = choice_of(SchemaChange, self.on_schema_change, setting="on_schema_change")
        if change is SchemaChange.IGNORE and columns is None:
            raise ConfigError(
                f"on_schema_change='ignore' leaves new columns of table {name} out, but the next"
                " start would read them. Name the columns to read: schema= for table=, or schemas="
            )
        return change is SchemaChange.STOP

    def _list_publication_tables(self, session: PostgresSession) -> Mapping[str, TableName]:
        """Return the tables of the user's publication, by the names of their outputs."""
        assert self.publication is not None
        names = slots.find_publication(session, self.publication)
        if not names:
            state = "does not exist" if names is None else "has no table"
            raise ConfigError(
                f"publication {self.publication} {state}, and its tables are to be read: correct"
                " publication=, or name the tables with tables="
            )
        return {format_name(name): name for name in names}

    def _prepare_slot(
        self, session: PostgresSession, name: str, tables: Sequence[SourceTable]
    ) -> tuple[int, Mapping[int, str]]:
        """Return the position of the slot, and the publication's version for each table, by OID.

        If there is no slot, create the publication and then the slot. pgoutput reads the catalog
        as of each change, so the publication must exist before the first change of the slot.
        """
        publication = self.publication_name
        versions = slots.check_publication(session, publication, tables)
        slots.require_updates(session, publication, tables)
        state = slots.find_slot(session, name)
        if state is not None:
            if state.is_active:
                raise ConfigError(
                    f"slot {name} is in use by another reader: stop that reader, or give slot="
                    f" another name{self._describe_new_slot()}"
                )
            if versions is None:
                raise ConfigError(
                    f"slot {name} exists, and publication {publication} does not: changes before"
                    f" the publication cannot be read. Drop the slot ({drop_statement(name)}), or"
                    f" give publication= the right name{self._describe_new_slot()}"
                )
            slots.logger.info("slot %s exists, and is read from its position", name)
            return state.confirmed, versions
        self._require_all_columns(tables)
        self._check_access(session, tables, creates_publication=versions is None)
        is_own = versions is None
        if versions is None:
            versions = slots.create_publication(session, publication, tables)
        try:
            return slots.create_slot(session, name), versions
        except BaseException:
            if is_own and session.is_open:
                slots.drop_publication(session, publication)
            raise

    def _describe_new_slot(self) -> str:
        """Return a warning about the changes that a new slot lacks, to append to an advice."""
        if self.copies_rows:
            return ""
        return (
            ". A new slot has no change from before its creation: to have these rows, too, give"
            " first_copy='all' and empty the target"
        )

    def _require_all_columns(self, tables: Iterable[SourceTable]) -> None:
        """Raise ConfigError if the first copy of `tables` cannot have the columns that it needs."""
        if self.copies_rows:
            for table in tables:
                require_all_columns(table)

    def _check_access(
        self,
        session: PostgresSession,
        tables: Sequence[SourceTable],
        *,
        creates_publication: bool,
    ) -> None:
        """Raise ConfigError if the user cannot read changes, before anything is created."""
        check_replication(self.endpoint, _SESSION_NAME)
        for table in tables:
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
