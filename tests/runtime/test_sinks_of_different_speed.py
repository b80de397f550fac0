"""A job with two sinks in one subtask ends when the slower one has committed every row."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.scripted_sink import ScriptedSink, When
from tests.support.waiting import await_true

from onceflow import Checkpointing, JobState, NoRestart, Pipeline
from onceflow.core.protocol.committables import RetryLater


def test_a_job_is_finished_when_the_slower_of_two_sinks_has_committed_every_row(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    shut = tmp_path / "shut"
    shut.touch()
    refuse = When(shut, RetryLater("the target takes no commit for now"))
    fast = DirectorySink(str(tmp_path / "fast"))
    slow = ScriptedSink(str(tmp_path / "slow"), {"commit": refuse})
    pipeline = Pipeline(
        cluster,
        name="two",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=None),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    records = pipeline.read(CountingSource(300), uid="records")
    records.write(fast, uid="fast")
    records.write(slow, uid="slow")
    job = pipeline.start()
    # All rows are decided, and the fast sink has committed them: only the slow one is left.
    await_true(lambda: (tmp_path / "fast" / "committed").exists() and len(fast.rows()) == 300)
    with pytest.raises(TimeoutError):
        job.wait(0.3)
    assert slow.rows() == []
    shut.unlink()
    assert job.wait(90).state is JobState.FINISHED
    assert sorted(row["id"] for row in slow.rows()) == list(range(300))
    assert slow.prepared() == []
