"""What the server says about itself and about the table to be written.

Queries of information_schema in place of SQLAlchemy's inspector, because every writer asks them:
the inspector does not see generated columns, privileges and the collation of each column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymysql.err import MySQLError, OperationalError

from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.failures import DENIED, PRIVILEGE_MISSING, XA_FATAL, code
from onceflow.sinks.mysql.names import XaNames, literal
from onceflow.sinks.sql import TableName

_VERSION = re.compile(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the commit modes need to know about a server."""

    mariadb: bool
    version: tuple[int, int, int]
    read_only: bool
    detaches: bool
    """Whether a session may go on after XA PREPARE, and others commit what it prepared."""
    binlog_format: str
    """Empty when there is no binary log."""
    galera: bool
    flush_at_commit: str
    """innodb_flush_log_at_trx_commit."""
    sync_binlog: str
    doublewrite: str
    redo_log: bool
    local_infile: bool
    user: str
    """As GRANT takes it."""

    @property
    def shown(self) -> str:
        """Product and version."""
        return f"{'MariaDB' if self.mariadb else 'MySQL'} {'.'.join(map(str, self.version))}"


def server_facts(session: Session) -> ServerFacts:
    """Return the facts as of now."""
    names = (
        "read_only",
        "super_read_only",
        "xa_detach_on_prepare",
        "log_bin",
        "binlog_format",
        "wsrep_on",
        "innodb_flush_log_at_trx_commit",
        "sync_binlog",
        "innodb_doublewrite",
        "local_infile",
    )
    listed = ", ".join(map(literal, names))
    found = session.query(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({listed})")
    values = {str(name).lower(): str(value) for name, value in found}
    # Of MySQL alone, and no variable.
    redo_log = session.query("SHOW GLOBAL STATUS LIKE 'Innodb_redo_log_enabled'")
    match = _VERSION.match(session.version_text)
    major, minor, patch = map(int, match.groups()) if match else (0, 0, 0)
    ((user,),) = session.query("SELECT CURRENT_USER()")
    return ServerFacts(
        mariadb=session.is_mariadb,
        version=(major, minor, patch),
        read_only="ON" in (values.get("read_only"), values.get("super_read_only")),
        detaches=session.is_mariadb or values.get("xa_detach_on_prepare") == "ON",
        binlog_format=values.get("binlog_format", "") if values.get("log_bin") == "ON" else "",
        galera=values.get("wsrep_on") == "ON",
        flush_at_commit=values.get("innodb_flush_log_at_trx_commit", ""),
        sync_binlog=values.get("sync_binlog", ""),
        doublewrite=values.get("innodb_doublewrite", ""),
        redo_log=not redo_log or redo_log[0][1] == "ON",
        local_infile=values.get("local_infile") == "ON",
        user=_grantee(str(user)),
    )


@dataclass(frozen=True, slots=True)
class ColumnType:
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


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of the target table."""

    name: str
    type: ColumnType
    nullable: bool
    has_default: bool
    generated: bool
    insertable: bool
    updatable: bool
    readable: bool


@dataclass(frozen=True, slots=True)
class TargetTable:
    """The table that rows go to."""

    name: TableName
    """With its database."""
    kind: str
    """BASE TABLE, VIEW and others."""
    engine: str
    columns: tuple[TableColumn, ...]
    unique_keys: tuple[tuple[str, frozenset[str]], ...] = ()
    """Every unique index over whole columns: its name and its columns."""
    other_unique: bool = False
    """Whether there is a unique index over parts of columns or expressions."""
    grantee: str = ""
    """Who looks at it, as GRANT takes it."""

    def column(self, name: str) -> TableColumn | None:
        """Return the column called `name`, or None."""
        return next((column for column in self.columns if column.name == name), None)

    def index_over(self, key: Sequence[str]) -> str | None:
        """Return the unique index over exactly the columns of `key`."""
        wanted = frozenset(key)
        return next((name for name, columns in self.unique_keys if columns == wanted), None)


def target_table(session: Session, name: TableName) -> TargetTable | None:
    """Return the table called `name`, in the session's database unless it names one; or None."""
    database = "DATABASE()" if name.schema is None else literal(name.schema)
    where = f"table_schema = {database} AND table_name = {literal(name.name)}"
    found = session.query(
        "SELECT table_schema, table_name, table_type, engine, CURRENT_USER() "
        f"FROM information_schema.tables WHERE {where}"
    )
    if not found:
        return None
    schema, table, kind, engine, user = found[0]
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
    return TargetTable(
        name=TableName(str(schema), str(table)),
        kind=str(kind),
        engine=str(engine or ""),
        columns=tuple(_column(row) for row in rows),
        unique_keys=keys,
        other_unique=other_unique,
        grantee=_grantee(str(user)),
    )


def _grantee(user: str) -> str:
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


def _column(row: tuple[Any, ...]) -> TableColumn:
    (name, data_type, column_type, precision, scale, fraction, length, octets) = row[:8]
    (charset, collation, nullable, default, extra, privileges) = row[8:]
    extra, granted = str(extra).lower(), str(privileges).split(",")
    return TableColumn(
        name=str(name),
        type=ColumnType(
            name=_text(data_type).lower(),
            shown=_text(column_type),
            precision=_number(precision),
            scale=_number(scale),
            fraction_digits=_number(fraction) or 0,
            length=_number(length),
            octets=_number(octets),
            charset=str(charset or ""),
            collation=str(collation or ""),
        ),
        nullable=nullable == "YES",
        has_default=default is not None or "auto_increment" in extra or "default_gen" in extra,
        generated="generated" in extra.replace("default_generated", ""),
        insertable="insert" in granted,
        updatable="update" in granted,
        readable="select" in granted,
    )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(value: object) -> int | None:
    return None if value is None else int(str(value))


def prepared_transactions(
    session: Session, names: XaNames, sink_id: str
) -> tuple[TransactionId, ...]:
    """Return what is prepared under exactly this sink id with this ledger, by anybody.

    Raises:
        MySQLError: The user may not ask (one of `DENIED`), or the server cannot answer.
    """
    parsed = (
        names.parsed(int(format_id), int(gtrid), _data_bytes(data))
        for format_id, gtrid, _, data in _recovered(session)
    )
    return tuple(sorted(one for one in parsed if one is not None and one.sink_id == sink_id))


def may_recover(session: Session) -> bool:
    """Return whether the user may list prepared transactions, and commit what others prepared."""
    try:
        _recovered(session)
    except MySQLError as error:
        if code(error) in DENIED:
            return False
        raise
    return True


def _recovered(session: Session) -> Sequence[tuple[Any, ...]]:
    try:
        return session.query("XA RECOVER")
    except MySQLError as error:
        # MySQL says "fatal error" to users without XA_RECOVER_ADMIN.
        if code(error) not in DENIED and code(error) != XA_FATAL:
            raise
        ((user,),) = session.query("SELECT CURRENT_USER()")
        raise OperationalError(
            PRIVILEGE_MISSING,
            "the user may not list prepared transactions. Run: GRANT XA_RECOVER_ADMIN ON *.* TO "
            f"{_grantee(str(user))}",
        ) from error


def _data_bytes(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.encode()
