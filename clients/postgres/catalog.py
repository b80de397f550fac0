"""The queries of the catalogs that describe the table to be written.

One query is used in place of SQLAlchemy's inspector, because every writer runs it. The inspector
needs a query for each aspect. It does not see what COPY depends on: the base type under domains,
enums as such, generated columns and the privilege on each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import (
    CheckConstraint,
    ColumnFacts,
    Table,
    TableColumn,
    TableName,
)
from onceflow.core.errors import ConfigError
from onceflow.core.spi.connector import Area, Finding

_TYPMOD_OFFSET = 4
"""Postgres stores the limit of a type plus 4, the size of a value's header."""
_MICROSECOND_DIGITS = 6
_TIMES = frozenset({"timestamp", "timestamptz", "time", "timetz"})
# The fields of an interval are bits in the upper half of its modifier; its digits are the lower
# half. Source: src/include/utils/timestamp.h and datetime.h, PostgreSQL 12 to 18.
_NO_DIGITS = 0xFFFF
_ALL_FIELDS = 0x7FFF
_HOURS, _MINUTES, _SECONDS = 1 << 10, 1 << 11, 1 << 12
_HOUR_US, _MINUTE_US = 3_600_000_000, 60_000_000
_NAME_BYTES_MAX = 63
"""NAMEDATALEN - 1. Source: PostgreSQL's documentation, "Identifiers and Key Words"."""
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}


def quote(name: str) -> str:
    """Return `name` as a quoted identifier.

    Raises:
        ConfigError: Postgres would cut the name.
    """
    check_name(name)
    return f'"{name.replace(chr(34), chr(34) * 2)}"'


def check_name(name: str) -> None:
    """Raise ConfigError if Postgres would cut `name`.

    Postgres cuts longer names without an error, so that two names may refer to one table.
    """
    size_bytes = len(name.encode())
    if size_bytes > _NAME_BYTES_MAX:
        raise ConfigError(
            f"the name {name!r} has {size_bytes} bytes, and Postgres cuts names to"
            f" {_NAME_BYTES_MAX}: use a shorter one"
        )


def literal(value: str) -> str:
    """Return `value` as a SQL literal, valid for both values of standard_conforming_strings."""
    escaped = value.replace("'", "''")
    return f" E'{escaped.replace(chr(92), chr(92) * 2)}'" if "\\" in value else f"'{escaped}'"


def identifier(name: TableName) -> str:
    """Return the quoted name of a table."""
    return f"{quote(name.schema)}.{quote(name.name)}" if name.schema else quote(name.name)


@dataclass(frozen=True, slots=True)
class PostgresType:
    """A type as its wire format requires it: the base type under any domains."""

    name: str
    """The type as the catalogs name it: int4, timestamptz; `enum` for enums, empty if unknown."""
    shown: str
    """The type as SQL names it, as the column was declared."""
    precision: int | None = None
    scale: int | None = None
    """The scale of numeric(precision, scale); None if there is no limit."""
    element: str = ""
    """The name of an array's elements; empty for other types."""
    base: str = ""
    """The type under any domains, as SQL names it, without limits. Values are cast to it."""
    length: int | None = None
    """The length of varchar(length) and char(length) in characters; None if there is no limit."""
    unit_us: int = 1
    """The smallest part of a time or interval that the column keeps, in microseconds: the server
    rounds to it without an error. 0 if it keeps none, as `interval day`."""
    has_limited_parts: bool = False
    """True if elements or attributes have limits to which the server cuts or rounds their texts."""
    has_constraints: bool = False
    """True if the column was declared as a domain with CHECK constraints."""
    is_recoded: bool = False
    """True if the database stores texts in another encoding than UTF-8, which lacks some of its
    characters."""

    @property
    def element_type(self) -> PostgresType:
        """The type of an array's elements, with the array's modifiers."""
        return replace(self, name=self.element, element="")


