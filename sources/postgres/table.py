"""The table that a source reads: its columns, its replica identity, and the key of its chunks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pyarrow as pa

from onceflow.clients.postgres.catalog import (
    PostgresType,
    find_table,
    identifier,
    quote,
)
from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import ConfigError
from onceflow.sources.postgres.columns import converter_of, default_type, is_text_form

_PARTS = re.compile(r'(?:(?P<schema>"(?:[^"]|"")+"|[^."]+)\.)?(?P<table>"(?:[^"]|"")+"|[^."]+)')
FULL = "f"
_NOTHING = "n"
KeyOrder: TypeAlias = Literal[
    "number", "text", "bool", "bytea", "date", "numeric", "timestamp", "timestamptz", "uuid"
]
"""The name of an order of values."""
_ORDERS: Mapping[str, KeyOrder] = {
    "int2": "number",
    "int4": "number",
    "int8": "number",
    "text": "text",
    "varchar": "text",
    "bool": "bool",
    "bytea": "bytea",
    "date": "date",
    "numeric": "numeric",
    "timestamp": "timestamp",
    "timestamptz": "timestamptz",
    "uuid": "uuid",
}
"""The order of the values of a key, by type: this process compares them as the server does."""
_FACTS = """
    SELECT c.oid::bigint, c.relreplident::text, c.relkind::text,
           c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT EXISTS (
               SELECT FROM pg_catalog.pg_partition_tree(c.oid) AS l
               JOIN pg_catalog.pg_class AS p ON p.oid = l.relid
               WHERE l.isleaf AND l.level > 0 AND (p.relkind <> 'r' OR p.relpersistence <> 'p'))
    FROM pg_catalog.pg_class AS c WHERE c.oid = pg_catalog.to_regclass({name})
"""
# This process compares texts by code point. The server does so with a collation that compares
# bytes, and only in UTF-8, whose bytes have the order of the code points.
_COLUMNS = """
    SELECT a.attname::text, a.atttypid::bigint, a.attstorage::text IN ('x', 'e', 'm'),
           current_setting('server_encoding') = 'UTF8' AND coalesce(CASE WHEN k.collname = 'default'
                THEN (SELECT d.datcollate IN ('C', 'POSIX')
                          AND coalesce(to_jsonb(d) ->> 'datlocprovider', 'c') = 'c'
                      FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
                ELSE k.collname IN ('C', 'POSIX') END, false)
    FROM pg_catalog.pg_attribute AS a
    LEFT JOIN pg_catalog.pg_collation AS k ON k.oid = a.attcollation
    WHERE a.attrelid = {table} AND a.attnum > 0 AND NOT a.attisdropped
"""
_KEY = """
    SELECT a.attname::text, i.indimmediate
    FROM pg_catalog.pg_index AS i
    CROSS JOIN LATERAL unnest((i.indkey::int2[])[0:i.indnkeyatts - 1])
        WITH ORDINALITY AS k(attnum, at)
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
    WHERE i.indrelid = {table} AND {condition}
    ORDER BY k.at
"""

_UNIDENTIFIED_PARTITION = """
    SELECT l.relid::regclass::text FROM pg_catalog.pg_partition_tree({table}) AS l
    JOIN pg_catalog.pg_class AS c ON c.oid = l.relid
    WHERE l.isleaf AND l.level > 0 AND c.relreplident <> 'f' AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_index AS i WHERE i.indrelid = c.oid AND i.indimmediate
            AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                    WHEN 'i' THEN i.indisreplident ELSE false END)
    ORDER BY 1 LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column that is read."""

    name: str
    source: PostgresType
    arrow: pa.DataType
    type_number: int
    """The OID of the declared type, as messages of the stream name it."""
    can_be_large: bool
    """True if Postgres may store values apart from the row, and omit them from changes."""
    is_binary_text: bool
    """True if the server compares the column's texts by code point, as this process does."""

    @property
    def is_text_form(self) -> bool:
        """True if the server converts the values to text, for a type without an Arrow type."""
        return is_text_form(self.source, self.arrow)

    @property
    def has_known_order(self) -> bool:
        """True if this process compares values of the column as `order_expression` does."""
        return self.order is not None

    @property
    def order(self) -> KeyOrder | None:
        """The order of the column's values as parts of a key; None if it is not known here."""
        if self.is_text_form or self.source.element:
            return None
        return _ORDERS.get(self.source.name)

    @property
    def has_own_order(self) -> bool:
        """True if the copy orders by the column itself, so that an index can have this order."""
        return self.has_known_order and (self.order != "text" or self.is_binary_text)

    @property
    def order_expression(self) -> str:
        """The SQL expression by whose values the first copy is ordered.

        Texts are compared by their bytes in UTF-8, which have the order of the code points.
        """
        name = quote(self.name)
        return name if self.has_own_order else f"pg_catalog.convert_to({name}, 'UTF8')"


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table that is read."""

    name: TableName
    oid: int
    identity: str
    """The replica identity: d default, f full, i index."""
    columns: tuple[SourceColumn, ...]
    key: tuple[str, ...]
    """The columns that identify a row, in the order of their index; empty if there are none."""
    stops_at_new_columns: bool
    """True if the job must stop at a change with a column that it does not read."""
    ignored_columns: frozenset[str]
    """The columns of the table that changes may have although the job does not read them."""
    unread: tuple[str, ...] = ()
    """The columns that could be read and are not named."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows."""
        return pa.schema([pa.field(column.name, column.arrow) for column in self.columns])

    @property
    def has_chunks(self) -> bool:
        """True if the first copy can continue after a key: this process knows the keys' order."""
        return bool(self.key) and all(column.has_known_order for column in self.key_columns)

    @property
    def ordered_key(self) -> tuple[str, ...]:
        """The key's columns with their orders; empty if the copy cannot continue after a key."""
        if not self.has_chunks:
            return ()
        return tuple(f"{column.name} {column.order}" for column in self.key_columns)

    @property
    def has_small_chunks(self) -> bool:
        """True if an index has the order of the keys.

        Otherwise the server sorts the whole table for each chunk, so all rows are one chunk.
        """
        return self.has_chunks and all(column.has_own_order for column in self.key_columns)

    @property
    def is_sent_as_text(self) -> bool:
        """True if the stream must send texts: the server has one format for all of its columns."""
        return any(column.is_text_form for column in self.columns)

    @property
    def key_columns(self) -> tuple[SourceColumn, ...]:
        """The columns of the key."""
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.key)

    @property
    def unsent_columns(self) -> tuple[str, ...]:
        """The columns whose large values Postgres does not send for updates that keep them."""
        if self.identity == FULL:
            return ()
        return tuple(column.name for column in self.columns if column.can_be_large)


