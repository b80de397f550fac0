"""The queries of information_schema that describe the table to be written.

They are used in place of SQLAlchemy's inspector, because every writer runs them. The inspector does
not see generated columns, privileges and the collation of each column. Names and values are SQL
text, valid under the SQL modes that every session here sets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import CheckConstraint, ColumnFacts, Table, TableColumn, TableName
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi.connector import Area, Finding

LOG_ROWS = ". Run SET GLOBAL binlog_format = 'ROW', and write it into the server's option file, too"
"""Ends an error of a server whose binary log takes statements alone."""
_FORMAT_ID = int.from_bytes(b"once", "big")
_QUALIFIER_LENGTH_MAX = 64
CHARSET = "utf8mb4"
# In this collation, texts that differ in any byte are different keys.
KEY_COLLATION = "utf8mb4_bin"
_BYTES_OF_HASH = 16


def quote(name: str) -> str:
    """Return `name` as a quoted identifier."""
    return f"`{name.replace('`', '``')}`"


def literal(value: str | int | None) -> str:
    """Return `value` as a SQL literal.

    Backslashes escape, because no session here disables that.
    """
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def identifier(table: TableName) -> str:
    """Return the quoted name of a table."""
    return f"{quote(table.schema)}.{quote(table.name)}" if table.schema else quote(table.name)


@dataclass(frozen=True, slots=True)
class XaNames:
    """The names of one ledger's transactions and session locks on the server.

    XA ids belong to the whole server and contain no database. So the branch qualifier names the
    ledger's database: two jobs with one sink id in two databases never touch each other's
    transactions.
    """

    ledger_database: str

    @property
    def qualifier(self) -> str:
        """The bqual of all ids: the database, or its hash unless it is ASCII of up to 64 bytes."""
        name = self.ledger_database
        # Readable if possible, for people who look at XA RECOVER.
        plain = name.isascii() and name.isprintable() and len(name) <= _QUALIFIER_LENGTH_MAX
        return name if plain else _hash(name)

    def xid(self, transaction: TransactionId) -> str:
        """Return the id in the form of XA statements."""
        return f"{literal(str(transaction))},{literal(self.qualifier)},{_FORMAT_ID}"

    def parse(self, format_id: int, gtrid_bytes: int, data: bytes) -> TransactionId | None:
        """Return the transaction of a row of XA RECOVER, or None if it is not of this ledger."""
        if format_id != _FORMAT_ID or data[gtrid_bytes:] != self.qualifier.encode():
            return None
        return TransactionId.parse(data[:gtrid_bytes].decode("ascii", "replace"))

    def writers_lock(self, sink_id: str) -> str:
        """Return the prefix of the lock names of all writers of a sink id.

        The subtask's number follows.
        """
        return f"onceflow/{_hash(f'{self.ledger_database}/{sink_id}')}/"

    def owner_lock(self, transaction: TransactionId) -> str:
        """Return the name of the lock held by the session that prepares `transaction`."""
        return f"onceflow/{_hash(f'{self.ledger_database}/{transaction}')}"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_BYTES_OF_HASH).hexdigest()


TEXTS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext"})


@dataclass(frozen=True, slots=True)
class MySQLType:
    """The properties of a column's type on which its values depend."""

    name: str
    """DATA_TYPE: int, varchar, datetime."""
    shown: str
    """COLUMN_TYPE: int unsigned, varchar(20), datetime(6)."""
    precision: int | None = None
    scale: int | None = None
    """The scale of numbers. The precision of bit(n) is n."""
    fraction_digits: int = 0
    """The number of digits of fractions of seconds."""
    length: int | None = None
    """The length in characters, or in bytes for binary types."""
    octets: int | None = None
    charset: str = ""
    collation: str = ""
    has_negative_zero: bool = True
    """True if a float keeps the sign of zero; MariaDB's does not."""

    @property
    def unsigned(self) -> bool:
        """True if the column is UNSIGNED."""
        return "unsigned" in self.shown

    @property
    def members(self) -> tuple[str, ...]:
        """The members of an enum."""
        quoted = re.findall(r"'((?:[^']|'')*)'", self.shown) if self.name == "enum" else []
        return tuple(member.replace("''", "'") for member in quoted)


