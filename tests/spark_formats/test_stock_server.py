"""The nightly batch of the documents on a Postgres as it is installed, which prepares nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.integration.postgres_sink_kit import query

from onceflow import connectors
from onceflow.integration.servers import EmbeddedPostgres

pytestmark = [pytest.mark.spark, pytest.mark.integration]
_PAGE = Path(__file__).parents[2] / "docs/spark-formats.md"
_STAGING = '.option("stagingLocation", "/var/lib/onceflow/staging")'


@pytest.fixture(scope="module")
def stock_url() -> Iterator[str]:
    with EmbeddedPostgres({"max_prepared_transactions": "0"}) as server:
        query(server.url, "CREATE TABLE orders (id bigint PRIMARY KEY)")
        yield server.url


def nightly_batch() -> str:
    """Return the program of the documents."""
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if '"nightly-orders"' in block]
    return str(code)


@pytest.mark.only_proof
def test_the_nightly_batch_of_the_documents_is_written_once_by_a_stock_server(
    spark: SparkSession, tmp_path: Path, stock_url: str
) -> None:
    connectors.register(spark)
    orders = str(tmp_path / "orders")
    spark.range(30).repartition(3).write.parquet(orders)
    names: dict[str, Any] = {"spark": spark, "orders": orders, "url": stock_url}

    without = nightly_batch().replace(_STAGING, "")
    for mode in ("auto", "two_phase", "ledger"):
        asked = without.replace(".save()", f'.option("commitMode", "{mode}").save()')
        with pytest.raises(PySparkException, match="Give option stagingLocation: a directory"):
            exec(compile(asked, str(_PAGE), "exec"), names)

    code = nightly_batch().replace("/var/lib/onceflow/staging", str(tmp_path / "staging"))
    for _ in range(2):
        exec(compile(code, str(_PAGE), "exec"), names)
    assert query(stock_url, "SELECT count(*), count(DISTINCT id) FROM orders") == [(30, 30)]
