"""Rows of both commit modes reach a replica once, and a replica is not written to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, query
from tests.integration.sink_kit import eventually

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import Aborted, Committed
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.sinks import MySQLSink

_Server = EmbeddedMySQL | EmbeddedMariaDB


@dataclass(frozen=True)
class Pair:
    """A server with a binary log, and its read-only replica."""

    source: _Server
    replica: _Server


@pytest.fixture(scope="module", params=[EmbeddedMySQL, EmbeddedMariaDB])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    make: type[_Server] = request.param
    with (
        make({"server-id": "1", "log-bin": "binlog"}) as source,
        make({"server-id": "2", "read-only": "ON"}) as replica,
    ):
        query(replica.url, *_following(source))
        yield Pair(source, replica)


def _following(source: _Server) -> tuple[str, str]:
    """Return what makes a new server the replica of `source`, from its beginning."""
    if isinstance(source, EmbeddedMariaDB):
        begin, word, more = "CHANGE MASTER TO", "MASTER", ""
        start = "START SLAVE"
    else:
        begin, word, more = "CHANGE REPLICATION SOURCE TO", "SOURCE", ", GET_SOURCE_PUBLIC_KEY = 1"
        start = "START REPLICA"
    settings = {
        "HOST": f"'{source.host}'", "PORT": source.port, "USER": "'root'",
        "PASSWORD": "'onceflow'", "LOG_FILE": "'binlog.000001'", "LOG_POS": 4, "CONNECT_RETRY": 1,
    }  # fmt: skip
    given = ", ".join(f"{word}_{name} = {value}" for name, value in settings.items())
    return f"{begin} {given}{more}", start


@pytest.mark.parametrize("mode", ["two_phase", "ledger"])
def test_rows_reach_the_replica_once_and_at_their_commit(
    pair: Pair, tmp_path: Path, mode: Literal["two_phase", "ledger"]
) -> None:
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    name = f"followed_{uuid.uuid4().hex[:16]}"
    query(pair.source.url, f"CREATE DATABASE {name}")
    url, followed = pair.source.database_url(name), pair.replica.database_url(name)
    with Job(MySQLSink(url, table="ledger", create=True, commit_mode=mode), staging=staging) as job:
        committer = job.check().committer()
        first, second, third = (
            job.prepare(1, [1, 2]),
            job.prepare(2, [3]),
            job.prepare(3, range(4, 5_000)),
        )
        assert committer.commit(first) == Committed()
        assert committer.abort(second) == Aborted()
        # The replica has all that came before this, and what is undecided is not seen there.
        query(url, "CREATE TABLE marker (id bigint)", "INSERT INTO marker VALUES (1)")
        eventually(lambda: _replicated(pair, name, "marker") == [1], timeout_s=90)
        assert ids_in(followed) == [1, 2]
        if mode == "two_phase":
            # Prepared in the server and in its binary log, which must agree afterwards.
            pair.source.restart()
        assert job.committer().commit(third) == Committed()
        query(url, "INSERT INTO marker VALUES (2)")
        eventually(lambda: _replicated(pair, name, "marker") == [1, 2], timeout_s=90)
        assert ids_in(followed) == ids_in(url) == [1, 2, *range(4, 5_000)]
        found = "SELECT transaction_id FROM onceflow_ledger ORDER BY 1"
        assert query(followed, found) == query(url, found)


def _replicated(pair: Pair, database: str, table: str) -> list[int]:
    there = query(
        pair.replica.url,
        "SELECT 1 FROM information_schema.tables "
        f"WHERE table_schema = '{database}' AND table_name = '{table}'",
    )
    return ids_in(pair.replica.database_url(database), table) if there else []


def test_replica_is_refused_as_a_target(pair: Pair) -> None:
    with (
        Job(MySQLSink(pair.replica.url, table="ledger", create=True)) as job,
        pytest.raises(ConfigError, match="is read-only, as replicas are.*name the primary"),
    ):
        job.check()
