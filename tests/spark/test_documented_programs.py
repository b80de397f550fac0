"""The programs in the pages on operators, state, sources and deployment run as shown."""

from __future__ import annotations

import linecache
import re
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from onceflow import Checkpointing, JobState, Pipeline, sum_
from onceflow.sinks import FileSink
from onceflow.sources import DatagenSource, GeneratedPayments

pytestmark = pytest.mark.spark

DOCUMENTS = Path(__file__).parents[2] / "docs"


def programs(document: str) -> list[str]:
    """The document's Python blocks."""
    text = (DOCUMENTS / document).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run(blocks: list[str], **names: Any) -> dict[str, Any]:
    """Run `blocks`, one after the other, and return what they have defined."""
    # As a program of the user's: its classes travel to the slots by value.
    names["__name__"] = "__main__"
    for number, block in enumerate(blocks):
        name = f"block {number} of a document"
        # As of a notebook's cell: compiled functions are read from their text.
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        exec(compile(block, name, "exec"), names)
    return names


def rows_in(directory: Path) -> list[dict[str, Any]]:
    return ds.dataset(str(directory)).to_table().to_pylist()


def payments() -> list[dict[str, Any]]:
    """The payments that `DatagenSource(rows=10_000, accounts=100)` generates."""
    return GeneratedPayments(seed=0, accounts=100).batch(np.arange(10_000)).to_pylist()


