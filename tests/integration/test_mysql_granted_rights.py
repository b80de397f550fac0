"""A decided commit that waits for a privilege, which is granted while its session is open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.mysql_sink_kit import Job, ids_in, query
from tests.integration.sink_kit import rows

from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.sinks import MySQLSink

pytestmark = pytest.mark.servers

_USER = "'writer'@'%'"


@pytest.fixture(scope="module", params=[EmbeddedMySQL, EmbeddedMariaDB])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedMySQL | EmbeddedMariaDB]:
    with request.param({}) as running:
        yield running


@pytest.mark.parametrize("scope", ["bank.*", "*.*"])
@pytest.mark.parametrize("table", ["ledger", "onceflow_ledger"])
def test_a_decided_commit_goes_on_once_its_right_is_granted(
    table: str, scope: str, server: EmbeddedMySQL | EmbeddedMariaDB, tmp_path: Path
) -> None:
    url = server.database_url("bank")
    query(server.url, "DROP DATABASE IF EXISTS bank", "CREATE DATABASE bank")
    query(url, f"DROP USER IF EXISTS {_USER}", f"CREATE USER {_USER} IDENTIFIED BY 'once'")
    query(url, f"GRANT ALL ON {scope} TO {_USER}")
    own = f"mysql://writer:once@{url.rpartition('@')[2]}"
    sink = MySQLSink(own, table="ledger", create=True, commit_mode="ledger")
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with Job(sink, staging=staging) as job:
        writer, committer = job.check().writer(), job.committer()
        for number in (1, 2):
            writer.write(rows([number]))
            (committable,) = writer.pre_commit(CheckpointId(number))
            if number == 1:
                assert committer.commit(committable) == Committed()
                query(url, f"REVOKE INSERT ON {scope} FROM {_USER}")
                if table == "ledger":
                    query(url, f"GRANT INSERT ON bank.onceflow_ledger TO {_USER}")
                committer.close()
        refused = committer.commit(committable)
        assert isinstance(refused, RetryLater)
        assert refused.until_fixed
        assert table in refused.reason
        query(url, f"GRANT INSERT ON {scope} TO {_USER}")
        assert committer.commit(committable) == Committed()
    assert ids_in(url) == [1, 2]
