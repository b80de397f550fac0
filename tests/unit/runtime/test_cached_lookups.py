"""A join with a table that changes asks for each key once in its time, and joins by exact keys."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

from onceflow.core.plan.lookup_tables import JoinedColumns, JoinType
from onceflow.core.plan.work import JoinLookup
from onceflow.core.runtime.dataflow.cached_lookups import CachedLookupJoiner, LookupCache
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.spi.lookups import LookupReader, LookupSource

STREAM = pa.schema([("n", pa.int64()), ("account", pa.string()), ("branch", pa.int32())])
TABLE = pa.schema([("account", pa.string()), ("branch", pa.int64()), ("name", pa.string())])


class Table(LookupReader, LookupSource):
    """A table in memory, which counts the questions."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.questions: list[list[tuple[Any, ...]]] = []
        self.now = 0.0

    @override
    def describe(self, on: Any) -> pa.Schema:
        return TABLE

    @override
    def open(self, on: Any, name: str) -> LookupReader:
        return self

    @override
    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        asked = [tuple(key.values()) for key in keys.to_pylist()]
        assert len(set(asked)) == len(asked)
        self.questions.append(asked)
        names = keys.schema.names
        # A server that ignores case returns further rows.
        wanted = {tuple(str(value).lower() for value in key) for key in asked}
        found = [r for r in self.rows if tuple(str(r[n]).lower() for n in names) in wanted]
        return pa.RecordBatch.from_pylist(found, TABLE)

    @override
    def close(self) -> None:
        self.questions.append([])


def joiner_of(
    table: Table, on: tuple[str, ...], how: JoinType, ttl_s: float = 60.0, keys_max: int = 100
) -> tuple[CachedLookupJoiner, list[dict[str, Any]]]:
    stream = STREAM if "branch" in on else STREAM.remove(2)
    columns = JoinedColumns.resolve(table.describe(on), stream, on, how, "lookup_join")
    work = JoinLookup(table, columns, ttl_s, keys_max)
    operator = CachedLookupJoiner("join", work, columns.to_joined_schema(stream), "a job")
    made: list[dict[str, Any]] = []
    operator.outputs.append(lambda batch: made.extend(batch.rows.to_pylist()))
    return operator, made


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("on", [("account",), ("branch", "account")])
def test_it_gives_what_a_nested_loop_gives(how: JoinType, on: tuple[str, ...]) -> None:
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", random.randrange(2**32)))
    sys.stdout.write(f"seed {seed}; ONCEFLOW_TEST_SEED sets it\n")
    draw = random.Random(seed)
    table = Table(
        [
            {"account": draw.choice("abcABC"), "branch": draw.randrange(3), "name": str(number)}
            for number in range(30)
        ]
    )
    operator, made = joiner_of(table, on, how, keys_max=draw.choice([1, 4, 100]))
    expected: list[tuple[Any, ...]] = []
    for _ in range(8):
        rows = [
            {"n": draw.randrange(99), "account": draw.choice([*"abcABCx", None]), "branch": 1}
            for _ in range(draw.randrange(12))
        ]
        batch = pa.RecordBatch.from_pylist(rows, STREAM)
        operator.receive(Batch(batch if "branch" in on else batch.select(["n", "account"])))
        for row in rows:
            names = [
                other["name"]
                for other in table.rows
                if all(other[name] == row[name] is not None for name in on)
            ]
            unmatched = [None] if how == "left" else []
            expected += [(row["n"], row["account"], name) for name in names or unmatched]
    assert [(row["n"], row["account"]) for row in made] == [row[:2] for row in expected]
    named = [(row["n"], row["account"], row["name"]) for row in made]
    assert sorted(map(str, named)) == sorted(map(str, expected))


def keys(*accounts: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"account": list(accounts)})


def test_a_key_is_asked_again_after_its_time_and_not_before() -> None:
    table = Table([{"account": "a", "branch": 1, "name": "first"}])
    cache = LookupCache(table, TABLE, 10.0, 100, lambda: table.now)
    for now, name in ((0.0, "first"), (9.9, "first"), (10.0, "second"), (19.9, "second")):
        table.now = now
        assert cache.find(keys("a", "missing")).column("name").to_pylist() == [name]
        table.rows[0]["name"] = "second"
    assert table.questions == [[("a",), ("missing",)]] * 2


def test_nothing_is_kept_for_no_time() -> None:
    table = Table([{"account": "a", "branch": 1, "name": "first"}])
    cache = LookupCache(table, TABLE, 0.0, 100, lambda: table.now)
    for _ in range(2):
        assert cache.find(keys("a")).num_rows == 1
    assert len(table.questions) == 2


def test_the_oldest_keys_make_room() -> None:
    table = Table([])
    cache = LookupCache(table, TABLE, 10.0, 2, lambda: table.now)
    for account in ("a", "b", "c", "b", "a"):
        cache.find(keys(account))
    assert [question[0][0] for question in table.questions] == ["a", "b", "c", "a"]


def test_many_keys_are_many_questions_and_more_than_are_kept() -> None:
    table = Table([{"account": str(n), "branch": 1, "name": str(n)} for n in range(2_500)])
    cache = LookupCache(table, TABLE, 10.0, 1_500, lambda: table.now)
    found = cache.find(keys(*map(str, range(2_500))))
    assert sorted(map(int, found.column("name").to_pylist())) == list(range(2_500))
    assert list(map(len, table.questions)) == [1_000, 1_000, 500]
    cache.find(keys("2400", "0"))
    assert table.questions[3:] == [[("0",)]]
