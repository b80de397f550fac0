"""Whole jobs into lake tables whose drivers are killed, stand still, or lose the table.

Tests that name an issue show that what went wrong there, in the sink of Kafka Connect, does not go
wrong here. All read the table back by DuckDB, and look through all its data files.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, cast

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table import Table
from tests.integration.lake_driver import catalog_properties
from tests.support.changing_source import ChangingSource
from tests.support.counting_source import SCHEMA
from tests.support.program import Program, python
from typing_extensions import override

_PROGRAM = Path(__file__).with_name("lake_driver.py")
RECORDS = 30_000
TIMEOUT_S = 120.0

_ROLL_BACKS_MAX = 50
_REPLACED = re.compile(
    "no longer has a record of sink id|and created anew|set back to an older copy"
)
"""What is said at a commit, and then at a start."""

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]


class LakeJob(ABC):
    """The drivers of one job, and its table."""

    format: ClassVar[str]
    rolled_back: ClassVar[str]
    """What an error says of a table that was."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.gathered = 0
        """How many checkpoints a version is made of; 0: each has its own."""
        self._drivers: list[Program] = []
        (directory / "orders").mkdir()

    def start(self) -> Program:
        log = self.directory / f"driver-{len(self._drivers)}.log"
        self._drivers.append(Program(log, *python(_PROGRAM, *self._arguments())))
        return self._drivers[-1]

    def _arguments(self) -> tuple[object, ...]:
        return self.format, self.directory, RECORDS, self.gathered

    def close(self) -> None:
        for driver in self._drivers:
            driver.kill()

    def order(self, order: str) -> None:
        """Have the next commit of any driver kill or stop its process."""
        (self.directory / "orders" / order).touch()

    def wait_until(self, holds: Callable[[], bool], driver: Program | None = None) -> None:
        """Wait until it holds, while `driver` runs."""
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, self.logs()
            assert driver is None or driver.poll() is None, self.logs()
            time.sleep(0.02)

    def wait_for_commits(self, count: int, driver: Program) -> None:
        """Wait until `count` more versions have rows."""
        goal = len(self.checkpoints()) + count
        self.wait_until(lambda: len(self.checkpoints()) >= goal, driver)

    def wait_for_stop(self, driver: Program) -> None:
        """Wait until `driver` stands still."""
        stat = Path(f"/proc/{driver.pid}/stat")
        self.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", driver)

    def finish(self, driver: Program) -> None:
        """Let the input end, and `driver` with it."""
        (self.directory / "end").touch()
        assert driver.wait(TIMEOUT_S) == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in self.directory.glob("*.log"))

    @abstractmethod
    def checkpoints(self) -> list[int]:
        """Return the checkpoint of each version with rows, in their order."""

    @abstractmethod
    def read(self) -> tuple[pa.Table, list[str]]:
        """Return the rows that readers see, and the paths of their data files."""

    @abstractmethod
    def moved_away(self) -> AbstractContextManager[None]:
        """Have nothing answer for the table in the block."""

    @abstractmethod
    def roll_back(self) -> Callable[[], object]:
        """Roll the table back by one version with rows; return what rolls it forward again."""

    def ask_status(self) -> str:
        """Return what `onceflow status` prints of the job, also of one that has ended."""
        program = [sys.executable, "-m", "onceflow.cli.main", "status", "lake"]
        storage = str(self.directory / "checkpoints")
        asked = subprocess.run(
            [*program, "--storage", storage], capture_output=True, text=True, timeout=60
        )
        return asked.stdout + asked.stderr

    def assert_each_row_once(self) -> None:
        checkpoints = self.checkpoints()
        assert checkpoints == sorted(set(checkpoints)), "one version a checkpoint, and they rise"
        _, paths = self.read()
        assert len(paths) == len(set(paths)), "a data file is in two versions"
        self.assert_all_rows()

    def assert_all_rows(self) -> None:
        """Have readers see each row of the input once."""
        rows, _ = self.read()
        with closing(duckdb.connect()) as database:
            database.register("orders", rows)
            counts: Any = database.sql(
                "SELECT count(*), count(DISTINCT id), min(id), max(id),"
                " count(*) FILTER (account <> CAST(id % 100 AS VARCHAR)) FROM orders"
            ).fetchall()
        assert counts == [(RECORDS, RECORDS, 0, RECORDS - 1, 0)]

    def assert_nothing_is_staged(self) -> None:
        staged = (self.directory / "checkpoints" / "lake" / "staged").rglob("*.arrow")
        assert list(staged) == []