_TABLE = """
    SELECT c.oid, n.nspname::text AS schema, c.relname::text AS name,
           c.relkind::text AS kind, c.relpersistence::text AS persistence,
           pg_catalog.has_table_privilege(c.oid, 'DELETE') AS deletable,
           pg_catalog.quote_ident(current_user) AS grantee,
           (SELECT array[l.relid::text, p.relkind::text, p.relpersistence::text]
            FROM pg_catalog.pg_partition_tree(c.oid) AS l
            JOIN pg_catalog.pg_class AS p ON p.oid = l.relid
            WHERE c.relkind = 'p' AND l.isleaf AND l.level > 0
                AND (p.relkind <> 'r' OR p.relpersistence <> 'p')
            LIMIT 1) AS odd_partition,
           pg_catalog.row_security_active(c.oid) AS has_policies,
           -- 2 UPDATE, 3 INSERT. The server looks at rules of UPDATE even if they are disabled.
           coalesce((SELECT r.rulename::text FROM pg_catalog.pg_rewrite AS r
                     WHERE r.ev_class = c.oid AND (r.ev_type = '2'
                         OR r.ev_type = '3' AND r.ev_enabled IN ('O', 'A'))
                     ORDER BY r.rulename LIMIT 1), '') AS rule
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.oid = pg_catalog.to_regclass({name})
"""
# A domain refers to its base type, which may be a domain again; only the last type counts. A domain
# has its own limits; a column of a domain has none.
_COLUMNS = """
    WITH RECURSIVE layer AS (
        SELECT a.attnum, a.atttypid AS type, a.atttypmod AS modifier, 0 AS depth,
               a.attnotnull AS not_null, a.atthasdef OR a.attidentity <> '' AS has_default
        FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = {table} AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT layer.attnum, t.typbasetype, t.typtypmod, layer.depth + 1,
               layer.not_null OR t.typnotnull, layer.has_default OR t.typdefault IS NOT NULL
        FROM layer JOIN pg_catalog.pg_type AS t ON t.oid = layer.type
        WHERE t.typtype = 'd'
    ),
    -- UNION, because a composite type may contain arrays of itself.
    part AS (
        SELECT layer.attnum, layer.type, -1 AS modifier FROM layer
        UNION
        SELECT part.attnum, inner_type.type, inner_type.modifier
        FROM part JOIN pg_catalog.pg_type AS t ON t.oid = part.type CROSS JOIN LATERAL (
            SELECT t.typbasetype AS type, t.typtypmod AS modifier WHERE t.typtype = 'd'
            UNION ALL
            SELECT t.typelem, -1 WHERE t.typcategory = 'A'
            UNION ALL
            SELECT f.atttypid, f.atttypmod FROM pg_catalog.pg_attribute AS f
            WHERE t.typtype = 'c' AND f.attrelid = t.typrelid AND f.attnum > 0
                AND NOT f.attisdropped
            UNION ALL
            SELECT r.rngsubtype, -1 FROM pg_catalog.pg_range AS r WHERE r.rngtypid = t.oid
        ) AS inner_type
        -- The limits of a column's own domains are in `layer`.
        WHERE t.typtype <> 'd' OR part.type NOT IN (
            SELECT layer.type FROM layer WHERE layer.attnum = part.attnum)
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
           a.attidentity = 'a' AS always_identity,
           (SELECT d.refobjid::regclass::text
            FROM pg_catalog.pg_attrdef AS f
            JOIN pg_catalog.pg_depend AS d ON d.objid = f.oid
                AND d.classid = 'pg_catalog.pg_attrdef'::regclass
                AND d.refclassid = 'pg_catalog.pg_class'::regclass
            JOIN pg_catalog.pg_class AS s ON s.oid = d.refobjid
            WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum
                -- The function must not be asked of a table, and CASE keeps the order.
                AND CASE WHEN s.relkind = 'S'
                    THEN NOT pg_catalog.has_sequence_privilege(s.oid, 'USAGE, UPDATE') END
            LIMIT 1) AS closed_sequence,
           CASE WHEN t.typcategory = 'A' AND e.typtype = 'b' THEN e.typname::text ELSE '' END
               AS element,
           EXISTS (SELECT FROM part JOIN pg_catalog.pg_type AS p ON p.oid = part.type
                   WHERE part.attnum = layer.attnum AND part.modifier >= 0
                       AND p.typnamespace = 'pg_catalog'::regnamespace
                       AND p.typname NOT IN ('bit', 'varbit')) AS has_limited_parts,
           EXISTS (SELECT FROM layer AS d JOIN pg_catalog.pg_constraint AS k ON k.contypid = d.type
                   WHERE d.attnum = layer.attnum AND k.contype = 'c') AS has_constraints,
           -- A database in SQL_ASCII takes all bytes.
           pg_catalog.current_setting('server_encoding') NOT IN ('UTF8', 'SQL_ASCII') AS is_recoded
    FROM layer
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = {table} AND a.attnum = layer.attnum
    JOIN pg_catalog.pg_type AS t ON t.oid = layer.type
    JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
    LEFT JOIN pg_catalog.pg_type AS e ON e.oid = t.typelem
    LEFT JOIN pg_catalog.pg_collation AS c ON c.oid = a.attcollation
    WHERE t.typtype <> 'd'
    ORDER BY a.attnum
"""
# `conkey` has a zero for the whole row, which no expression over single columns can give. Since
# Postgres 18 a constraint may be NOT ENFORCED. A row trigger (bit 1) that runs before (bit 2) may
# still change a row that violates a constraint. A constraint over a column with a collation of its
# own is left out: values that are cast to the column's type have the collation of the type.
_CHECKS = """
    SELECT k.conname::text, pg_catalog.pg_get_expr(k.conbin, k.conrelid), array_agg(a.attname::text)
    FROM pg_catalog.pg_constraint AS k
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey)
    JOIN pg_catalog.pg_type AS y ON y.oid = a.atttypid
    WHERE k.conrelid = {table} AND k.contype = 'c' AND NOT 0 = ANY (k.conkey)
        AND coalesce((to_jsonb(k) ->> 'conenforced')::boolean, true)
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_trigger AS t
                        WHERE t.tgrelid = k.conrelid AND t.tgtype & 3 = 3)
    GROUP BY k.oid, k.conname, k.conbin, k.conrelid
    HAVING bool_and(a.attcollation = y.typcollation)
    ORDER BY k.conname
"""
# Generated columns are listed like CHECK constraints. If the column may be null, the condition is
# never false: it only makes the server evaluate the expression.
_GENERATED = """
    SELECT format('of generated column %s', a.attname),
        format(CASE WHEN a.attnotnull THEN '(%s)::%s IS NOT NULL'
                    ELSE 'pg_catalog.num_nulls((%s)::%s) >= 0' END,
            pg_catalog.pg_get_expr(d.adbin, d.adrelid),
            pg_catalog.format_type(a.atttypid, a.atttypmod)),
        array_agg(c.attname::text)
    FROM pg_catalog.pg_attribute AS a
    JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    JOIN pg_catalog.pg_depend AS p ON p.classid = 'pg_catalog.pg_attrdef'::regclass
        AND p.objid = d.oid AND p.refobjid = a.attrelid AND p.refobjsubid <> a.attnum
    JOIN pg_catalog.pg_attribute AS c ON c.attrelid = p.refobjid AND c.attnum = p.refobjsubid
    JOIN pg_catalog.pg_type AS y ON y.oid = c.atttypid
    WHERE a.attrelid = {table} AND a.attgenerated = 's'
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_trigger AS t
                        WHERE t.tgrelid = a.attrelid AND t.tgtype & 3 = 3)
    GROUP BY a.attname, a.attnotnull, a.atttypid, a.atttypmod, d.adbin, d.adrelid
    HAVING bool_and(c.attcollation = y.typcollation)
    ORDER BY a.attname
"""
# Without partial indexes, indexes over expressions, and those that are checked only at the end.
_UNIQUE_KEYS = """
    SELECT i.indexrelid::regclass::text, array_agg(a.attname::text)
    FROM pg_catalog.pg_index AS i
    CROSS JOIN LATERAL unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) AS k(attnum)
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
    WHERE i.indrelid = {table} AND i.indisunique AND i.indisvalid AND i.indimmediate
        AND i.indpred IS NULL AND i.indexprs IS NULL
    GROUP BY i.indexrelid
"""


