"""The state backends that the suites run over, and the tier of each clause for each sink.

By default all clauses run for a sink that prepares transactions in a database. A sink that keeps
its rows aside until they are decided has all but those that kill whole jobs. For the others
`script/test --servers` runs what is about the sink, at half as many lines of its code: clauses that
kill whole jobs are about the engine as much, and the others' jobs are killed by tests of their own.
MySQL and MariaDB are both tried with what dies, and their common code by MySQL; tests of
tests/integration/sql hold what else can be said of their commits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conformance.state_job import BACKENDS, Job
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.state import StateBackend
from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clause_catalog import CLAUSES
from onceflow.integration.conformance.clauses import (
    batching,
    beginning,
    breaking,
    deciding,
    ending,
    gathering,
    growing,
    killing,
    overtaking,
    reading,
    running,
    source_jobs,
    writing,
)
from onceflow.integration.conformance.harness import Effort
from onceflow.integration.conformance.source_catalog import SOURCE_CLAUSES

WHOLE = {"TestPostgresTwoPhase", "TestSQLiteInserts"}
EXAMPLES = {
    "TestDeltaExample",
    "TestDeltaSink",
    "TestDeltaUpserts",
    "TestHttpSink",
    "TestIcebergSink",
    "TestIcebergUpserts",
    "TestOwnSink",
    "TestRedisSink",
    "TestSQLiteUpserts",
}

DEFAULT_RUN_ROUNDS = 2
"""What script/test says; --all says nothing, and has more."""

OF_JOBS = (*running.CLAUSES, batching.batch_killed_at_each_step)
OF_LINES = (*killing.CLAUSES, *overtaking.CLAUSES)
"""They kill or hold up a process at every line of the sink's own code."""
OF_DEATHS = (
    breaking.server_killed_before_commit,
    breaking.server_away_changes_nothing,
    breaking.frozen_server_commits_once,
    writing.death_rolls_back_what_is_open,
    writing.pre_committed_survives_death,
)
"""What a server does when it, or who speaks with it, dies."""
OPERATORS = {
    "test_batch_timers.py": "set_through_snapshots_and_rescaling[heap-0]",
    "test_count_windows.py": "records_through_snapshots_and_rescaling[heap-7]",
    "test_deduplication.py": "model_through_snapshots_and_rescaling[heap-int-Keep.LAST]",
    "test_early_windows.py": "when_the_interval_has_passed[heap]",
    "test_interval_joins.py": "model_through_snapshots_and_rescaling[heap-300-2500-full]",
    "test_last_rows.py": "model_through_snapshots_and_rescaling[heap-4-by-two]",
    "test_top_rows.py": "model_through_snapshots_and_rescaling[heap-7-3]",
    "test_window_functions.py": "gap=0.003)-9-records]",
    "test_window_joins.py": "slide=0.004, offset=0)-9-full]",
}
"""Modules of operators, which are tried on RocksDB by default. The name of the one test of each
module that runs on the heap, too, ends with the text: it compares the operator with a model."""
NO_SERVER = {"kill", "start", "pause", "unpause", "address", "sink_at", "secrets"}
LACKING = {
    "TestBeginningSink": NO_SERVER,
    "TestDeltaExample": {*NO_SERVER, "bad_batch"},
    "TestDeltaSink": NO_SERVER,
    "TestDeltaUpserts": NO_SERVER,
    "TestFileSink": NO_SERVER,
    "TestHttpSink": {"kill", "start", "pause", "unpause", "bad_batch"},
    "TestIcebergSink": NO_SERVER,
    "TestIcebergUpserts": NO_SERVER,
    "TestOwnSink": NO_SERVER,
    "TestPartitionedDeltaSink": NO_SERVER,
    "TestPartitionedIcebergSink": NO_SERVER,
    "TestPartitionedFileSink": NO_SERVER,
    "TestReferenceSink": NO_SERVER,
    "TestSQLiteInserts": NO_SERVER,
    "TestSQLiteUpserts": NO_SERVER,
}
"""What clauses need and these sinks' targets have none of: a library of the writing process."""
GLOBAL = {
    "TestDeltaExample",
    "TestDeltaSink",
    "TestDeltaUpserts",
    "TestIcebergSink",
    "TestIcebergUpserts",
    "TestPartitionedDeltaSink",
    "TestPartitionedIcebergSink",
}
"""Sinks that commit whole checkpoints, in their order."""
GATHERING = {
    "TestDeltaUpserts",
    "TestIcebergUpserts",
    "TestPartitionedDeltaSink",
    "TestPartitionedIcebergSink",
}
"""Those of them that commit several together."""
OF_BEGUN_COMMITS = (*beginning.CLAUSES, running.job_killed_at_begun)
BEGINNING = {"TestBeginningSink", "TestKafka"}
"""Sinks whose commits may be begun before their decision."""
OF_REFUSED_COMMITS = (
    deciding.refused_commit_waits_for_a_person,
    deciding.own_error_of_a_refused_commit_waits_for_a_person,
)
OBSTRUCTED = {"TestReferenceSink", "TestSQLiteInserts", "TestSQLiteUpserts"}
"""Sinks whose targets can be made to refuse what is decided."""
OF_WAITING_READERS = (
    ending.poll_without_rows_returns_in_time,
    ending.close_ends_a_waiting_poll,
    ending.wake_ends_a_waiting_poll,
)
LACKING_OF_SOURCES: dict[str, tuple[Clause, ...]] = {
    "TestPostgresChanges": (
        ending.bounded_end,
        ending.ended_splits_have_no_more_rows,
        ending.wake_ends_a_waiting_poll,
        growing.splits_that_appear_are_read_whole,
        reading.rescaling_returns_each_row_once,
        source_jobs.job_killed_while_splits_appear,
    ),
    "TestDatagenSource": (*OF_WAITING_READERS, *(one for one in SOURCE_CLAUSES if one.needs)),
}
"""Clauses without meaning for a source: computed rows neither come later nor go away, and a slot is
one split without an end, whose reader has no wake()."""
SHORT_SOURCES = {"TestDatagenSource", "TestKafkaSource"}
"""Sources whose jobs are killed in `script/test --servers` only; the others' are by default."""
OF_NETWORKS = tuple(clause for clause in breaking.CLAUSES if clause not in OF_DEATHS)