def parse_name(text: str) -> TableName:
    """Return the name in `table` or `schema.table`, where a part with a dot is in double quotes.

    Raises:
        ConfigError: The text has another form.
    """
    parts = _PARTS.fullmatch(text)
    if parts is not None and '."' in f".{text}":
        schema, name = (_unquote(parts[group] or "") for group in ("schema", "table"))
        if "." in schema + name:
            return TableName(schema or None, name)
    try:
        return TableName.parse(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def format_name(name: TableName) -> str:
    """Return `name` in the form that `parse_name` reads."""
    parts = [name.name] if name.schema is None else [name.schema, name.name]
    return ".".join(f'"{p.replace(chr(34), chr(34) * 2)}"' if "." in p else p for p in parts)


def _unquote(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def describe_table(
    session: Session,
    name: TableName,
    columns: pa.Schema | None,
    *,
    is_followed: bool,
    stops_at_new_columns: bool,
    has_generated: bool = False,
) -> SourceTable:
    """Return the table called `name` with the columns of `columns`, or with all of its columns.

    If it is not followed, it needs no key. If `stops_at_new_columns` is true, a job that follows it
    leaves out generated columns only. Generated columns are read with `has_generated` alone:
    changes do not have them, and a target of the same form computes them.

    Raises:
        ConfigError: The table is missing, or cannot be read; the message says what to do.
        SqlError: The server does not answer.
    """
    table = find_table(session, name)
    if table is None:
        raise ConfigError(f"there is no table {name}: create it, or correct table=")
    quoted = _literal(identifier(table.name))
    ((oid, identity, kind, is_logged),) = session.query(_FACTS.format(name=quoted))
    if table.unfit is not None and not is_logged:
        raise ConfigError(f"{table.name} cannot be read: {table.unfit}")
    if table.inherited_by:
        raise ConfigError(
            f"table {table.name} cannot be read: its rows include those of {table.inherited_by},"
            " which inherits from it, and their changes have the name of that table. Name the"
            " tables at the end of the inheritance"
        )
    condition = "i.indisreplident" if identity == "i" else "i.indisprimary"
    parts = session.query(_KEY.format(table=oid, condition=condition))
    key = tuple(str(column) for column, _ in parts)
    if is_followed:
        _check_identity(table.name, identity, key, kind)
        if not all(is_immediate for _, is_immediate in parts):
            raise _make_deferrable_error(table.name, key)
        _check_partitions(session, table.name, int(oid))
    facts = {row[0]: row[1:] for row in session.query(_COLUMNS.format(table=oid))}
    readable = [c for c in table.columns if has_generated or not c.generated]
    types = _choose_types(table.name, {c.name: _own(c.type) for c in readable}, columns)
    return SourceTable(
        table.name,
        int(oid),
        str(identity),
        tuple(
            SourceColumn(
                column.name,
                _own(column.type),
                types[column.name],
                *_order_facts(facts[column.name]),
            )
            for column in readable
            if column.name in types
        ),
        key,
        stops_at_new_columns=stops_at_new_columns,
        ignored_columns=frozenset(
            column.name
            for column in table.columns
            if column.name not in types and (column.generated or not stops_at_new_columns)
        ),
        unread=tuple(column.name for column in readable if column.name not in types),
    )


def require_key_columns(table: SourceTable) -> None:
    """Raise ConfigError if a column of the key of `table` is not read."""
    names = [column.name for column in table.columns]
    if missing := [name for name in table.key if name not in names]:
        raise ConfigError(
            f"table {table.name}: its key has the columns {', '.join(table.key)}, and schema= lacks"
            f" {', '.join(missing)}: add them"
        )


def require_all_columns(table: SourceTable) -> None:
    """Raise ConfigError if no column may be left out, and the first copy would leave some out."""
    if table.stops_at_new_columns and table.unread:
        raise ConfigError(
            f"on_schema_change='stop' allows no column to be left out, and the first copy of table"
            f" {table.name} would leave out {', '.join(table.unread)}: add them to schema=, or give"
            " on_schema_change='ignore'"
        )


def _order_facts(facts: Sequence[object]) -> tuple[int, bool, bool]:
    type_number, can_be_large, is_binary_text = facts
    return int(str(type_number)), bool(can_be_large), bool(is_binary_text)


def _own(column_type: object) -> PostgresType:
    assert isinstance(column_type, PostgresType), column_type
    return column_type


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _check_identity(name: TableName, identity: str, key: Sequence[str], kind: str) -> None:
    """Raise ConfigError unless each change contains the key or all old values of its row.

    With a publication and no identity, Postgres would refuse UPDATE and DELETE of all programs.
    """
    if identity == FULL or (key and identity != _NOTHING):
        return
    state = "REPLICA IDENTITY NOTHING" if identity == _NOTHING else "no primary key"
    advice = f"ALTER TABLE {identifier(name)} REPLICA IDENTITY FULL"
    if kind == "p":
        advice += ", for it and for each partition"
    raise ConfigError(
        f"table {name} has {state}, so a change does not say which row it concerns, and Postgres"
        f" would refuse every UPDATE and DELETE of a published table. Add a primary key, or run:"
        f" {advice}"
    )


def _check_partitions(session: Session, name: TableName, oid: int) -> None:
    """Raise ConfigError unless changes of each partition identify their rows."""
    for (partition,) in session.query(_UNIDENTIFIED_PARTITION.format(table=oid)):
        raise ConfigError(
            f"partition {partition} of table {name} has neither a primary key nor a replica"
            " identity of its own, so Postgres would refuse every UPDATE and DELETE of it. Run, for"
            f" each partition: ALTER TABLE {partition} REPLICA IDENTITY FULL"
        )


def _make_deferrable_error(name: TableName, key: Sequence[str]) -> ConfigError:
    """Return the error for a primary key that the server checks at the end of a transaction.

    With the default replica identity, Postgres would refuse UPDATE and DELETE of all programs. With
    FULL, an update may give a row the key of another row, whose later delete removes both.
    """
    columns = ", ".join(map(quote, key))
    return ConfigError(
        f"the primary key of table {name} is DEFERRABLE, so two rows may have one key within a"
        " transaction, and a target that applies one change after the other would lose a row."
        f" Create a key that is not: CREATE UNIQUE INDEX my_key ON {identifier(name)} ({columns}),"
        f" and run ALTER TABLE {identifier(name)} REPLICA IDENTITY USING INDEX my_key"
    )


def _choose_types(
    table: TableName, present: dict[str, PostgresType], columns: pa.Schema | None
) -> dict[str, pa.DataType]:
    """Return the Arrow type of each column to read.

    Raises:
        ConfigError: A column is missing, or its values have no exact type in Arrow.
    """
    if columns is None:
        chosen = {name: default_type(source) for name, source in present.items()}
    else:
        chosen = {field.name: field.type for field in columns}
    types: dict[str, pa.DataType] = {}
    for name, given in chosen.items():
        source = present.get(name)
        if source is None:
            raise ConfigError(
                f"table {table} has no column {name!r} that can be read; it has"
                f" {', '.join(map(quote, present))}. Generated columns are read by lookups alone"
            )
        if given is None or converter_of(source, given) is None:
            default = default_type(source)
            advice = (
                "give schema= with the other columns"
                if default is None
                else f"give {default}{'' if default == pa.string() else ', or string for its text'}"
            )
            raise ConfigError(
                f"column {name!r} of table {table} has type {source.shown}, whose values are not"
                f" read{'' if given is None else f' as {given}'}: {advice}"
            )
        types[name] = given
    return types