def find_schema(session: Session, name: TableName) -> str | None:
    """Return the schema in which the search path finds the table, or would create it.

    None if the path names no schema.
    """
    ((schema,),) = session.query(
        "SELECT coalesce((SELECT n.nspname FROM pg_catalog.pg_class AS c"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        f" WHERE c.oid = pg_catalog.to_regclass({literal(identifier(name))})),"
        " pg_catalog.current_schema())::text"
    )
    return None if schema is None else str(schema)


def find_table(session: Session, name: TableName) -> Table | None:
    """Return the table called `name` as the search path finds it, or None."""
    known = session.query(_TABLE.format(name=literal(identifier(name))))
    if not known:
        return None
    oid, schema, table, kind, persistence, deletable, grantee = known[0][:7]
    odd_partition, has_policies, rule = known[0][7:]
    shown = TableName(schema, table)
    keys = session.query(_UNIQUE_KEYS.format(table=int(oid)))
    return Table(
        name=shown,
        columns=tuple(
            _column(row, grantee) for row in session.query(_COLUMNS.format(table=int(oid)))
        ),
        unfit=_unfit(shown, kind, persistence)
        or _unfit_partition(shown, odd_partition)
        or (_unfit_for_policies(shown, grantee) if has_policies else None),
        unique_keys=tuple((index, frozenset(columns)) for index, columns in keys),
        inherited_by=find_child(session, shown),
        rule=rule,
        deletable=deletable,
        grantee=grantee,
        checks=tuple(
            CheckConstraint(check, expression, frozenset(columns))
            for query in (_CHECKS, _GENERATED)
            for check, expression, columns in session.query(query.format(table=int(oid)))
        ),
    )


