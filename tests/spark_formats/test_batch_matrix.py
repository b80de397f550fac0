"""Every target, with one table and several, by each way of writing, with every fault: rows once.

A cell runs its jobs as Spark calls a format, or as a function of `foreach_batch` works, in this
process; what is killed runs in one of its own. A server that is killed is the cell's own; files and
the own sink have none. Spark's own processes are killed in test_killed_executor,
test_killed_commit and test_stream_sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from threading import Barrier

import pytest
from tests.spark_formats import write_cases
from tests.spark_formats.batches import SCHEMA, Driver, killed_at, rows
from tests.spark_formats.foreach_runs import ForeachRun
from tests.spark_formats.writes import Write

from onceflow.connectors.spark.batch.commits import TaskReport
from onceflow.connectors.spark.batch.identity import stream_target
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.core.crash_points import CrashPoint, record_death
from onceflow.core.errors import Fenced
from onceflow.integration.servers.kinds import Killable

Part = Sequence[int]
RESTART_S = 120.0
"""Longer than any server takes to start on a busy machine."""
pytestmark = pytest.mark.timeout(600)
"""Above all that a cell may wait for: a server that is started twice (`RESTART_S` each), or two
processes that are killed (150 s each), and the records of two topics (100 s each). So it fails at
the wait that took too long, which says what is missing."""


def query_options(case: write_cases.WriteCase) -> dict[str, str]:
    """Return the options of a query into `case`, which its checkpoint names."""
    own = ("sinkid", *write_cases.TOKEN)
    return {name: value for name, value in case.options.items() if name not in own}


class QueryRun:
    """One micro-batch of a query, planned, with the steps of `Write`."""

    def __init__(self, case: write_cases.WriteCase, checkpoint: Path, number: int) -> None:
        location = CheckpointLocation(str(checkpoint))
        named = stream_target(case.make_sink, query_options(case), location)
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

    cases: tuple[write_cases.WriteCase, ...]
    """Several only by `foreach_batch`: each of its rows is written to all of them."""
    app: str
    number: int
    first: int
    """The first of its ids."""
    interface: str
    directory: Path
    restart_server: Callable[[], object] | None = None
    """SIGKILL the server and start it again, once for all jobs that run at once."""

    @property
    def parts(self) -> tuple[Part, Part]:
        return range(self.first, self.first + 5), range(self.first + 5, self.first + 9)

    def begin(self) -> Write | QueryRun | ForeachRun:
        if self.interface == "write":
            (case,) = self.cases
            options = {**case.options, "txnappid": self.app, "txnversion": str(self.number)}
            if "sinkid" in options:
                options["sinkid"] += f"-{self.app}"
            return Write(case.make_sink, options)
        (self.directory / "metadata").write_text(f'{{"id": "{self.directory.name}"}}')
        if self.interface == "stream":
            (case,) = self.cases
            return QueryRun(case, self.directory, self.number)
        sinks = {
            f"table {place}": case.make_sink(query_options(case))
            for place, case in enumerate(self.cases)
        }
        return ForeachRun(sinks, self.directory, self.number)

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


def kill_server(job: Job) -> None:
    assert job.restart_server is not None
    run = job.begin()
    run.write(*job.parts)
    job.restart_server()
    _at_first_commit.set(job.restart_server)
    run.commit_alone()
    assert _at_first_commit.get() is None
    job.run()


def restart_server(server: Killable) -> None:
    server.restart()


_at_first_commit: ContextVar[Callable[[], object] | None] = ContextVar("at_commit", default=None)
"""What this thread does when its batch's first transaction is committed, and the others are not."""


def reach(point: CrashPoint) -> None:
    """Pass a crash point of the commit in this process."""
    interrupt = _at_first_commit.get()
    if point == "committed" and interrupt is not None:
        record_death(point)
        _at_first_commit.set(None)
        interrupt()


FAULTS = {
    "clean": run_clean,
    "repeated": run_repeatedly,
    "killed-driver": kill_driver,
    "killed-executor": kill_executor,
    "killed-server": kill_server,
    "two-at-once": run_two_at_once,
}
INTERFACES = ("write", "stream", "foreach_batch")
TARGETS = (
    write_cases.postgres_case,
    write_cases.mysql_case,
    write_cases.mariadb_case,
    write_cases.kafka_case,
    write_cases.files_case,
    write_cases.own_case,
)
LAYOUTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "one-table": (("a", "nightly", 1),),
    "two-tables": (("a", "nightly", 1), ("b", "nightly", 1)),
    "two-jobs": (("a", "nightly", 1), ("a", "hourly", 1)),
    "two-tokens": (("a", "nightly", 1), ("a", "nightly", 2)),
    "shared-staging": (("a", "nightly", 1), ("b", "hourly", 1)),
    "threads": (("a", "nightly", 1), ("b", "nightly", 1)),
}
"""Tables, job and number of each batch. All share one staging directory."""
UNDER_ONE_DECISION = (("ab", "nightly", 1),)
"""Two tables by `foreach_batch`."""
QUICK = {
    (write_cases.postgres_case, "two-tokens", "stream", "killed-driver"),
    (write_cases.postgres_case, "threads", "write", "repeated"),
    (write_cases.postgres_case, "two-tables", "foreach_batch", "killed-server"),
    (write_cases.files_case, "two-tables", "write", "two-at-once"),
    (write_cases.own_case, "shared-staging", "stream", "killed-executor"),
    (write_cases.own_case, "two-jobs", "foreach_batch", "killed-driver"),
}


def cells() -> Iterator[object]:
    for make, layout, interface, fault in product(TARGETS, LAYOUTS, INTERFACES, FAULTS):
        if fault == "killed-server" and make not in write_cases.SERVERS:
            continue
        marks = [pytest.mark.integration] if make in write_cases.SERVERS else []
        if (make, layout, interface, fault) not in QUICK:
            marks.append(pytest.mark.slow)
        name = make.__name__.removesuffix("_case")
        cell = f"{name}-{layout}-{interface}-{fault}"
        yield pytest.param(make, layout, interface, fault, marks=marks, id=cell)


@pytest.mark.parametrize(("make", "layout", "interface", "fault"), list(cells()))
def test_each_row_of_each_job_is_in_its_table_once(
    make: write_cases.MakeCase,
    layout: str,
    interface: str,
    fault: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    together = interface == "foreach_batch" and layout == "two-tables"
    batches = UNDER_ONE_DECISION if together else LAYOUTS[layout]
    at_once = len(batches) if layout == "threads" else 1
    make_table: Callable[[Path, str], write_cases.WriteCase] = partial(make, request)
    restart = None
    if fault == "killed-server":
        server, make_table = write_cases.start_own_server(make, request)
        restart = Barrier(at_once, lambda: restart_server(server), RESTART_S).wait
        monkeypatch.setattr("onceflow.connectors.spark.batch.commits.reach", reach)
    cases = {
        table: make_table(tmp_path, table)
        for table in sorted({table for tables, _, _ in batches for table in tables})
    }
    jobs: list[Job] = []
    for tables, app, number in batches:
        directory = tmp_path / f"{tables}-{app}"
        directory.mkdir(exist_ok=True)
        into = tuple(cases[table] for table in tables)
        jobs.append(Job(into, app, number, 10 * len(jobs), interface, directory, restart))
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(FAULTS[fault], jobs))
    for case in cases.values():
        own = [job for job in jobs if case in job.cases]
        assert case.ids() == sorted(one for job in own for part in job.parts for one in part)