def is_slow(test: str, clause: Clause) -> bool:
    """Return whether `clause` is a slow test for the sink of class `test`, not among `WHOLE`."""
    if test in GATHERING:
        return clause is not gathering.gathered_commit_leaves_out_what_is_committed
    if test == "TestMariaDBTwoPhase":
        return clause not in OF_DEATHS
    if test == "TestMySQLTwoPhase":
        return clause not in OF_DEATHS + OF_NETWORKS + OF_LINES
    return clause in OF_JOBS or (test in EXAMPLES and clause in OF_LINES)


def says_nothing(test: str, clause: Clause) -> bool:
    """Return whether `clause` has no meaning for the sink of class `test`."""
    if clause is gathering.gathered_commit_leaves_out_what_is_committed:
        return test not in GATHERING
    if clause in gathering.CLAUSES:
        return test not in GLOBAL
    if clause in OF_BEGUN_COMMITS and test not in BEGINNING:
        return True
    if clause in OF_REFUSED_COMMITS:
        return test not in OBSTRUCTED
    if clause is deciding.commit_in_any_order:
        return test in GLOBAL
    return not LACKING.get(test, set()).isdisjoint(clause.needs)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without_meaning: list[pytest.Item] = []
    for item in items:
        callspec, test = getattr(item, "callspec", None), item.getparent(pytest.Class)
        if callspec is None:
            continue
        if callspec.params.get("backend") == "heap":
            by_default = OPERATORS.get(item.path.name, "")
            if not item.name.endswith(by_default):
                item.add_marker(pytest.mark.servers)
        if test is None:
            continue
        clause = callspec.params.get("clause")
        if clause in SOURCE_CLAUSES and clause in LACKING_OF_SOURCES.get(test.name, ()):
            without_meaning.append(item)
        elif clause in source_jobs.CLAUSES and test.name in SHORT_SOURCES:
            item.add_marker(pytest.mark.servers)
        if not isinstance(clause, Clause) or clause not in CLAUSES:
            continue
        if says_nothing(test.name, clause):
            without_meaning.append(item)
        elif test.name == "TestSQLiteInserts" and clause in OF_JOBS:
            if clause is not running.job_killed_again_and_again:
                item.add_marker(pytest.mark.servers)
        elif test.name not in WHOLE:
            slow = is_slow(test.name, clause)
            item.add_marker(pytest.mark.slow if slow else pytest.mark.servers)
    if without_meaning:
        config.hook.pytest_deselected(items=without_meaning)
        dropped = set(without_meaning)
        items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a clause of the default run that cannot be tested: those without meaning are left out.

    A clause that rests on a failed one stays skipped.
    """
    report = yield
    test = item.getparent(pytest.Class)
    is_by_default = not any(map(item.get_closest_marker, ("servers", "slow")))
    if test is not None and is_by_default and report.when == "call" and report.skipped:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if "rests on" not in reason:
            report.outcome = "failed"
            report.longrepr = f"{item.name} proves nothing for {test.name}: {reason}"
    return report


@pytest.fixture
def onceflow_effort(request: pytest.FixtureRequest, onceflow_effort: Effort) -> Effort:
    """Return the options' effort, or half of it if a sink's jobs are not killed here."""
    test = request.node.getparent(pytest.Class)
    if test is None or test.name in WHOLE or onceflow_effort.rounds > DEFAULT_RUN_ROUNDS:
        return onceflow_effort
    return replace(onceflow_effort, rounds=1)


@pytest.fixture(
    # All of a small cache's state goes through the database, as that of a large one does at last.
    params=[
        "heap",
        "rocksdb-small-cache",
        pytest.param("heap-layers", marks=pytest.mark.servers),
        pytest.param("rocksdb-incremental", marks=pytest.mark.slow),
    ]
)
def backend(request: pytest.FixtureRequest) -> StateBackend:
    return BACKENDS[request.param]


@pytest.fixture
def job(backend: StateBackend, tmp_path: Path) -> Iterator[Job]:
    running = Job(backend, tmp_path / "scratch", MemoryStorage())
    yield running
    running.close()
