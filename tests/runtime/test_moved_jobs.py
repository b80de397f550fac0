"""A savepoint stands alone: a job goes on from it in storage that knows nothing of the old one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset
import pytest
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS
from tests.support.moved_job import (
    assert_all_once,
    ids_in,
    move_killed_job,
    move_stopped_job,
    sqlite_sink,
)
from tests.support.staged_sink import StagedSink

from onceflow import Checkpointing, JobState, LocalProcesses, Pipeline
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


def test_the_proofs_that_a_savepoint_needs_outlive_later_checkpoints(tmp_path: Path) -> None:
    """The second savepoint lists the rows of the first one, too: no checkpoint came in between."""
    source, sink = CountingSource(2_000, pause_s=0.1), sqlite_sink(tmp_path)
    held = source.held_in_the_middle()
    job = counting_job(tmp_path / "old", held, sink).start()
    job.wait_for(records=100)
    job.savepoint(str(tmp_path / "first"))
    job.wait_for(records=1_000)
    savepoint = job.savepoint(str(tmp_path / "second"))
    for number in range(1, 5):
        job.checkpoint()
        job.wait_for(checkpoints=number)
    job.cancel(60)
    assert len(ids_in(tmp_path)) == 1_000
    pipeline = counting_job(tmp_path / "new", replace(source, pause_s=0.0), sink)
    status = pipeline.start(from_savepoint=savepoint, allow_rewind=True).wait(60)
    assert status.state is JobState.FINISHED
    assert ids_in(tmp_path) == list(range(2_000))


def counting_job(storage: Path, source: CountingSource, sink: Sink) -> Pipeline:
    """Return a job that writes the records of `source`, with checkpoints on request alone."""
    checkpointing = Checkpointing(storage=str(storage), interval=None, retained=1)
    pipeline = Pipeline(
        LocalProcesses(),
        name="moved",
        parallelism=2,
        checkpointing=checkpointing,
        settings=SETTINGS,
    )
    pipeline.read(source, uid="records").write(sink, uid="rows")
    return pipeline


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