def list_referenced_tables(session: Session, name: TableName) -> frozenset[TableName]:
    """Return the tables to which foreign keys of the table called `name` refer."""
    rows = session.query(
        "SELECT DISTINCT n.nspname::text, c.relname::text FROM pg_catalog.pg_constraint AS k"
        " JOIN pg_catalog.pg_class AS c ON c.oid = k.confrelid"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE k.contype = 'f'"
        f" AND k.conrelid = pg_catalog.to_regclass({literal(identifier(name))})"
    )
    return frozenset(TableName(str(schema), str(table)) for schema, table in rows)


def find_child(session: Session, name: TableName) -> str:
    """Return a table that inherits from the ordinary table called `name`.

    Empty if there is none.
    """
    rows = session.query(
        "SELECT h.inhrelid::regclass::text FROM pg_catalog.pg_inherits AS h"
        " JOIN pg_catalog.pg_class AS c ON c.oid = h.inhparent"
        f" WHERE c.oid = pg_catalog.to_regclass({literal(identifier(name))}) AND c.relkind = 'r'"
        " LIMIT 1"
    )
    return str(rows[0][0]) if rows else ""


def read_column_facts(session: Session, name: TableName) -> dict[str, ColumnFacts]:
    """Return the facts of each column of the table called `name`.

    Empty if it is not a logged table.

    `needs_value` is False for all columns, because the server refuses each row that lacks a value.
    """
    table = literal(identifier(name))
    rows = session.query(
        "SELECT a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod),"
        " coalesce(k.collisdeterministic, true)"
        " FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid"
        " LEFT JOIN pg_catalog.pg_collation AS k ON k.oid = a.attcollation"
        f" WHERE c.oid = pg_catalog.to_regclass({table}) AND c.relkind IN ('r', 'p')"
        " AND c.relpersistence = 'p' AND a.attnum > 0 AND NOT a.attisdropped"
    )
    return {
        str(column): ColumnFacts(
            str(shown),
            needs_value=False,
            key_fault="" if deterministic else _describe_key_fault(str(column), ""),
        )
        for column, shown, deterministic in rows
    }


def _unfit(name: TableName, kind: str, persistence: str) -> Finding | None:
    """Return why COPY cannot write a table, or why a prepared transaction loses what it wrote.

    Or None.

    `kind` is pg_class.relkind: r table, p partitioned table, v, m, f as in `_KINDS`. `persistence`
    is pg_class.relpersistence: p permanent, u unlogged, t temporary.
    """
    area = Area(f"table {name}")
    if kind not in ("r", "p"):
        needed = "an ordinary or a partitioned table"
        return area.problem(f"it is {_KINDS.get(kind, 'no table')}", needed, f"name {needed}")
    if persistence == "u":
        needed = (
            "a logged table: a crash of the server deletes all rows of this table, committed"
            " rows too"
        )
        alter = f"ALTER TABLE {identifier(name)} SET LOGGED"
        return area.problem("it is unlogged", needed, alter)
    if persistence == "t":
        needed = "a permanent table: prepared transactions cannot use this one"
        return area.problem("it is temporary", needed, "name a permanent table")
    return None


def _unfit_partition(name: TableName, partition: Sequence[str] | None) -> Finding | None:
    """Return why a table loses rows of `partition` (its name, kind and persistence), or None."""
    if partition is None:
        return None
    shown, kind, persistence = partition
    area = Area(f"table {name}")
    if kind == "f":
        needed = "no foreign partitions: a foreign table commits separately"
        return area.problem(f"its partition {shown} is a foreign table", needed, "detach it")
    needed = (
        "logged partitions: a crash of the server deletes all rows of this partition, committed"
        " rows too"
    )
    alter = f"ALTER TABLE {shown} SET LOGGED"
    kind_text = "unlogged" if persistence == "u" else "temporary"
    return area.problem(f"its partition {shown} is {kind_text}", needed, alter)


