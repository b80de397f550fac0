"""Ledger mode in Postgres: servers that prepare nothing, and commits that wait for the disk."""

from __future__ import annotations

from pathlib import Path

from tests.integration.postgres_sink_kit import Job, ids_in, query

from onceflow.core.protocol.committables import Committed
from onceflow.core.storage import FileStagingArea
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.sinks import PostgresSink

SINK_ID = "job.ledger"


def test_works_on_a_server_that_prepares_nothing(tmp_path: Path) -> None:
    staging = FileStagingArea.in_directory(str(tmp_path), SINK_ID)
    with EmbeddedPostgres({"max_prepared_transactions": "0"}) as server:
        sink = PostgresSink(server.url, table="ledger", create=True, commit_mode="ledger")
        with Job(sink, staging=staging) as job:
            job.check()
            assert job.committer().commit(job.prepare(1, [1, 2])) == Committed()
        assert ids_in(server.url) == [1, 2]


def test_commit_is_durable_where_the_role_does_not_wait_for_the_disk(
    postgres_database: str, tmp_path: Path
) -> None:
    """The staged rows are deleted after it: what the server forgets then is gone."""
    query(postgres_database, "CREATE TABLE seen (value text)")
    query(
        postgres_database,
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen "
        "VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$",
    )
    url = f"{postgres_database}?options=-c%20synchronous_commit%3Doff"
    sink = PostgresSink(url, table="ledger", create=True, commit_mode="ledger")
    staging = FileStagingArea.in_directory(str(tmp_path), SINK_ID)
    with Job(sink, staging=staging) as job:
        job.check()
        query(
            postgres_database,
            "CREATE TRIGGER note BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION note()",
        )
        assert job.committer().commit(job.prepare(1, [1])) == Committed()
    assert query(postgres_database, "SELECT value FROM seen") == [("on",)]
