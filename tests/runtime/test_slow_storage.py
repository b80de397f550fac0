"""Storage that is slower than driver and slots are patient holds up neither of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger

from onceflow import HeapBackend, JobState, LocalProcesses, RuntimeSettings
from onceflow.core import state
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.storage import ClaimedLog
from onceflow.integration.conformance.processes import eventually

IMPATIENT = RuntimeSettings(
    start_timeout_s=60, heartbeat_interval_s=0.2, heartbeat_timeout_s=3.0, cancel_timeout_s=60
)
SLOW_S = 4.0


@pytest.mark.only_proof
def test_an_append_that_takes_longer_than_slots_wait_for_the_driver_costs_no_attempt(
    cluster: AnyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, took_s = ClaimedLog.append, list[float]()
    appended = tmp_path / "appended"

    def append_slowly(log: ClaimedLog, completed: CompletedCheckpoint) -> None:
        if completed.checkpoint == 2:
            time.sleep(SLOW_S)
            took_s.append(SLOW_S)
            appended.touch()
        append(log, completed)

    monkeypatch.setattr(ClaimedLog, "append", append_slowly)
    source = CountingSource(20_000, pause_s=0.001, ends_with=str(appended))
    pipeline, sink = ledger(cluster, tmp_path, source, settings=IMPATIENT)
    status = pipeline.run(120)
    assert status.state is JobState.FINISHED
    assert took_s == [SLOW_S]
    assert status.restores == 0
    assert_exactly_once(sink, source)


@dataclass(frozen=True)
class SlowlyOpened(state.StateBackend):
    """Touches `began` and takes `takes_s` to restore; then it is the heap."""

    began: str
    takes_s: float

    def open(
        self,
        context: state.StateContext,
        restored: Sequence[state.StateHandle],
        reader: state.StateReader,
    ) -> state.KeyedStateStore:
        Path(self.began).touch()
        time.sleep(self.takes_s)
        return HeapBackend().open(context, restored, reader)


def test_a_restore_that_takes_longer_than_the_driver_waits_for_slots_costs_no_attempt(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(2_000)
    backend = SlowlyOpened(str(tmp_path / "began"), SLOW_S)
    pipeline, sink = ledger(cluster, tmp_path, source, settings=IMPATIENT, backend=backend)
    status = pipeline.run(120)
    assert status.state is JobState.FINISHED
    assert status.restores == 0
    assert_exactly_once(sink, source)


def test_a_job_is_cancelled_while_its_state_is_restored(tmp_path: Path) -> None:
    """Slots hear of it, and none of them has to be killed."""
    cluster = LocalProcesses(tmp_path / "logs")
    began = tmp_path / "began"
    backend = SlowlyOpened(str(began), takes_s=300)
    pipeline, _ = ledger(
        cluster, tmp_path, CountingSource(2_000), settings=IMPATIENT, backend=backend
    )
    job = pipeline.start()
    assert eventually(began.exists, 60)
    job.cancel()
    assert job.wait(IMPATIENT.cancel_timeout_s / 2).state is JobState.CANCELLED
    said = [log.read_text() for log in (tmp_path / "logs").glob("*-slot-*.log")]
    assert any("the slot did not finish closing" in text for text in said), said
