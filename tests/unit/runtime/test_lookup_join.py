"""A join with a table in memory gives what Arrow's own join gives, for any rows in any batches."""

from __future__ import annotations

import pickle
import random
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest

from onceflow.core.errors import ConfigError
from onceflow.core.plan.lookup_tables import LOOKUP_BYTES_MAX, LookupTable
from onceflow.core.plan.work import JoinTable
from onceflow.core.runtime.dataflow import lookup_join
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.lookup_join import LookupJoiner
from onceflow.core.state import hash_keys

STREAM = pa.schema([("n", pa.int64()), ("account", pa.string()), ("branch", pa.int32())])


def joined(
    table: pa.Table, rows: pa.Table, on: tuple[str, ...], how: Literal["inner", "left"]
) -> list[dict[str, Any]]:
    lookup = LookupTable(table, rows.schema, on, LOOKUP_BYTES_MAX)
    lookup.load()
    loaded: LookupTable = pickle.loads(pickle.dumps(lookup))
    schema = loaded.to_joined_schema(rows.schema, how)
    operator = LookupJoiner("join", JoinTable(loaded, how), schema)
    made: list[dict[str, Any]] = []
    operator.outputs.append(lambda batch: made.extend(batch.rows.to_pylist()))
    for batch in rows.to_batches(max_chunksize=37):
        operator.receive(Batch(batch))
    return made


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("on", [("account",), ("account", "branch")])
@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_it_gives_what_a_nested_loop_gives(
    monkeypatch: pytest.MonkeyPatch,
    how: Literal["inner", "left"],
    on: tuple[str, ...],
    collide: bool,
    seed: int,
) -> None:
    draw = random.Random(seed)
    if collide:
        # Most keys share their hash with others.
        plain = hash_keys

        def few_hashes(*given: Any) -> Any:
            return plain(*given) % np.uint64(5)

        monkeypatch.setattr(lookup_join, "hash_keys", few_hashes)

    def key() -> dict[str, Any]:
        return {
            "account": draw.choice([None, *"abcdefghij"]),
            "branch": draw.choice([None, 1, 2]),
        }

    rows = [{"n": n, **key()} for n in range(300)]
    table = [{**key(), "note": f"note {n}", "size": draw.choice([None, n])} for n in range(40)]
    if "branch" not in on:
        table = [{name: one[name] for name in one if name != "branch"} for one in table]
    made = joined(pa.Table.from_pylist(table), pa.Table.from_pylist(rows, STREAM), on, how)
    expected: list[dict[str, Any]] = []
    for row in rows:
        found = [
            one
            for one in table
            if all(row[name] is not None and row[name] == one[name] for name in on)
        ]
        added = [{"note": one["note"], "size": one["size"]} for one in found]
        if not added and how == "left":
            added = [{"note": None, "size": None}]
        expected += [row | one for one in added]
    assert made == expected


def test_an_empty_table_joins_nothing() -> None:
    table = pa.schema([("account", pa.large_string()), ("note", pa.string())]).empty_table()
    rows = pa.Table.from_pylist([{"n": 1, "account": "a", "branch": 1}], STREAM)
    assert joined(table, rows, ("account",), "inner") == []
    alone = {"n": 1, "account": "a", "branch": 1, "note": None}
    assert joined(table, rows, ("account",), "left") == [alone]


@pytest.mark.parametrize(
    ("table", "on", "message"),
    [
        ({"other": [1]}, ("account",), "the table has no such column; there are other"),
        ({"other": [1]}, ("other",), "the stream has no such column; there are n, account"),
        ({"account": [1]}, ("account",), "the stream's column is string and the table's int64"),
        ({"account": ["a"], "n": [1]}, ("account",), "both stream and table have a column 'n'"),
        ({"account": ["a"]}, (), "at least one column"),
    ],
)
def test_a_join_that_cannot_be_is_refused_by_column(
    table: dict[str, list[Any]], on: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LookupTable(pa.table(table), STREAM, on, LOOKUP_BYTES_MAX)


def test_what_is_no_table_and_a_table_that_is_too_large_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"join\(list\): give a bounded Spark DataFrame"):
        LookupTable([], STREAM, ("account",), LOOKUP_BYTES_MAX)  # type: ignore[arg-type]
    table = pa.table({"account": [str(n) for n in range(1000)]})
    with pytest.raises(ConfigError, match="1000 rows in .* bytes, and at most 1000 bytes"):
        LookupTable(table, STREAM, ("account",), 1000).load()
    floats = pa.schema([("ratio", pa.float64())])
    with pytest.raises(ConfigError, match="'ratio' has type double, which cannot be a key"):
        LookupTable(pa.table({"ratio": [1.0]}), floats, ("ratio",), LOOKUP_BYTES_MAX)