class IcebergLakeJob(LakeJob):
    """Snapshots of a table in a SQLite catalog."""

    format = "iceberg"
    rolled_back = "was rolled back or replaced"

    @contextmanager
    def table(self) -> Generator[Table | None, None, None]:
        with closing(load_catalog("default", **catalog_properties(self.directory))) as catalog:
            try:
                yield catalog.load_table("shop.orders")
            except NoSuchTableError:
                yield None

    @override
    def checkpoints(self) -> list[int]:
        with self.table() as table:
            summaries = [snapshot.summary for snapshot in table.snapshots()] if table else []
        found: list[int] = []
        for summary in summaries:
            assert summary is not None
            # A claim has the checkpoint of the snapshot before it.
            if summary["onceflow.checkpoint"] != summary["onceflow.checkpoint-before"]:
                found.append(int(summary["onceflow.checkpoint"] or 0))
        return found

    @override
    def read(self) -> tuple[pa.Table, list[str]]:
        with self.table() as table:
            assert table is not None
            files = [task.file.file_path for task in table.scan().plan_files()]
            return table.scan().to_arrow(), files

    @override
    @contextmanager
    def moved_away(self) -> Generator[None, None, None]:
        catalog, away = self.directory / "catalog.db", self.directory / "away.db"
        catalog.rename(away)
        catalog.mkdir()
        yield
        catalog.rmdir()
        away.rename(catalog)

    @override
    def roll_back(self) -> Callable[[], object]:
        for _ in range(_ROLL_BACKS_MAX):
            with self.table() as table:
                assert table is not None
                last = reversed(table.snapshots()[-2:])
                newest, before = (snapshot.snapshot_id for snapshot in last)
                # Refused if the job has committed since the table was loaded.
                with suppress(CommitFailedException):
                    self._set_branch(table, before)
                    return lambda: self._roll_forward(newest)
        raise AssertionError(f"the job committed during each of {_ROLL_BACKS_MAX} roll-backs")

    @contextmanager
    def stand_aside(self) -> Generator[None, None, None]:
        """Have another table of the same columns in the table's stead in the block."""
        with closing(load_catalog("default", **catalog_properties(self.directory))) as catalog:
            catalog.rename_table("shop.orders", "shop.away")
            catalog.create_table("shop.orders", SCHEMA)
            yield
            catalog.drop_table("shop.orders")
            catalog.rename_table("shop.away", "shop.orders")

    def _roll_forward(self, snapshot_id: int) -> None:
        with self.table() as table:
            assert table is not None
            self._set_branch(table, snapshot_id)

    def _set_branch(self, table: Table, snapshot_id: int) -> None:
        with table.manage_snapshots() as snapshots:
            snapshots.set_current_snapshot(snapshot_id)


class DeltaLakeJob(LakeJob):
    """Versions of a table in a directory."""

    format = "delta"
    rolled_back = "restored an older version"

    @override
    def checkpoints(self) -> list[int]:
        infos = [action["commitInfo"] for action in self._actions() if "commitInfo" in action]
        made = [info for info in infos if info["operation"] in ("WRITE", "MERGE")]
        return [int(one["onceflow.checkpoint"]) for one in made]

    @override
    def read(self) -> tuple[pa.Table, list[str]]:
        files = [action["add"]["path"] for action in self._actions() if "add" in action]
        return cast("Any", DeltaTable(self.directory / "table")).to_pyarrow_table(), files

    @override
    @contextmanager
    def moved_away(self) -> Generator[None, None, None]:
        """Deny the log; data files of writers go on."""
        log, away = self.directory / "table" / "_delta_log", self.directory / "away"
        log.rename(away)
        log.touch()
        yield
        log.unlink()
        away.rename(log)

    @override
    def roll_back(self) -> Callable[[], object]:
        table = DeltaTable(self.directory / "table")
        newest = table.version()
        table.restore(newest - 1)
        return lambda: DeltaTable(self.directory / "table").restore(newest)

    def _actions(self) -> list[dict[str, Any]]:
        """Return what all versions say, in their order."""
        log = sorted((self.directory / "table" / "_delta_log").glob("*.json"))
        return [json.loads(line) for one in log for line in one.read_text("utf-8").splitlines()]


class IcebergChangesJob(IcebergLakeJob):
    """Rows of accounts that are replaced and deleted."""

    format = "iceberg+account"


class DeltaChangesJob(DeltaLakeJob):
    """Rows of accounts that are replaced and deleted."""

    format = "delta+account"


@pytest.fixture(params=[IcebergChangesJob, DeltaChangesJob], ids=["iceberg", "delta"])
def changes_job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LakeJob]:
    made: LakeJob = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=[IcebergLakeJob, DeltaLakeJob], ids=["iceberg", "delta"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LakeJob]:
    made: LakeJob = request.param(tmp_path)
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
    job.wait_for_commits(3, driver)
    job.order(moment)
    assert driver.wait(TIMEOUT_S) == -signal.SIGKILL
    committed = job.checkpoints()
    driver = job.start()
    job.wait_for_commits(2, driver)
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
    job.wait_for_commits(3, zombie)
    job.order(moment)
    job.wait_for_stop(zombie)
    driver = job.start()
    job.wait_for_commits(3, driver)
    zombie.signal(signal.SIGCONT)
    job.wait_for_commits(2, driver)
    assert zombie.wait(TIMEOUT_S) != 0, "the zombie finds that a newer attempt owns the job"
    job.finish(driver)
    job.assert_each_row_once()


