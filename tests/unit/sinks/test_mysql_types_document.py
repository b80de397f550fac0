"""The MySQL and MariaDB columns of the type tables say what the code does, cell by cell.

That values arrive as they were is tested on real servers: see mysql_type_samples.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from tests.unit.sinks.test_types_document import ARROW

from onceflow.clients.mysql.catalog import TEXTS, MySQLType
from onceflow.clients.mysql.types import BINARIES, wire_of
from onceflow.clients.sql.tables import TableName
from onceflow.core.arrow.kinds import to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.sinks.mysql.dialect import MYSQL
from onceflow.sinks.sql.ddl import creation

_DOCUMENT = Path(__file__).resolve().parents[3] / "docs/reference/types.md"
_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
# The document names these together: each takes what the others take.
_TARGETS: dict[str, tuple[str, ...]] = {
    "integers": (*_INTEGERS, *(f"{name} unsigned" for name in _INTEGERS)),
    "bit": ("bit",),
    "decimal": ("decimal",),
    "float": ("float",),
    "double": ("double",),
    "texts": tuple(sorted(TEXTS)),
    "json": ("json",),
    "enum": ("enum",),
    "uuid": ("uuid",),
    "binaries": tuple(sorted(BINARIES)),
    "date": ("date",),
    "datetime": ("datetime",),
    "timestamp": ("timestamp",),
    "time": ("time",),
}


def taken_by(kind: pa.DataType) -> str:
    """Return the types into which columns of `kind` go, as the document names them."""
    found: list[str] = []
    for shown, names in _TARGETS.items():
        takes = {
            wire_of(to_plain_type(kind), MySQLType(name.split()[0], name)) is not None
            for name in names
        }
        assert len(takes) == 1, f"{shown}: some take {kind} and others do not"
        found += [shown] if takes == {True} else []
    return "any" if len(found) == len(_TARGETS) else ", ".join(found) or "-"


def created_as(kind: pa.DataType, *, key: bool) -> str:
    """Return the type of the column in a table that onceflow creates, or "-"."""
    try:
        schema = pa.schema([pa.field("v", kind, nullable=not key)])
        text = creation(MYSQL, TableName(None, "t"), schema, ("v",) if key else ())
    except (ConfigError, ValueError):
        return "-"
    found = re.search(r"\bv`? (.*?)(?: NOT NULL)?, ?PRIMARY|\bv`? (.*)\)", " ".join(text.split()))
    assert found is not None, text
    made = (found[1] or found[2]).partition(")ENGINE")[0].strip().lower()
    made = made.removesuffix(" null").replace(" character set utf8mb4", "").replace("collate ", "")
    return made.replace("20, 4", "p, s").replace("50, 4", "p, s").replace("binary(5)", "binary(n)")


def row(name: str) -> str:
    """Return the line of the table for the Arrow type called so."""
    kind = ARROW[name]
    plain_type, key_type = created_as(kind, key=False), created_as(kind, key=True)
    made = plain_type if key_type in (plain_type, "-") else f"{plain_type}; in a key {key_type}"
    return f"| {name} | {taken_by(kind)} | {made} |"


@pytest.mark.parametrize("name", ["year", "set", "inet4", "inet6", "geometry", "point", "vector"])
def test_a_type_that_the_document_leaves_out_takes_no_values(name: str) -> None:
    takes = [
        shown
        for shown, kind in ARROW.items()
        if not pa.types.is_null(kind) and wire_of(to_plain_type(kind), MySQLType(name, name))
    ]
    assert takes == [], "name it in _TARGETS, and in the document"


@pytest.mark.parametrize("name", ARROW)
def test_line_of_the_document_is_what_the_code_does(name: str) -> None:
    section = _DOCUMENT.read_text(encoding="utf-8").partition("## MySQL and MariaDB\n")[2]
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in section.splitlines()}
    assert lines.get(name) == row(name)
