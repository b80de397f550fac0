"""The README's five lines and the examples of Spark formats run as shown."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.integration.postgres_sink_kit import query

from onceflow.integration.servers import KafkaServer
from onceflow.integration.workload import Payments, produce

pytestmark = [pytest.mark.spark, pytest.mark.integration]
ROOT = Path(__file__).parents[2]


def five_lines() -> str:
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "writeStream" in block
    ]
    assert code in (ROOT / "docs/spark-formats.md").read_text()
    return str(code)


def test_the_five_lines_of_the_readme_write_each_record_once(
    spark: SparkSession,
    tmp_path: Path,
    onceflow_kafka: KafkaServer,
    kafka_topic: Callable[[int], str],
    postgres_database: str,
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(2)
    produce(Payments(records=3_000, accounts=50, partitions=2, seed=5), servers, topic)
    code = five_lines().replace('"subscribe", "payments"', f'"subscribe", "{topic}"')
    code = code.replace("/var/lib/onceflow/payments", str(tmp_path / "checkpoint"))
    # All that is there, and then the end: as shown it goes on for ever, from the latest on.
    code = code.replace(".load()", '.option("startingOffsets", "earliest").load()')
    code = code.replace(".start())", ".trigger(availableNow=True).start())")
    for _ in range(2):
        names: dict[str, Any] = {"spark": spark, "servers": servers, "url": postgres_database}
        exec(compile(code, "README.md", "exec"), names)
        assert names["query"].awaitTermination(100)
    counted = 'SELECT count(*), count(DISTINCT (partition, "offset")) FROM payments'
    assert query(postgres_database, counted) == [(3_000, 3_000)]


def test_the_nightly_batch_is_written_once_a_night(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = runpy.run_path(str(ROOT / "examples/nightly_batch.py"))
    for night in ("20260130", "20260130", "20260131"):
        program["main"](str(tmp_path), night)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "[('20260130', 1000), ('20260131', 1000)]"


def test_foreach_batch_of_the_examples_counts_nothing_twice(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = runpy.run_path(str(ROOT / "examples/foreach_batch.py"))
    for expected in (1_000, 2_000):
        program["main"](str(tmp_path))
        assert capsys.readouterr().out.splitlines()[-1] == f"(10, {expected})"
