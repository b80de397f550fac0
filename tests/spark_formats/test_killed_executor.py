"""A format on a standalone cluster of two workers, whose Python has no onceflow: it is sent along.

Alone, by --py-files; or in an environment with all that it needs, by --archives. An executor is
killed while its task writes, and a Python worker when it has prepared its rows.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.integration.postgres_sink_kit import await_lock_wait, ids_in, prepared, query
from tests.support.standalone import SPARK_HOME, standalone_cluster

from onceflow.core.crash_points import VARIABLE
from onceflow.integration.faults.processes import kill_tree

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("cluster_program.py")
FILES, ROWS = 2, 100
DEADLINE_S = 500.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    with standalone_cluster(tmp_path) as url:
        yield url


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    return built


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
    """Return a Python by its place in the environment that is sent along, packed.

    What pip would install there is copied from our own environment.
    """
    venv.create(directory / "environment", with_pip=False)
    (site,) = (directory / "environment").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    for name in needed("onceflow") - {"onceflow"}:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), site / file)
    pack = ["tar", "-C", "environment", "--exclude=pyspark", "-czf", "environment.tar.gz", "."]
    subprocess.run(pack, cwd=directory, check=True)
    return "./environment/bin/python", ["--archives", "environment.tar.gz#environment"]


def needed(name: str) -> set[str]:
    """Return the names of what is installed with `name`, its own among them, but for pyspark."""
    found: set[str] = set()
    todo = [name]
    while todo:
        one = canonicalize_name(todo.pop())
        if one in found or one == "pyspark":
            continue
        found.add(one)
        wanted = map(Requirement, importlib.metadata.requires(one) or ())
        # Of an extra, what is there: psycopg's is its client library.
        todo += [each.name for each in wanted if is_installed(each)]
    return found


def is_installed(requirement: Requirement) -> bool:
    extras = ("", "binary", "rsa", "kafka", "mysql", "postgres", "rocksdb")
    if requirement.marker and not any(requirement.marker.evaluate({"extra": x}) for x in extras):
        return False
    return bool(list(importlib.metadata.distributions(name=requirement.name)))


def submitted(
    directory: Path, master: str, python: str, sent: Sequence[str], url: str
) -> subprocess.Popen[bytes]:
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
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            [submit, "--master", master, *sent, *conf, PROGRAM, str(directory), url],
            cwd=directory,
            env=kept | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(SPARK_HOME)},
            stdout=log,
            stderr=subprocess.STDOUT,
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
            found = {one.laddr.port for one in process.net_connections("tcp")}
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
    log = tmp_path / "log"
    with psycopg.connect(postgres_database) as locked:
        locked.execute("LOCK TABLE ledger IN EXCLUSIVE MODE")
        process = submitted(tmp_path, master, python, sent, postgres_database)
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
