"""Tests the lag of a job in its status."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typing_extensions import override

from onceflow import (
    Checkpointing,
    JobEvent,
    JobState,
    JobStatus,
    LagMeasured,
    LocalProcesses,
    Pipeline,
)
from onceflow.connectors import SourceProgress, SourceWarning, Split, SplitOffsets
from onceflow.core.runtime.driver import source_lag
from onceflow.integration.conformance.processes import eventually
from onceflow.sinks import FileSink
from onceflow.sources import DatagenSource


@dataclass(frozen=True)
class _AnswersNever(DatagenSource):
    """Its server takes the question and says nothing until `answers` is there."""

    answers: str = ""

    @override
    def latest_offsets(self, splits: Sequence[Split]) -> Sequence[SplitOffsets]:
        while not Path(self.answers).exists():
            time.sleep(0.01)
        return super().latest_offsets(splits)


@dataclass(frozen=True)
class _Measured(DatagenSource):
    """Its server keeps data for it, never moves, and warns."""

    @override
    def measure(self, splits: Sequence[Split]) -> SourceProgress | None:
        warning = SourceWarning("full", f"{len(splits)} splits keep much")
        return SourceProgress(lag_bytes=7, retained_from="0/1", warnings=(warning,))


def test_lag_is_told_and_a_source_that_does_not_answer_holds_up_nothing(
    cluster: LocalProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(source_lag, "LAG_INTERVAL_S", 0.1)
    told: list[LagMeasured] = []

    def listener(event: JobEvent, status: JobStatus) -> None:
        if isinstance(event, LagMeasured):
            told.append(event)

    pipeline = Pipeline(
        cluster,
        name="behind",
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval="100 ms"),
        listeners=[listener],
    )
    counted = _Measured(rows=4_000, accounts=10, rows_per_second=2_000, batch_rows=100)
    answers = tmp_path / "answers"
    mute = _AnswersNever(rows=100, accounts=10, answers=str(answers))
    for uid, source in (("a", counted), ("b", mute)):
        pipeline.read(source, uid=uid).write(FileSink(str(tmp_path / uid)), uid=f"{uid}-out")
    job = pipeline.start()
    assert eventually(lambda: job.status().lag.get("a", 4_000) < 4_000, 90)
    assert "b" not in job.status().lag
    assert eventually(lambda: job.status().checkpoints_completed > 3, 90), "nobody waits for b"
    measured = [event.progress for event in told if event.progress is not None]
    assert len(measured) > 1
    assert {progress.lag_bytes for progress in measured} == {7}
    assert len({progress.moved_at_s for progress in measured}) == 1, "it has not moved"
    assert [line for line in caplog.messages if "keep much" in line] == [
        "source a: 1 splits keep much"
    ]
    assert "a: 1 splits keep much" in str(job.status())
    last = job.wait(60)
    assert last.state is JobState.FINISHED
    answers.touch()
    (split,) = [split for event in told for split in event.splits][-1:]
    assert 0 <= split.next <= split.end == 4_000
    assert split.lag < 4_000
