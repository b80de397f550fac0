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

from onceflow import JobState, LocalProcesses
from onceflow.core.runtime.driver.stop_signals import SAME_SIGNAL_S
from onceflow.integration.faults import children_of, kill_session

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

_REPOSITORY = Path(__file__).parents[2]
_PROGRAM = (sys.executable, signalled_job.__file__)
_SUBMITTED = (str(Path(sys.executable).with_name("spark-submit")), signalled_job.__file__)
_PATIENCE_S = 90.0


class Program:
    """The driver program, in a process group of its own as a terminal's is."""

    def __init__(
        self, directory: Path, command: Sequence[str], way: str, cluster: AnyCluster | None
    ) -> None:
        self._directory = directory
        self._log = directory / "program.log"
        runs_on = "processes" if isinstance(cluster, LocalProcesses) else "spark"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(directory), way, runs_on],
                cwd=_REPOSITORY,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "PYSPARK_PYTHON": sys.executable,
                    "PYSPARK_DRIVER_PYTHON": sys.executable,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def group(self, number: signal.Signals) -> None:
        """Signal the group, as ^C and a shell's `kill %1` do."""
        os.killpg(self.pid, number)

    def slots(self) -> list[int]:
        """Return the slots' pids, once some checkpoints are completed."""
        path, deadline = self._directory / "slots", time.monotonic() + _PATIENCE_S
        while not path.exists():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        return [int(pid) for pid in path.read_text().split()]

    def await_said(self, text: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while text not in self.said():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def end(self, timeout_s: float = _PATIENCE_S) -> int:
        """Return the exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the program did not end\n{self.said()}")

    def said(self) -> str:
        return self._log.read_text(errors="replace")


@pytest.fixture
def program(tmp_path: Path) -> Generator[Callable[..., Program]]:
    started: list[Program] = []

    def start(
        command: Sequence[str] = _PROGRAM, way: str = "wait", cluster: AnyCluster | None = None
    ) -> Program:
        started.append(Program(tmp_path, command, way, cluster))
        return started[-1]

    yield start
    for one in started:
        kill_session(one.pid)
        one.process.wait()


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


def _interrupt_group(running: Program) -> None:
    running.group(signal.SIGINT)


def _terminate_group(running: Program) -> None:
    running.group(signal.SIGTERM)


def _terminate(running: Program) -> None:
    os.kill(running.pid, signal.SIGTERM)


# A supervisor that knows the driver; ^C is what the next tests send.
_TELLING = ((_PROGRAM, _terminate),)
_WAYS = [
    pytest.param(
        command,
        send,
        marks=() if (command, send) in _TELLING else pytest.mark.slow,
        id=f"{Path(command[0]).name.partition('3')[0]}-{send.__name__.lstrip('_')}",
    )
    for command in (_PROGRAM, _SUBMITTED)
    for send in (_interrupt_group, _terminate, _terminate_group)
]


@pytest.mark.parametrize(("command", "send"), _WAYS)
@pytest.mark.only_proof
def test_a_signal_is_a_stop_with_a_last_checkpoint(
    spark: SparkSession,
    tmp_path: Path,
    program: Callable[..., Program],
    command: Sequence[str],
    send: Callable[[Program], None],
) -> None:
    """Sent to the group, or to the one process that a supervisor knows."""
    running = program(command)
    running.slots()
    send(running)
    assert (running.end(), "ended: stopped" in running.said()) == (0, True), running.said()
    assert "closed" in running.said()
    assert "Traceback" not in running.said(), running.said()
    assert_goes_on_exactly_once(spark, tmp_path)


@SLOWLY_ON_SPARK
def test_a_program_that_does_something_else_stops_as_well(
    cluster: AnyCluster, tmp_path: Path, program: Callable[..., Program]
) -> None:
    running = program(way="poll", cluster=cluster)
    running.slots()
    running.group(signal.SIGINT)
    assert (running.end(), "ended: stopped" in running.said()) == (0, True), running.said()
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
    cluster: AnyCluster, tmp_path: Path, program: Callable[..., Program], again: bool
) -> None:
    """A frozen slot keeps the last checkpoint from completing."""
    running = program(way="wait" if again else "impatient", cluster=cluster)
    with _frozen(running.slots()[0]):
        running.group(signal.SIGINT)
        running.await_said("stops with a last checkpoint")
        if again:
            time.sleep(SAME_SIGNAL_S + 0.1)
            running.group(signal.SIGINT)
        assert (running.end(), "ended: cancelled" in running.said()) == (0, True), running.said()
    why = "another SIGINT" if again else "not stopped within 5 s"
    assert f"{why}: job ledger is cancelled" in running.said()
    assert_goes_on_exactly_once(cluster, tmp_path)


@SLOWLY_ON_SPARK
@pytest.mark.only_proof
def test_process_1_of_a_container_stops_at_sigterm(
    cluster: AnyCluster, tmp_path: Path, program: Callable[..., Program]
) -> None:
    """The kernel keeps from process 1 all signals that it has no handler for."""
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("a process may not make a pid namespace here")
    running = program((*unshare, *_PROGRAM), cluster=cluster)
    running.slots()
    (first,) = children_of(running.pid)
    os.kill(first, signal.SIGTERM)
    assert (running.end(), "ended: stopped" in running.said()) == (0, True), running.said()
    assert_goes_on_exactly_once(cluster, tmp_path)


@pytest.mark.only_proof
def test_spark_that_is_stopped_under_a_job_ends_it_at_once_by_that_name(
    spark: SparkSession, tmp_path: Path, program: Callable[..., Program]
) -> None:
    running = program(way="spark_stop")
    running.slots()
    assert running.end() == 1
    assert "SparkStopped: Spark is gone" in running.said(), running.said()
    assert "NoneType" not in running.said(), running.said()
    assert_goes_on_exactly_once(spark, tmp_path)


@pytest.mark.slow  # as where Spark is stopped
def test_a_jvm_that_dies_ends_the_job_at_once_by_that_name(
    spark: SparkSession, tmp_path: Path, program: Callable[..., Program]
) -> None:
    running = program()
    running.slots()
    (jvm,) = children_of(running.pid)
    os.kill(jvm, signal.SIGKILL)
    assert running.end() == 1
    assert "SparkStopped: Spark is gone" in running.said(), running.said()
    assert_goes_on_exactly_once(spark, tmp_path)
