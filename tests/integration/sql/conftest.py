"""Each test runs on every kind of database, in a new one on the session's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.sql.databases import DATABASES, Database, SqlJob

from onceflow.core.storage import FileStagingArea


@pytest.fixture(scope="module", params=DATABASES, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> type[Database]:
    found: type[Database] = request.param
    return found


@pytest.fixture
def database(kind: type[Database], request: pytest.FixtureRequest) -> Database:
    return kind(request.getfixturevalue(f"{kind.name}_database"))


@pytest.fixture
def job(database: Database) -> Iterator[SqlJob]:
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
    """Where rows wait for their commit in ledger mode."""
    return FileStagingArea.in_directory(str(tmp_path / "storage"), "job.ledger")
