"""A job that has run goes on when its environment is away for a while; a first start is refused."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.scripted_sink import ScriptedSink, When
from tests.support.waiting import await_status

from onceflow import (
    ExponentialDelay,
    FixedDelay,
    JobState,
    LocalProcesses,
    OnceflowError,
)
from onceflow.core.errors import ConfigError, SettingsRefused

TIMEOUT_S = 60.0
ONE_MISTAKE = ExponentialDelay(initial_delay_s=0.02, max_delay_s=0.05, same_mistakes=2)
"""Gives up at once where equal errors count as one mistake of the program."""


TABLE_AWAY = ConfigError("table payments does not exist: create it")
HOST_AWAY = OSError(-2, "Name or service not known")


def sink_in(directory: Path, away: Path, error: Exception) -> ScriptedSink:
    """Return a sink that raises `error` at a start while the file `away` is there."""
    return ScriptedSink(str(directory / "out"), {"validate": When(away, error)})


@dataclass(frozen=True)
class Cluster(LocalProcesses):
    """Processes of this machine, whose network has a file that says what is away."""

    away: str = ""


@dataclass(frozen=True)
class NameAway(Cluster):
    """The driver's own name does not resolve while the file `away` is there."""

    @property
    def driver_host(self) -> str:
        return "driver.invalid" if Path(self.away).exists() else "127.0.0.1"


@dataclass(frozen=True)
class WorkersAway(Cluster):
    """No worker is there while the file `away` is."""

    def await_slots(self, parallelism: int, timeout_s: float) -> None:
        if Path(self.away).exists():
            raise ConfigError("parallelism=2 needs 2 task slots at once; add executors or cores")


CASES = pytest.mark.parametrize(
    ("cluster_class", "error", "words"),
    [
        (Cluster, TABLE_AWAY, "ConfigError: table payments does not exist"),
        (Cluster, HOST_AWAY, "OSError: [Errno -2] Name or service not known"),
        (NameAway, TABLE_AWAY, "SettingsRefused: the driver cannot listen at driver.invalid"),
        (WorkersAway, TABLE_AWAY, "ConfigError: parallelism=2 needs 2 task slots"),
    ],
    ids=["table", "host", "driver", "workers"],
)


@CASES
def test_a_job_that_has_run_outlasts_what_the_environment_takes_away(
    tmp_path: Path, cluster_class: type[Cluster], error: Exception, words: str
) -> None:
    away, no_more = tmp_path / "away", tmp_path / "no more"
    source = CountingSource(2_000, pause_s=0.005, ends_with=str(no_more))
    pipeline, sink = ledger(
        cluster_class(away=str(away)),
        tmp_path,
        source,
        sink=sink_in(tmp_path, away, error),
        restart=ONE_MISTAKE,
    )
    job = pipeline.start()
    try:
        running = await_status(job, lambda now: now.checkpoints_completed > 1)
        away.touch()
        os.kill(running.slots[0].pid, signal.SIGKILL)
        lost = await_status(job, lambda now: "failure 6 in " in now.last_error)
        assert lost.last_error.startswith(words)
        assert "the first was SlotLost: slot 0 is lost" in lost.last_error
        away.unlink()
        no_more.touch()
        assert job.wait(TIMEOUT_S).state is JobState.FINISHED
    finally:
        job.cancel()
    assert_exactly_once(sink, source)


@CASES
def test_a_first_start_without_its_environment_ends_at_once_and_says_why(
    tmp_path: Path, cluster_class: type[Cluster], error: Exception, words: str
) -> None:
    away = tmp_path / "away"
    away.touch()
    pipeline, _ = ledger(
        cluster_class(away=str(away)),
        tmp_path,
        CountingSource(100),
        sink=sink_in(tmp_path, away, error),
        restart=ExponentialDelay(initial_delay_s=0.02),
    )
    job = pipeline.start()
    with pytest.raises((OnceflowError, OSError)):
        job.wait(TIMEOUT_S)
    assert job.status().last_error.startswith(words)
    assert job.status().state is JobState.FAILED


def test_a_strategy_that_gives_up_ends_the_job_by_the_words_of_the_environment(
    tmp_path: Path,
) -> None:
    away = tmp_path / "away"
    pipeline, _ = ledger(
        WorkersAway(away=str(away)),
        tmp_path,
        CountingSource(2_000, pause_s=0.005, endless=True),
        restart=FixedDelay(attempts=2, delay_s=0.01),
    )
    job = pipeline.start()
    running = await_status(job, lambda now: now.checkpoints_completed > 1)
    away.touch()
    os.kill(running.slots[0].pid, signal.SIGKILL)
    with pytest.raises(ConfigError) as raised:
        job.wait(TIMEOUT_S)
    text = str(raised.value)
    assert text.startswith("parallelism=2 needs 2 task slots at once; add executors or cores")
    assert "(failure 3 in " in text
    assert "; the first was SlotLost: slot 0 is lost" in text
    assert text.endswith("(no further restart: failure 3, 2 restarts allowed)")


def test_a_driver_that_cannot_listen_says_where_and_what_to_set() -> None:
    from onceflow.core.runtime.transport.control_plane import ControlServer
    from onceflow.core.runtime.transport.credentials import Credentials

    with pytest.raises(SettingsRefused, match=r"driver\.invalid.*driver_host"):
        ControlServer("driver.invalid", Credentials("token", None), lambda _: None)
