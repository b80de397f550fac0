"""Tests that commits between a savepoint and the end of its job are part of the savepoint."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.runtime.test_timers import await_rows, timed
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    HeapBackend,
    JobState,
    KeyedFunction,
    LocalProcesses,
    Pipeline,
    Record,
    RocksDBBackend,
    StateAccess,
    StateBackend,
    Stream,
    Timer,
    TumblingProcessingTimeWindows,
    count,
)
from onceflow.core.errors import SavepointRefused
from onceflow.core.protocol.checkpoints.decisions import WriteSavepoint
from onceflow.core.runtime.driver.savepoints import Savepoints
from onceflow.core.storage import ClaimedLog

RECORDS = 300
DUE_MS = 1_000
"""How long after the first record the last timer, window or partner is due, at the most."""


def _write_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each savepoint take longer to be written than anything waits for the clock."""
    write = Savepoints.write

    def slow(self: Savepoints, decision: WriteSavepoint, log: ClaimedLog) -> int:
        time.sleep(1.5 * DUE_MS / 1000)
        return write(self, decision, log)

    monkeypatch.setattr(Savepoints, "write", slow)


class Later(KeyedFunction):
    """Emits each key once, `DUE_MS` after its first record, or as soon after as `file` is there."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return pa.schema([("id", pa.string())])

    def open(self, state: StateAccess) -> None:
        self._timers = state.timers()

    def process(self, record: Record) -> None:
        self._wait(DUE_MS)

    def on_timer(self, timer: Timer) -> Record | None:
        if self._file is None or self._file.exists():
            return {"id": str(timer.key)}
        self._wait(100)
        return None

    def _wait(self, wait_ms: int) -> None:
        now_ms = self._timers.current_processing_time()
        self._timers.register_processing_time_timer(now_ms + wait_ms)


def _timers(records: Stream) -> Stream:
    return records.key_by("id").process(Later(), uid="work")


def _windows(records: Stream) -> Stream:
    windows = TumblingProcessingTimeWindows(DUE_MS / 1000)
    return records.key_by("id").window(windows).aggregate(n=count(), uid="work")


def _outer_join(records: Stream) -> Stream:
    """No record has a partner: each comes out alone when its time is over."""
    others = records.filter(lambda record: False)
    alone = records.key_by("id").join(others.key_by("id"), how="left", ttl=DUE_MS / 1000)
    return alone.merge(uid="work")


def _pipeline(
    directory: Path, storage: str, source: CountingSource, work: Callable[[Stream], Stream],
    backend: StateBackend,
) -> tuple[Pipeline, DirectorySink]:  # fmt: skip
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        LocalProcesses(),
        name="stops",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / storage), interval=0.1),
        state_backend=backend,
        settings=replace(SETTINGS, heartbeat_interval_s=0.1),
    )
    work(pipeline.read(source, uid="records")).write(sink, uid="out")
    return pipeline, sink


@pytest.mark.parametrize("work", [_timers, _windows, _outer_join])
@pytest.mark.parametrize(
    "backend", [HeapBackend(), pytest.param(RocksDBBackend(), marks=pytest.mark.slow)]
)
def test_what_the_clock_makes_after_a_stop_savepoint_is_made_once_by_the_job_that_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Stream], Stream],
    backend: StateBackend,
) -> None:
    """All of it is due while the savepoint is written, before the last checkpoint is taken."""
    _write_slowly(monkeypatch)
    source = CountingSource(RECORDS, ends_with=str(tmp_path / "ends"))
    pipeline, sink = _pipeline(tmp_path, "first", source, work, backend)
    job = pipeline.start()
    job.wait_for(records=RECORDS)
    status = job.stop(60, savepoint=str(tmp_path / "kept"))
    place = status.savepoints[-1].place
    assert status.state is JobState.STOPPED
    moved, _ = _pipeline(tmp_path, "second", source, work, backend)
    job = moved.start(from_savepoint=place)
    await_rows(sink, RECORDS)
    (tmp_path / "ends").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert Counter(str(row["id"]) for row in sink.rows()) == Counter(map(str, range(RECORDS)))
    assert sink.prepared() == []


def test_a_savepoint_after_which_timers_have_fired_and_were_committed_is_refused(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """The sources are idle, so their positions are those of the last checkpoint."""
    source = CountingSource(RECORDS, accounts=RECORDS, ends_with=str(tmp_path / "ends"))
    pipeline, sink = timed(cluster, tmp_path, source, Later(tmp_path / "fire"))
    job = pipeline.start()
    job.wait_for(records=RECORDS)
    place = job.savepoint(timeout_s=60)
    assert sink.rows() == []
    (tmp_path / "fire").touch()
    await_rows(sink, source.accounts)
    assert job.stop(60).state is JobState.STOPPED
    with pytest.raises(SavepointRefused, match="rows under sink id 'timers.out'"):
        pipeline.start(from_savepoint=place).wait(60)
    (tmp_path / "ends").touch()
    assert pipeline.start().wait(60).state is JobState.FINISHED
    accounts = range(source.accounts)
    assert Counter(row["id"] for row in sink.rows()) == Counter(map(str, accounts))
