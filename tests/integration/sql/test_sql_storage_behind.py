"""A database tells what it has committed: a start from storage that is behind it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.sql.databases import Database
from tests.support.clusters import AnyCluster
from tests.support.moving_job import (
    MovingJob,
    go_there_and_back,
    refuse_an_older_copy,
    refuse_an_older_savepoint,
    refuse_empty_storage,
)

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


@pytest.fixture
def moving(cluster: AnyCluster, tmp_path: Path, database: Database, mode: str) -> MovingJob:
    return MovingJob(cluster, tmp_path, TableTarget(database, mode), "job.ledger")


@pytest.mark.only_proof
def test_an_older_copy_of_the_storage_is_refused_at_every_try_by_what_a_database_has(
    moving: MovingJob,
) -> None:
    refuse_an_older_copy(moving)


@pytest.mark.slow
def test_a_savepoint_that_is_older_than_a_database_is_refused_at_every_try(
    moving: MovingJob,
) -> None:
    refuse_an_older_savepoint(moving)


@pytest.mark.slow
def test_a_job_that_writes_to_a_database_moves_from_storage_to_storage_and_back(
    moving: MovingJob,
) -> None:
    go_there_and_back(moving)


@pytest.mark.slow
def test_another_storage_of_a_job_that_writes_to_a_database_is_named_and_no_remedy_doubles_a_row(
    moving: MovingJob,
) -> None:
    refuse_empty_storage(moving)
