"""The README's five lines and the examples of Spark formats run as shown."""

from __future__ import annotations

import re
import runpy
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from examples import own_sink_query
from pyspark.sql import SparkSession
from tests.integration.postgres_sink_kit import query
from tests.support.program import Program, python

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


@pytest.mark.slow  # two Sparks; test_batch_kills kills its steps
def test_a_sink_of_ones_own_as_a_format_adds_nothing_twice_when_its_driver_is_killed(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def total() -> int:
        path = f"file:{tmp_path}/own.db?mode=ro"
        try:
            with closing(sqlite3.connect(path, uri=True)) as database:
                return int(database.execute("SELECT sum(amount) FROM totals").fetchone()[0] or 0)
        except sqlite3.OperationalError:
            return 0  # not made yet

    everything = own_sink_query.FILES * own_sink_query.PAYMENTS
    process = spawned(["-m", "examples.own_sink_query", str(tmp_path)], tmp_path / "log")
    try:
        process.wait_until(total, 200)
    finally:
        process.kill_tree()
    assert 0 < total() < everything
    own_sink_query.main(str(tmp_path))
    assert capsys.readouterr().out.splitlines()[-1] == f"(10, {everything})"


_JOB_WITH_A_MODULE = """
import sys
from my_sink import OwnSink
from pyspark.sql import SparkSession
from onceflow import connectors

spark = SparkSession.builder.getOrCreate()
connectors.register(spark)
spark.sparkContext.addPyFile(f"{sys.argv[1]}/my_sink.py")
make = lambda options: OwnSink(options["path"], options["table"], key="id")
spark.dataSource.register(connectors.data_source("my-table", make))
for _ in range(2):
    (spark.range(9).write.format("my-table").mode("append")
     .option("path", f"{sys.argv[1]}/own.db").option("table", "a")
     .option("stagingLocation", f"{sys.argv[1]}/staging")
     .option("txnAppId", "nightly").option("txnVersion", "1").save())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sink_in_a_module_beside_the_program_is_sent_to_workers_by_the_documented_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_sink.py").write_text((ROOT / "examples" / "own_sink.py").read_text())
    (tmp_path / "job.py").write_text(_JOB_WITH_A_MODULE)
    with spawned([str(tmp_path / "job.py"), str(tmp_path)], tmp_path / "log") as process:
        assert process.wait(500) == 0, process.tail()
    with closing(sqlite3.connect(tmp_path / "own.db")) as database:
        assert database.execute("SELECT count(*), count(DISTINCT id) FROM a").fetchone() == (9, 9)


def spawned(arguments: list[str], log: Path) -> Program:
    return Program(
        log,
        *python(*arguments),
        environment={
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell",
        },
    )
