"""Sources and splits that a job did not have when it began."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.clusters import SLOWLY_ON_SPARK, AnyCluster
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS, ledger
from tests.support.scripted_source import ScriptedSource
from tests.support.waiting import await_in

from onceflow import (
    Checkpointing,
    FixedDelay,
    JobState,
    LocalProcesses,
    NoRestart,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
)
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.errors import OffsetOutOfRange, SourceUnavailable
from onceflow.core.protocol.restart import RestartStrategy
from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split

ROWS_A_SPLIT = 10


@dataclass(frozen=True)
class GrowingSource(Source):
    """Has the splits that are named in a directory, ten rows each, and fails while told to."""

    directory: Path

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    @property
    def bounded(self) -> bool:
        return False

    @property
    def discovery_interval_s(self) -> float | None:
        return 0.05

    def splits(self) -> Sequence[Split]:
        return [Split(path.name, b"0") for path in sorted(self.directory.glob("[0-9]*"))]

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        if (self.directory / "away").exists():
            (self.directory / "asked").touch()
            raise SourceUnavailable("nobody answers")
        if (self.directory / "lost").exists():
            raise OffsetOutOfRange("split 0 is gone for good")
        names = {split.id for split in known}
        return [*known, *(split for split in self.splits() if split.id not in names)]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return _Reader(splits)


class _Reader(SourceReader):
    def __init__(self, splits: Sequence[Split]) -> None:
        self._next = {split.id: int(split.position) for split in splits}

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        for split, following in self._next.items():
            if following < ROWS_A_SPLIT:
                self._next[split] = following + 1
                number = int(split) * ROWS_A_SPLIT + following
                return pa.record_batch([[number], ["a"], [0]], schema=SCHEMA)
        time.sleep(timeout_s)
        return None

    def add_splits(self, splits: Sequence[Split]) -> None:
        self._next |= {split.id: int(split.position) for split in splits}

    def snapshot(self) -> Sequence[Split]:
        return [Split(split, str(following).encode()) for split, following in self._next.items()]

    def close(self) -> None:
        pass


def _has_rows(sink: DirectorySink, count: int) -> bool:
    return len(sink.rows()) >= count


def _copy(
    cluster: AnyCluster, tmp_path: Path, restart: RestartStrategy | None = None
) -> tuple[Pipeline, DirectorySink, Path]:
    """Build the growing source, with one split, -> directory."""
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "0").touch()
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        cluster,
        name="copy",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        restart=restart or NoRestart(),
        settings=SETTINGS,
    )
    pipeline.read(GrowingSource(splits), uid="records").write(sink, uid="copy")
    return pipeline, sink, splits


@pytest.mark.parametrize("point", ["offered", "decided"])
def test_splits_that_appear_are_read_once_though_a_slot_dies_that_has_just_got_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: CrashPoint
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(VARIABLE, str(points))
    restart = FixedDelay(attempts=3, delay_s=0.01)
    pipeline, sink, splits = _copy(LocalProcesses(tmp_path / "logs"), tmp_path, restart)
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    await_in(job, lambda: _has_rows(sink, ROWS_A_SPLIT))
    (points / point).touch()
    for name in ("1", "2", "3"):
        (splits / name).touch()
    await_in(job, lambda: _has_rows(sink, 4 * ROWS_A_SPLIT))
    assert job.stop(60).restores == 1
    assert Counter(row["id"] for row in sink.rows()) == Counter(range(4 * ROWS_A_SPLIT))


@SLOWLY_ON_SPARK
def test_source_that_is_new_in_an_existing_job_is_read_exactly_once(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, sink = ledger(cluster, tmp_path, CountingSource(300))
    pipeline.run(60)
    more = DirectorySink(str(tmp_path / "more"))
    for _ in range(2):
        pipeline, _ = ledger(cluster, tmp_path, CountingSource(300))
        pipeline.read(CountingSource(500), uid="more").write(more, uid="more-out")
        assert pipeline.run(60).state is JobState.FINISHED
    assert Counter(row["id"] for row in sink.rows()) == Counter(range(300))
    assert Counter(row["id"] for row in more.rows()) == Counter(range(500))


def test_source_that_cannot_be_asked_for_new_splits_is_asked_again_and_ends_no_job(
    cluster: AnyCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, sink, splits = _copy(cluster, tmp_path)
    job = pipeline.start()
    await_in(job, lambda: job.state is JobState.RUNNING)
    (splits / "away").touch()
    await_in(job, (splits / "asked").exists)
    (splits / "1").touch()
    (splits / "away").unlink()
    await_in(job, lambda: len(sink.rows()) == 2 * ROWS_A_SPLIT)
    assert job.stop().restores == 0
    assert Counter(row["id"] for row in sink.rows()) == Counter(range(2 * ROWS_A_SPLIT))
    assert "source records cannot list new splits at the moment" in caplog.text


def test_source_that_can_never_be_read_on_ends_the_job_with_its_own_error(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline, _, splits = _copy(cluster, tmp_path)
    job = pipeline.start()
    await_in(job, lambda: job.state is JobState.RUNNING)
    (splits / "lost").touch()
    with pytest.raises(OffsetOutOfRange, match="split 0 is gone for good"):
        job.wait(60)


@dataclass(frozen=True)
class RebuildingSource(ScriptedSource):
    """Answers each question with splits that it makes anew, and counts the questions in a file."""

    interval_s: float | None = None

    @property
    def bounded(self) -> bool:
        return False

    @property
    def discovery_interval_s(self) -> float | None:
        return self.interval_s

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        with (Path(self.directory) / "questions").open("a") as questions:
            questions.write("discover\n")
        return [Split(split.id, split.position) for split in known]

    @property
    def questions(self) -> int:
        path = Path(self.directory) / "questions"
        return len(path.read_text().splitlines()) if path.exists() else 0


def _count_in_windows(cluster: AnyCluster, source: Source, tmp_path: Path) -> Pipeline:
    """Build source -> a count for each second of event time -> directory."""
    pipeline = Pipeline(
        cluster,
        name="windows",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.05),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("at"))
    windows = records.key_by("account").window(TumblingEventTimeWindows(1))
    sink = DirectorySink(str(tmp_path / "out"))
    (tmp_path / "out" / "committed").mkdir(parents=True, exist_ok=True)
    windows.aggregate(n=count(), uid="windows").write(sink, uid="out")
    return pipeline


def test_job_with_watermarks_runs_through_the_discoveries_of_a_source_that_makes_its_splits_anew(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = RebuildingSource(str(tmp_path / "records"), interval_s=0.05)
    source.write(0, *(("a", 1_000 * second + 500, 1) for second in range(10)))
    source.write(1, ("b", 9_500, 1))
    job = _count_in_windows(cluster, source, tmp_path).start()
    sink = DirectorySink(str(tmp_path / "out"))
    await_in(job, lambda: len(sink.rows()) == 9)
    # The event times of both splits are in the checkpoints from here on.
    job.wait_for(checkpoints=job.status().checkpoints_completed + 1)
    before = source.questions
    await_in(job, lambda: source.questions >= before + 5)
    assert job.stop().restores == 0


def test_job_that_starts_again_behind_a_quiet_split_emits_every_window_that_is_due(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = RebuildingSource(str(tmp_path / "records"))
    sink = DirectorySink(str(tmp_path / "out"))
    # Split 1 has come further than split 0 ever will, and gets no record again.
    source.write(1, ("quiet", 30_000, 1))
    for first, windows in ((0, 9), (10, 19)):
        source.write(0, *(("a", 1_000 * (first + n) + 500, 1) for n in range(10)))
        job = _count_in_windows(cluster, source, tmp_path).start()
        await_in(job, partial(_has_rows, sink, windows))
        assert job.stop().state is JobState.STOPPED
        assert len(sink.rows()) == windows
