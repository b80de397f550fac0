"""A database tells what it has committed: a start from storage that is behind it is refused."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from tests.integration.sink_kit import eventually
from tests.integration.sql.databases import Database, Postgres
from tests.support import moving_job
from tests.support.clusters import AnyCluster

from onceflow.core.spi import Sink


@dataclass(frozen=True)
class TableTarget:
    """A table of a database."""

    database: Database
    mode: str

    def sink(self) -> Sink:
        return self.database.sink(table="ledger", create=True, commit_mode=self.mode)

    def ids(self) -> list[int]:
        return self.database.ids_in() if "ledger" in self.database.tables() else []

    def back_up(self) -> None:
        """Copy the tables as they are at one moment."""
        self.database.query(
            *(f"CREATE TABLE {to} AS SELECT * FROM {of}" for of, to in self._copies)
        )

    def put_back(self) -> None:
        for table, copy in self._copies:
            self.database.query(f"DELETE FROM {table}", f"INSERT INTO {table} SELECT * FROM {copy}")

    @property
    def _copies(self) -> list[tuple[str, str]]:
        tables = ("ledger", self.database.ledger, self.database.fence)
        return [(table, f"copy_{n}") for n, table in enumerate(tables)]


@pytest.fixture
def moving(
    cluster: AnyCluster, tmp_path: Path, database: Database, mode: str
) -> moving_job.MovingJob:
    return moving_job.MovingJob(cluster, tmp_path, TableTarget(database, mode), "job.ledger")


@pytest.mark.only_proof
def test_an_older_copy_of_the_storage_is_refused_at_every_try_by_what_a_database_has(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.refuse_an_older_copy(moving)


@pytest.mark.slow
def test_a_savepoint_that_is_older_than_a_database_is_refused_at_every_try(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.refuse_an_older_savepoint(moving)


@pytest.mark.slow
def test_a_job_that_writes_to_a_database_moves_from_storage_to_storage_and_back(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.go_there_and_back(moving)


@pytest.mark.slow
def test_another_storage_of_a_job_that_writes_to_a_database_is_named_and_no_remedy_doubles_a_row(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.refuse_empty_storage(moving)


@pytest.mark.slow
def test_a_job_begins_again_from_a_savepoint_once_a_database_is_put_back(
    moving: moving_job.MovingJob, database: Database, mode: str
) -> None:
    moving_job.begin_again_from_a_savepoint(moving, TableTarget(database, mode))


@pytest.mark.servers
def test_a_copy_that_was_made_while_a_savepoint_was_committed_is_known_to_lack_the_rest(
    cluster: AnyCluster, tmp_path: Path, postgres_database: str
) -> None:
    """One of two subtasks has committed its rows of it: the rows of the other are committed then.

    By the highest checkpoint alone the copy would have all of it, and its rows would be missed.
    """
    target = TableTarget(Postgres(postgres_database), "ledger")
    moving = moving_job.MovingJob(cluster, tmp_path, target, "job.ledger", parallelism=2)
    job = moving.pipeline("a", interval=None).start()
    moving.commit(job, ids_min=20)
    with ThreadPoolExecutor(1) as pool:
        with _second_subtask_held(target.database):
            stopping = pool.submit(moving.stop_with_savepoint, job)
            eventually(lambda: _leads(target.database))
            target.back_up()
        place = stopping.result(60)
    target.put_back()
    assert len(moving.ids()) > 20
    moving.finish("a", from_savepoint=place, allow_rewind=True)


@contextmanager
def _second_subtask_held(database: Database) -> Generator[None, None, None]:
    """Keep the second subtask's commits waiting."""
    database.query(
        "CREATE FUNCTION wait_for_the_copy() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(18); RETURN NEW; END $$"
    )
    with psycopg.connect(database.url, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(18)")
        database.query(
            f"CREATE TRIGGER held BEFORE INSERT ON {database.ledger} FOR EACH ROW"
            " WHEN (NEW.subtask = 1) EXECUTE FUNCTION wait_for_the_copy()"
        )
        yield


def _leads(database: Database) -> bool:
    """Return whether the first subtask has committed a later checkpoint than the second."""
    last = database.query(
        "SELECT MAX(checkpoint) FILTER (WHERE subtask = 0) >"
        f" MAX(checkpoint) FILTER (WHERE subtask = 1) FROM {database.ledger}"
    )
    return bool(last[0][0])
