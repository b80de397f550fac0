"""A join with a table that changes asks for each key once in its time, and joins by exact keys."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.support.drawn_seeds import draw_random
from typing_extensions import override

from onceflow.core.errors import SourceUnavailable, UserFunctionError
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
    draw = draw_random()
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


@pytest.mark.parametrize(
    "kind",
    [
        pa.timestamp("s", "Europe/Berlin"),
        pa.timestamp("ns"),
        pa.timestamp("s"),
        pa.date64(),
        pa.dictionary(pa.int32(), pa.timestamp("ms", "Europe/Berlin")),
    ],
    ids=str,
)
def test_each_instant_is_a_key_of_its_own(kind: pa.DataType) -> None:
    # One clock time in autumn and one day, and instants that Python's datetimes lack.
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    numbers = [1_698_539_400, 1_698_543_000, 10**12, 10**12 + 1]
    factor = 1000 if plain == pa.timestamp("ms", "Europe/Berlin") else 1
    column = pa.array([number * factor for number in numbers]).view(plain)
    rows = pa.record_batch(
        [column if plain is kind else column.dictionary_encode(), ["0", "1", "2", "3"]],
        schema=pa.schema([("at", kind), ("name", pa.string())]),
    )
    operator, made = joiner_of_rows(rows)
    operator.receive(Batch(rows.select(["at"])))
    operator.receive(Batch(rows.select(["at"])))
    assert made == [["0", "1", "2", "3"]] * 2


def joiner_of_rows(rows: Any, on: str = "at") -> tuple[CachedLookupJoiner, list[list[Any]]]:
    """Return a left join of a stream of the column `on` with a reader that returns `rows`."""

    class Rows(Table):
        @override
        def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
            if isinstance(rows, Exception):
                raise rows
            returned: pa.RecordBatch = rows
            return returned

    schema = rows.schema if on == "at" else TABLE
    columns = JoinedColumns.resolve(schema, pa.schema([schema.field(on)]), (on,), "left", "join")
    joined = columns.to_joined_schema(pa.schema([schema.field(on)]))
    operator = CachedLookupJoiner("join", JoinLookup(Rows([]), columns, 60.0, 100), joined, "a job")
    made: list[list[Any]] = []
    operator.outputs.append(lambda batch: made.append(batch.rows.column("name").to_pylist()))
    return operator, made


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (TypeError("no such driver"), "TypeError: no such driver"),
        (None, "returned NoneType"),
        (pa.record_batch({"name": ["n"], "account": ["a"], "branch": [1]}), "returned ['name', "),
        (pa.record_batch({"account": ["a"], "branch": [0.5], "name": ["n"]}), "truncated"),
    ],
    ids=["an error", "nothing", "another order", "other values"],
)
def test_a_mistake_of_a_reader_names_the_operator(returned: Any, problem: str) -> None:
    operator, _ = joiner_of_rows(returned, "account")
    with pytest.raises(UserFunctionError) as caught:
        operator.receive(Batch(keys("a")))
    assert problem in str(caught.value)
    assert "operator 'join'" in str(caught.value)
    assert caught.value.fingerprint, "another try fails alike"


def test_an_unreachable_table_stays_unreachable() -> None:
    operator, _ = joiner_of_rows(SourceUnavailable("the table is away"), "account")
    with pytest.raises(SourceUnavailable, match="is away"):
        operator.receive(Batch(keys("a")))


def keys(*accounts: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"account": list(accounts)})


def test_a_key_is_asked_again_after_its_time_and_not_before() -> None:
    table = Table([{"account": "a", "branch": 1, "name": "first"}])
    cache = LookupCache(table.read, TABLE, 10.0, 100, lambda: table.now)
    for now, name in ((0.0, "first"), (9.9, "first"), (10.0, "second"), (19.9, "second")):
        table.now = now
        assert cache.find(keys("a", "missing")).column("name").to_pylist() == [name]
        table.rows[0]["name"] = "second"
    assert table.questions == [[("a",), ("missing",)]] * 2


def test_nothing_is_kept_for_no_time() -> None:
    table = Table([{"account": "a", "branch": 1, "name": "first"}])
    cache = LookupCache(table.read, TABLE, 0.0, 100, lambda: table.now)
    for _ in range(2):
        assert cache.find(keys("a")).num_rows == 1
    assert len(table.questions) == 2


def test_the_oldest_keys_make_room() -> None:
    table = Table([])
    cache = LookupCache(table.read, TABLE, 10.0, 2, lambda: table.now)
    for account in ("a", "b", "c", "b", "a"):
        cache.find(keys(account))
    assert [question[0][0] for question in table.questions] == ["a", "b", "c", "a"]


def test_many_keys_are_many_questions_and_more_than_are_kept() -> None:
    table = Table([{"account": str(n), "branch": 1, "name": str(n)} for n in range(2_500)])
    cache = LookupCache(table.read, TABLE, 10.0, 1_500, lambda: table.now)
    found = cache.find(keys(*map(str, range(2_500))))
    assert sorted(map(int, found.column("name").to_pylist())) == list(range(2_500))
    assert list(map(len, table.questions)) == [1_000, 1_000, 500]
    cache.find(keys("2400", "0"))
    assert table.questions[3:] == [[("0",)]]
