"""A savepoint stands alone: a job goes on from it in storage that knows nothing of the old one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow.dataset
import pytest
from tests.support.moved_job import assert_all_once, move_killed_job, move_stopped_job
from tests.support.staged_sink import StagedSink

from onceflow.core.spi import Sink
from onceflow.sinks import FileSink, SQLiteSink

KINDS = pytest.mark.parametrize("kind", ["sqlite", "own", "files"])


@KINDS
def test_a_killed_job_goes_on_from_a_savepoint_in_new_storage_with_the_rows_it_had_not_committed(
    tmp_path: Path, kind: str
) -> None:
    move_killed_job(tmp_path, _sink(kind, tmp_path))
    assert_all_once(_ids(kind, tmp_path))


@KINDS
def test_a_job_that_stopped_with_a_savepoint_goes_on_in_new_storage_without_the_old_one(
    tmp_path: Path, kind: str
) -> None:
    move_stopped_job(tmp_path, _sink(kind, tmp_path))
    assert_all_once(_ids(kind, tmp_path))


def _sink(kind: str, directory: Path) -> Sink:
    target = directory / "target"
    match kind:
        case "sqlite":
            return SQLiteSink(f"sqlite:///{target}", table="rows", create=True)
        case "own":
            return StagedSink(str(target))
        case _:
            return FileSink(str(target))


def _ids(kind: str, directory: Path) -> list[int]:
    """Return the id of every visible row, sorted, doubles kept."""
    target = directory / "target"
    if kind == "files":
        files = pyarrow.dataset.dataset(target, format="parquet")
        return sorted(files.to_table(columns=["id"]).column("id").to_pylist())
    with closing(sqlite3.connect(target)) as database:
        return [int(row[0]) for row in database.execute("SELECT id FROM rows ORDER BY id")]
