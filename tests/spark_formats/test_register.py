"""`register`: in the threads of a pool, and in an environment that nobody has activated."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from onceflow import connectors

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[2]


def test_threads_of_a_pool_that_register_first_write_a_table_each(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.range(20, numPartitions=1)

    def save(table: str) -> None:
        writer = rows.write.format("onceflow-sqlite").mode("append").option("dbtable", table)
        writer = writer.option("createTable", "true").option("url", f"{tmp_path}/a.db")
        writer.option("stagingLocation", f"{tmp_path}/staging").save()

    tables = ["t_a", "t_b"]
    with ThreadPoolExecutor(2, initializer=connectors.register, initargs=(spark,)) as pool:
        assert list(pool.map(save, tables)) == [None, None]
    with sqlite3.connect(tmp_path / "a.db") as database:
        for table in tables:
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (20,)


@pytest.mark.parametrize("chosen", [None, "/opt/python3"])
def test_workers_of_a_local_master_run_the_programs_python_unless_one_was_chosen(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", chosen or "python3")
    if chosen is None:
        monkeypatch.delenv("PYSPARK_PYTHON")
    else:
        monkeypatch.setenv("PYSPARK_PYTHON", chosen)
    connectors.register(spark)
    assert spark.sparkContext.pythonExec == (chosen or sys.executable)


@pytest.mark.slow  # a Spark of its own
@pytest.mark.timeout(300)
def test_a_program_writes_where_the_first_python3_of_the_path_has_no_onceflow(
    tmp_path: Path,
) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    environment = {name: one for name, one in os.environ.items() if name != "PYSPARK_PYTHON"}
    environment["PATH"] = f"{tmp_path / 'bare' / 'bin'}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = ""
    program = [sys.executable, str(ROOT / "examples/nightly_batch.py"), str(tmp_path), "20260131"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert done.stdout.splitlines()[-1] == "[('20260131', 1000)]"
