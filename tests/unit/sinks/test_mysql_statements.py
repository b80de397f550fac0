"""Statements that write rows to MySQL and MariaDB, by the indexes of their tables."""

from __future__ import annotations

import pyarrow as pa
import pytest

from onceflow.clients.mysql.catalog import MySQLType
from onceflow.clients.mysql.types import MySQLFit
from onceflow.clients.sql.tables import Table, TableColumn, TableName, Target
from onceflow.sinks.mysql.dml import put_statements
from onceflow.sinks.sql.write_mode import WriteMode

_BIGINT = MySQLType("bigint", "bigint")
_COLUMNS = tuple(TableColumn(name, _BIGINT, False, False, False, True) for name in ("id", "v"))
_FITS = tuple(
    MySQLFit(column, pa.int64(), column.name == "id", type=_BIGINT) for column in _COLUMNS
)
_KEY = ("PRIMARY", frozenset({"id"}))


@pytest.mark.parametrize("mariadb", [False, True])
@pytest.mark.parametrize("mode", [WriteMode.UPSERT, WriteMode.IGNORE])
@pytest.mark.parametrize(
    ("others", "other_unique", "by_any_index"),
    [
        ((), False, True),
        ((), True, False),
        ((("u", frozenset({"v"})),), False, False),
    ],
)
def test_a_key_is_matched_by_any_index_only_if_there_is_one(
    others: tuple[tuple[str, frozenset[str]], ...],
    other_unique: bool,
    by_any_index: bool,
    mode: WriteMode,
    mariadb: bool,
) -> None:
    """ON DUPLICATE KEY would change the row of another key that an index over a part finds."""
    table = Table(
        TableName("shop", "t"), _COLUMNS, unique_keys=(_KEY, *others), other_unique=other_unique
    )
    rows = pa.record_batch([[1], [2]], names=["id", "v"])
    statements = put_statements(Target(table, _FITS), mode, ("id",), mariadb=mariadb)
    written = b"".join(statement(_FITS, rows) for statement in statements)
    assert (b"ON DUPLICATE KEY" in written) is by_any_index
