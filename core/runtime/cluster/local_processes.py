"""This machine as a cluster: each slot is a separate process, without Spark and its JVM."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError, OnceflowError, SettingsRefused, SlotLost
from onceflow.core.local_files import make_private_directory
from onceflow.core.runtime.cluster import process_host
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.slot.slot import run_slot

_log = logging.getLogger("onceflow.runtime.cluster")

_LOG_END_BYTES = 2000
"""The number of bytes at the end of a process's output that an error shows."""
_LAST_WORDS_S = 1.0
"""The time in which messages that a slot sent before its death arrive; see `LocalSlots._tell`."""


@check_fields
@dataclass(frozen=True, slots=True)
class LocalProcesses:
    """Runs the slots of a pipeline as processes of this machine: `Pipeline(LocalProcesses(), …)`.

    For tests, and for jobs that are small enough for one machine: no Spark session is needed and no
    JVM is started. Otherwise jobs run as on Spark: a slot is a process with a subtask of every
    chain, and it ends when its driver ends. If a slot is killed, another attempt follows.

    The stdout and stderr of slots go to `log_directory`, in one file per slot and attempt that only
    its owner may read. If `log_directory` is None, they go to the stderr of this process.
    """

    log_directory: str | Path | None = None

    @property
    def is_local(self) -> bool:
        """Always True: driver and slots share this machine."""
        return True

    @property
    def driver_host(self) -> str:
        """The loopback address."""
        return "127.0.0.1"

    def check(self, parallelism: int) -> None:
        """Start the host of processes. Returns at once."""
        del parallelism
        _host().begin()

    def check_alive(self) -> None:
        """Do nothing: this machine cannot be lost."""

    def await_slots(self, parallelism: int, timeout_s: float) -> None:
        """Return at once: there can be any number of processes."""

    def start(self, plan: AttemptPlan, ended: Callable[[OnceflowError], None]) -> LocalSlots:
        """Start a process for each slot; returns before they run."""
        return LocalSlots(plan, self.log_directory, ended)

    def take_signals(self) -> None:
        """Do nothing: slots are in a separate process group."""


class LocalSlots:
    """The processes of one attempt."""

    def __init__(
        self,
        plan: AttemptPlan,
        log_directory: str | Path | None,
        ended: Callable[[OnceflowError], None],
    ) -> None:
        self._plan = plan
        self._log_directory = Path(log_directory) if log_directory is not None else None
        self._ended = ended
        self._lost = False
        self._links: dict[process_host.Link, tuple[int, int]] = {}
        """The slot number and process id of each running process."""
        self._killed = threading.Event()
        name = f"slots of job {plan.job}, attempt {plan.attempt}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Kill every remaining process with SIGKILL."""
        self._killed.set()
        for _, pid in list(self._links.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of all processes; return True if they ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # Slots will need the same modules of onceflow as the driver: import them once in the host.
        imports = [name for name in list(sys.modules) if name.startswith(IMPORTED_BY_HOST)]
        try:
            for slot in range(self._plan.parallelism):
                if not self._killed.is_set():
                    self._start(slot, imports)
        except (process_host.ProcessKilled, OSError) as error:
            self._tell(SlotLost(f"a process could not be started: {error}"))
        while self._links:
            # A link is ready if it has a last message, or at its end: the process is over in both
            # cases.
            for link in wait(list(self._links)):
                self._on_word(link)  # type: ignore[arg-type]
        if not self._lost:
            self._ended(SlotLost("every slot returned before the job was done"))

    def _start(self, slot: int, imports: list[str]) -> None:
        log = 2
        if self._log_directory is not None:
            # Append: a job that starts again under the same attempt number keeps the older
            # output.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            log = os.open(self._log_path(self._log_directory, slot), flags, 0o600)
        try:
            pid, link = _host().start(
                _run_slot,
                self._plan,
                slot,
                imports=imports,
                log=log,
                timeout_s=self._plan.settings.start_timeout_s,
            )
        finally:
            if log != 2:
                os.close(log)
        self._links[link] = (slot, pid)

    def _on_word(self, link: process_host.Link) -> None:
        """Handle the last message of a process, then close its link."""
        slot, pid = self._links[link]
        try:
            word = link.recv()
        except (EOFError, OSError):
            how = f"its process {pid} {_host().how_ended(pid)}"
            _log.info("slot %d of job %s: %s", slot, self._plan.job, how)
            self._tell(SlotLost(f"slot {slot} is lost: {how}{self._end_of_log(slot)}"))
        else:
            match word:
                case process_host.Raised("ConfigError", text):
                    self._tell(ConfigError(text))
                case process_host.Raised("SettingsRefused", text):
                    self._tell(SettingsRefused(text))
                case process_host.Raised(kind, text):
                    self._tell(SlotLost(f"slot {slot} is lost: {kind}: {text}"))
                case process_host.Returned():
                    pass
                case other:
                    self._tell(SlotLost(f"slot {slot} is lost: its process says {other!r:.200}"))
        del self._links[link]
        link.close()

    def _tell(self, error: OnceflowError) -> None:
        """Tell the driver after a delay, so that the slot's own last messages arrive first."""
        if not self._lost:
            self._lost = True
            later = threading.Timer(_LAST_WORDS_S, self._ended, [error])
            later.daemon = True
            later.start()

    def _log_path(self, directory: Path, slot: int) -> Path:
        make_private_directory(directory)
        plan = self._plan
        return directory / f"{plan.job}-attempt-{plan.attempt}-slot-{slot}.log"

    def _end_of_log(self, slot: int) -> str:
        if self._log_directory is None:
            return ""
        path = self._log_path(self._log_directory, slot)
        with contextlib.suppress(OSError):
            text = path.read_bytes()[-_LOG_END_BYTES:].decode("utf-8", "replace").strip()
            return f"; {path} ends with:\n{text}" if text else ""
        return ""


IMPORTED_BY_HOST: tuple[str, ...] = ("onceflow.core.", "onceflow.sources.", "onceflow.sinks.")
"""The beginnings of the names of modules that the host imports if the driver has imported them."""
_HOSTS: list[process_host.ProcessHost] = []
_HOSTS_LOCK = threading.Lock()


def fork_own_host() -> None:
    """Fork this process into the host from which it later starts its slots.

    The process must have a single thread. A host that is a new program would have to import all
    modules again, which takes seconds of CPU time.
    """
    process_host.import_for_slots()
    host = process_host.ProcessHost.fork()
    host.close_at_exit()
    _HOSTS[:] = [host]


def _host() -> process_host.ProcessHost:
    """Return the host that starts the slots of all jobs of this process."""
    with _HOSTS_LOCK:
        if not _HOSTS:
            host = process_host.ProcessHost()
            host.close_at_exit()
            _HOSTS.append(host)
        return _HOSTS[0]


def _run_slot(link: process_host.Link, plan: AttemptPlan, slot: int) -> str:
    del link
    return run_slot(plan, slot)
