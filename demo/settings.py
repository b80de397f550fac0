"""The settings of the demo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from onceflow.core.errors import ConfigError
from onceflow.integration.workload import Payments


class Backend(str, Enum):
    """The state backends."""

    HEAP = "heap"
    ROCKSDB = "rocksdb"


class SinkKind(str, Enum):
    """The kind of target that the job writes."""

    POSTGRES = "postgres"
    MYSQL = "mysql"
    MARIADB = "mariadb"
    KAFKA = "kafka"

    @property
    def target_kind(self) -> str:
        """The kind of target that holds the rows."""
        return "topic" if self is SinkKind.KAFKA else "table"

    @property
    def product(self) -> str:
        """Its name, as its makers spell it."""
        match self:
            case SinkKind.POSTGRES:
                return "Postgres"
            case SinkKind.MYSQL:
                return "MySQL"
            case SinkKind.MARIADB:
                return "MariaDB"
            case SinkKind.KAFKA:
                return "Kafka"


class StorageKind(str, Enum):
    """The kinds of checkpoint storage."""

    DIRECTORY = "directory"
    S3 = "s3"


class DemoCommitMode(str, Enum):
    """The way in which a database keeps rows between pre-commit and commit."""

    AUTO = "auto"
    TWO_PHASE = "two_phase"
    LEDGER = "ledger"


class KillKind(str, Enum):
    """The kind of process that is killed with SIGKILL."""

    SLOT = "slot"
    """The Python process of one slot."""
    WORKER = "worker"
    """All Python worker processes of one executor, and the daemon that forks them."""
    DRIVER = "driver"
    """The driver's Python process and its JVM; a new driver takes the job over."""
    EXECUTOR = "executor"
    """The JVM of one executor (runs Spark as local-cluster, so that there is one)."""
    POSTGRES = "postgres"
    """Every process of the database server, which is then started again."""
    MYSQL = "mysql"
    """The database server, which is then started again."""
    MARIADB = "mariadb"
    """The database server, which is then started again."""
    KAFKA = "kafka"
    """The broker, which is then started again; with --sink kafka it is the target too."""


DEFAULT_KILLS = (KillKind.SLOT, KillKind.WORKER, KillKind.DRIVER)
KILL_OF_DATABASE = {
    SinkKind.POSTGRES: KillKind.POSTGRES,
    SinkKind.MYSQL: KillKind.MYSQL,
    SinkKind.MARIADB: KillKind.MARIADB,
}
"""The kill that needs this sink; the broker is there with every sink."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The flags of `onceflow demo`, checked."""

    sink: SinkKind = SinkKind.POSTGRES
    commit_mode: DemoCommitMode = DemoCommitMode.AUTO
    records: int = 1_000_000
    accounts: int = 100_000
    partitions: int = 2
    parallelism: int = 2
    backend: Backend = Backend.HEAP
    kills: tuple[KillKind, ...] = DEFAULT_KILLS
    seed: int = 0
    interval_s: float = 1.0
    at_least_once: bool = False
    storage: StorageKind = StorageKind.DIRECTORY
    unaligned: bool = False
    move: bool = False
    """Whether the job is stopped with a savepoint after the kills, and goes on as `moved` says."""
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("records", "partitions", "parallelism"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be 1 or more, not {getattr(self, name)}")
        if self.interval_s <= 0 or self.timeout_s <= 0:
            raise ConfigError("--interval and --timeout must be positive")
        for sink, kill in KILL_OF_DATABASE.items():
            if kill in self.kills and sink is not self.sink:
                raise ConfigError(
                    f"--kill {kill.value} needs --sink {sink.value}: with --sink "
                    f"{self.sink.value} there is no {sink.product}"
                )
        if self.commit_mode is not DemoCommitMode.AUTO and (
            self.sink is SinkKind.KAFKA or self.at_least_once
        ):
            other = "--at-least-once" if self.at_least_once else "--sink kafka"
            raise ConfigError(
                f"--commit-mode {self.commit_mode.value} is how a database commits exactly once; "
                f"leave it out with {other}"
            )
        if self.unaligned and self.at_least_once:
            raise ConfigError(
                "--unaligned needs exactly once: with --at-least-once no barrier waits"
            )
        self.payments()

    def payments(self) -> Payments:
        """Return the workload."""
        return Payments(self.records, self.accounts, self.partitions, self.seed)

    @property
    def spark_master(self) -> str:
        """Spark in one JVM, or with executors of their own when one is to be killed."""
        if KillKind.EXECUTOR in self.kills:
            return f"local-cluster[{self.parallelism},1,1024]"
        return f"local[{self.parallelism}]"

    @property
    def moved(self) -> DemoSettings:
        """The same with one slot more, on the other backend."""
        other = Backend.HEAP if self.backend is Backend.ROCKSDB else Backend.ROCKSDB
        return replace(self, parallelism=self.parallelism + 1, backend=other)


def choose_kills(named: tuple[KillKind, ...], count: int | None) -> tuple[KillKind, ...]:
    """Return `count` kills out of `named` (or of the default kinds), repeated as often as needed.

    Without a count, each once.
    """
    kinds = named or DEFAULT_KILLS
    kill_count = len(kinds) if count is None else count
    if kill_count < 0:
        raise ConfigError(f"--kills must be 0 or more, not {kill_count}")
    return tuple(kinds[i % len(kinds)] for i in range(kill_count))
