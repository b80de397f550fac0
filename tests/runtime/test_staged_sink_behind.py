"""A staged sink of one's own, whose target knows more than the checkpoint storage it is given."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.counting_source import CountingSource
from tests.support.floored_sink import FlooredSink
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, FixedDelay, JobState, LocalProcesses, Pipeline
from onceflow.core.errors import CommitFailed

_RECORDS = 1_000


def _pipeline(directory: Path, storage: str, *, ends: bool = False) -> Pipeline:
    pipeline = Pipeline(
        LocalProcesses(),
        name="own",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(directory / storage), interval=0.05),
        restart=FixedDelay(attempts=1, delay_s=0.01),
        settings=replace(SETTINGS, commit_deadline_s=0.5),
    )
    source = CountingSource(
        _RECORDS,
        batch_rows=5 if not ends else 100,
        pause_s=0.01,
        ends_with="" if ends else str(directory / "never"),
    )
    pipeline.read(source, uid="records").write(FlooredSink(str(directory / "rows.db")), uid="out")
    return pipeline


def test_a_staged_sink_whose_target_has_taken_more_sends_to_the_newer_storage_and_has_rows_once(
    tmp_path: Path,
) -> None:
    job = _pipeline(tmp_path, "a").start()
    job.wait_for(checkpoints=2)
    job.stop(60)
    shutil.copytree(tmp_path / "a", tmp_path / "older")
    job = _pipeline(tmp_path, "a").start()
    job.wait_for(checkpoints=8)
    job.stop(60)
    sink = FlooredSink(str(tmp_path / "rows.db"))
    before = sink.ids()
    with pytest.raises(CommitFailed) as failed:
        _pipeline(tmp_path, "older").run(60)
    assert "the job has run in other storage since: start it there" in str(failed.value)
    assert "another id" not in str(failed.value)
    assert sink.ids() == before
    assert _pipeline(tmp_path, "a", ends=True).run(60).state is JobState.FINISHED
    assert sink.ids() == list(range(_RECORDS))
