"""The interface of a contestant: its processes, which are started, struck and started again."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.support.program import Program

from benchmarks.scoreboard.records import RecordFormat
from onceflow.core.errors import OnceflowError
from onceflow.integration.faults import processes

RESTART_S = 1.0
"""The time after which the supervisor starts a process that has ended."""

Way = Literal["append", "upsert"]
Say = Callable[[str], None]


class NotRun(OnceflowError):
    """Raised when a contestant cannot be installed on this machine."""

    domain = "external"
    retry = "never"


@dataclass(frozen=True, slots=True)
class Place:
    """The servers and the directory of one run."""

    bootstrap_servers: str
    topic: str
    database_host: str
    database_port: int
    database: str
    directory: Path

    @property
    def url(self) -> str:
        """The URL of the database for libpq."""
        return f"postgresql://postgres@{self.database_host}:{self.database_port}/{self.database}"

    @property
    def jdbc_url(self) -> str:
        """The URL of the database for JDBC."""
        address = f"{self.database_host}:{self.database_port}"
        return f"jdbc:postgresql://{address}/{self.database}?user=postgres"


@dataclass(frozen=True, slots=True)
class Role:
    """A process of a contestant, which the supervisor starts again when it ends."""

    name: str
    command: Callable[[], Sequence[object]]
    """Returns the command of the next start."""
    environment: Mapping[str, str | None] = field(default_factory=dict[str, str | None])


class Deployment:
    """The processes of a contestant in one run, under a supervisor that starts them again.

    Subclasses with workers that are no roles of their own override `find_worker`.
    """

    replaces_frozen: bool = True
    """True if a second process may run beside a frozen one. False: the frozen one is killed."""

    def __init__(
        self, roles: Sequence[Role], directory: Path, *, coordinator: str, worker: str
    ) -> None:
        self._roles = {role.name: role for role in roles}
        self._directory = directory
        self._coordinator = coordinator
        self._worker = worker
        self._programs: dict[str, Program] = {}
        self._former: list[Program] = []
        self._restart_at: dict[str, float] = {}
        self.starts = 0

    def start(self) -> None:
        """Start every role."""
        for name in self._roles:
            self._start(name)

    def supervise(self) -> None:
        """Start roles again that have ended `RESTART_S` ago. Call it again and again."""
        for name, program in self._programs.items():
            if program.poll() is None:
                continue
            now = time.monotonic()
            if now >= self._restart_at.setdefault(name, now + RESTART_S):
                del self._restart_at[name]
                self._start(name)

    def find_worker(self) -> int | None:
        """Return the pid of a process that works on records, or None if there is none now."""
        program = self._programs[self._worker]
        return program.pid if program.poll() is None else None

    def kill_worker(self) -> bool:
        """SIGKILL a worker. Return False if there is none now."""
        pid = self.find_worker()
        return pid is not None and processes.kill_process(pid)

    def kill_coordinator(self) -> bool:
        """SIGKILL the coordinator with its JVM, and leave its workers to find out."""
        program = self._programs[self._coordinator]
        if program.poll() is not None:
            return False
        victims = (program.pid, *self._find_jvms(program.pid))
        for victim in victims:
            processes.kill_process(victim)
        return True

    def freeze(self) -> Callable[[], None] | None:
        """SIGSTOP the role that works, and return what thaws it, or None if it does not run.

        The supervisor starts another process in its place at once.
        """
        program = self._programs[self._worker]
        if program.poll() is not None:
            return None
        processes.pause_tree(program.pid)
        if not self.replaces_frozen:
            return program.kill_tree
        self._former.append(program)
        self._start(self._worker)

        def thaw() -> None:
            processes.unpause_tree(program.pid)

        return thaw

    def end(self) -> None:
        """SIGKILL everything that is left."""
        for program in (*self._programs.values(), *self._former):
            processes.kill_tree(program.pid)
            program.end()

    def log_tail(self) -> str:
        """Return the end of each role's log."""
        return "\n".join(
            f"--- {name}\n{program.tail()[-1500:]}" for name, program in self._programs.items()
        )

    def _find_jvms(self, pid: int) -> tuple[int, ...]:
        return ()

    def _start(self, name: str) -> None:
        previous = self._programs.get(name)
        if previous is not None and previous not in self._former:
            self._former.append(previous)
        role = self._roles[name]
        self.starts += 1
        self._programs[name] = Program(
            self._directory / f"{name}.log", *role.command(), environment=role.environment
        )


class Contestant(ABC):
    """One row of the table: an engine with one way to write."""

    name: str
    """The name that `--only` takes."""
    engine: str
    """The engine with its version."""
    sink: str
    """The sink and its way to write."""
    way: Way
    """"append": the table of payments has no unique key. "upsert": its id is the primary key."""
    settings: tuple[str, ...]
    links: tuple[str, ...]
    """Pages of the engine's documentation from which the settings are."""
    claim: Literal["exactly once", "at least once", "at least once, effectively once by key"]
    """The guarantee that the documentation gives for rows in the database."""
    record_format: RecordFormat = "json"
    no_totals: str = ""
    """The reason why the contestant writes no totals, or empty."""

    @abstractmethod
    def install(self, say: Say) -> None:
        """Install the engine, once on this machine.

        Raises:
            NotRun: The engine cannot be installed here.
        """

    @abstractmethod
    def deploy(self, place: Place) -> Deployment:
        """Return the processes of a run. `Deployment.start` starts them."""
