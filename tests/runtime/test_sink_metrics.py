"""Tests that a job's numbers about its sinks' transactions agree with the targets."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from examples.delta_sink import DeltaSink
from tests.support.clusters import SLOWLY_ON_SPARK, AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.picky_sink import REFUSED_AMOUNT, PickySink
from tests.support.scripted_sink import ScriptedSink, When
from tests.support.waiting import await_status

from onceflow import Checkpointing, FixedDelay, JobState, JobStatus, Pipeline
from onceflow.core.protocol.committables import CommitOutcome, Committable, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.events.status_parts import SinkStatus
from onceflow.core.spi import CommitterContext, GlobalCommitter

RECORDS = 6_000


def pipeline_in(cluster: AnyCluster, directory: Path) -> Pipeline:
    return Pipeline(
        cluster,
        name="metered",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )


def sink_of(status: JobStatus, uid: str) -> SinkStatus:
    return next((sink for sink in status.sinks if sink.uid == uid), SinkStatus(uid, ""))


def committed_files(sink: DirectorySink) -> int:
    return len(list((Path(sink.directory) / "committed").iterdir()))


@SLOWLY_ON_SPARK
def test_at_the_end_the_counts_are_those_of_the_targets(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(RECORDS, pause_s=0.005)
    all_rows, some = DirectorySink(str(tmp_path / "all")), PickySink(str(tmp_path / "some"))
    pipeline = pipeline_in(cluster, tmp_path)
    records = pipeline.read(source, uid="records")
    records.write(all_rows, uid="everything")
    records.write(some, uid="picky", on_bad_row="drop")
    status = pipeline.run(90)
    refused = sum(amount_of(n) == REFUSED_AMOUNT for n in range(RECORDS))
    assert refused > 0
    assert [sink.uid for sink in status.sinks] == ["everything", "picky"]
    for sink, target, left_out in (
        (sink_of(status, "everything"), all_rows, 0),
        (sink_of(status, "picky"), some, refused),
    ):
        assert sink.committed == committed_files(target) > 1
        assert (sink.rows_committed, sink.rows_rejected) == (RECORDS - left_out, left_out)
        assert len(target.rows()) == sink.rows_committed
        assert (sink.open, sink.prepared, sink.aborted, sink.retried) == (0, 0, 0, 0)
        assert sink.oldest_prepared_s == 0
        assert 0 < sink.last_commit_ms < 60_000
    assert sink_of(status, "everything").sink_id == "metered.everything"
    assert status.rejected == refused


def test_what_cannot_be_committed_is_told_while_it_waits(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    source = CountingSource(RECORDS, pause_s=0.02)
    closed = When(gate, RetryLater("the gate is closed"), there=False)
    sink = ScriptedSink(str(tmp_path / "out"), {"commit": closed})
    pipeline = pipeline_in(cluster, tmp_path)
    pipeline.read(source, uid="records").write(sink, uid="ledger")
    job = pipeline.start()

    def is_stuck(status: JobStatus) -> bool:
        told = sink_of(status, "ledger")
        return told.prepared >= 4 and told.retried >= 4 and told.oldest_prepared_s >= 1

    told = sink_of(await_status(job, is_stuck), "ledger")
    assert (told.committed, told.rows_committed, told.last_commit_ms) == (0, 0, 0)
    assert told.commit_refusal.startswith("transaction metered.ledger/")
    for word in (", which checkpoint ", "the gate is closed", "`onceflow txn show metered."):
        assert word in told.commit_refusal
    assert f"; sink ledger refuses {told.commit_refusal}" in str(job.status())
    with pytest.raises(TimeoutError, match="; sink ledger refuses transaction metered.ledger/"):
        job.wait(0.1)
    assert committed_files(sink) == 0
    assert told.prepared <= len(sink.prepared())

    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    await_status(job, lambda status: len(status.attempts) >= 2)
    # Recovery commits what is decided, and its refusals are told, too.
    status = await_status(job, lambda status: "ledger" in status.refusals)
    assert "; sink ledger refuses transaction metered.ledger/" in str(status)
    gate.touch()
    status = job.wait(90)
    assert status.state is JobState.FINISHED
    told = sink_of(status, "ledger")
    # The first attempt committed nothing, so all that is there is the second one's, recovery's
    # share included.
    assert status.attempts[-1].committed > 0
    assert told.committed == committed_files(sink)
    assert told.rows_committed == len(sink.rows()) == RECORDS
    assert (told.commit_refusal, dict(status.refusals)) == ("", {})
    assert told.aborted >= status.attempts[-1].aborted
    assert (told.prepared, told.oldest_prepared_s, sink.prepared()) == (0, 0, [])


@dataclass(frozen=True)
class GatedTable(DeltaSink):
    """Takes no checkpoint before the file `gate` is there."""

    gate: str = ""

    def committer(self, context: CommitterContext) -> GlobalCommitter:
        committer = super().committer(context)
        commit = committer.commit_checkpoint

        def wait(checkpoint: CheckpointId, committables: Sequence[Committable]) -> CommitOutcome:
            if not Path(self.gate).exists():
                return RetryLater("the gate is closed")
            return commit(checkpoint, committables)

        committer.commit_checkpoint = wait  # type: ignore[method-assign]
        return committer


@pytest.mark.servers
def test_a_whole_checkpoint_that_the_driver_cannot_commit_is_told_while_it_waits(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    table = GatedTable(str(tmp_path / "table"), str(gate))
    pipeline = pipeline_in(cluster, tmp_path)
    pipeline.read(CountingSource(300, pause_s=0.01), uid="records").write(table, uid="lake")
    job = pipeline.start()
    told = await_status(job, lambda status: "lake" in status.refusals).refusals["lake"]
    assert told.startswith("checkpoint 1 of sink metered.lake (")
    for word in (", which checkpoint 1 decided, is not committed after ", "the gate is closed"):
        assert word in told
    gate.touch()
    status = job.wait(90)
    assert (status.state, dict(status.refusals)) == (JobState.FINISHED, {})