def resolve_table(session: Session, name: TableName) -> TableName:
    """Return `name` without the session's own database.

    In lower case if the server ignores case.
    """
    ((database, ignores_case),) = session.query("SELECT DATABASE(), @@lower_case_table_names")
    if ignores_case:
        name = TableName(name.schema and name.schema.lower(), name.name.lower())
        database = database and str(database).lower()
    return TableName(None if name.schema == database else name.schema, name.name)


def find_table(session: Session, name: TableName) -> Table | None:
    """Return the table called `name`, or None. Without a schema it is in the session's database."""
    where = _where(name)
    known = session.query(
        "SELECT table_schema, table_name, table_type, engine, CURRENT_USER(), VERSION() "
        f"FROM information_schema.tables WHERE {where}"
    )
    if not known:
        return None
    schema, table, kind, engine, user, version = known[0]
    is_mariadb = "mariadb" in str(version).lower()
    shown = TableName(str(schema), str(table))
    rows = session.query(
        "SELECT column_name, data_type, column_type, numeric_precision, numeric_scale, "
        "datetime_precision, character_maximum_length, character_octet_length, "
        "character_set_name, collation_name, is_nullable, column_default, extra, privileges "
        f"FROM information_schema.columns WHERE {where} ORDER BY ordinal_position"
    )
    keys, other_unique = read_unique_keys(session, name)
    columns = tuple(_column(shown, row, is_mariadb=is_mariadb) for row in rows)
    return Table(
        name=shown,
        columns=columns,
        unfit=_unfit(shown, str(kind), str(engine or "")),
        unique_keys=keys,
        other_unique=other_unique,
        grantee=grantee(str(user)),
        checks=_read_checks(session, name, columns, str(user), is_mariadb=is_mariadb),
    )


def explain_missing_table(session: Session, name: TableName, where: str) -> ConfigError:
    """Return the error for a table that `find_table` has not found in `where`."""
    ((user,),) = session.query("SELECT CURRENT_USER()")
    return ConfigError(
        f"table {name} does not exist in {where}, or user {user} may not read it. If it exists, run"
        f" as its owner: GRANT SELECT ON {identifier(name)} TO {grantee(str(user))}"
    )


def read_column_types(session: Session, name: TableName) -> dict[str, tuple[str, str]]:
    """Return the type and the charset of each column of the table called `name`."""
    rows = session.query(
        "SELECT column_name, column_type, character_set_name FROM information_schema.columns"
        f" WHERE {_where(name)}"
    )
    return {str(column): (_text(shown), str(charset or "")) for column, shown, charset in rows}


def list_referenced_tables(session: Session, name: TableName) -> frozenset[TableName]:
    """Return the tables to which foreign keys of the table called `name` refer."""
    database = "DATABASE()" if name.schema is None else literal(name.schema)
    rows = session.query(
        "SELECT unique_constraint_schema, referenced_table_name"
        " FROM information_schema.referential_constraints"
        f" WHERE constraint_schema = {database} AND table_name = {literal(name.name)}"
    )
    return frozenset(TableName(str(schema), str(table)) for schema, table in rows)


def has_index(session: Session, name: TableName, columns: Sequence[str]) -> bool:
    """Return True if an index begins with `columns`, in any order."""
    rows = session.query(
        "SELECT index_name, column_name FROM information_schema.statistics"
        f" WHERE {_where(name)} AND seq_in_index <= {len(columns)}"
    )
    indexed: dict[str, set[str]] = {}
    for index, column in rows:
        indexed.setdefault(str(index), set()).add(str(column))
    return set(columns) in indexed.values()


