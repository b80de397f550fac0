"""Whole jobs into an Iceberg table whose drivers are killed, stand still, or lose the catalog.

Tests that name an issue show that what went wrong there, in the sink of Kafka Connect, does not go
wrong here. All read the table back by DuckDB, and look through all its manifests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table
from tests.integration.iceberg_driver import catalog_properties

_PROGRAM = Path(__file__).with_name("iceberg_driver.py")
_ROOT = _PROGRAM.parents[2]
_RECORDS = 30_000
_TIMEOUT_S = 120.0

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]


class LakeJob:
    """The drivers of one job, and its table."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._drivers: list[subprocess.Popen[bytes]] = []
        (directory / "orders").mkdir()

    def start(self) -> subprocess.Popen[bytes]:
        with (self.directory / f"driver-{len(self._drivers)}.log").open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(self.directory), str(_RECORDS)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])},
                stdout=log,
                stderr=log,
            )
        self._drivers.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._drivers:
            driver.kill()
            driver.wait(30)

    def order(self, order: str) -> None:
        """Have the next commit of any driver kill or stop its process."""
        (self.directory / "orders" / order).touch()

    def wait_until(
        self, holds: Callable[[], bool], driver: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Wait until it holds, while `driver` runs."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, self.logs()
            assert driver is None or driver.poll() is None, self.logs()
            time.sleep(0.02)

    def wait_for_snapshots(self, count: int, driver: subprocess.Popen[bytes]) -> None:
        """Wait until `count` more snapshots have rows."""
        goal = len(self.checkpoints()) + count
        self.wait_until(lambda: len(self.checkpoints()) >= goal, driver)

    def wait_for_stop(self, driver: subprocess.Popen[bytes]) -> None:
        """Wait until `driver` stands still."""
        stat = Path(f"/proc/{driver.pid}/stat")
        self.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", driver)

    def finish(self, driver: subprocess.Popen[bytes]) -> None:
        """Let the input end, and `driver` with it."""
        (self.directory / "end").touch()
        assert driver.wait(_TIMEOUT_S) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in self.directory.glob("*.log"))

    @contextmanager
    def table(self) -> Generator[Table | None, None, None]:
        with closing(load_catalog("default", **catalog_properties(self.directory))) as catalog:
            try:
                yield catalog.load_table("shop.orders")
            except NoSuchTableError:
                yield None

    def checkpoints(self) -> list[int]:
        """Return the checkpoint of each snapshot with rows, in their order."""
        with self.table() as table:
            summaries = [one.summary for one in table.snapshots()] if table else []
        found: list[int] = []
        for summary in summaries:
            assert summary is not None
            if summary.get("added-records"):
                found.append(int(summary["onceflow.checkpoint"] or 0))
        return found

    def assert_each_row_once(self) -> None:
        checkpoints = self.checkpoints()
        assert checkpoints == sorted(set(checkpoints)), "one snapshot a checkpoint, and they rise"
        with self.table() as table, closing(duckdb.connect()) as database:
            assert table is not None
            table.scan().to_duckdb("orders", connection=database)
            counts: Any = database.sql(
                "SELECT count(*), count(DISTINCT id), min(id), max(id),"
                " count(*) FILTER (account <> CAST(id % 100 AS VARCHAR)) FROM orders"
            ).fetchall()
            assert counts == [(_RECORDS, _RECORDS, 0, _RECORDS - 1, 0)]
            paths = [task.file.file_path for task in table.scan().plan_files()]
        assert len(paths) == len(set(paths)), "a data file is in two snapshots"

    def assert_nothing_is_staged(self) -> None:
        staged = (self.directory / "checkpoints" / "lake" / "staged").rglob("*.arrow")
        assert list(staged) == []


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LakeJob]:
    made = LakeJob(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("kill-before", id="between_data_files_and_commit"),
        pytest.param("kill-after", id="iceberg_16282_between_commit_and_reply"),
    ],
)
def test_driver_killed_around_a_commit_registers_each_file_once(job: LakeJob, moment: str) -> None:
    """iceberg#16282: a commit was made, its coordinator died, and the next one made it again."""
    driver = job.start()
    job.wait_for_snapshots(3, driver)
    job.order(moment)
    assert driver.wait(_TIMEOUT_S) == -signal.SIGKILL
    committed = job.checkpoints()
    driver = job.start()
    job.wait_for_snapshots(2, driver)
    assert job.checkpoints()[: len(committed)] == committed
    job.finish(driver)
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


@pytest.mark.parametrize("moment", ["stop-before", "stop-after"])
def test_iceberg_17551_16016_zombie_driver_that_wakes_later_changes_nothing(
    job: LakeJob, moment: str
) -> None:
    """iceberg#17551, #16016: a coordinator that was replaced lived on, and wrote its old state.

    It stands still with a commit on its way, wakes when the next driver has gone on, and neither
    adds its files nor sets back what is recorded as committed. What its slots have staged since the
    next driver looked is left, for the start after that.
    """
    zombie = job.start()
    job.wait_for_snapshots(3, zombie)
    job.order(moment)
    job.wait_for_stop(zombie)
    driver = job.start()
    job.wait_for_snapshots(3, driver)
    zombie.send_signal(signal.SIGCONT)
    job.wait_for_snapshots(2, driver)
    assert zombie.wait(_TIMEOUT_S) != 0, "the zombie finds that a newer attempt owns the job"
    job.finish(driver)
    job.assert_each_row_once()


def test_iceberg_17637_13763_two_drivers_that_start_at_once_make_one_job(job: LakeJob) -> None:
    """iceberg#17637, #13763: two coordinators lived at once, and files were in two snapshots."""
    drivers = [job.start(), job.start()]
    job.wait_until(lambda: len(job.checkpoints()) >= 3)
    (job.directory / "end").touch()
    job.wait_until(lambda: any(driver.poll() == 0 for driver in drivers))
    job.assert_each_row_once()


def test_a_catalog_that_is_away_for_a_while_loses_and_doubles_nothing(job: LakeJob) -> None:
    driver = job.start()
    job.wait_for_snapshots(2, driver)
    catalog, away = job.directory / "catalog.db", job.directory / "away.db"
    catalog.rename(away)
    catalog.mkdir()
    staged = job.directory / "checkpoints" / "lake" / "staged"
    job.wait_until(lambda: len(list(staged.rglob("*.arrow"))) > 6, driver)
    catalog.rmdir()
    away.rename(catalog)
    job.wait_for_snapshots(2, driver)
    job.finish(driver)
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


def test_job_killed_again_and_again_at_random_moments_writes_each_row_once(job: LakeJob) -> None:
    for _ in range(4):
        driver = job.start()
        job.wait_for_snapshots(1, driver)
        driver.kill()
        driver.wait(30)
    job.finish(job.start())
    job.assert_each_row_once()
    job.assert_nothing_is_staged()
