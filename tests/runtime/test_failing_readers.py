"""Readers of a source of one's own that raise: the job ends by name, or waits for what may pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, JobState, LocalProcesses, Pipeline
from onceflow.core.errors import SourceError
from onceflow.core.protocol.restart import ExponentialDelay
from onceflow.core.spi import EndOfInput, PolledRows, ReaderContext, Source, SourceReader, Split

RECORDS = 500


class DriverError(Exception):
    """An error that the driver of a message broker has defined."""


@dataclass(frozen=True)
class PoisonedSource(CountingSource):
    """Raises `error` in place of the second half of a split, while the file `poison` is there."""

    poison: str = ""
    error: type[Exception] = ValueError

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        reader = super().reader(splits, context)
        poll = reader.poll

        def refuse(timeout_s: float) -> PolledRows | EndOfInput | None:
            position = int(reader.snapshot()[0].position)
            if Path(self.poison).exists() and position >= self.records // 2:
                raise self.error(f"{context.attempt}: no number at byte {position}")
            return poll(timeout_s)

        reader.poll = refuse  # type: ignore[method-assign]
        return reader


def poisoned(directory: Path, error: type[Exception]) -> Source:
    poison = directory / "poison"
    poison.touch()
    return PoisonedSource(RECORDS, splits_count=1, pause_s=0.01, poison=str(poison), error=error)


def pipeline_in(directory: Path, source: Source) -> tuple[Pipeline, DirectorySink]:
    pipeline = Pipeline(
        LocalProcesses(),
        name="poisoned",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.05),
        restart=ExponentialDelay(initial_delay_s=0.01, max_delay_s=0.01),
        settings=SETTINGS,
    )
    sink = DirectorySink(str(directory / "out"))
    pipeline.read(source, uid="numbers").write(sink, uid="out")
    return pipeline, sink


@pytest.mark.parametrize("error", [ValueError, pa.ArrowInvalid, DriverError])
def test_a_reader_that_fails_in_the_same_way_ends_the_job_by_name(
    tmp_path: Path, error: type[Exception]
) -> None:
    pipeline, sink = pipeline_in(tmp_path, poisoned(tmp_path, error))
    with pytest.raises(SourceError) as raised:
        pipeline.run(60)
    text = str(raised.value)
    for words in (
        f"source 'numbers': poll of CountingReader raised {error.__name__}: ",
        "no number at byte 250",
        "BadRecord",
        "in refuse",
        "the job failed in the same way 3 times",
    ):
        assert words in text

    # The advice, followed: the next start writes each record once.
    (tmp_path / "poison").unlink()
    assert pipeline.run(60).state is JobState.FINISHED
    assert sorted(row["id"] for row in sink.rows()) == list(range(RECORDS))


@dataclass(frozen=True)
class UnreadableSource(CountingSource):
    """Has a reader that cannot be opened."""

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        raise ValueError(f"{context.attempt}: no such compression")


def test_a_source_whose_reader_cannot_be_opened_ends_the_job_by_name(tmp_path: Path) -> None:
    pipeline, _ = pipeline_in(tmp_path, UnreadableSource(RECORDS))
    words = "source 'numbers': reader of UnreadableSource raised ValueError: .*in the same way 3"
    with pytest.raises(SourceError, match=f"(?s){words}"):
        pipeline.run(20)


def test_a_reader_whose_server_is_away_is_asked_again_as_long_as_it_lasts(tmp_path: Path) -> None:
    pipeline, sink = pipeline_in(tmp_path, poisoned(tmp_path, ConnectionResetError))
    job = pipeline.start()
    deadline = time.monotonic() + 60
    while len(job.status().attempts) <= 5:
        assert time.monotonic() < deadline, job.status()
        assert not job.status().state.ended, job.status()
        time.sleep(0.02)
    assert "source 'numbers': poll of CountingReader raised ConnectionReset" in str(job.status())
    (tmp_path / "poison").unlink()
    assert job.wait(60).state is JobState.FINISHED
    assert sorted(row["id"] for row in sink.rows()) == list(range(RECORDS))
