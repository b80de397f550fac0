"""Which commit mode is chosen where both are possible, and that everybody keeps to it."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from tests.integration.sql.databases import Database, SqlJob

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.committables import Committed
from onceflow.core.spi.staging import is_staged
from onceflow.core.storage import FileStagingArea

_KEEPS_XA = "XA transactions can be prepared and listed"
# Why two-phase commit is possible.
_WHY = {
    "postgres": "max_prepared_transactions = ",
    "mysql": _KEEPS_XA,
    "mariadb": _KEEPS_XA,
}


def _auto(database: Database, staging: FileStagingArea) -> SqlJob:
    return SqlJob(database.sink(table="ledger", create=True), staging=staging)


def test_two_phase_is_chosen_where_it_is_possible_and_said_why(
    database: Database, staging: FileStagingArea, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onceflow.sinks")
    with _auto(database, staging) as job:
        committable = job.check().prepare(1, [1])
        assert not is_staged(committable)
        assert database.prepared() == [str(committable.transaction)]
        assert job.committer().commit(committable) == Committed()
    assert "commit_mode auto chose two_phase: " in caplog.text
    assert _WHY[database.name] in caplog.text
    recorded = f"SELECT sink_id, attempt, commit_mode FROM {database.fence}"
    assert database.query(recorded) == [("job.ledger", 1, "two_phase")]


def test_writers_do_what_the_check_recorded_and_not_what_they_find(
    database: Database, staging: FileStagingArea
) -> None:
    with _auto(database, staging) as job:
        job.check()
        database.query(f"UPDATE {database.fence} SET commit_mode = 'ledger'")
        assert is_staged(job.prepare(1, [1]))
        database.query(f"UPDATE {database.fence} SET commit_mode = 'paxos'")
        with pytest.raises(ConfigError, match="'paxos'"):
            job.writer()


def test_recorded_mode_that_may_not_be_read_is_not_guessed(
    database: Database, staging: FileStagingArea
) -> None:
    with _auto(database, staging) as job:
        job.check()
    refused = pytest.raises(SinkError, match="the commit mode cannot be read.*denied")
    with database.user("SELECT ON ledger") as limited:
        job = SqlJob(limited.sink(table="ledger"), staging=staging)
        with job, refused:
            job.writer()


def test_modes_print_themselves(kind: type[Database]) -> None:
    sink = kind(f"{kind.scheme}://u@h/d").sink(table="t")
    assert "commit_mode='auto'" in repr(sink)
    assert "commit_mode='ledger'" in repr(dataclasses.replace(sink, commit_mode="ledger"))
