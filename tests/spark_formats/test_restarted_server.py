"""The database is down when a batch is to be decided: the commit waits for it."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.postgres_sink_kit import ids_in, prepared
from tests.spark_formats import write_cases
from tests.spark_formats.batches import SCHEMA, driver_of
from tests.spark_formats.writes import Write

from onceflow.core.crash_points import CrashPoint
from onceflow.core.errors import SinkError
from onceflow.core.protocol.batches import decision_of
from onceflow.integration.pytest_plugin import DatabaseFactory
from onceflow.integration.servers.kinds import Killable
from onceflow.sinks import PostgresSink
from onceflow.sinks.sql.batch_table import SqlBatchDecisions

pytestmark = pytest.mark.integration
DOWN_S = 3.0


@contextmanager
def down(server: Killable, for_s: float = DOWN_S) -> Generator[None, None, None]:
    """Kill `server`, and start it again after `for_s`, while the block goes on."""
    server.kill()
    starter = threading.Timer(for_s, server.start)
    starter.start()
    try:
        yield
    finally:
        starter.join()


def case_on_own_server(
    make: write_cases.MakeCase, request: pytest.FixtureRequest, directory: Path
) -> tuple[Killable, write_cases.WriteCase]:
    server, on_server = write_cases.start_own_server(make, request)
    return server, on_server(directory, "events")


@pytest.mark.parametrize(
    "make",
    [
        write_cases.postgres_case,
        pytest.param(write_cases.mysql_case, marks=pytest.mark.servers),
        pytest.param(write_cases.mariadb_case, marks=pytest.mark.servers),
    ],
)
@pytest.mark.parametrize("mode", ["two_phase", pytest.param("ledger", marks=pytest.mark.servers)])
def test_a_write_whose_database_is_killed_before_the_commit_is_whole_after_the_restart(
    request: pytest.FixtureRequest, tmp_path: Path, make: write_cases.MakeCase, mode: str
) -> None:
    server, case = case_on_own_server(make, request, tmp_path)
    case = replace(case, options={**case.options, "commitmode": mode})
    write = Write(case.make_sink, case.options)
    write.write(range(5), range(5, 9))
    with down(server):
        write.commit()
    assert case.ids() == list(range(9))
    again = Write(case.make_sink, case.options)
    assert again.plan.decided
    again.write(range(9))
    again.commit()
    assert case.ids() == list(range(9))


@pytest.mark.parametrize(
    "make",
    [
        write_cases.postgres_case,
        pytest.param(write_cases.mysql_case, marks=pytest.mark.servers),
        pytest.param(write_cases.mariadb_case, marks=pytest.mark.servers),
    ],
)
def test_a_write_whose_database_is_killed_after_its_last_commit_waits_for_it(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make: write_cases.MakeCase,
) -> None:
    """The next run lists the transactions in doubt of a database that is down."""
    server, case = case_on_own_server(make, request, tmp_path)
    case = replace(case, options={**case.options, "commitmode": "two_phase"})
    write = Write(case.make_sink, case.options)
    write.write(range(9))
    interrupted: list[CrashPoint] = []
    with ExitStack() as until_it_is_up:

        def interrupt(point: CrashPoint) -> None:
            if point == "committed" and not interrupted:
                interrupted.append(point)
                until_it_is_up.enter_context(down(server))

        monkeypatch.setattr("onceflow.connectors.spark.batch.commits.reach", interrupt)
        write.commit_alone()
    assert interrupted == ["committed"]
    assert case.ids() == list(range(9))
    assert Write(case.make_sink, case.options).plan.decided


def test_a_query_whose_database_restarts_between_two_batches_goes_on(
    postgres_server: DatabaseFactory, tmp_path: Path
) -> None:
    """A query plans each batch over the connection that it has kept."""
    server = postgres_server()
    driver = driver_of(PostgresSink(server.url, table="events", create=True), tmp_path)
    with closing(driver.commits()) as commits:
        for number in range(2):
            with down(server, 1.0) if number else nullcontext():
                plan = commits.plan(SCHEMA, number, f"offsets {number}")
            first = number * 5
            commits.commit([driver.task(plan, 0, range(first, first + 5))])
    assert (ids_in(server.url, "events"), prepared(server.url)) == (list(range(10)), [])


def test_a_decision_for_a_database_that_stays_down_fails_in_time_and_names_it(
    postgres_server: DatabaseFactory, tmp_path: Path
) -> None:
    server = postgres_server()
    sink = PostgresSink(server.url, table="events", create=True)
    driver = driver_of(sink, tmp_path)
    report = driver.task(driver.plan(0), 0, range(5))
    server.kill()
    decision = decision_of(report.batch, report.attempt, [(0, report.committables)])
    target = driver.target
    keeper = SqlBatchDecisions(sink.settings, target.sink_id, target.owner, reconnect_timeout_s=0.5)
    with pytest.raises(
        SinkError, match=r"(?s)is not decided: cannot connect.*It was tried for 0\.5 s"
    ):
        keeper.decide(decision)
    with pytest.raises(SinkError, match="cannot connect"):
        driver.plan(1)
