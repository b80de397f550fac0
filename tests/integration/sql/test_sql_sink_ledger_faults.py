"""Ledger mode while servers die and hang, and connections break."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.sink_kit import rows, until_settled
from tests.integration.sql.databases import Database, SqlJob, SqlServer
from tests.integration.word_proxy import WordProxy

from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileStagingArea

# As it goes over the wire; what begins a transaction says COMMIT too, in READ COMMITTED.
COMMIT = {"postgres": "COMMIT\0", "mysql": "\3COMMIT", "mariadb": "\3COMMIT"}
_NUMBERS = itertools.count()


@pytest.fixture
def database(kind: type[Database], server: SqlServer) -> Iterator[Database]:
    """A new database on that server."""
    database = kind.create(server, f"f{next(_NUMBERS)}")
    yield database
    database.drop(server)


def _ledger(database: Database, staging: FileStagingArea, **settings: Any) -> SqlJob:
    usual: dict[str, Any] = {"create": True, "commit_mode": "ledger", **settings}
    return SqlJob(database.sink(table="ledger", **usual), staging=staging)


# -- connections break -----------------------------------------------------------------------------


def test_commit_that_landed_but_was_reported_failed_is_not_applied_twice(
    proxy: WordProxy, database: Database, staging: FileStagingArea
) -> None:
    remote_database = database.through(proxy.port)
    with _ledger(database, staging) as job, _ledger(remote_database, staging) as remote:
        committable = job.check().prepare(1, [1, 2])
        committer = remote.committer()
        proxy.lose_reply(COMMIT[database.name])
        assert committer.commit(committable) == committables.AlreadyCommitted()
        assert proxy.resets == 1
        assert committer.commit(committable) == committables.AlreadyCommitted()
        assert list(committer.in_doubt()) == []
    assert database.ids_in() == [1, 2]


def test_commit_that_never_arrived_is_done_again(
    proxy: WordProxy, database: Database, staging: FileStagingArea
) -> None:
    remote_database = database.through(proxy.port)
    with _ledger(database, staging) as job, _ledger(remote_database, staging) as remote:
        committable = job.check().prepare(1, [1, 2])
        proxy.lose_request(COMMIT[database.name])
        assert remote.committer().commit(committable) == committables.Committed()
        assert proxy.resets == 1
    assert database.ids_in() == [1, 2]


@pytest.mark.parametrize("arrives", [True, False])
def test_connection_that_breaks_within_the_apply_changes_nothing(
    proxy: WordProxy, database: Database, staging: FileStagingArea, arrives: bool
) -> None:
    remote_database = database.through(proxy.port)
    with _ledger(database, staging) as job, _ledger(remote_database, staging) as remote:
        committable = job.check().prepare(1, [1, 2])
        (proxy.lose_reply if arrives else proxy.lose_request)("onceflow_ledger")
        assert remote.committer().commit(committable) == committables.Committed()
        assert proxy.resets == 1
    assert database.ids_in() == [1, 2]


def test_abort_whose_reply_was_lost_is_done_again(
    proxy: WordProxy, database: Database, staging: FileStagingArea
) -> None:
    remote_database = database.through(proxy.port)
    with _ledger(database, staging) as job, _ledger(remote_database, staging) as remote:
        committable = job.check().prepare(1, [1])
        proxy.lose_reply("onceflow_ledger")
        assert remote.committer().abort(committable) == committables.Aborted()
        assert proxy.resets == 1
        assert list(job.committer().in_doubt()) == []
    assert database.ids_in() == []


# -- the server dies, or hangs ---------------------------------------------------------------------


def test_staged_rows_wait_for_a_server_that_is_down(
    server: SqlServer, database: Database, staging: FileStagingArea
) -> None:
    with _ledger(database, staging, connect_timeout_s=0.5) as job:
        writer = job.check().writer()
        writer.write(rows([1]))
        server.kill()
        try:
            (committable,) = writer.pre_commit(CheckpointId(1))
            assert isinstance(job.committer().commit(committable), committables.RetryLater)
        finally:
            server.start()
        assert job.committer().commit(committable) == committables.Committed()
    assert database.ids_in() == [1]


def test_frozen_server_does_not_hang_the_committer(
    server: SqlServer, database: Database, staging: FileStagingArea
) -> None:
    with _ledger(database, staging, statement_timeout_s=0.5, connect_timeout_s=2.0) as job:
        first, second = job.check().prepare(1, [1]), job.prepare(2, [2])
        committer = job.committer()
        assert committer.commit(first) == committables.Committed()
        began = time.monotonic()
        server.pause()
        try:
            assert isinstance(committer.commit(second), committables.Unknown)
        finally:
            server.unpause()
        assert time.monotonic() - began < 60
        outcome = until_settled(lambda: committer.commit(second))
        assert outcome in (committables.Committed(), committables.AlreadyCommitted())
    assert database.ids_in() == [1, 2]


def test_committed_rows_outlive_the_server(
    server: SqlServer, database: Database, staging: FileStagingArea
) -> None:
    with _ledger(database, staging) as job:
        committable = job.check().prepare(1, [1])
        assert job.committer().commit(committable) == committables.Committed()
        server.kill()
        server.start()
        assert job.committer().commit(committable) == committables.AlreadyCommitted()
    assert database.ids_in() == [1]
