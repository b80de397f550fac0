"""Batches as Spark runs them, without Spark, of rows with given ids.

A step may be run in a process that kills itself at a crash point, as Spark's processes do.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import cloudpickle
import pyarrow as pa
from tests.integration.killed_jobs import start

from onceflow.connectors.spark.batch.commits import BatchTarget
from onceflow.core.crash_points import CrashPoint
from onceflow.core.spi import Sink
from onceflow.core.storage.staging.staged_rows import FileStagingArea
from onceflow.integration.conformance.batch_driver import BatchDriver

Driver: TypeAlias = BatchDriver[Iterable[int]]
"""Of rows that are told by their ids."""

KILLED_S = 150.0
"""A process takes 1 s to be killed on a quiet machine, and took ten times as long with ten
processes for each core."""
SCHEMA = pa.schema(
    [pa.field("id", pa.int64()), pa.field("account", pa.string()), pa.field("amount", pa.int64())]
)


def rows(ids: Iterable[int]) -> pa.RecordBatch:
    listed = list(ids)
    columns = [
        pa.array(listed, pa.int64()),
        pa.array([f"acct-{one % 7}" for one in listed], pa.string()),
        pa.array([one % 100 for one in listed], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def driver_of(sink: Sink, directory: Path) -> Driver:
    """Return the driver of a query whose checkpoint is in `directory`."""
    staging = FileStagingArea.in_directory(str(directory), "events-1")
    target = BatchTarget(sink, "events-1", "Spark query q", "q", staging)
    return Driver(target, SCHEMA, rows, str(directory))


def killed_at(point: CrashPoint, directory: Path, step: Callable[[], object]) -> None:
    """Run `step` in a process of its own that is killed when it reaches `point`.

    Not in a fork of this one: clients' threads here may hold locks that nobody there would release.

    Raises:
        AssertionError: It ended in another way.
    """
    points = directory / "points"
    points.mkdir(exist_ok=True)
    (points / point).touch()
    pickled = directory / "step"
    pickled.write_bytes(cloudpickle.dumps(step))
    attempt = start(_run_step, str(points), [str(pickled)])
    assert attempt.wait(KILLED_S) == -signal.SIGKILL, (point, attempt.errors)


def _run_step(arguments: Sequence[str]) -> None:
    pickle.loads(Path(arguments[0]).read_bytes())()