def _unfit_for_policies(name: TableName, grantee: str) -> Finding:
    """Return why rows of a table with row-level security cannot be written or changed."""
    needed = (
        "a user without row-level policies: policies hide rows from changes, and COPY does not"
        " work with them"
    )
    grant = f"ALTER ROLE {grantee} BYPASSRLS; or connect as the owner of the table"
    return Area(f"table {name}").problem("row-level security applies to the user", needed, grant)


def _column(row: Sequence[Any], grantee: str) -> TableColumn:
    name, modifier, not_null, has_default, generated, insertable, updatable, readable = row[:8]
    deterministic, shown, base, kind, always_identity, closed_sequence, element = row[8:15]
    has_limited_parts, has_constraints, is_recoded = row[15:]
    precision, scale = _numeric_limits(element or kind, modifier)
    length: int | None = None
    if (element or kind) in ("varchar", "bpchar") and modifier >= _TYPMOD_OFFSET:
        length = modifier - _TYPMOD_OFFSET
    unit_us = _unit_us(element or kind, modifier)
    return TableColumn(
        name=name,
        type=PostgresType(
            kind,
            shown,
            precision=precision,
            scale=scale,
            element=element,
            base=base,
            length=length,
            unit_us=unit_us,
            has_limited_parts=has_limited_parts,
            has_constraints=has_constraints,
            is_recoded=is_recoded,
        ),
        nullable=not not_null,
        has_default=has_default,
        generated=generated,
        insertable=insertable,
        updatable=updatable,
        readable=readable,
        key_fault="" if deterministic and kind != "jsonb" else _describe_key_fault(name, kind),
        default_fault=(
            f"its column {name!r}, which the rows do not have, takes its default from sequence"
            f" {closed_sequence}, which the role may not use. Run: GRANT USAGE ON SEQUENCE"
            f" {closed_sequence} TO {grantee}"
            if closed_sequence
            else ""
        ),
        update_fault=_describe_update_fault(name) if always_identity else "",
    )


def _describe_update_fault(name: str) -> str:
    """Return the fault that Postgres accepts a value for the column only in a new row."""
    return (
        f"column {name!r} is GENERATED ALWAYS AS IDENTITY, which no row may be updated in: drop it"
        f" from the rows, or run ALTER TABLE … ALTER COLUMN {quote(name)} SET GENERATED BY DEFAULT"
    )


def _numeric_limits(kind: str, modifier: int) -> tuple[int | None, int | None]:
    """Return the precision and scale of numeric(precision, scale).

    None for each without a limit.
    """
    if kind != "numeric" or modifier < _TYPMOD_OFFSET:
        return None, None
    packed = modifier - _TYPMOD_OFFSET
    # Eleven bits with a sign: numeric(3, -2) is a valid type since PostgreSQL 15.
    return packed >> 16, ((packed & 0x7FF) ^ 1024) - 1024


def _unit_of_digits(digits: int) -> int:
    unit: int = 10 ** (_MICROSECOND_DIGITS - digits)
    return unit


def _unit_us(kind: str, modifier: int) -> int:
    """Return the resolution of a time in a column of `kind`, in microseconds."""
    if modifier < 0 or kind not in (*_TIMES, "interval"):
        return 1
    if kind in _TIMES:
        return _unit_of_digits(modifier)
    fields, digits = modifier >> 16 & _ALL_FIELDS, modifier & _NO_DIGITS
    if fields & _SECONDS:
        return 1 if digits == _NO_DIGITS else _unit_of_digits(digits)
    if fields & _MINUTES:
        return _MINUTE_US
    return _HOUR_US if fields & _HOURS else 0


def _describe_key_fault(name: str, kind: str) -> str:
    """Return the fault that keys with different text may be equal in the table."""
    if kind == "jsonb":
        compares, remedy = "JSON by its meaning", "give it type text"
    else:
        compares = "text by rules other than byte equality"
        remedy = "give it a deterministic collation or type text"
    return (
        f"key column {name!r} compares {compares}, so two keys of the stream may become one row;"
        f" {remedy}, and normalize the keys in the rows"
    )
