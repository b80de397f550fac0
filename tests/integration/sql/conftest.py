"""Each test runs on every kind of database, in a new one on the session's server.

In the modules `AS_ON_MYSQL` its tests on MariaDB are slow ones, and the tests `AS_ON_POSTGRES` on
both. So are MySQL's in ledger mode, where a module has both modes: its statements are the same, and
the mode is Postgres's.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.sql import databases
from tests.integration.word_proxy import WordProxy

from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedPostgres

AS_ON_MYSQL = {
    f"test_sql_{name}"
    for name in (
        *("sink", "sink_bad_rows", "sink_changes", "sink_check", "sink_disk", "sink_ledger"),
        *("sink_modes", "sink_tables", "sink_types", "target_set_back", "doctor"),
    )
}
"""Where MariaDB is written to by the same statements; it differs in how what it prepares outlives
sessions and kills, which other modules hold."""
_ALWAYS = {"test_value_that_the_server_refuses_is_a_bad_row_of_that_column"}
AS_ON_POSTGRES = {
    f"test_{name}"
    for name in (
        "at_least_once_job_killed_before_its_decision_doubles_rows",
        "at_least_once_shows_rows_at_once_and_again_when_replayed",
        "checkpoint_that_times_out_names_the_sink_and_who_holds_its_rows",
        "checkpoint_of_bad_rows_alone_prepares_nothing",
        "commits_in_any_order_and_number_show_each_row_once",
        "mode_may_change_between_attempts_and_nothing_in_doubt_is_forgotten",
        "more_changes_than_fit_into_memory_are_applied_once",
        "orphan_of_a_lost_decision_log_is_listed_and_rolled_back",
        "pruning_many_rows_ends_with_none_left",
        "rows_that_are_refused_by_us_or_by_the_server_are_left_out_and_told",
        "switching_to_at_least_once_finds_what_exactly_once_left_in_doubt",
        "values_that_do_not_fit_become_null_where_the_user_says_so",
    )
}
"""What is done above the statements, by the code that all databases share."""


def _is_twin(
    test: str, module: str, kind: type[databases.Database] | None, mode: str | None
) -> bool:
    if test in AS_ON_POSTGRES:
        return kind in (databases.MySQL, databases.MariaDB)
    if module in AS_ON_MYSQL and kind is databases.MySQL and mode == "ledger":
        return True
    return kind is databases.MariaDB and module in AS_ON_MYSQL and test not in _ALWAYS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or not item.nodeid.startswith("tests/integration/sql/"):
            continue
        test = item.name.partition("[")[0]
        params = callspec.params
        if _is_twin(test, item.path.stem, params.get("kind"), params.get("mode")):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=databases.DATABASES, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> type[databases.Database]:
    found: type[databases.Database] = request.param
    return found


@pytest.fixture
def database(kind: type[databases.Database], request: pytest.FixtureRequest) -> databases.Database:
    return kind(request.getfixturevalue(f"{kind.name}_database"))


@pytest.fixture(scope="session")
def guarded_postgres() -> Iterator[EmbeddedPostgres]:
    """A Postgres that asks everybody but its superuser for a password.

    `nobody`, whom there is not, comes as far as to be told so.
    """
    trusted = "host all postgres,nobody 127.0.0.1/32 trust"
    asked = "host all all 127.0.0.1/32 scram-sha-256"
    with EmbeddedPostgres(hba_lines=[trusted, asked]) as server:
        yield server


@pytest.fixture
def guarded_postgres_database(guarded_postgres: EmbeddedPostgres) -> Iterator[str]:
    database = databases.Postgres.create(guarded_postgres, f"guarded_{uuid.uuid4().hex[:16]}")
    yield database.url
    database.drop(guarded_postgres)


@pytest.fixture
def guarded(kind: type[databases.Database], request: pytest.FixtureRequest) -> databases.Database:
    """A database whose server asks users for their passwords."""
    return kind(request.getfixturevalue(kind.guarded_by))


@pytest.fixture
def job(database: databases.Database) -> Iterator[databases.SqlJob]:
    """A job that inserts into `ledger`, by two-phase commit."""
    with database.job(table="ledger", create=True) as job:
        yield job.check()


@pytest.fixture(params=["two_phase", "ledger"])
def mode(request: pytest.FixtureRequest) -> str:
    """Each way to reach exactly-once in turn."""
    found: str = request.param
    return found


@pytest.fixture
def staging(tmp_path: Path) -> FileStagingArea:
    """Return the directory where rows wait for their commit in ledger mode."""
    return FileStagingArea.in_directory(str(tmp_path / "storage"), "job.ledger")


@pytest.fixture(scope="module")
def server(kind: type[databases.Database]) -> Iterator[databases.SqlServer]:
    """A server of the module's own, for modules that kill it."""
    with kind.server() as server:
        yield server


@pytest.fixture
def proxy(server: databases.SqlServer) -> Iterator[WordProxy]:
    """A way to that server which breaks where a test says."""
    proxy = WordProxy(("127.0.0.1", server.port))
    yield proxy
    proxy.close()
