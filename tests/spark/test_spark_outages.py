"""A job on a standalone cluster outlasts its master, and workers that are away for too long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.job_process import JobProcess
from tests.support.ledger import assert_exactly_once
from tests.support.standalone import standalone_cluster

pytestmark = [pytest.mark.spark, pytest.mark.servers, pytest.mark.timeout(500)]

START_TIMEOUT_S = 20
RECORDS = 20_000
TIMEOUT_S = 150.0


def test_a_job_outlasts_its_restarted_master_and_then_all_its_workers(tmp_path: Path) -> None:
    end = tmp_path / "end"
    options = {
        "--records": RECORDS,
        "--pause-s": 0.2,
        "--ends-with": end,
        "--start-timeout-s": START_TIMEOUT_S,
    }
    arguments = [str(part) for option in options.items() for part in option]
    module = "tests.support.ledger_process"
    with (
        standalone_cluster(tmp_path) as cluster,
        JobProcess(tmp_path, module, *arguments, "--master", cluster.url) as job,
    ):
        job.await_checkpoints(2)
        cluster.kill_master()
        job.await_checkpoints(2)
        cluster.start_master()
        after_master = job.await_checkpoints(2)
        assert after_master["restores"] == 0, after_master
        cluster.kill_workers()
        killed_at_s = time.monotonic()
        away = job.await_status(
            lambda now: "needs 2 task slots at once" in now["last_error"], timeout_s=TIMEOUT_S
        )
        assert time.monotonic() - killed_at_s >= START_TIMEOUT_S
        error = away["last_error"].partition("\n")[0]
        assert error.startswith("SettingsRefused: parallelism=2 needs 2 task slots at once")
        assert f"has had only 0 for {START_TIMEOUT_S} s" in error
        assert "s without a checkpoint; the first was SlotLost: " in error
        assert error in away["summary"]
        cluster.start_workers()
        job.await_status(
            lambda now: (
                now["state"] == "running"
                and now["checkpoints_completed"] > away["checkpoints_completed"]
            ),
            timeout_s=TIMEOUT_S,
        )
        job.finish()
    source = CountingSource(RECORDS)
    assert_exactly_once(DirectorySink(str(tmp_path / "out")), source)
