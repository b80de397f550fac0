"""The README's pipeline runs as shown, word for word, against real servers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from onceflow import JobState
from onceflow.core.api.pipeline import Job
from onceflow.integration.servers import KafkaServer
from onceflow.integration.workload import Payments, produce

pytestmark = pytest.mark.spark

README = (Path(__file__).parents[2] / "README.md").read_text()
PAYMENT = pa.schema(
    [("id", pa.int64()), ("account", pa.string()), ("amount", pa.int64()), ("ts", pa.int64())]
)


def test_the_ten_line_pipeline_of_the_readme_runs_as_shown(
    spark: SparkSession,
    tmp_path: Path,
    onceflow_kafka: KafkaServer,
    kafka_topic: Callable[[int], str],
    postgres_database: str,
) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert "Pipeline(" in code
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(2)
    produce(Payments(records=3_000, accounts=50, partitions=2, seed=5), servers, topic)
    code = code.replace('topic="payments"', f"topic={topic!r}")
    code = code.replace('storage="/var/lib/onceflow"', f"storage={str(tmp_path)!r}")
    names: dict[str, Any] = {
        "spark": spark,
        "servers": servers,
        "url": postgres_database,
        "PAYMENT": PAYMENT,
    }
    exec(compile(code, "README.md", "exec"), names)
    job: Job = names["job"]
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        deadline = time.monotonic() + 60
        rows = 0
        while rows < 3_000 and time.monotonic() < deadline:
            time.sleep(0.1)
            if job.status().checkpoints_completed:
                found = connection.execute("SELECT count(*), count(DISTINCT id) FROM ledger")
                rows, distinct = found.fetchone() or (0, 0)
                assert rows == distinct
        assert job.stop(60).state is JobState.STOPPED
        wrong = connection.execute(
            "SELECT count(*) FROM (SELECT balance, sum(amount) OVER (PARTITION BY account ORDER BY"
            " n) AS total FROM ledger) AS chain WHERE balance <> total"
        ).fetchone()
    assert (rows, wrong) == (3_000, (0,))
