"""What the server says about itself and about the table to be written.

One query of the catalogs in place of SQLAlchemy's inspector, because every writer asks it: the
inspector needs a query for each aspect and does not see what COPY depends on, which is the base
type under domains, enums as such, generated columns and the privilege on each column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow, dict_row

from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.sql import TableName

SERVER_VERSION_MIN = 120000
"""PostgreSQL 12: the oldest whose catalogs have generated columns."""

_TYPMOD_OFFSET = 4


def identifier(name: TableName) -> sql.Identifier:
    """Return `name`, quoted."""
    return sql.Identifier(*([name.schema] if name.schema else []), name.name)


def quoted(column: str) -> str:
    """Return the name of a column as statements take it."""
    return sql.Identifier(column).as_string(None)


@dataclass(frozen=True, slots=True)
class PostgresType:
    """A type as its wire format sees it: the base type under any domains."""

    name: str
    """In the catalogs' words: int4, text, timestamptz; `enum` for any enum, empty when unknown."""
    shown: str
    """In SQL's words, as the column was declared."""
    precision: int | None = None
    scale: int | None = None
    """Of numeric(precision, scale); None without limit."""
    element: str = ""
    """Of an array: the element's name; else empty."""
    base: str = ""
    """In SQL's words without limits, the type under any domains: what values are cast to."""
    length: int | None = None
    """Of varchar(length) and char(length), in characters; None without limit."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of the target table."""

    name: str
    type: PostgresType
    nullable: bool
    has_default: bool
    generated: bool
    insertable: bool
    """Whether the connected role may write it."""
    updatable: bool = True
    readable: bool = True
    deterministic: bool = True
    """Whether equal text is the same bytes, by the column's collation."""


@dataclass(frozen=True, slots=True)
class TargetTable:
    """The table that rows go to."""

    name: TableName
    kind: str
    """pg_class.relkind: r table, p partitioned table, v view, m materialized view, f foreign."""
    persistence: str
    """pg_class.relpersistence: p permanent, u unlogged, t temporary."""
    columns: tuple[TableColumn, ...]
    deletable: bool = True
    """Whether the connected role may delete rows."""
    unique_keys: tuple[frozenset[str], ...] = ()
    """The columns of every unique index that ON CONFLICT can go by."""
    grantee: str = ""
    """The connected role, as GRANT takes it."""

    @property
    def quoted(self) -> str:
        """The name as statements take it."""
        return identifier(self.name).as_string(None)

    def column(self, name: str) -> TableColumn | None:
        """Return the column called `name`, or None."""
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What two-phase commit needs to know about a server."""

    version: int
    """As 160004."""
    max_prepared_transactions: int
    standby: bool
    read_only: bool
    database: str
    role: str
    schema: str | None
    """Where a table without a schema is created; None when the search path names none."""


def server_facts(connection: psycopg.Connection[TupleRow]) -> ServerFacts:
    """Return the facts as of now."""
    row = connection.execute(
        "SELECT current_setting('max_prepared_transactions')::int, pg_is_in_recovery(), "
        "current_setting('transaction_read_only')::bool, current_database(), "
        "current_user::text, current_schema()::text"
    ).fetchone()
    if row is None:
        raise psycopg.InternalError("the server answered a SELECT of one row with none")
    maximum, standby, read_only, database, role, schema = row
    return ServerFacts(
        connection.info.server_version, maximum, standby, read_only, database, role, schema
    )


_TABLE = """
    SELECT c.oid, n.nspname::text AS schema, c.relname::text AS name,
           c.relkind::text AS kind, c.relpersistence::text AS persistence,
           pg_catalog.has_table_privilege(c.oid, 'DELETE') AS deletable,
           pg_catalog.quote_ident(current_user) AS grantee
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.oid = pg_catalog.to_regclass(%s)
"""
# A domain leads to the type under it, which may be a domain again; only the last one counts. The
# limits of a domain are its own, a domain's column has none.
_COLUMNS = """
    WITH RECURSIVE layer AS (
        SELECT a.attnum, a.atttypid AS type, a.atttypmod AS modifier, 0 AS depth,
               a.attnotnull AS not_null, a.atthasdef OR a.attidentity <> '' AS has_default
        FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT layer.attnum, t.typbasetype, t.typtypmod, layer.depth + 1,
               layer.not_null OR t.typnotnull, layer.has_default OR t.typdefault IS NOT NULL
        FROM layer JOIN pg_catalog.pg_type AS t ON t.oid = layer.type
        WHERE t.typtype = 'd'
    )
    SELECT a.attname::text AS name, layer.modifier, layer.not_null, layer.has_default,
           a.attgenerated <> '' AS generated,
           pg_catalog.has_column_privilege(a.attrelid, a.attnum, 'INSERT') AS insertable,
           pg_catalog.has_column_privilege(a.attrelid, a.attnum, 'UPDATE') AS updatable,
           pg_catalog.has_column_privilege(a.attrelid, a.attnum, 'SELECT') AS readable,
           t.typname <> 'citext' AND coalesce(c.collisdeterministic, true) AS deterministic,
           pg_catalog.format_type(a.atttypid, a.atttypmod) AS shown,
           pg_catalog.format_type(layer.type, -1) AS base,
           CASE WHEN t.typtype = 'e' THEN 'enum'
                WHEN n.nspname = 'pg_catalog' OR t.typname = 'citext' THEN t.typname::text
                ELSE '' END AS type,
           CASE WHEN t.typcategory = 'A' AND e.typtype = 'b' THEN e.typname::text ELSE '' END
               AS element
    FROM layer
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = %(table)s AND a.attnum = layer.attnum
    JOIN pg_catalog.pg_type AS t ON t.oid = layer.type
    JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
    LEFT JOIN pg_catalog.pg_type AS e ON e.oid = t.typelem
    LEFT JOIN pg_catalog.pg_collation AS c ON c.oid = a.attcollation
    WHERE t.typtype <> 'd'
    ORDER BY a.attnum
