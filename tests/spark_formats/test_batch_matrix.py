"""Every target, with one table and several, by `write` and by a query, with every fault: rows once.

A cell runs its jobs as Spark calls a format, in this process; what is killed runs in one of its
own. Cells that are held elsewhere are not here:

    a server is killed        test_batch_faults; of all databases, tests/integration/sql
    `foreach_batch`           test_foreach_batch; its commits are those of a query, to a group
    Spark's own processes     test_killed_executor, test_killed_commit, test_stream_sink
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from tests.spark_formats.batches import SCHEMA, Driver, killed_at, rows
from tests.spark_formats.write_cases import (
    SERVERS,
    TOKEN,
    MakeCase,
    WriteCase,
    files_case,
    kafka_case,
    mariadb_case,
    mysql_case,
    own_case,
    postgres_case,
)
from tests.spark_formats.writes import Write

from onceflow.connectors.spark.batch_commits import TaskReport
from onceflow.connectors.spark.batch_identity import stream_target
from onceflow.connectors.spark.checkpoint_location import CheckpointLocation
from onceflow.core.errors import Fenced

Part = Sequence[int]


class QueryRun:
    """One micro-batch of a query, planned, with the steps of `Write`."""

    def __init__(self, case: WriteCase, checkpoint: Path, number: int) -> None:
        own = ("sinkid", *TOKEN)
        options = {name: value for name, value in case.options.items() if name not in own}
        named = stream_target(case.make_sink, options, CheckpointLocation(str(checkpoint)))
        self.driver: Driver = Driver(named.target, SCHEMA, rows, named.directory)
        self.plan = self.driver.plan(number)
        self.reports: list[TaskReport] = []

    def write(self, *parts: Part, task_attempt: int = 0) -> None:
        """Run a task for each of `parts`, each as its try number `task_attempt`."""
        self.reports = [
            self.driver.task(self.plan, index, part, task_attempt=task_attempt)
            for index, part in enumerate(parts)
        ]

    def commit(self) -> None:
        """Commit what the tasks have written; as Spark, abort where that fails."""
        try:
            self.commit_alone()
        except Exception:
            self.driver.abort(self.plan)
            raise

    def commit_alone(self) -> None:
        """Commit, and leave what fails to the next run."""
        self.driver.commit(self.reports)


@dataclass(frozen=True)
class Job:
    """One batch of one job, which may be tried any number of times."""

    case: WriteCase
    app: str
    number: int
    first: int
    """The first of its ids."""
    interface: str
    directory: Path

    @property
    def parts(self) -> tuple[Part, Part]:
        return range(self.first, self.first + 5), range(self.first + 5, self.first + 9)

    def begin(self) -> Write | QueryRun:
        if self.interface == "stream":
            (self.directory / "metadata").write_text(f'{{"id": "{self.directory.name}"}}')
            return QueryRun(self.case, self.directory, self.number)
        options = {**self.case.options, "txnappid": self.app, "txnversion": str(self.number)}
        if "sinkid" in options:
            options["sinkid"] += f"-{self.app}"
        return Write(self.case.make_sink, options)

    def run(self) -> None:
        run = self.begin()
        run.write(*self.parts)
        run.commit()

    def run_alone(self) -> None:
        run = self.begin()
        run.write(*self.parts)
        run.commit_alone()


def run_clean(job: Job) -> None:
    job.run()


def run_repeatedly(job: Job) -> None:
    for _ in range(3):
        job.run()


def kill_driver(job: Job) -> None:
    killed_at("prepared", job.directory, job.run_alone)
    # Nothing is decided: the next try writes all of it, and is killed in its commit.
    killed_at("logged", job.directory, job.run_alone)
    job.run()
    job.run()


def kill_executor(job: Job) -> None:
    run = job.begin()
    killed_at("prepared", job.directory, partial(run.write, *job.parts))
    run.write(*job.parts, task_attempt=1)
    run.commit()
    job.run()


def run_two_at_once(job: Job) -> None:
    early, late = job.begin(), job.begin()
    late.write(*job.parts)
    with pytest.raises(Fenced, match="another run|has claimed"):
        early.write(*job.parts)
        early.commit()
    late.commit()
    job.run()


FAULTS = {
    "clean": run_clean,
    "repeated": run_repeatedly,
    "killed-driver": kill_driver,
    "killed-executor": kill_executor,
    "two-at-once": run_two_at_once,
}
TARGETS = (postgres_case, mysql_case, mariadb_case, kafka_case, files_case, own_case)
LAYOUTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "one-table": (("a", "nightly", 1),),
    "two-tables": (("a", "nightly", 1), ("b", "nightly", 1)),
    "two-jobs": (("a", "nightly", 1), ("a", "hourly", 1)),
    "two-tokens": (("a", "nightly", 1), ("a", "nightly", 2)),
    "shared-staging": (("a", "nightly", 1), ("b", "hourly", 1)),
    "threads": (("a", "nightly", 1), ("b", "nightly", 1)),
}
"""Table, job and number of each batch. All share one staging directory."""
QUICK = {
    (postgres_case, "two-tokens", "stream", "killed-driver"),
    (postgres_case, "threads", "write", "repeated"),
    (files_case, "two-tables", "write", "two-at-once"),
    (own_case, "shared-staging", "stream", "killed-executor"),
    (kafka_case, "two-jobs", "write", "killed-driver"),
}


def cells() -> Iterator[object]:
    for make, layout, interface, fault in product(TARGETS, LAYOUTS, ("write", "stream"), FAULTS):
        marks = [pytest.mark.integration] if make in SERVERS else []
        if (make, layout, interface, fault) not in QUICK:
            marks.append(pytest.mark.slow)
        name = make.__name__.removesuffix("_case")
        cell = f"{name}-{layout}-{interface}-{fault}"
        yield pytest.param(make, layout, interface, fault, marks=marks, id=cell)


@pytest.mark.parametrize(("make", "layout", "interface", "fault"), list(cells()))
def test_each_row_of_each_job_is_in_its_table_once(
    make: MakeCase,
    layout: str,
    interface: str,
    fault: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    cases: dict[str, WriteCase] = {}
    jobs: list[Job] = []
    for table, app, number in LAYOUTS[layout]:
        if table not in cases:
            cases[table] = make(request, tmp_path, table)
        directory = tmp_path / f"{table}-{app}"
        directory.mkdir(exist_ok=True)
        jobs.append(Job(cases[table], app, number, 10 * len(jobs), interface, directory))
    if layout == "threads":
        with ThreadPoolExecutor(len(jobs)) as threads:
            list(threads.map(FAULTS[fault], jobs))
    else:
        for job in jobs:
            FAULTS[fault](job)
    for table, case in cases.items():
        own = [job for job in jobs if job.case is cases[table]]
        assert case.ids() == sorted(one for job in own for part in job.parts for one in part)
