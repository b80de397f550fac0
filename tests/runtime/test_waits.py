"""A running job says which server outside it waits for, where that is, and since when."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.counting_source import CountingReader, CountingSource
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.scripted_sink import ScriptedSink, Wait
from tests.support.waiting import await_status
from typer.testing import CliRunner

from onceflow import JobState, LocalProcesses
from onceflow.cli.jobs.client import Answer
from onceflow.cli.main import app
from onceflow.core import spi

TIMEOUT_S = 90.0


@dataclass(frozen=True)
class SilentSource(CountingSource):
    """A source whose server sends nothing while the file `silent` is there."""

    silent: str = ""

    def reader(self, splits: Sequence[spi.Split], context: spi.ReaderContext) -> spi.SourceReader:
        return _SilentReader(self, splits)


class _SilentReader(CountingReader):
    def __init__(self, source: SilentSource, splits: Sequence[spi.Split]) -> None:
        super().__init__(source, splits)
        self._silent = Path(source.silent)
        self._since: float | None = None

    def poll(self, timeout_s: float) -> pa.RecordBatch | spi.EndOfInput | None:
        if self._silent.exists():
            self._since = self._since or time.monotonic()
            time.sleep(min(timeout_s, 0.05))
            return None
        self._since = None
        return super().poll(timeout_s)

    def find_outage(self) -> spi.Outage | None:
        since = self._since
        if since is None:
            return None
        return spi.Outage("Kafka at broker.example:9092", time.monotonic() - since)


@pytest.mark.only_proof
def test_status_names_the_servers_that_a_running_job_waits_for_until_they_answer(
    tmp_path: Path,
) -> None:
    silent, hangs, no_more = tmp_path / "silent", tmp_path / "hangs", tmp_path / "no more"
    source = SilentSource(1_000, pause_s=0.005, ends_with=str(no_more), silent=str(silent))
    steps = {"pre_commit": Wait(hangs, there=True)}
    sink = ScriptedSink(str(tmp_path / "out"), steps, "database 'shop' at db.example:5432")
    pipeline, _ = ledger(LocalProcesses(), tmp_path, source, sink=sink)
    job = pipeline.start()
    try:
        await_status(job, lambda now: now.checkpoints_completed > 1)
        began_s = time.time()
        silent.touch()
        hangs.touch()
        waiting = await_status(
            job, lambda now: {wait.uid for wait in now.waits} == {"records", "ledger"}
        )
        assert waiting.state is JobState.RUNNING
        of_sink, of_source = waiting.waits
        assert of_sink.what == "database 'shop' at db.example:5432"
        assert of_sink.call == "pre-commit", "nothing has failed: it may be a large pre-commit"
        assert of_source.what == "Kafka at broker.example:9092"
        assert all(began_s - 2 < wait.since_s < time.time() for wait in waiting.waits)
        told = told_by_the_command_line(tmp_path)
        assert {wait["uid"]: wait["what"] for wait in told["waits"]} == {
            wait.uid: wait.what for wait in waiting.waits
        }
        assert "ledger is in a pre-commit at database 'shop'" in told["summary"]
        assert "records is waiting for Kafka at broker.example:9092" in told["summary"]
        silent.unlink()
        hangs.unlink()
        await_status(job, lambda now: not now.waits)
        no_more.touch()
        assert job.wait(TIMEOUT_S).state is JobState.FINISHED
    finally:
        job.cancel()
    assert_exactly_once(sink, source)


def told_by_the_command_line(directory: Path) -> Answer:
    storage = str(directory / "checkpoints")
    result = CliRunner().invoke(app, ["status", "ledger", "--storage", storage, "--json"])
    assert result.exit_code == 0, result.output
    answer: Answer = json.loads(result.output)
    return answer
