"""The search for NUL looks at the right bytes, and at no others."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.postgres.types import PostgresFit, wire_of
from onceflow.clients.sql.tables import TableColumn
from onceflow.core.errors import BadRow

_TEXTS = st.lists(st.none() | st.text(st.sampled_from("ab\0é"), max_size=4), max_size=12)


def _fit(kind: pa.DataType, target: str = "text") -> PostgresFit:
    shown = PostgresType(target, target)
    wire = wire_of(kind, shown)
    assert wire is not None
    return PostgresFit(TableColumn("v", shown, True, False, False, True), wire, type=shown)


@given(_TEXTS, st.sampled_from([pa.string(), pa.large_string()]), st.data())
def test_nul_is_found_wherever_it_is_and_nowhere_else(
    texts: list[str | None], kind: pa.DataType, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(texts)))
    count = data.draw(st.integers(0, len(texts) - first))
    column = pa.array(texts, kind).slice(first, count)
    expected = texts[first : first + count]
    bad = [row for row, text in enumerate(expected) if text is not None and "\0" in text]
    if bad:
        with pytest.raises(BadRow, match=rf"column 'v'.*\(row {bad[0]} "):
            _fit(kind).convert(column)
    else:
        assert _fit(kind).convert(column).to_pylist() == expected


def test_nul_under_a_null_is_no_value() -> None:
    offsets = pa.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0")
    data = pa.py_buffer(b"\0\0a")
    valid = pa.py_buffer(b"\2")
    column = pa.Array.from_buffers(pa.string(), 2, [valid, offsets, data])
    assert column.to_pylist() == [None, "a"]
    assert _fit(pa.string()).convert(column).to_pylist() == [None, "a"]


@given(st.lists(st.none() | st.uuids(), max_size=10), st.booleans())
def test_uuid_text_becomes_its_bytes(values: list[object], dashes: bool) -> None:
    texts = [None if v is None else str(v) if dashes else str(v).replace("-", "") for v in values]
    got = _fit(pa.string(), "uuid").convert(pa.array(texts, pa.string()))
    assert got.type == pa.binary(16)
    assert got.to_pylist() == [getattr(value, "bytes", None) for value in values]
