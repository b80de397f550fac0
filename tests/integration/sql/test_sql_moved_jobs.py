"""A job moves by a savepoint, and its storage is deleted: rows that wait there move along."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.sql.databases import Database
from tests.support.moved_job import assert_all_once, move_killed_job, move_stopped_job

from onceflow.core.spi import Sink

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("move", [move_stopped_job, move_killed_job])
def test_rows_in_a_database_are_there_once_though_the_job_moved_by_a_savepoint(
    tmp_path: Path, database: Database, mode: str, move: Callable[[Path, Sink], None]
) -> None:
    move(tmp_path, database.sink(table="ledger", create=True, commit_mode=mode))
    assert_all_once(database.ids_in())
    assert database.prepared() == []
