"""^C, SIGTERM and a Spark that is stopped: the program ends as it should, and no row is doubled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.spark import signalled_job
from tests.spark.signalled_job import source_in
from tests.support.clusters import SLOWLY_ON_SPARK, AnyCluster
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.program import Program

from onceflow import JobState, LocalProcesses
from onceflow.core.runtime.driver.stop_signals import SAME_SIGNAL_S
from onceflow.integration.faults import children_of

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

_PROGRAM = (sys.executable, signalled_job.__file__)
_SUBMITTED = (str(Path(sys.executable).with_name("spark-submit")), signalled_job.__file__)
_PATIENCE_S = 180.0


class Driver(Program):
    """The driver program, in a process group of its own as a terminal's is."""

    def __init__(
        self, directory: Path, command: Sequence[str], way: str, cluster: AnyCluster | None
    ) -> None:
        self._slots = directory / "slots"
        runs_on = "processes" if isinstance(cluster, LocalProcesses) else "spark"
        python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        log = directory / "program.log"
        super().__init__(log, *command, directory, way, runs_on, environment=python)

    def slots(self) -> list[int]:
        """Return the slots' pids, once some checkpoints are completed."""
        self.wait_until(self._slots.exists, _PATIENCE_S)
        return [int(pid) for pid in self._slots.read_text().split()]

    def await_output(self, text: str) -> None:
        self.wait_until(lambda: text in self.output(), _PATIENCE_S)


@pytest.fixture
def program(tmp_path: Path) -> Generator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(
        command: Sequence[str] = _PROGRAM, way: str = "wait", cluster: AnyCluster | None = None
    ) -> Driver:
        started.append(Driver(tmp_path, command, way, cluster))
        return started[-1]

    yield start
    for one in started:
        one.end()


@contextmanager
def _frozen(pid: int) -> Generator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def assert_goes_on_exactly_once(cluster: AnyCluster, directory: Path) -> None:
    """Start the job again, in this process, and let it read all that there is."""
    (directory / "end").touch()
    pipeline, sink = ledger(cluster, directory, source_in(directory))
    status = pipeline.run(_PATIENCE_S)
    assert status.state is JobState.FINISHED
    assert status.attempt == 2, "the program's own was the only attempt before"
    assert_exactly_once(sink, source_in(directory))


def _interrupt_group(running: Driver) -> None:
    running.signal_group(signal.SIGINT)


def _terminate_group(running: Driver) -> None:
    running.signal_group(signal.SIGTERM)


def _terminate(running: Driver) -> None:
    running.signal(signal.SIGTERM)


# A supervisor that knows the driver; ^C is what the next tests send.
_WAYS = [
    pytest.param(_PROGRAM, _terminate, LocalProcesses(), id="processes-terminate"),
    *(
        pytest.param(
            command,
            send,
            None,
            marks=(
                pytest.mark.servers
                if (command, send) == (_PROGRAM, _terminate)
                else pytest.mark.slow
            ),
            id=f"{Path(command[0]).name.partition('3')[0]}-{send.__name__.lstrip('_')}",
        )
        for command in (_PROGRAM, _SUBMITTED)
        for send in (_interrupt_group, _terminate, _terminate_group)
    ),
]


@pytest.mark.parametrize(("command", "send", "runs_on"), _WAYS)
def test_a_signal_is_a_stop_with_a_last_checkpoint(
    tmp_path: Path,
    program: Callable[..., Driver],
    command: Sequence[str],
    send: Callable[[Driver], None],
    runs_on: LocalProcesses | None,
) -> None:
    """Sent to the group, or to the one process that a supervisor knows. None is Spark."""
    running = program(command, cluster=runs_on)
    running.slots()
    send(running)
    assert (running.wait(_PATIENCE_S), "ended: stopped" in running.output()) == (0, True), (
        running.output()
    )
    assert "closed" in running.output()
    assert "Traceback" not in running.output(), running.output()
    assert_goes_on_exactly_once(LocalProcesses(tmp_path / "logs"), tmp_path)


@SLOWLY_ON_SPARK
def test_a_program_that_does_something_else_stops_as_well(
    cluster: AnyCluster, tmp_path: Path, program: Callable[..., Driver]
) -> None:
    running = program(way="poll", cluster=cluster)
    running.slots()
    running.signal_group(signal.SIGINT)
    assert (running.wait(_PATIENCE_S), "ended: stopped" in running.output()) == (0, True), (
        running.output()
    )
    assert_goes_on_exactly_once(cluster, tmp_path)


@SLOWLY_ON_SPARK
@pytest.mark.parametrize(
    "again",
    [
        pytest.param(True, id="second signal"),
        pytest.param(False, id="deadline", marks=pytest.mark.slow),
    ],
)
@pytest.mark.only_proof
def test_a_stop_that_does_not_come_is_cancelled(
    cluster: AnyCluster, tmp_path: Path, program: Callable[..., Driver], again: bool
) -> None:
    """A frozen slot keeps the last checkpoint from completing."""
    running = program(way="wait" if again else "impatient", cluster=cluster)
    with _frozen(running.slots()[0]):
        running.signal_group(signal.SIGINT)
        running.await_output("stops with a last checkpoint")
        if again:
            time.sleep(SAME_SIGNAL_S + 0.1)
            running.signal_group(signal.SIGINT)
        assert (running.wait(_PATIENCE_S), "ended: cancelled" in running.output()) == (0, True), (
            running.output()
        )
    why = "another SIGINT received" if again else "not stopped within 5 s"
    assert f"{why}: job ledger is cancelled" in running.output()
    assert_goes_on_exactly_once(cluster, tmp_path)


@SLOWLY_ON_SPARK
@pytest.mark.only_proof
def test_process_1_of_a_container_stops_at_sigterm(
    cluster: AnyCluster, tmp_path: Path, program: Callable[..., Driver]
) -> None:
    """The kernel keeps from process 1 all signals that it has no handler for."""
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("a process may not make a pid namespace here")
    running = program((*unshare, *_PROGRAM), cluster=cluster)
    running.slots()
    (first,) = children_of(running.pid)
    os.kill(first, signal.SIGTERM)
    assert (running.wait(_PATIENCE_S), "ended: stopped" in running.output()) == (0, True), (
        running.output()
    )
    assert_goes_on_exactly_once(cluster, tmp_path)


@pytest.mark.only_proof
def test_spark_that_is_stopped_under_a_job_ends_it_at_once_by_that_name(
    tmp_path: Path, program: Callable[..., Driver]
) -> None:
    running = program(way="spark_stop")
    running.slots()
    assert running.wait(_PATIENCE_S) == 1
    assert "SparkStopped: the connection to Spark is lost" in running.output(), running.output()
    assert "NoneType" not in running.output(), running.output()
    assert_goes_on_exactly_once(LocalProcesses(tmp_path / "logs"), tmp_path)


@pytest.mark.slow  # as where Spark is stopped
def test_a_jvm_that_dies_ends_the_job_at_once_by_that_name(
    spark: SparkSession, tmp_path: Path, program: Callable[..., Driver]
) -> None:
    running = program()
    running.slots()
    (jvm,) = children_of(running.pid)
    os.kill(jvm, signal.SIGKILL)
    assert running.wait(_PATIENCE_S) == 1
    assert "SparkStopped: the connection to Spark is lost" in running.output(), running.output()
    assert_goes_on_exactly_once(spark, tmp_path)