def test_iceberg_17637_13763_two_drivers_that_start_at_once_make_one_job(job: LakeJob) -> None:
    """iceberg#17637, #13763: two coordinators lived at once, and files were in two snapshots."""
    drivers = [job.start(), job.start()]
    job.wait_until(lambda: len(job.checkpoints()) >= 3)
    (job.directory / "end").touch()
    job.wait_until(lambda: any(driver.poll() == 0 for driver in drivers))
    job.assert_each_row_once()


@pytest.mark.parametrize("gathered", [0, 3])
def test_a_table_that_is_away_for_a_while_loses_and_doubles_nothing(
    job: LakeJob, gathered: int
) -> None:
    job.gathered = gathered
    driver = job.start()
    job.wait_for_commits(2, driver)
    staged = job.directory / "checkpoints" / "lake" / "staged"
    with job.moved_away():
        job.wait_until(lambda: len(list(staged.rglob("*.arrow"))) > 6 + 2 * gathered, driver)
    job.wait_for_commits(2, driver)
    job.finish(driver)
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


@pytest.mark.parametrize("gathered", [0, 3])
def test_a_table_that_is_rolled_back_under_a_job_is_named_and_made_whole_once_it_is_set_right(
    job: LakeJob, gathered: int
) -> None:
    job.gathered = gathered
    driver = job.start()
    job.wait_for_commits(3, driver)
    roll_forward = job.roll_back()
    job.wait_until(lambda: job.rolled_back in job.ask_status())
    roll_forward()
    if driver.poll() is not None:
        driver = job.start()
    job.wait_for_commits(2, driver)
    job.finish(driver)
    job.assert_all_rows()
    job.assert_nothing_is_staged()


@pytest.mark.parametrize("job", [IcebergLakeJob], indirect=True)
@pytest.mark.parametrize("gathered", [0, 3])
def test_a_table_in_whose_stead_another_stands_is_named_and_made_whole_once_it_is_back(
    job: IcebergLakeJob, gathered: int
) -> None:
    job.gathered = gathered
    driver = job.start()
    job.wait_for_commits(2, driver)
    with job.stand_aside():
        job.wait_until(lambda: _REPLACED.search(job.ask_status()) is not None)
    if driver.poll() is not None:
        driver = job.start()
    job.wait_for_commits(2, driver)
    job.finish(driver)
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


def test_job_killed_again_and_again_at_random_moments_writes_each_row_once(job: LakeJob) -> None:
    for _ in range(4):
        driver = job.start()
        job.wait_for_commits(1, driver)
        driver.kill()
    job.finish(job.start())
    job.assert_each_row_once()
    job.assert_nothing_is_staged()


@pytest.mark.parametrize("moment", ["kill-before", "kill-after", "stop-before", "stop-after"])
def test_gathered_commits_survive_killed_and_overtaken_drivers(job: LakeJob, moment: str) -> None:
    """The next driver gathers others, of which the overtaken one's commit has some."""
    job.gathered = 5
    first = job.start()
    job.wait_for_commits(2, first)
    job.order(moment)
    if moment.startswith("kill"):
        assert first.wait(TIMEOUT_S) == -signal.SIGKILL
    else:
        job.wait_for_stop(first)
    job.gathered = 3
    second = job.start()
    job.wait_for_commits(2, second)
    if moment.startswith("stop"):
        first.signal(signal.SIGCONT)
        assert first.wait(TIMEOUT_S) != 0, "it finds that a newer attempt owns the job"
    job.finish(second)
    job.assert_each_row_once()
    if moment.startswith("kill"):
        job.assert_nothing_is_staged()


@pytest.mark.parametrize("gathered", [0, 3])
def test_changes_by_key_are_applied_once_whenever_drivers_are_killed_or_overtaken(
    changes_job: LakeJob, gathered: int
) -> None:
    """One change in three deletes. Each driver but the last dies, or wakes when it is replaced."""
    job = changes_job
    job.gathered = gathered
    for moment in ("kill-before", "kill-after"):
        driver = job.start()
        job.wait_for_commits(2, driver)
        job.order(moment)
        assert driver.wait(TIMEOUT_S) == -signal.SIGKILL
    zombie = job.start()
    job.wait_for_commits(1, zombie)
    job.order("stop-before")
    job.wait_for_stop(zombie)
    driver = job.start()
    job.wait_for_commits(2, driver)
    zombie.signal(signal.SIGCONT)
    assert zombie.wait(TIMEOUT_S) != 0
    job.finish(driver)
    checkpoints = job.checkpoints()
    assert checkpoints == sorted(set(checkpoints)), "one version a checkpoint, and they rise"
    rows, _ = job.read()
    assert sorted(rows["id"].to_pylist()) == ChangingSource(RECORDS).ids_at_the_end()