def _read_checks(
    session: Session,
    name: TableName,
    columns: Sequence[TableColumn],
    user: str,
    *,
    is_mariadb: bool,
) -> tuple[CheckConstraint, ...]:
    """Return the CHECK constraints that a client can check before the rows are sent.

    A generated column that may not be null is listed like a CHECK constraint.

    A trigger may change a row before its constraints are checked. So no constraint is returned if
    the table has a trigger, or if the user may not see triggers. MariaDB's JSON columns are texts
    with a constraint that checks the syntax. These constraints are always returned.
    """
    if is_mariadb:
        database = "DATABASE()" if name.schema is None else literal(name.schema)
        rows = session.query(
            "SELECT constraint_name, check_clause FROM information_schema.check_constraints"
            f" WHERE constraint_schema = {database} AND table_name = {literal(name.name)}"
        )
    else:
        rows = session.query(
            "SELECT c.constraint_name, c.check_clause FROM information_schema.check_constraints AS"
            " c JOIN information_schema.table_constraints AS t ON c.constraint_schema ="
            " t.constraint_schema AND c.constraint_name = t.constraint_name"
            f" WHERE {_where(name)} AND t.enforced = 'YES'"
            # MariaDB has no generated column that may not be null.
            " UNION ALL SELECT CONCAT('of generated column ', column_name),"
            " CONCAT('((', generation_expression, ') IS NOT NULL)')"
            f" FROM information_schema.columns WHERE {_where(name)} AND is_nullable = 'NO'"
            " AND generation_expression <> ''"
        )
    checks: list[CheckConstraint] = []
    for check, shown in ((_text(check), _text(clause)) for check, clause in rows):
        # MySQL shows a clause with backslashes, as it would stand within quotes.
        clause = shown if is_mariadb else re.sub(r"\\(.)", r"\1", shown, flags=re.DOTALL)
        named = frozenset(column.name for column in columns if quote(column.name) in clause)
        checks.append(CheckConstraint(check, clause, named))
    json = tuple(each for each in checks if each.expression == f"json_valid({quote(each.name)})")
    return json if len(json) == len(checks) or _may_trigger(session, name, user) else tuple(checks)


def _may_trigger(session: Session, name: TableName, user: str) -> bool:
    """Return False if it is known that the table has no trigger."""
    database = "DATABASE()" if name.schema is None else literal(name.schema)
    granted = f"grantee = {literal(grantee(user))} AND privilege_type = 'TRIGGER'"
    ((is_granted, triggers),) = session.query(
        f"SELECT EXISTS (SELECT 1 FROM information_schema.user_privileges WHERE {granted})"
        f" OR EXISTS (SELECT 1 FROM information_schema.schema_privileges WHERE {granted}"
        f" AND table_schema = {database})"
        f" OR EXISTS (SELECT 1 FROM information_schema.table_privileges WHERE {granted}"
        f" AND {_where(name)}),"
        " EXISTS (SELECT 1 FROM information_schema.triggers WHERE"
        f" event_object_schema = {database} AND event_object_table = {literal(name.name)})"
    )
    return not int(is_granted) or bool(int(triggers))


def read_column_facts(session: Session, name: TableName) -> dict[str, ColumnFacts]:
    """Return the facts of each column of the table called `name`.

    Empty if it is no InnoDB table.
    """
    where = _where(name)
    rows = session.query(
        "SELECT column_name, column_type, is_nullable, column_default, extra, data_type,"
        f" collation_name FROM information_schema.columns WHERE {where} AND"
        " (SELECT table_type = 'BASE TABLE' AND engine = 'InnoDB'"
        f" FROM information_schema.tables WHERE {where})"
    )
    return {
        str(column): ColumnFacts(
            _text(shown),
            needs_value=nullable != "YES"
            and not _has_default(default, str(extra).lower())
            and not _is_generated(str(extra).lower()),
            key_fault=_key_fault(
                name,
                str(column),
                MySQLType(_text(data_type).lower(), _text(shown), collation=_text(collation or "")),
                nullable=nullable == "YES",
            ),
        )
        for column, shown, nullable, default, extra, data_type, collation in rows
    }


