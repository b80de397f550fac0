"""Tests that values which the server would always refuse are refused before they are staged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest

from onceflow.clients.mysql.catalog import MySQLType
from onceflow.clients.mysql.types import MySQLFit
from onceflow.clients.mysql.types import wire_of as mysql_wire_of
from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.postgres.types import PostgresFit, wire_of
from onceflow.clients.sql.tables import Table, TableColumn, TableName, Target
from onceflow.core.errors import BadRow
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks import PostgresSink
from onceflow.sinks.sql.row_validator import RowValidator, find_refused_rows
from onceflow.sinks.sql.write_mode import ChangeRules, WriteMode

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("v", pa.string())])
BY_KEY = ChangeRules(WriteMode.UPSERT, ("id",), tombstones=True)


def _fit(name: str, kind: PostgresType, given: pa.DataType, *, nullable: bool) -> PostgresFit:
    wire = wire_of(given, kind)
    assert wire is not None
    return PostgresFit(TableColumn(name, kind, nullable, False, False, True), wire, type=kind)


def _taken(
    values: Sequence[str | None],
    on_bad_row: OnBadRow,
    *,
    nullable: bool = False,
    null_overflow: bool = False,
    rules: ChangeRules = BY_KEY,
) -> tuple[dict[int, str | None], list[bool], list[tuple[int, str]]]:
    """Return the rows let through by id, their deletes, and the rejected ones with reasons."""
    name = TableName("public", "t")
    fits = (
        _fit("id", PostgresType("int8", "bigint"), pa.int64(), nullable=False),
        _fit(
            "v",
            PostgresType("varchar", "character varying(3)", length=3),
            pa.string(),
            nullable=nullable,
        ),
    )
    target = Target(Table(name, ()), fits)
    bad_rows = BadRows(on_bad_row, SCHEMA)
    sink = PostgresSink("postgresql://h/d", table="t")
    settings = replace(sink.settings, table=name, rules=rules, null_overflow=null_overflow)
    validator = RowValidator(settings, lambda _: target, bad_rows)
    batch = pa.record_batch([list(range(len(values))), list(values)], schema=SCHEMA)
    taken: dict[int, str | None] = {}
    deletes: list[bool] = []
    for part in validator.take(batch):
        rows = part.rows
        taken |= dict(zip(rows["id"].to_pylist(), rows["v"].to_pylist(), strict=True))
        deletes += part.deletes.to_pylist()
    rejected = [
        (number, reason)
        for one in bad_rows.take()
        for number, reason in zip(one.rows["id"].to_pylist(), one.reasons, strict=True)
    ]
    return taken, deletes, rejected


def test_text_over_the_columns_length_ends_the_job_before_it_is_staged() -> None:
    with pytest.raises(BadRow, match=r"column 'v': the value 'ñañañ'.*over 3 letters"):
        _taken(["abc", "ñañañ"], OnBadRow.FAIL)


def test_text_is_measured_in_letters_and_not_in_bytes() -> None:
    taken, _, _ = _taken(["ñañ", "日本語"], OnBadRow.FAIL)
    assert taken == {0: "ñañ", 1: "日本語"}


def test_null_in_a_column_that_takes_none_ends_the_job_before_it_is_staged() -> None:
    with pytest.raises(BadRow, match=r"column 'v' of type .* is NOT NULL"):
        _taken(["abc", None], OnBadRow.FAIL, rules=ChangeRules())


def test_rows_that_do_not_fit_are_told_each_with_its_reason_and_the_others_go_on() -> None:
    taken, _, rejected = _taken(
        ["abc", None, "long", "x", "longer"], OnBadRow.DEAD_LETTER, rules=ChangeRules()
    )
    assert taken == {0: "abc", 3: "x"}
    assert [number for number, _ in rejected] == [1, 2, 4]
    assert ["NOT NULL" in reason for _, reason in rejected] == [True, False, False]
    assert [
        quoted in reason
        for (_, reason), quoted in zip(rejected[1:], ("'long'", "'longer'"), strict=True)
    ] == [True, True]


def test_of_a_delete_only_the_key_counts() -> None:
    taken, deletes, rejected = _taken(["abc", None], OnBadRow.FAIL)
    assert (taken, deletes, rejected) == ({0: "abc", 1: None}, [False, True], [])


def test_overflow_becomes_null_where_the_column_takes_nulls() -> None:
    taken, _, rejected = _taken(["abc", "longer"], OnBadRow.FAIL, nullable=True, null_overflow=True)
    assert (taken, rejected) == ({0: "abc", 1: None}, [])


def test_a_list_that_does_not_fit_takes_no_other_row_of_its_batch_with_it() -> None:
    integers = PostgresType("_int4", "integer[]", element="int4")
    fit = _fit("v", integers, pa.list_(pa.int64()), nullable=True)
    column = pa.array([[1], [2, 2**40], None, [], [3], [-(2**40)]], pa.list_(pa.int64()))
    assert list(find_refused_rows(fit, column)) == [1, 5]
    assert list(find_refused_rows(fit, column.slice(2, 3))) == []


def test_a_row_beside_a_list_of_views_that_does_not_fit_is_left_out_alone() -> None:
    texts = PostgresType("_text", "text[]", element="text")
    views = pa.list_(pa.string_view())
    name = TableName("public", "t")
    target = Target(Table(name, ()), (_fit("v", texts, views, nullable=True),))
    rows = pa.record_batch({"v": pa.array([["a"], ["\0"], None, ["b", None]], views)})
    bad_rows = BadRows(OnBadRow.DEAD_LETTER, rows.schema)
    sink = PostgresSink("postgresql://h/d", table="t")
    validator = RowValidator(replace(sink.settings, table=name), lambda _: target, bad_rows)
    (valid,) = validator.take(rows)
    assert valid.rows["v"].to_pylist() == [["a"], None, ["b", None]]
    (rejected,) = bad_rows.take()
    assert rejected.rows["v"].to_pylist() == [["\0"]]
    assert "column 'v'" in rejected.reasons[0]


def test_a_decimal_with_more_scale_than_digits_goes_into_an_unsigned_column() -> None:
    kind = MySQLType("decimal", "decimal(5,2) unsigned", 5, 2)
    wire = mysql_wire_of(pa.decimal128(3, 5), kind)
    assert wire is not None
    fit = MySQLFit(TableColumn("v", kind, True, False, False, True), wire, type=kind)
    # Of 0 and 0.00001: pyarrow makes no value of such a type from Python's.
    unscaled = pa.py_buffer(bytes(16) + (1).to_bytes(16, "little"))
    values = pa.Array.from_buffers(pa.decimal128(3, 5), 2, [None, unscaled])
    assert fit.convert(values.slice(0, 1)).to_pylist() == [Decimal("0.00")]
    with pytest.raises(BadRow, match=r"column 'v': the value Decimal\('0.00001'\)"):
        fit.convert(values)