def test_programs_of_the_pages_on_operators_and_joins_run_as_shown(
    spark: SparkSession, tmp_path: Path
) -> None:
    checkpoints, target = str(tmp_path / "checkpoints"), str(tmp_path / "target")
    pages = programs("operators.md") + programs("joins.md")
    run(pages, spark=spark, checkpoints=checkpoints, target=target)
    large = [payment for payment in payments() if payment["amount"] > 1_000]
    assert sorted(one["id"] for one in rows_in(tmp_path / "target/large")) == [
        one["id"] for one in large
    ]
    last = {one["account"]: one for one in sorted(rows_in(tmp_path / "target/totals"), key=_count)}
    sums = Counter[str]()
    for one in large:
        sums[one["account"]] += one["amount"]
    assert {account: one["total"] for account, one in last.items()} == sums
    assert all(one["euros"] == one["amount"] / 100 for one in last.values())
    amounts = defaultdict[str, set[int]](set)
    for payment in payments():
        amounts[payment["account"]].add(payment["amount"])
    kinds = Counter[str]()
    for one in rows_in(tmp_path / "target/latest"):
        kinds[one["account"]] = max(kinds[one["account"]], one["amounts"])
    assert kinds == {account: len(seen) for account, seen in amounts.items()}
    newest: dict[str, dict[str, Any]] = {}
    for one in sorted(rows_in(tmp_path / "target/latest"), key=_count):
        newest[one["account"]] = one
    assert {account: one["payments"] for account, one in newest.items()} == Counter(
        payment["account"] for payment in payments()
    )
    doubled = sorted((one["id"], one["amount"]) for one in rows_in(tmp_path / "target/doubled"))
    assert doubled == [(payment["id"], 2 * payment["amount"]) for payment in payments()]
    selected = sorted((one["id"], one["euros"]) for one in rows_in(tmp_path / "target/selected"))
    assert selected == [(one["id"], one["amount"] / 100) for one in large]
    projected = {
        (one["id"], one["payer"], one["euros"]) for one in rows_in(tmp_path / "target/projected")
    }
    assert projected == {(one["id"], one["account"], one["amount"] / 100) for one in payments()}
    asked = sorted((one["id"], one["fee"]) for one in rows_in(tmp_path / "target/asked"))
    assert asked == [(one["id"], one["amount"] // 100) for one in payments()]
    called = rows_in(tmp_path / "target/called")
    assert sorted((one["id"], one["vowels"], one["euros"]) for one in called) == [
        (one["id"], 1, one["amount"] / 100) for one in payments()
    ]


def test_programs_of_the_dataframes_page_run_as_shown(spark: SparkSession, tmp_path: Path) -> None:
    checkpoints, target = str(tmp_path / "checkpoints"), str(tmp_path / "target")
    spark.sql("CREATE OR REPLACE TEMP VIEW orders AS SELECT * FROM VALUES"
        " (DATE'2026-01-01', 'a', 1L), (DATE'2026-01-01', 'a', 2L), (DATE'2026-01-02', 'a', 4L)"
        " AS orders(day, account, amount)")  # fmt: skip
    names: dict[str, Any] = {
        "Checkpointing": Checkpointing,
        "Pipeline": Pipeline,
        "FileSink": FileSink,
    }
    names |= {"FileSink": FileSink, "sum_": sum_, "DatagenSource": DatagenSource}
    run(programs("dataframes.md"), spark=spark, checkpoints=checkpoints, target=target, **names)
    assert sorted(one["total"] for one in rows_in(tmp_path / "target/totals")) in ([1, 3], [2, 3])
    credit = {"acct-000001": 500, "acct-000002": 900}
    assert sorted((one["id"], one["credit"]) for one in rows_in(tmp_path / "target/enriched")) == [
        (payment["id"], credit.get(payment["account"])) for payment in payments()
    ]


def _count(row: dict[str, Any]) -> int:
    count: int = row["payments"]
    return count


def test_programs_of_the_pages_on_state_run_as_shown(spark: SparkSession, tmp_path: Path) -> None:
    checkpoints, target = str(tmp_path / "checkpoints"), str(tmp_path / "target")
    balances, savepoint = str(tmp_path / "balances"), str(tmp_path / "savepoint")
    names = {"checkpoints": checkpoints, "target": target}
    names |= {"balances": balances, "savepoint": savepoint}
    pages = programs("state.md") + programs("state-as-data.md")
    run(pages, spark=spark, **names)
    paid = Counter[str]()
    for one in rows_in(tmp_path / "balances"):
        paid[one["account"]] += one["amount"]
    last = {one["balance"] for one in rows_in(tmp_path / "balances")}
    assert {paid["acct-000001"] + 100, paid["acct-000002"] + 250} <= last
    rows = rows_in(tmp_path / "target")
    assert len(rows) == 10_000
    assert sum(row["first"] for row in rows) == len({row["account"] for row in rows}) == 100
    reached = defaultdict[tuple[str, date], set[int]](set)
    for one in rows:
        reached[one["account"], date.fromtimestamp(one["ts"] / 1000)].add(one["today"])
    sums = Counter[tuple[str, date]]()
    for one in payments():
        sums[one["account"], date.fromtimestamp(one["ts"] / 1000)] += one["amount"]
    assert all(total in reached[key] for key, total in sums.items())


def test_settings_of_the_deployment_page_are_taken(spark: SparkSession) -> None:
    assert run(programs("deployment.md")[:1], spark=spark)["pipeline"].name == "ledger"


def test_own_source_of_its_page_is_read_once_and_goes_on_where_it_stood(
    spark: SparkSession, tmp_path: Path
) -> None:
    lines = [f"line {number} of a file" for number in range(100_000)]
    paths = (str(tmp_path / "a"), str(tmp_path / "b"))
    for path in paths:
        Path(path).write_text("\n".join(lines) + "\n")
    names = run([programs("sources.md")[0], programs("write-your-own-source.md")[0]])
    source = names["LinesSource"](paths)

    with pytest.raises(names["ConfigError"], match="no such file: /missing"):
        names["LinesSource"](("/missing",)).validate()
    whole = source.reader(source.splits(), None)
    first = whole.poll(0.0)
    goes_on = source.reader(whole.snapshot(), None)
    assert goes_on.poll(0.0).equals(whole.poll(0.0))

    pipeline = Pipeline(
        spark, name="lines", parallelism=2, checkpointing=Checkpointing(str(tmp_path / "log"))
    )
    pipeline.read(source, uid="lines").write(FileSink(str(tmp_path / "target")), uid="out")
    assert pipeline.run(60).state is JobState.FINISHED
    written = Counter(one["line"] for one in rows_in(tmp_path / "target"))
    assert first.num_rows < len(lines)
    assert written == Counter(lines + lines)