def _has_default(default: object, extra: str) -> bool:
    return default is not None or "auto_increment" in extra or "default_gen" in extra


def _is_generated(extra: str) -> bool:
    # `DEFAULT_GENERATED` marks a default that is an expression. Such a column can be written.
    return "generated" in extra.replace("default_generated", "")


def _where(name: TableName) -> str:
    """Return the condition that finds a table in views of information_schema."""
    database = "DATABASE()" if name.schema is None else literal(name.schema)
    return f"table_schema = {database} AND table_name = {literal(name.name)}"


def _unfit(name: TableName, kind: str, engine: str) -> Finding | None:
    """Return why a transaction does not keep what it writes to a table, or None."""
    if kind != "BASE TABLE":
        kind_text = f"it is a {kind.lower()}"
        return Area(f"table {name}").problem(kind_text, "a table", "name an ordinary table")
    if engine.lower() != "innodb":
        return Area(f"table {name}").problem(
            f"it uses the engine {engine}, which does not support prepared transactions",
            "an engine with transactions",
            f"ALTER TABLE {identifier(name)} ENGINE = InnoDB",
        )
    return None


def grantee(user: str) -> str:
    """Return the value of CURRENT_USER() in the form that GRANT accepts."""
    name, _, host = user.rpartition("@")
    return f"{literal(name)}@{literal(host)}"


def read_unique_keys(
    session: Session, name: TableName
) -> tuple[tuple[tuple[str, frozenset[str]], ...], bool]:
    """Return the unique indexes over whole columns, and True if there are others.

    Each index is a pair of its name and its columns.
    """
    rows = session.query(
        "SELECT index_name, column_name, sub_part FROM information_schema.statistics "
        f"WHERE {_where(name)} AND non_unique = 0 ORDER BY index_name, seq_in_index"
    )
    parts: dict[str, list[str | None]] = {}
    for index, column, prefix in rows:
        # A unique index over a prefix or an expression makes rows unique by a value that no column
        # stores.
        whole = column is not None and prefix is None
        parts.setdefault(str(index), []).append(str(column) if whole else None)
    whole_ones = tuple(
        (index, frozenset(name for name in columns if name is not None))
        for index, columns in parts.items()
        if None not in columns
    )
    return whole_ones, len(whole_ones) < len(parts)


def _column(table: TableName, row: tuple[Any, ...], *, is_mariadb: bool) -> TableColumn:
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
        has_negative_zero=not is_mariadb,
    )
    return TableColumn(
        name=str(name),
        type=kind,
        nullable=nullable == "YES",
        has_default=_has_default(default, extra),
        generated=_is_generated(extra),
        insertable="insert" in granted,
        updatable="update" in granted,
        readable="select" in granted,
        key_fault=_key_fault(table, str(name), kind, nullable=nullable == "YES"),
    )


def _key_fault(table: TableName, name: str, kind: MySQLType, *, nullable: bool) -> str:
    """Return the reason why equal values may differ in their bytes; empty if they do not.

    Does not consider trailing spaces, which have a check of their own.
    """
    exact = kind.collation.endswith("_bin") or kind.collation == "binary"
    if kind.name not in TEXTS or exact:
        return ""
    return (
        f"key column {name!r} has collation {kind.collation}, which treats different texts as"
        " equal, so two keys of the stream may become one row. Run: ALTER TABLE"
        f" {identifier(table)} MODIFY {quote(name)} {kind.shown} CHARACTER SET utf8mb4 COLLATE"
        f" utf8mb4_bin{'' if nullable else ' NOT NULL'}"
    )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(value: object) -> int | None:
    return None if value is None else int(str(value))
