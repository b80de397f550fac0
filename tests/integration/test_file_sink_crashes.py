"""Jobs killed with SIGKILL at every single step, and started again, leave each row there once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.file_sink_job import ALL_IDS, ROWS_A_CHECKPOINT
from tests.integration.file_sink_kit import S3Server, hidden_files, seen_ids

_PROGRAM = Path(__file__).with_name("file_sink_job.py")
_ROOT = _PROGRAM.parents[2]


class JobRunner:
    """The program that forks a process for each job."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])},
            text=True,
        )

    def run(
        self, url: str, options: dict[str, Any], log: Path, kill_at: int | str = 0
    ) -> tuple[int, int]:
        """Return the exit status of one job, and how many steps it took if it came to its end."""
        log.mkdir(exist_ok=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps([url, options, str(log), kill_at])}\n")
        self._process.stdin.flush()
        status, steps = json.loads(self._process.stdout.readline())
        return status, steps

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[JobRunner]:
    runner = JobRunner()
    yield runner
    runner.close()


class World:
    """Fresh targets and decision logs, one pair for each kill, and an eye on what readers see."""

    def __init__(self, runner: JobRunner, directory: Path, server: S3Server | None = None) -> None:
        self._runner = runner
        self._directory = directory
        self._server = server
        self.options = server.options if server else {}

    def url(self, name: object) -> str:
        return self._server.url(f"out-{name}") if self._server else str(self.out(name))

    def out(self, name: object) -> Path:
        return self._directory / f"out-{name}"

    def run(self, name: object, kill_at: int | str = 0) -> tuple[int, int]:
        log = self._directory / f"log-{name}"
        return self._runner.run(self.url(name), self.options, log, kill_at)

    def seen(self, name: object) -> list[int]:
        if self._server:
            return seen_ids(self.url(name).removeprefix("s3://"), self._server.file_system())
        return seen_ids(self.out(name))

    def steps(self) -> int:
        """Return how many steps a job takes that is not killed, whose rows are all seen."""
        status, steps = self.run("whole")
        assert status == 0
        assert self.seen("whole") == ALL_IDS
        return steps

    def kill_and_restart(self, name: object, kill_at: int | str, second_kill_at: int = 0) -> bool:
        """Kill a job at a step; readers then see the decided rows alone, and in the end each row.

        Returns True if the restarted job was killed, too. False: it had ended before that step.
        """
        status, _ = self.run(name, kill_at)
        assert status == -signal.SIGKILL, name
        log = self._directory / f"log-{name}"
        decided = len(list(log.glob("decision-*"))) * ROWS_A_CHECKPOINT
        found = self.seen(name)
        assert len(found) == len(set(found)), f"doubled while it was down, killed at {name}"
        assert set(found) <= set(ALL_IDS[:decided]), f"undecided is seen, killed at {name}"
        second_status = 0
        if second_kill_at:
            second_status, steps = self.run(name, second_kill_at)
            assert second_status == -signal.SIGKILL or steps < second_kill_at, name
        status, _ = self.run(name)
        assert status == 0, f"killed at {name}"
        assert self.seen(name) == ALL_IDS, f"killed at {name}"
        return second_status != 0


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.servers
def test_job_killed_at_steps_in_a_directory_writes_each_row_once(
    runner: JobRunner, tmp_path: Path, every: int
) -> None:
    """Every so many steps are tried; every third restart is killed as well, at another step."""
    world = World(runner, tmp_path)
    steps = world.steps()
    assert steps > 80
    killed_twice = 0
    for step in range(1, steps + 1, every):
        second_kill_at = 0 if step % 3 else step // 2 + 5
        killed_twice += world.kill_and_restart(step, step, second_kill_at)
        for below in ("open", "staged", "publishing", "aborting"):
            assert hidden_files(world.out(step), below) == [], f"left behind after step {step}"
    assert killed_twice > steps // every // 6, killed_twice


@pytest.mark.parametrize(
    "request_",
    [
        "/open/",
        "/staged/",
        "copy_object",
        "/committed/",
        "delete_object",
        "/pruned/",
    ],
)
def test_job_killed_before_a_request_to_s3_writes_each_row_once(
    runner: JobRunner, server: S3Server, tmp_path: Path, request_: str
) -> None:
    """`/committed/` is between the last copy and the proof: the copies are there already."""
    name = f"{request_.strip('/')}-{tmp_path.name}"
    World(runner, tmp_path, server).kill_and_restart(name, request_)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_job_killed_before_any_request_to_s3_writes_each_row_once(
    runner: JobRunner, server: S3Server, tmp_path: Path
) -> None:
    world = World(runner, tmp_path, server)
    steps = world.steps()
    killed_twice = sum(
        world.kill_and_restart(f"{step}-{tmp_path.name}", step, second_kill_at=step // 2 + 5)
        for step in range(1, steps + 1)
    )
    assert killed_twice > steps // 2, killed_twice
