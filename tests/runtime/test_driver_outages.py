"""A driver that loses its own name, or stands still, goes on and blames nobody else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.job_process import JobProcess
from tests.support.ledger import assert_exactly_once
from tests.support.own_names import OwnNames, require_own_names

from onceflow.integration.faults.processes import is_alive

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]
MODULE = "tests.support.ledger_process"
SOURCE = CountingSource(20_000)
OUTAGE_S = 15.0
SILENCE_S = 15.0


def _arguments(directory: Path) -> list[str]:
    return [
        *("--records", str(SOURCE.records), "--pause-s", "0.2"),
        *("--ends-with", str(directory / "end")),
    ]


def _finish(job: JobProcess) -> None:
    job.finish()
    assert_exactly_once(DirectorySink(str(job.directory / "out")), SOURCE)


def _slot_pids(status: dict[str, Any]) -> list[int]:
    return [int(slot["pid"]) for slot in status["slots"]]


def test_a_job_outlasts_the_absence_of_its_drivers_own_name(tmp_path: Path) -> None:
    require_own_names()
    names = OwnNames(tmp_path, "driver.test")
    own_host = ("--driver-host", "driver.test", "--restart-delay-max-s", "2")
    arguments = [*_arguments(tmp_path), *own_host]
    with JobProcess(tmp_path, MODULE, *arguments, prefix=names.prefix) as job:
        running = job.await_checkpoints(2)
        names.take_away("driver.test")
        os.kill(_slot_pids(running)[0], signal.SIGKILL)
        ends = time.monotonic() + OUTAGE_S
        away = job.await_status(
            lambda now: time.monotonic() > ends and "driver.test" in now["last_error"]
        )
        names.bring_back("driver.test")
        job.await_checkpoints(2)
        _finish(job)
    error = away["last_error"].partition("\n")[0]
    assert error.startswith("SettingsRefused: the driver cannot listen at driver.test")
    assert "Name or service not known" in error
    assert "; the first was SlotLost: slot 0 is lost" in error
    assert error in away["summary"]


def test_a_driver_that_stood_still_for_longer_than_its_slots_wait_names_itself_as_the_cause(
    tmp_path: Path,
) -> None:
    # The slots wait for so long, and 5 s more. A loaded machine keeps it while nothing is stopped.
    silence = ("--heartbeat-timeout-s", str(SILENCE_S))
    with JobProcess(tmp_path, MODULE, *_arguments(tmp_path), *silence) as job:
        slots = _slot_pids(job.await_checkpoints(2))
        os.kill(job.pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + SILENCE_S + 60
            while any(map(is_alive, slots)):
                assert time.monotonic() < deadline, "the slots stay with a silent driver"
                time.sleep(0.1)
        finally:
            os.kill(job.pid, signal.SIGCONT)
        woken = job.await_status(lambda now: now["restores"] > 0 and now["state"] == "running")
        assert "The cause may be this driver: its process did not run for" in woken["summary"]
        job.await_checkpoints(2)
        _finish(job)
