"""The job of `page_job` in a process of its own, as a test of its page sees it."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.driver_process import DriverProcess

from onceflow.integration.servers.server import free_port

START_TIMEOUT_S = 90.0


class PageJobProcess(DriverProcess):
    """Runs the job at one port; started again, it listens there again, with another token."""

    def __init__(self, directory: Path, rows_per_s: int = 100, parallelism: int = 1) -> None:
        """Describe it; `start` runs it. By default it takes little of the processor."""
        super().__init__(directory)
        self._rows_per_s = rows_per_s
        self._parallelism = parallelism
        self._directory = directory
        self.storage = str(directory / "checkpoints")
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Run the job until it has completed a checkpoint in this attempt; no-op while it runs."""
        if self.starts == 0 or self.exit_status is not None:
            arguments = [str(self._directory), "--port", str(self._port)]
            arguments += ["--rows-per-second", str(self._rows_per_s)]
            arguments += ["--parallelism", str(self._parallelism)]
            self.launch("tests.support.page_job", arguments, {})
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._has_completed_a_checkpoint():
            assert self.exit_status is None, self.log_tail()
            assert time.monotonic() < deadline, self.log_tail()
            time.sleep(0.1)

    @property
    def token(self) -> str:
        """The token that the running driver has drawn at its start."""
        return (Path(self.storage) / "payments" / "driver.token").read_text(encoding="ascii")

    def get(self, path: str) -> dict[str, Any]:
        """Return what the driver says at `/v1/path`."""
        return self._ask(urllib.request.Request(f"{self.url}/v1/{path}"))

    def post(self, path: str) -> dict[str, Any]:
        """Ask the driver for something."""
        return self._ask(urllib.request.Request(f"{self.url}/v1/{path}", b"{}"))

    def slot_pids(self) -> list[int]:
        """Return the processes of the attempt that runs."""
        return [slot["pid"] for slot in self.get("overview")["slots"]]

    def _ask(self, request: urllib.request.Request) -> dict[str, Any]:
        request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=10) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def _has_completed_a_checkpoint(self) -> bool:
        # Before it answers, and while what a killed one left is in storage.
        with contextlib.suppress(OSError, urllib.error.URLError):
            now = self.get("overview")
            last = now["last_checkpoint"]
            attempt = now["attempt"]
            return now["state"] == "running" and bool(last) and last["attempt"] == attempt
        return False
