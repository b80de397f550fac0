"""A format on a standalone cluster of two workers, whose Python has no onceflow: it is sent along.

Alone, by --py-files; or in an environment with all that it needs, by --archives. An executor is
killed while its task writes, and a Python worker when it has prepared its rows.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sysconfig
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.postgres_sink_kit import await_lock_wait, ids_in, prepared, query
from tests.support import packed_environment
from tests.support.program import Program
from tests.support.standalone import SPARK_HOME, standalone_cluster

from onceflow.core.crash_points import VARIABLE

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(1200)]
PROGRAM = Path(__file__).with_name("cluster_program.py")
FILES, ROWS = 2, 100
DEADLINE_S = 500.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    with standalone_cluster(tmp_path) as cluster:
        yield cluster.url


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return packed_environment.build_wheel(tmp_path)


def by_py_files(directory: Path, wheel: Path) -> tuple[str, list[str]]:
    """Return the executors' Python, which lacks onceflow only, and what sends that along.

    A wheel under another name, as the document says.
    """
    venv.create(directory / "python", with_pip=False)
    (site,) = (directory / "python").glob("lib/python*/site-packages")
    # A plain path: our own .pth files, with the tree's folder in one of them, are not read there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = directory / "python" / "bin" / "python"
    missing = subprocess.run([python, "-c", "import onceflow"], capture_output=True, cwd=directory)
    assert missing.returncode == 1
    archive = wheel.rename(directory / "onceflow.zip")
    return str(python), ["--py-files", str(archive)]


def by_archives(directory: Path, wheel: Path) -> tuple[str, list[str]]:
    """Return a Python by its place in the environment that is sent along, packed."""
    packed_environment.pack_environment(directory, wheel)
    return packed_environment.ENVIRONMENT_PYTHON, packed_environment.SEND_ENVIRONMENT


def submitted(directory: Path, master: str, python: str, sent: Sequence[str], url: str) -> Program:
    """Start it in `directory`, as the document says."""
    points = directory / "points"
    points.mkdir()
    (points / "prepared").touch()
    given = {
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.pyspark.python": python,
        f"spark.executorEnv.{VARIABLE}": str(points),
    }
    conf = [part for name, value in given.items() for part in ("--conf", f"{name}={value}")]
    submit = SPARK_HOME / "bin" / "spark-submit"
    return Program(
        directory / "log",
        *(submit, "--master", master, *sent, *conf, PROGRAM, directory, url),
        cwd=directory,
        environment={
            "PYTHONPATH": None,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(SPARK_HOME),
        },
    )


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
            found = {connection.laddr.port for connection in process.net_connections("tcp")}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if found & ports:
            for parent in process.parents():
                if any("CoarseGrainedExecutorBackend" in word for word in parent.cmdline()):
                    return int(parent.pid)
    raise AssertionError(f"no executor has a connection from {ports}")


@pytest.mark.slow
@pytest.mark.parametrize("send", [by_py_files, by_archives])
def test_on_a_cluster_to_which_the_package_is_sent_a_killed_executor_loses_and_doubles_nothing(
    master: str,
    wheel: Path,
    postgres_database: str,
    tmp_path: Path,
    send: Callable[[Path, Path], tuple[str, list[str]]],
) -> None:
    python, sent = send(tmp_path, wheel)
    query(postgres_database, "CREATE TABLE ledger (id bigint PRIMARY KEY)")
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        ids = range(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"id": pa.array(ids, pa.int64())})
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
    with psycopg.connect(postgres_database) as locked:
        locked.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
        process = submitted(tmp_path, master, python, sent, postgres_database)
        try:
            await_lock_wait(postgres_database, timeout_s=DEADLINE_S)
            os.kill(executor_of_a_waiting_task(postgres_database), signal.SIGKILL)
            locked.rollback()
            assert process.wait(DEADLINE_S) == 0, process.tail()
        finally:
            process.kill_tree()
    assert not (tmp_path / "points" / "prepared").exists()
    assert "Lost executor" in process.output()
    assert ids_in(postgres_database) == list(range(FILES * ROWS))
    assert prepared(postgres_database) == []
