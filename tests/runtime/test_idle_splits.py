"""Splits and sources without records hold up nobody, and are not at their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.test_timers import await_rows
from tests.support.clusters import AnyCluster
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.scripted_source import ScriptedSource

from onceflow import (
    Checkpointing,
    JobState,
    Pipeline,
    Stream,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
)

IDLE = WatermarkStrategy("at", idle_after=0.1)


def begin(cluster: AnyCluster, directory: Path, parallelism: int) -> tuple[Pipeline, DirectorySink]:
    (directory / "out" / "committed").mkdir(parents=True, exist_ok=True)
    checkpointing = Checkpointing(storage=str(directory / "checkpoints"), interval=0.05)
    pipeline = Pipeline(
        cluster, name="idle", parallelism=parallelism, checkpointing=checkpointing,
        settings=SETTINGS,
    )  # fmt: skip
    return pipeline, DirectorySink(str(directory / "out"))


def write_counts(records: Stream, sink: DirectorySink) -> None:
    windows = records.key_by("account").window(TumblingEventTimeWindows(1))
    windows.aggregate(n=count(), uid="counts").write(sink, uid="out")


def test_windows_come_out_up_to_the_latest_split_when_all_become_idle_at_once(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """So it is after each restart: all splits have been quiet for as long then."""
    source = ScriptedSource(str(tmp_path / "records"))
    pipeline, sink = begin(cluster, tmp_path, parallelism=1)
    write_counts(pipeline.read(source, uid="records", watermarks=IDLE), sink)
    source.write(0, ("a", 5, 1))
    source.write(1, ("a", 10, 1), ("a", 2_500, 1))
    job = pipeline.start()
    await_rows(sink, 1, 30)
    assert [row["n"] for row in sink.rows()] == [2]
    source.end()
    assert job.wait(60).state is JobState.FINISHED
    assert [row["n"] for row in sink.rows()] == [2, 1]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_source_that_ends_while_another_is_idle_does_not_end_event_time(
    cluster: AnyCluster, tmp_path: Path, parallelism: int
) -> None:
    """A later record of the idle source is in its window, and the window is emitted once."""
    ends, goes_on = (ScriptedSource(str(tmp_path / name)) for name in ("ends", "goes-on"))
    pipeline, sink = begin(cluster, tmp_path, parallelism)
    streams = [
        pipeline.read(source, uid=uid, watermarks=IDLE)
        for uid, source in (("ends", ends), ("goes-on", goes_on))
    ]
    write_counts(streams[0].union(streams[1]), sink)
    ends.write(0, ("a", 5, 1))
    ends.end()
    goes_on.write(0, ("a", 10, 1))
    goes_on.write(1, ("a", 20, 1))
    job = pipeline.start()
    job.wait_for(checkpoints=job.status().checkpoints_completed + 20)
    assert not sink.rows()
    goes_on.write(1, ("a", 30, 1))
    goes_on.end()
    assert job.wait(60).state is JobState.FINISHED
    assert [row["n"] for row in sink.rows()] == [4]
