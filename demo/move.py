"""The move in the middle of the demo: stop with a savepoint, go on elsewhere and otherwise.

It is done as a user does it, by `onceflow stop --savepoint` and a program started anew: with one
slot more, on the other state backend, and in storage that knows nothing of the first one's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from demo.driver import JOB, DemoDriver, JobSpec
from demo.settings import DemoSettings

from onceflow.core.errors import OnceflowError

_STOP_TIMEOUT_S = 180.0
_FRACTION = 0.7
"""Of the payments: what is killed is killed before these, and the rest comes after the move."""
_LOOK_INTERVAL_S = 0.05


class MoveFailed(OnceflowError):
    """Raised when the job could not be stopped with a savepoint."""

    domain = "external"
    retry = "never"


@dataclass(frozen=True, slots=True)
class DoneMove:
    """The move, as it was done."""

    savepoint: str
    at_s: float
    """Seconds since the job was started."""
    stopped_s: float
    """From asking until the first driver had ended."""
    parallelism: tuple[int, int]
    """Slots before and after."""
    backend: tuple[str, str]
    storage: tuple[str, str]


def records_before(settings: DemoSettings) -> int:
    """Return how many payments there are before the move; all, if there is none."""
    return int(settings.records * _FRACTION) if settings.move else settings.records


class Mover:
    """Moves the job once, when it may. `look` by the demo's loop, `released_records` by any."""

    def __init__(
        self,
        settings: DemoSettings,
        spec: JobSpec,
        driver: DemoDriver,
        say: Callable[[str], None],
    ) -> None:
        """Take what is to be moved; nothing is released beyond it until that is done."""
        self._settings = settings
        self._spec = spec
        self._driver = driver
        self._say = say
        self._began = time.monotonic()
        self.released_records = records_before(settings)
        self.done: DoneMove | None = None

    @property
    def finished(self) -> bool:
        """True if no move is left."""
        return self.done is not None or not self._settings.move

    @property
    def storages(self) -> tuple[str, ...]:
        """Every place where the job has had its checkpoints."""
        return self.done.storage if self.done else (self._spec.storage,)

    def look(self, *, kills_over: bool, committed_records: int) -> None:
        """Move the job if it is time; returns when its new driver has been started.

        Raises:
            MoveFailed: It could not be stopped with a savepoint; quotes what was said.
        """
        settings = self._settings
        early = 0 if settings.kills else self.released_records // 2
        if self.finished or not kills_over or committed_records <= early:
            return
        asked_at = time.monotonic()
        savepoint = self._stop()
        moved = settings.moved
        spec = replace(
            self._spec,
            spark_master=moved.spark_master,
            parallelism=moved.parallelism,
            backend=moved.backend.value,
            storage=f"{self._spec.storage}-moved",
            from_savepoint=savepoint,
        )
        self.done = DoneMove(
            savepoint,
            at_s=asked_at - self._began,
            stopped_s=time.monotonic() - asked_at,
            parallelism=(settings.parallelism, moved.parallelism),
            backend=(settings.backend.value, moved.backend.value),
            storage=(self._spec.storage, spec.storage),
        )
        self._say(f"{self.done.at_s:5.1f} s  {describe(self.done)}")
        self._driver.start_as(spec)
        self.released_records = settings.records

    def _stop(self) -> str:
        """Return the savepoint with which the job has stopped, its driver gone."""
        command = (sys.executable, "-m", "onceflow.cli.main", "stop", JOB, "--savepoint", "--json")
        storage = ("--storage", self._spec.storage, "--timeout", f"{_STOP_TIMEOUT_S:g}")
        try:
            asked = subprocess.run(
                (*command, *storage),
                capture_output=True,
                text=True,
                check=False,
                timeout=2 * _STOP_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise MoveFailed(f"onceflow stop --savepoint did not answer: {error}") from error
        if asked.returncode != 0:
            raise MoveFailed(
                f"onceflow stop --savepoint ended with status {asked.returncode}:"
                f" {asked.stdout}{asked.stderr}; the driver's log ends:\n{self._driver.log_tail()}"
            )
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while self._driver.exit_status is None:
            if time.monotonic() > deadline:
                raise MoveFailed(f"the driver that was stopped does not end: {self._driver.pid}")
            time.sleep(_LOOK_INTERVAL_S)
        savepoint: str = json.loads(asked.stdout.splitlines()[-1])["place"]
        return savepoint


def describe(move: DoneMove) -> str:
    """Return the move in words."""
    (slots, more), (backend, other) = move.parallelism, move.backend
    return (
        f"stopped with savepoint {move.savepoint} in {move.stopped_s:.1f} s: goes on with {more}"
        f" slots in place of {slots}, on {other} in place of {backend}, checkpoints in"
        f" {move.storage[1]}"
    )
