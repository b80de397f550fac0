"""What the server says about itself and about the table to be written.

Queries of information_schema in place of SQLAlchemy's inspector, because every writer asks them:
the inspector does not see generated columns, privileges and the collation of each column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onceflow.sinks.mysql.names import identifier, literal, quoted
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import Table, TableColumn, TableName

TEXTS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext"})


@dataclass(frozen=True, slots=True)
class MySQLType:
    """A column's type, as far as values depend on it."""

    name: str
    """DATA_TYPE: int, varchar, datetime."""
    shown: str
    """COLUMN_TYPE: int unsigned, varchar(20), datetime(6)."""
    precision: int | None = None
    scale: int | None = None
    """Of numbers; of bit(n) the precision is n."""
    fraction_digits: int = 0
    """Of seconds."""
    length: int | None = None
    """In characters; of bytes, in bytes."""
    octets: int | None = None
    charset: str = ""
    collation: str = ""

    @property
    def unsigned(self) -> bool:
        """Whether there is nothing below zero."""
        return "unsigned" in self.shown

    @property
    def members(self) -> tuple[str, ...]:
        """What an enum may be."""
        quoted = re.findall(r"'((?:[^']|'')*)'", self.shown) if self.name == "enum" else []
        return tuple(member.replace("''", "'") for member in quoted)


def found(session: Session, name: TableName) -> Table | None:
    """Return the table called `name`, in the session's database unless it names one; or None."""
    database = "DATABASE()" if name.schema is None else literal(name.schema)
    where = f"table_schema = {database} AND table_name = {literal(name.name)}"
    known = session.query(
        "SELECT table_schema, table_name, table_type, engine, CURRENT_USER() "
        f"FROM information_schema.tables WHERE {where}"
    )
    if not known:
        return None
    schema, table, kind, engine, user = known[0]
    shown = TableName(str(schema), str(table))
    rows = session.query(
        "SELECT column_name, data_type, column_type, numeric_precision, numeric_scale, "
        "datetime_precision, character_maximum_length, character_octet_length, "
        "character_set_name, collation_name, is_nullable, column_default, extra, privileges "
        f"FROM information_schema.columns WHERE {where} ORDER BY ordinal_position"
    )
    keys, other_unique = _unique_keys(
        session.query(
            "SELECT index_name, column_name, sub_part FROM information_schema.statistics "
            f"WHERE {where} AND non_unique = 0 ORDER BY index_name, seq_in_index"
        )
    )
    return Table(
        name=shown,
        columns=tuple(_column(shown, row) for row in rows),
        unfit=_unfit(shown, str(kind), str(engine or "")),
        unique_keys=keys,
        other_unique=other_unique,
        grantee=grantee(str(user)),
    )


def _unfit(name: TableName, kind: str, engine: str) -> str:
    """Say why a transaction does not keep what it writes to a table, and nothing else."""
    if kind != "BASE TABLE":
        return f"{name} is a {kind.lower()}; name an ordinary table"
    if engine.lower() != "innodb":
        return (
            f"table {name} is stored by {engine}, which takes no part in prepared transactions. "
            f"Run: ALTER TABLE {identifier(name)} ENGINE = InnoDB"
        )
    return ""


def grantee(user: str) -> str:
    """Return CURRENT_USER() as GRANT takes it."""
    name, _, host = user.rpartition("@")
    return f"{literal(name)}@{literal(host)}"


def _unique_keys(
    rows: Sequence[tuple[Any, ...]],
) -> tuple[tuple[tuple[str, frozenset[str]], ...], bool]:
    parts: dict[str, list[str | None]] = {}
    for index, column, prefix in rows:
        whole = column is not None and prefix is None
        parts.setdefault(str(index), []).append(str(column) if whole else None)
    whole_ones = tuple(
        (index, frozenset(name for name in columns if name is not None))
        for index, columns in parts.items()
        if None not in columns
    )
    return whole_ones, len(whole_ones) < len(parts)


def _column(table: TableName, row: tuple[Any, ...]) -> TableColumn:
    (name, data_type, column_type, precision, scale, fraction, length, octets) = row[:8]
    (charset, collation, nullable, default, extra, privileges) = row[8:]
    extra, granted = str(extra).lower(), str(privileges).split(",")
    kind = MySQLType(
        name=_text(data_type).lower(),
        shown=_text(column_type),
        precision=_number(precision),
        scale=_number(scale),
        fraction_digits=_number(fraction) or 0,
        length=_number(length),
        octets=_number(octets),
        charset=str(charset or ""),
        collation=str(collation or ""),
    )
    return TableColumn(
        name=str(name),
        type=kind,
        nullable=nullable == "YES",
        has_default=default is not None or "auto_increment" in extra or "default_gen" in extra,
        generated="generated" in extra.replace("default_generated", ""),
        insertable="insert" in granted,
        updatable="update" in granted,
        readable="select" in granted,
        key_fault=_key_fault(table, str(name), kind, nullable=nullable == "YES"),
    )


def _key_fault(table: TableName, name: str, kind: MySQLType, *, nullable: bool) -> str:
    """Say why equal values may differ in their bytes; spaces at the end are looked at apart."""
    exact = kind.collation.endswith("_bin") or kind.collation == "binary"
    if kind.name not in TEXTS or exact:
        return ""
    return (
        f"key column {name!r} has collation {kind.collation}, which takes different text for "
        "equal, so two keys of the stream may be one row. Run: ALTER TABLE "
        f"{identifier(table)} MODIFY {quoted(name)} {kind.shown} CHARACTER SET utf8mb4 COLLATE "
        f"utf8mb4_bin{'' if nullable else ' NOT NULL'}"
    )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(value: object) -> int | None:
    return None if value is None else int(str(value))
