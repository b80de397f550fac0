"""Jobs that move by a savepoint into new storage; the old one is deleted before they go on."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, FixedDelay, JobState, LocalProcesses, Pipeline
from onceflow.core.spi import Sink
from onceflow.sinks import SQLiteSink


def move_killed_job(directory: Path, sink: Sink, sink_id: str | None = None) -> None:
    """Take a savepoint after three checkpoints, end the job at once, and go on elsewhere."""
    job = copy_job(directory / "old", sink, sink_id, interval=None).start()
    for number in (1, 2, 3):
        job.checkpoint()
        job.wait_for(checkpoints=number)
    savepoint = job.savepoint(str(directory / "kept"))
    job.cancel(60)
    shutil.rmtree(directory / "old")
    go_on(copy_job(directory / "new", sink, sink_id), savepoint, allow_rewind=True)


def move_stopped_job(directory: Path, sink: Sink, sink_id: str | None = None) -> None:
    """Stop with a savepoint after three checkpoints, and go on elsewhere."""
    job = copy_job(directory / "old", sink, sink_id).start()
    job.wait_for(checkpoints=3)
    status = job.stop(60, savepoint=str(directory / "kept"))
    assert status.state is JobState.STOPPED
    shutil.rmtree(directory / "old")
    go_on(copy_job(directory / "new", sink, sink_id), status.savepoints[-1].place)


def go_on(pipeline: Pipeline, savepoint: str, *, allow_rewind: bool = False) -> None:
    """Start from `savepoint`, take two checkpoints and stop."""
    job = pipeline.start(from_savepoint=savepoint, allow_rewind=allow_rewind)
    job.wait_for(checkpoints=2)
    status = job.stop(60)
    assert (status.state, status.restored_savepoint) == (JobState.STOPPED, savepoint)


def copy_job(
    storage: Path,
    sink: Sink,
    sink_id: str | None = None,
    *,
    interval: float | None = 0.05,
    retained: int = 1,
) -> Pipeline:
    """Return a job without end that writes numbered records of two splits into `sink`."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="moved",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(storage), interval=interval, retained=retained),
        restart=FixedDelay(attempts=3, delay_s=0.01),
        settings=SETTINGS,
    )
    source = CountingSource(0, endless=True, pause_s=0.005)
    pipeline.read(source, uid="records").write(sink, uid="rows", sink_id=sink_id)
    return pipeline


def assert_all_once(ids: list[int]) -> None:
    """Each split's records from the first one on: none twice, none missing."""
    assert ids
    for split in (0, 1):
        mine = [one for one in ids if one % 2 == split]
        assert mine == list(range(split, split + 2 * len(mine), 2))


def sqlite_sink(directory: Path) -> SQLiteSink:
    """Return a sink into a database below `directory`."""
    return SQLiteSink(f"sqlite:///{directory / 'target'}", table="rows", create=True)


def ids_in(directory: Path) -> list[int]:
    """Return the id of every row of `sqlite_sink`, sorted, doubles kept."""
    with closing(sqlite3.connect(directory / "target")) as database:
        return [int(row[0]) for row in database.execute("SELECT id FROM rows ORDER BY id")]
