"""A server whose binary log takes statements alone, and so no rows of the sink."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from tests.integration.doctor_kit import examine
from tests.integration.mysql_sink_kit import Job, ids_in, query
from tests.integration.sink_kit import rows

from onceflow.core.errors import SettingsRefused
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.sinks import MySQLSink

pytestmark = pytest.mark.servers

_Mode: TypeAlias = Literal["ledger", "two_phase", "auto"]
_FORMAT = "SET GLOBAL binlog_format = "
_ADVICE = f"Run {_FORMAT}'ROW'"


@pytest.fixture(scope="module", params=[EmbeddedMySQL, EmbeddedMariaDB])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedMySQL | EmbeddedMariaDB]:
    """A server of the module's own that has a binary log."""
    with request.param({"log-bin": "binlog", "server-id": "1"}) as running:
        query(running.url, "CREATE DATABASE bank")
        yield running


@pytest.fixture
def url(server: EmbeddedMySQL | EmbeddedMariaDB) -> Iterator[str]:
    yield server.database_url("bank")
    query(server.url, "DROP DATABASE bank", "CREATE DATABASE bank", f"{_FORMAT}'ROW'")


def _job(url: str, mode: _Mode, directory: Path) -> Job:
    sink = MySQLSink(url, table="ledger", create=True, commit_mode=mode)
    return Job(sink, staging=FileStagingArea.in_directory(str(directory), "job.ledger"))


@pytest.mark.parametrize("mode", ["ledger", "two_phase", "auto"])
def test_server_that_logs_statements_is_refused_at_the_start_with_what_fixes_it(
    url: str, mode: _Mode, tmp_path: Path
) -> None:
    query(url, f"{_FORMAT}'STATEMENT'")
    with _job(url, mode, tmp_path) as job:
        with pytest.raises(SettingsRefused, match=_ADVICE):
            job.check()
        query(url, f"{_FORMAT}'ROW'")
        writer = job.check().writer()
        writer.write(rows([1]))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
    assert ids_in(url) == [1]


def test_commit_to_a_server_that_logs_statements_is_stuck_until_it_logs_rows(
    url: str, tmp_path: Path
) -> None:
    with _job(url, "ledger", tmp_path) as job:
        writer, committer = job.check().writer(), job.committer()
        writer.write(rows([1]))
        (committable,) = writer.pre_commit(CheckpointId(1))
        query(url, f"{_FORMAT}'STATEMENT'")
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert outcome.until_fixed
        assert _ADVICE in outcome.reason
        assert ids_in(url) == []
        query(url, f"{_FORMAT}'ROW'")
        assert committer.commit(committable) == Committed()
    assert ids_in(url) == [1]


def test_doctor_says_that_the_server_logs_statements(url: str) -> None:
    query(url, f"{_FORMAT}'STATEMENT'")
    by_text = {finding["found"]: finding for finding in examine("--url", url)[1]}
    query(url, by_text["binlog_format = STATEMENT"]["remedy"])
    assert query(url, "SELECT @@global.binlog_format") == [("ROW",)]
