"""The table of types in the documents says what the source does, type by type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from onceflow.clients.postgres.catalog import PostgresType
from onceflow.sources.postgres.columns import default_type

_DOCUMENT = Path(__file__).resolve().parents[3] / "docs/reference/source-types.md"


def _of(name: str, **limits: Any) -> PostgresType:
    return PostgresType(name, name, **limits)


_TYPES = {
    "smallint": _of("int2"), "integer": _of("int4"), "bigint": _of("int8"), "real": _of("float4"),
    "double precision": _of("float8"), "boolean": _of("bool"), "char(n)": _of("bpchar", length=3),
    "numeric(p,s)": _of("numeric", precision=20, scale=4), '"char"': _of("char"),
    "geometry": _of(""), "hstore": _of(""), "ltree": _of(""),
}  # fmt: skip


_SPELLED = {
    "float": "float32", "double": "float64", "date32[day]": "date32",
    "timestamp[us, tz=UTC]": "timestamp[us, UTC]", "decimal128(20, 4)": "decimal128(p, s)",
}  # fmt: skip


def _rows() -> dict[str, str]:
    """Return the Arrow type of each type that the table names."""
    section = _DOCUMENT.read_text(encoding="utf-8").split("### Columns and values")[1]
    rows: dict[str, str] = {}
    for line in section.split("###")[0].splitlines():
        if not line.startswith("| ") or line.startswith("| Postgres"):
            continue
        types, arrow, _ = line.strip("|").split("|")
        names, kinds = (re.findall(r"`([^`]+)`", cell) for cell in (types, arrow))
        # A single type stands for all; a second one is a remark.
        each = kinds if len(kinds) == len(names) else [*kinds[:1], ""][:1] * len(names)
        rows |= dict(zip(names, each, strict=True))
    return rows


@pytest.mark.parametrize("name", _rows())
def test_line_of_the_document_is_what_the_source_does(name: str) -> None:
    kind = default_type(_TYPES.get(name, _of(name)))
    assert _rows()[name] == ("" if kind is None else _SPELLED.get(str(kind), str(kind)))


def test_the_table_names_the_types_that_users_ask_for() -> None:
    assert {"jsonb", "timestamptz", "numeric(p,s)", "money", "inet", "hstore", "xml"} < {*_rows()}
