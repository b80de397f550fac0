"""Tests that permanent refusals of a target end the job by name, or make the sink stuck."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.scripted_sink import ScriptedSink, When

from onceflow import (
    Checkpointing,
    FailureRate,
    JobState,
    LocalProcesses,
    Pipeline,
)
from onceflow.core.errors import PreCommitFailed, SinkError, TargetRefused
from onceflow.core.protocol.committables import Committable, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.restart import ExponentialDelay, RestartStrategy
from onceflow.core.spi import SinkWriter, WriterContext

RECORDS = 500


class DriverError(Exception):
    """An error that the driver of a database has defined."""


class ServerUnavailableError(Exception):
    """An error that the driver of a database has defined for a server that is away."""


@dataclass(frozen=True)
class RefusingSink(DirectorySink):
    """Refuses rows at `pre_commit` from the checkpoint on in which the file `poison` is there."""

    poison: str = ""
    error: type[Exception] = ValueError

    def writer(self, context: WriterContext) -> SinkWriter:
        writer = super().writer(context)
        pre_commit = writer.pre_commit

        def refuse(checkpoint: CheckpointId) -> Sequence[Committable]:
            if Path(self.poison).exists():
                raise self.error(f"{context.attempt}: a value of checkpoint {checkpoint} is bad")
            return pre_commit(checkpoint)

        writer.pre_commit = refuse  # type: ignore[method-assign]
        return writer


def pipeline_in(directory: Path, restart: RestartStrategy | None = None) -> Pipeline:
    strategy = ExponentialDelay(initial_delay_s=0.01, max_delay_s=0.01)
    return Pipeline(
        LocalProcesses(),
        name="refused",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=restart or strategy,
        settings=SETTINGS,
    )


@pytest.mark.parametrize(
    ("error", "named", "restart"),
    [
        (ValueError, TargetRefused, None),
        (ValueError, TargetRefused, FailureRate(failures=1000, interval_s=3600.0, delay_s=0.01)),
        (DriverError, PreCommitFailed, None),
    ],
    ids=["exponential", "rate", "driver"],
)
def test_a_pre_commit_that_is_refused_in_the_same_way_ends_the_job_by_name(
    tmp_path: Path,
    error: type[Exception],
    named: type[SinkError],
    restart: RestartStrategy | None,
) -> None:
    poison = tmp_path / "poison"
    poison.touch()
    sink = RefusingSink(str(tmp_path / "out"), str(poison), error)
    pipeline = pipeline_in(tmp_path, restart)
    pipeline.read(CountingSource(RECORDS), uid="records").write(sink, uid="ledger")
    with pytest.raises(named) as refused:
        pipeline.run(60)
    text = str(refused.value)
    for words in (
        f"checkpoint 1 was not pre-committed: {error.__name__}: 3: a value of checkpoint 1 is bad",
        "sink 'ledger'",
        "change the rows before the sink, the sink, or its target, and start the job again",
        "no further restart: the job failed in the same way 3 times, and same_mistakes=3",
    ):
        assert words in text
    assert sink.rows() == []
    assert sink.prepared() == []

    # The advice, followed: the next start writes each row once.
    poison.unlink()
    assert pipeline.run(60).state is JobState.FINISHED
    assert sorted(row["id"] for row in sink.rows()) == list(range(RECORDS))


@dataclass(frozen=True)
class UnwritableSink(DirectorySink):
    """Has a writer that cannot be opened."""

    def writer(self, context: WriterContext) -> SinkWriter:
        raise ValueError(f"{context.attempt}: no such compression")


def test_a_sink_whose_writer_cannot_be_opened_ends_the_job_by_name(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    sink = UnwritableSink(str(tmp_path / "out"))
    pipeline.read(CountingSource(RECORDS), uid="records").write(sink, uid="ledger")
    words = "sink 'ledger': its writer was not opened: ValueError: .*in the same way 3 times"
    with pytest.raises(TargetRefused, match=f"(?s){words}"):
        pipeline.run(20)


@pytest.mark.parametrize("error", [ConnectionResetError, ServerUnavailableError])
def test_a_failure_that_may_pass_is_tried_again_as_long_as_it_lasts(
    tmp_path: Path, error: type[Exception]
) -> None:
    poison = tmp_path / "poison"
    poison.touch()
    sink = RefusingSink(str(tmp_path / "out"), str(poison), error)
    pipeline = pipeline_in(tmp_path)
    pipeline.read(CountingSource(RECORDS), uid="records").write(sink, uid="ledger")
    job = pipeline.start()
    deadline = time.monotonic() + 60
    while len(job.status().attempts) <= 5:
        assert time.monotonic() < deadline, job.status()
        assert not job.status().state.ended, job.status()
        time.sleep(0.02)
    poison.unlink()
    assert job.wait(60).state is JobState.FINISHED
    assert sorted(row["id"] for row in sink.rows()) == list(range(RECORDS))


@pytest.mark.parametrize("error", [None, DriverError], ids=["outcome", "driver"])
def test_a_decided_commit_that_is_refused_is_stuck_over_attempts_and_never_dropped(
    tmp_path: Path, error: type[Exception] | None
) -> None:
    fixed = tmp_path / "fixed"
    words = "row 7 is in the way: remove it"
    answer = error(words) if error else RetryLater(words, until_fixed=True)
    # Its target refuses every commit until the file `fixed` is there.
    steps = {"commit": When(fixed, answer, there=False)}
    sink = ScriptedSink(str(tmp_path / "out"), steps)
    pipeline = pipeline_in(tmp_path)
    pipeline.read(CountingSource(RECORDS), uid="records").write(sink, uid="ledger")
    job = pipeline.start()
    deadline = time.monotonic() + 60
    while not any(sink.commit_stuck for sink in job.status().sinks):
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.02)
    assert "; sink ledger is stuck and refuses transaction refused.ledger/" in str(job.status())
    assert "remove it" in str(job.status())
    assert sink.rows() == []
    job.cancel()

    # A new start takes up what is decided, and says the same until somebody has fixed it.
    job = pipeline.start()
    while not any(sink.commit_stuck for sink in job.status().sinks):
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.02)
    fixed.touch()
    status = job.wait(60)
    assert status.state is JobState.FINISHED
    assert not any(sink.commit_stuck or sink.commit_refusal for sink in status.sinks)
    assert sorted(row["id"] for row in sink.rows()) == list(range(RECORDS))
