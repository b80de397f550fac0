"""A format on a standalone cluster of two workers, whose Python has no onceflow: it is sent along.

An executor is killed while its task writes, and a Python worker when it has prepared its rows.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.postgres_sink_kit import await_lock_wait, ids_in, prepared, query
from tests.support.standalone import SPARK_HOME, spawn, standalone_cluster

from onceflow.core.crash_points import VARIABLE
from onceflow.integration.faults.processes import kill_tree

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("cluster_program.py")
FILES, ROWS = 2, 100
DEADLINE_S = 240.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    with standalone_cluster(tmp_path) as url:
        yield url


@pytest.fixture
def python_without_onceflow(tmp_path: Path) -> Path:
    """What executors run: an environment with all that onceflow needs."""
    venv.create(tmp_path / "python", with_pip=False)
    (site,) = (tmp_path / "python").glob("lib/python*/site-packages")
    # A plain path: our own .pth files, with the tree's folder in one of them, are not read there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = tmp_path / "python" / "bin" / "python"
    missing = subprocess.run([python, "-c", "import onceflow"], capture_output=True, cwd=tmp_path)
    assert missing.returncode == 1
    return python


@pytest.fixture
def onceflow_zip(tmp_path: Path) -> Path:
    """A wheel under another name, as the document says."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel.rename(tmp_path / "onceflow.zip")


def submitted(
    directory: Path, master: str, python: Path, archive: Path, url: str
) -> subprocess.Popen[bytes]:
    points = directory / "points"
    points.mkdir()
    (points / "prepared").touch()
    given = {
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.pyspark.python": str(python),
        f"spark.executorEnv.{VARIABLE}": str(points),
    }
    conf = [part for name, value in given.items() for part in ("--conf", f"{name}={value}")]
    submit = SPARK_HOME / "bin" / "spark-submit"
    command: list[str | Path] = [submit, "--master", master, "--py-files", archive]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = kept | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(SPARK_HOME)}
    return spawn([*command, *conf, PROGRAM, str(directory), url], directory / "log", environment)


def executor_of_a_waiting_task(url: str) -> int:
    """Return the process of the executor one of whose tasks waits for a lock in the database."""
    waiting = (
        "SELECT client_port FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    psutil: Any = importlib.import_module("psutil")  # it has no types
    ports = {row[0] for row in query(url, waiting)}
    for process in psutil.process_iter():
        try:
            found = {one.laddr.port for one in process.net_connections("tcp")}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if found & ports:
            for parent in process.parents():
                if any("CoarseGrainedExecutorBackend" in word for word in parent.cmdline()):
                    return int(parent.pid)
    raise AssertionError(f"no executor has a connection from {ports}")


@pytest.mark.slow
def test_on_a_cluster_to_which_the_package_is_sent_a_killed_executor_loses_and_doubles_nothing(
    master: str,
    python_without_onceflow: Path,
    onceflow_zip: Path,
    postgres_database: str,
    tmp_path: Path,
) -> None:
    query(postgres_database, "CREATE TABLE ledger (id bigint PRIMARY KEY)")
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        ids = range(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"id": pa.array(ids, pa.int64())})
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
    log = tmp_path / "log"
    with psycopg.connect(postgres_database) as locked:
        locked.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
        process = submitted(
            tmp_path, master, python_without_onceflow, onceflow_zip, postgres_database
        )
        try:
            await_lock_wait(postgres_database, timeout_s=DEADLINE_S)
            os.kill(executor_of_a_waiting_task(postgres_database), signal.SIGKILL)
            locked.rollback()
            assert process.wait(DEADLINE_S) == 0, log.read_text()[-4000:]
        finally:
            kill_tree(process.pid)
            process.wait(30)
    assert not (tmp_path / "points" / "prepared").exists()
    assert "Lost executor" in log.read_text()
    assert ids_in(postgres_database) == list(range(FILES * ROWS))
    assert prepared(postgres_database) == []
