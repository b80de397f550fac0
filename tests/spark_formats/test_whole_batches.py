"""The documented view of whole batches, while transactions of a batch are committed one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest
from tests.integration import mysql_sink_kit, postgres_sink_kit
from tests.spark_formats.batches import Driver, killed_at

from onceflow.connectors.spark.batch.identity import write_target
from onceflow.integration.conformance.batch_driver import BatchDriver
from onceflow.sinks import MySQLSink, PostgresSink

pytestmark = pytest.mark.integration
_PAGE = Path(__file__).parents[2] / "docs/spark-formats.md"
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("night", pa.int64())])


def view_of_the_documents() -> str:
    blocks = re.findall(r"```sql\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    (statement,) = [block for block in blocks if "whole_orders" in block]
    return str(statement)


@pytest.mark.parametrize("kind", ["postgres", pytest.param("mysql", marks=pytest.mark.slow)])
def test_the_view_of_the_documents_shows_whole_batches_whatever_is_committed_yet(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url: str = request.getfixturevalue(f"{kind}_database")
    kit = postgres_sink_kit if kind == "postgres" else mysql_sink_kit
    kit.query(url, "CREATE TABLE orders (id bigint PRIMARY KEY, night bigint)")
    sink = (PostgresSink if kind == "postgres" else MySQLSink)(url, table="orders")
    options = {"txnappid": "nightly-orders", "txnversion": "1"}
    named, _ = write_target(lambda _: sink, options)

    def driver_of_night(night: int) -> Driver:
        def rows(ids: Iterable[int]) -> pa.RecordBatch:
            listed = list(ids)
            return pa.RecordBatch.from_pydict(
                {"id": listed, "night": [night] * len(listed)}, schema=SCHEMA
            )

        return BatchDriver(named.target, SCHEMA, rows)

    first, second = driver_of_night(1), driver_of_night(2)
    first.batch(1, range(5), range(5, 10))
    view = view_of_the_documents()
    kit.query(url, view if kind == "postgres" else view.replace("onceflow.onceflow_", "onceflow_"))
    assert kit.ids_in(url, "whole_orders") == list(range(10))

    killed_at("committed", tmp_path, lambda: second.batch(2, range(10, 15), range(15, 20)))
    assert kit.ids_in(url, "orders") == list(range(15)), "part of the second night"
    assert kit.ids_in(url, "whole_orders") == list(range(10))
    assert second.plan(2).decided
    assert kit.ids_in(url, "whole_orders") == kit.ids_in(url, "orders") == list(range(20))
