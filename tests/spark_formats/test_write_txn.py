"""`onceflow txn --txn-app-id`: what a killed batch write has left, told, settled and given up."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration import mysql_sink_kit, postgres_sink_kit
from tests.spark_formats.batches import SCHEMA, Driver, killed_at, rows
from tests.spark_formats.test_query_txn import run, verdicts

from onceflow.connectors.spark.batch.identity import write_target
from onceflow.core.errors import CommitFailed, Fenced, PreparedTransactionLost
from onceflow.core.protocol.batches import decision_of
from onceflow.sinks import MySQLSink, PostgresSink

pytestmark = pytest.mark.integration
TABLE = "(id bigint PRIMARY KEY, account varchar(50), amount int)"


@dataclass(frozen=True)
class Writes:
    """Two tables of one database, and the batch writes of several jobs into them."""

    url: str
    kind: type[PostgresSink] | type[MySQLSink]
    staging: Path

    def driver(self, app: str = "nightly", table: str = "ledger", mode: str = "auto") -> Driver:
        sink = self.kind(self.url, table=table, commit_mode=mode)  # type: ignore[arg-type]
        options = {"txnappid": app, "txnversion": "1"}
        if mode == "ledger":
            options["staginglocation"] = str(self.staging)
        named, _ = write_target(lambda _: sink, options)
        return Driver(named.target, SCHEMA, rows, named.directory)

    def ids(self, table: str = "ledger") -> list[int]:
        kit = postgres_sink_kit if self.kind is PostgresSink else mysql_sink_kit
        found: list[int] = kit.ids_in(self.url, table)
        return found

    def list_marks(self) -> list[int]:
        """Return whether each decided batch of the job is known to be committed whole."""
        kit, schema = (
            (postgres_sink_kit, "onceflow.") if self.kind is PostgresSink else (mysql_sink_kit, "")
        )
        asked = f"SELECT settled FROM {schema}onceflow_batches WHERE source LIKE 'nightly@%'"
        return sorted(int(one) for (one,) in kit.query(self.url, asked))

    def where(self, *more: str) -> list[str]:
        return ["--url", self.url, "--txn-app-id", "nightly", *more]


@pytest.fixture(params=["postgres", pytest.param("mysql", marks=pytest.mark.slow)])
def writes(request: pytest.FixtureRequest, tmp_path: Path) -> Writes:
    url: str = request.getfixturevalue(f"{request.param}_database")
    kit = postgres_sink_kit if request.param == "postgres" else mysql_sink_kit
    for table in ("ledger", "other"):
        kit.query(url, f"CREATE TABLE {table} {TABLE}")
    kind = PostgresSink if request.param == "postgres" else MySQLSink
    return Writes(url, kind, tmp_path / "staging")


def test_what_a_killed_write_decided_is_committed_and_the_rest_rolled_back(
    writes: Writes, tmp_path: Path
) -> None:
    """Nobody waits for the next night; the writes of other jobs stay as they are."""
    decided, undecided = writes.driver(), writes.driver(table="other")
    another = writes.driver(app="another")
    killed_at("committed", tmp_path, lambda: decided.batch(1, range(5), range(5, 10)))
    killed_at("prepared", tmp_path, lambda: undecided.batch(1, range(5)))
    killed_at("prepared", tmp_path, lambda: another.batch(1, range(20, 25)))
    assert (writes.ids(), writes.ids("other")) == ([0, 1, 2, 3, 4], [])
    assert sorted(verdicts(*writes.where())) == ["decided", "pending"]
    assert writes.list_marks() == [0]
    assert run("commit", "--all", "--yes", *writes.where())[0] == 0
    assert writes.ids() == list(range(10))
    # The view of the documents shows the batch from now on, and not from the next night.
    assert writes.list_marks() == [1]
    assert run("abort", "--all", "--fence", "--yes", *writes.where())[0] == 0
    assert verdicts(*writes.where()) == []
    assert len(another.in_doubt()) == 1

    assert decided.plan(1).decided
    undecided.batch(1, range(7))
    assert writes.ids("other") == list(range(7))


@pytest.mark.untraced("decides without the steps of a commit, and gives decided rows up")
def test_staged_rows_that_the_table_refuses_are_listed_and_given_up_and_may_be_written_anew(
    writes: Writes,
) -> None:
    """As rows that a version before staged and decided, or that a task staged beside its twin."""
    driver = writes.driver(mode="ledger")
    driver.batch(1, range(5))
    plan = driver.plan(2)
    reports = [driver.task(plan, 0, range(3, 6)), driver.task(plan, 1, range(6, 9))]
    commits = driver.commits()
    parts = [(report.partition, report.committables) for report in reports]
    commits.decisions.decide(
        decision_of(plan.batch, plan.attempt, parts, fingerprint=plan.fingerprint)
    )
    began = time.monotonic()
    with pytest.raises(CommitFailed, match="commits or aborts it now") as failure:
        commits.commit(reports)
    commits.close()
    assert time.monotonic() - began < 30
    assert len(str(failure.value)) < 1_000

    where = writes.where("--storage", str(writes.staging))
    assert verdicts(*where) == ["decided", "decided"]
    refused, kept = sorted(str(report.committables[0].transaction) for report in reports)
    status, printed, _ = run("abort", refused, "--yes", *where)
    assert (status, "would lose its rows for good" in printed["results"][0]["message"]) == (1, True)
    assert run("abort", refused, "--force", "--yes", *where)[0] == 0
    assert run("commit", kept, "--yes", *where)[0] == 0
    assert writes.ids() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert driver.plan(2).decided, "the batch counts as written without them"

    plan = driver.plan(3)
    report = driver.task(plan, 0, [7])
    commits = driver.commits()
    commits.decisions.decide(
        decision_of(
            plan.batch, plan.attempt, [(0, report.committables)], fingerprint=plan.fingerprint
        )
    )
    commits.close()
    (one,) = report.committables
    assert run("abort", str(one.transaction), "--force", "--yes", *where)[0] == 0
    driver.batch(3, [9])
    assert writes.ids() == [0, 1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("place", ["emptied", "not given"])
def test_decided_rows_whose_staging_directory_is_lost_are_named_and_given_up_as_advised(
    writes: Writes, tmp_path: Path, place: str
) -> None:
    """Rows staged beside a prepared twin are applied after the decision; a kill comes between."""
    options = {"txnappid": "nightly", "txnversion": "1"}
    sink = writes.kind(writes.url, table="ledger", commit_mode="two_phase")

    def driver(**more: str) -> Driver:
        named, _ = write_target(lambda _: sink, {**options, **more})
        return Driver(named.target, SCHEMA, rows, named.directory)

    staged = {"staginglocation": str(writes.staging)}
    first = driver(**staged)
    plan = first.plan(1)
    first.task(plan, 0, range(5))
    reports = [
        first.task(plan, 0, range(5), task_attempt=1),
        first.task(plan, 1, range(5, 9)),
    ]
    assert reports[0].beside
    killed_at("logged", tmp_path, lambda: first.commit(reports))
    shutil.move(writes.staging, tmp_path / "away")
    if place == "not given":
        assert run("commit", "--all", "--yes", *writes.where())[0] == 0
        # A batch that has lost rows is not marked as whole: the next run is to say so.
        assert (writes.ids(), writes.list_marks()) == (list(range(5, 9)), [0])
    repeat = driver(**staged) if place == "emptied" else driver()
    began = time.monotonic()
    with pytest.raises((CommitFailed, PreparedTransactionLost)) as lost:
        repeat.plan(1)
    assert time.monotonic() - began < 30
    text = str(lost.value)
    (one,) = reports[0].committables
    assert f"{one.transaction} (5 rows for " in text
    assert "write 1 of nightly" in text or "nightly to ledger" in text
    assert "Restore the directory" in text
    if place == "emptied":
        shutil.copytree(tmp_path / "away", writes.staging, dirs_exist_ok=True)
        assert driver(**staged).plan(1).decided
        assert writes.ids() == list(range(9))
        return
    advice = re.search(r"onceflow txn (abort .*?) --url URL (.*?) --storage", text)
    assert advice is not None
    command = shlex.split(f"{advice[1]} {advice[2]}")
    empty = ["--url", writes.url, "--storage", str(tmp_path / "empty"), "--yes"]
    assert run(*command, *empty)[0] == 0
    assert driver().plan(1).decided, "the batch counts as written without them"
    assert writes.ids() == list(range(5, 9))


def test_a_write_that_still_runs_decides_nothing_after_the_fence(writes: Writes) -> None:
    driver = writes.driver()
    plan = driver.plan(1)
    report = driver.task(plan, 0, range(5))
    assert run("abort", "--all", "--fence", "--yes", *writes.where())[0] == 0
    with pytest.raises(Fenced):
        driver.commit([report])
    assert writes.ids() == []


def test_an_app_that_never_wrote_there_and_a_missing_target_are_named(writes: Writes) -> None:
    writes.driver().batch(1, [1])
    status, _, errors = run("list", "--url", writes.url, "--txn-app-id", "nobody")
    assert status != 0
    assert "nothing was written with txnAppId 'nobody'" in " ".join(errors.split())
    assert "--url" in run("list", "--txn-app-id", "nightly")[2]
