"""Storage that is slower than driver and slots are patient holds up neither of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger

from onceflow import JobState, RuntimeSettings
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.storage import ClaimedLog

IMPATIENT = RuntimeSettings(
    start_timeout_s=60, heartbeat_interval_s=0.2, heartbeat_timeout_s=2.0, cancel_timeout_s=10
)
SLOW_S = 5.0


def test_an_append_that_takes_longer_than_slots_wait_for_the_driver_costs_no_attempt(
    cluster: AnyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, took_s = ClaimedLog.append, list[float]()

    def append_slowly(log: ClaimedLog, completed: CompletedCheckpoint) -> None:
        if completed.checkpoint == 2:
            time.sleep(SLOW_S)
            took_s.append(SLOW_S)
        append(log, completed)

    monkeypatch.setattr(ClaimedLog, "append", append_slowly)
    source = CountingSource(20_000, pause_s=0.001)
    pipeline, sink = ledger(cluster, tmp_path, source, settings=IMPATIENT)
    status = pipeline.run(120)
    assert status.state is JobState.FINISHED
    assert took_s == [SLOW_S]
    assert status.restores == 0
    assert_exactly_once(sink, source)
