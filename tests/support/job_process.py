"""A job in a process of its own, which a test looks at as its user does: by `onceflow status`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.program import Program, python
from typer.testing import CliRunner

from onceflow.cli.jobs.client import Answer
from onceflow.cli.main import app

TIMEOUT_S = 90.0


class JobProcess(Program):
    """The job `ledger`, whose checkpoints are in `directory`, and whose input ends at its file end.

    `module` is a program of tests that takes `directory` and `arguments`. `prefix` is a command
    that runs another command.
    """

    def __init__(
        self, directory: Path, module: str, *arguments: str, prefix: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        command = (*prefix, *python("-m", module, directory, *arguments))
        super().__init__(directory / "driver.log", *command)

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
            assert self.poll() is None, (status, self.tail())
            assert time.monotonic() < deadline, (status, self.tail())
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
        assert self.wait(TIMEOUT_S) == 0, self.tail()
