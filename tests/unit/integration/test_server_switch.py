"""One switch chooses every server; what it cannot give is an error with the reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from onceflow.integration.servers import ServerError, ServerKind, kinds
from onceflow.integration.servers.container import ContainerKafka, ContainerMySQL

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (
        kinds.SWITCH_VARIABLE,
        kinds.POSTGRES_VARIABLE,
        kinds.MYSQL_VARIABLE,
        kinds.MARIADB_VARIABLE,
        kinds.KAFKA_VARIABLE,
    ):
        monkeypatch.delenv(variable, raising=False)


def test_servers_are_processes_where_nothing_is_said() -> None:
    assert kinds.find_kind() is ServerKind.EMBEDDED


def test_switch_that_says_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kinds.SWITCH_VARIABLE, "docker")
    with pytest.raises(ServerError, match=r"=docker is neither `embedded` nor `containers`"):
        kinds.find_kind()


@pytest.mark.parametrize("make", [kinds.make_postgres, kinds.make_mysql, kinds.make_mariadb])
def test_containers_without_a_daemon_are_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]
) -> None:
    monkeypatch.setenv(kinds.SWITCH_VARIABLE, "containers")
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
    with pytest.raises(ServerError, match=r"(?s)no Docker daemon answers: /no.*script/integration"):
        make()


@pytest.mark.parametrize(
    ("variable", "shared"),
    [
        (kinds.POSTGRES_VARIABLE, kinds.share_postgres),
        (kinds.MYSQL_VARIABLE, kinds.share_mysql),
        (kinds.MARIADB_VARIABLE, kinds.share_mariadb),
    ],
)
def test_server_that_runs_already_is_used_and_its_password_not_printed(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    shared: Callable[[], AbstractContextManager[tuple[ServerKind, kinds.DatabaseServer]]],
) -> None:
    monkeypatch.setenv(variable, "db://me:secret@far:1234/first?x=1")
    # It wins over the switch.
    monkeypatch.setenv(kinds.SWITCH_VARIABLE, "containers")
    with shared() as (kind, server):
        assert kind is ServerKind.EXTERNAL
        assert server.url == "db://me:secret@far:1234/first?x=1"
        assert server.database_url("other") == "db://me:secret@far:1234/other?x=1"
        assert "secret" not in repr(server)


def test_broker_that_runs_already_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kinds.KAFKA_VARIABLE, "far:9092")
    with kinds.share_kafka() as (kind, server):
        assert (kind, server.bootstrap_servers) == (ServerKind.EXTERNAL, "far:9092")


def test_container_images_are_the_official_ones() -> None:
    """Changed in one place, and named in docs/integration-testing.md."""
    assert ContainerMySQL.official_image == "mysql:9"
    assert ContainerKafka.official_image == "apache/kafka:4.2.1"


def test_option_of_pytest_is_the_switch(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kinds.SWITCH_VARIABLE, "embedded")
    pytester.makepyfile(
        """
        import os, subprocess, sys

        def test_children_know_it_too():
            said = "import os; print(os.environ['ONCEFLOW_TEST_SERVERS'])"
            child = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
            assert child.stdout == "containers\\n"
        """
    )
    result = pytester.runpytest_subprocess("--onceflow-servers=containers")
    result.assert_outcomes(passed=1)
    refused = pytester.runpytest_subprocess("--onceflow-servers=docker")
    refused.stderr.fnmatch_lines(["*invalid choice*embedded*containers*"])


def test_plugin_gives_its_fixtures_to_a_project_that_imports_nothing(
    pytester: pytest.Pytester,
) -> None:
    result = pytester.runpytest_subprocess("--fixtures")
    for fixture in (
        "postgres_database",
        "mysql_database",
        "mariadb_database",
        "kafka_topic",
        "postgres_server",
        "mysql_server",
        "mariadb_server",
        "kafka_server",
    ):
        result.stdout.re_match_lines([rf"{fixture}(| \[.*\]) -- .*"])