"""
# Not those over a part of the rows, over expressions, or checked only at the end.
_UNIQUE_KEYS = """
    SELECT array_agg(a.attname::text)
    FROM pg_catalog.pg_index AS i
    CROSS JOIN LATERAL unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) AS k(attnum)
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
    WHERE i.indrelid = %(table)s AND i.indisunique AND i.indisvalid AND i.indimmediate
        AND i.indpred IS NULL AND i.indexprs IS NULL
    GROUP BY i.indexrelid
"""


def target_table(connection: psycopg.Connection[TupleRow], name: TableName) -> TargetTable | None:
    """Return the table called `name` as the search path finds it, or None."""
    with connection.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(_TABLE, (identifier(name).as_string(connection),)).fetchone()
        if found is None:
            return None
        rows = cursor.execute(_COLUMNS, {"table": found["oid"]}).fetchall()
    keys = connection.execute(_UNIQUE_KEYS, {"table": found["oid"]}).fetchall()
    return TargetTable(
        name=TableName(found["schema"], found["name"]),
        kind=found["kind"],
        persistence=found["persistence"],
        columns=tuple(_column(row) for row in rows),
        deletable=found["deletable"],
        unique_keys=tuple(frozenset(names) for (names,) in keys),
        grantee=found["grantee"],
    )


def _column(row: dict[str, Any]) -> TableColumn:
    precision: int | None = None
    scale: int | None = None
    if row["type"] == "numeric" and row["modifier"] >= _TYPMOD_OFFSET:
        packed = row["modifier"] - _TYPMOD_OFFSET
        precision = packed >> 16
        # Eleven bits with sign: numeric(3, -2) is a type since PostgreSQL 15.
        scale = ((packed & 0x7FF) ^ 1024) - 1024
    length: int | None = None
    if row["type"] in ("varchar", "bpchar") and row["modifier"] >= _TYPMOD_OFFSET:
        length = row["modifier"] - _TYPMOD_OFFSET
    return TableColumn(
        name=row["name"],
        type=PostgresType(
            row["type"], row["shown"], precision, scale, row["element"], row["base"], length
        ),
        nullable=not row["not_null"],
        has_default=row["has_default"],
        generated=row["generated"],
        insertable=row["insertable"],
        updatable=row["updatable"],
        readable=row["readable"],
        deterministic=row["deterministic"],
    )


def prepared_transactions(
    connection: psycopg.Connection[TupleRow], sink_id: str
) -> tuple[TransactionId, ...]:
    """Return what is prepared under exactly this sink id in this database, by anybody."""
    rows = connection.execute(
        "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()"
    ).fetchall()
    parsed = (TransactionId.parse(str(gid)) for (gid,) in rows)
    return tuple(sorted(one for one in parsed if one is not None and one.sink_id == sink_id))
