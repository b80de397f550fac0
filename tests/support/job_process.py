"""A job in a process of its own, which a test looks at as its user does: by `onceflow status`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from onceflow.cli.jobs.client import Answer
from onceflow.cli.main import app

_REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 90.0


class JobProcess:
    """The job, whose checkpoints are in `directory`, and whose input ends at `directory`/end."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self.directory = directory
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """The process of the driver."""
        return self._process.pid

    def ask(self) -> Answer | None:
        """Return what `onceflow status --json` prints, or None if no driver answers yet."""
        storage = str(self.directory / "checkpoints")
        if not Path(storage).is_dir():
            return None
        result = CliRunner().invoke(app, ["status", "ledger", "--storage", storage, "--json"])
        answer: Answer | None = json.loads(result.stdout) if result.exit_code == 0 else None
        return answer

    def await_status(
        self, holds: Callable[[Answer], bool], *, timeout_s: float = TIMEOUT_S
    ) -> Answer:
        """Return the first status for which `holds` is true."""
        deadline = time.monotonic() + timeout_s
        status: Answer | None = None
        while True:
            status = self.ask() or status
            if status is not None and holds(status):
                return status
            assert self._process.poll() is None, (status, self._log_tail())
            assert time.monotonic() < deadline, (status, self._log_tail())
            time.sleep(0.1)

    def await_checkpoints(self, more: int) -> Answer:
        """Return the status once `more` further checkpoints are completed in a running job."""
        begun = self.await_status(lambda now: now["state"] == "running")
        least = begun["checkpoints_completed"] + more
        return self.await_status(
            lambda now: now["state"] == "running" and now["checkpoints_completed"] >= least
        )

    def finish(self) -> None:
        """End the input, and the job with it."""
        (self.directory / "end").touch()
        assert self.await_end() == 0, self._log_tail()

    def await_end(self) -> int:
        """Return the exit status of the driver's process."""
        return self._process.wait(TIMEOUT_S)

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


@contextmanager
def run_job(
    directory: Path, module: str, *arguments: str, prefix: Sequence[str] = ()
) -> Generator[JobProcess, None, None]:
    """Run `module`, a program of tests, with `directory` and `arguments`; kill it at the end.

    `prefix` is a command that runs another command.
    """
    log = directory / "driver.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, str(directory), *arguments],
            cwd=_REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield JobProcess(directory, process, log)
    finally:
        process.kill()
        process.wait(30)
