"""The schedules of `script/chaos`. Equal numbers draw equal schedules.

A schedule fixes the job and its faults with their moments. What a real machine does in between
stays different from run to run, so a schedule repeats the attack and not each interleaving.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from onceflow.core.crash_points import CRASH_POINTS, CrashPoint

TopicGraph: TypeAlias = Literal["running", "union", "join", "left-join"]
Graph: TypeAlias = Literal["running", "union", "join", "left-join", "changes"]
"""The last one copies a table of Postgres by its changes. The others read topics."""
Backend: TypeAlias = Literal["heap", "rocksdb"]

GRAPHS: tuple[Graph, ...] = ("running", "union", "join", "left-join", "changes")
PARALLELISM_MAX = 3
_FAULTS_MAX = 6
_FIRST_FAULT_S = 0.5
_PRODUCING_S = (8.0, 14.0)
_RECORDS = (8_000, 20_000)
_CHANGES = (2_000, 5_000)


class FaultKind(str, Enum):
    """The kinds of faults that `--kinds` names."""

    SLOTS = "slots"
    """SIGKILL of the process of one slot."""
    DRIVER = "driver"
    """SIGKILL of the driver, and a new driver a moment later."""
    TWO_DRIVERS = "two-drivers"
    """A second driver of the same job beside a living or frozen one, or both killed at once."""
    DATABASE = "database"
    """SIGKILL of the database server, and its start a moment later."""
    BROKER = "broker"
    """SIGKILL of the Kafka broker, and its start a moment later."""
    NETWORK = "network"
    """Connections to a server that are cut, refused, held or slowed by a proxy."""
    FROZEN = "frozen"
    """SIGSTOP of a slot, the driver or a server, and SIGCONT a moment later."""
    STORAGE = "storage"
    """Checkpoint storage in which calls fail, or that is full."""
    DISK = "disk"
    """A disk of checkpoints or scratch directories that is full, read-only, or fails."""
    CLOCK = "clock"
    """Wall clocks of the driver, of slots, or of both, that jump by an hour and back."""
    HOSTS = "hosts"
    """A host of a Spark cluster that is cut off, hears or reaches nobody, or has a bad cable."""
    POINTS = "points"
    """SIGKILL at each of up to three crash points of the code."""
    SAVEPOINT = "savepoint"
    """A stop with a savepoint, and a start with other slots on the other backend."""


class SinkKind(str, Enum):
    """The kinds of sinks, with the way in which they commit."""

    POSTGRES = "postgres"
    POSTGRES_LEDGER = "postgres-ledger"
    MYSQL = "mysql"
    MYSQL_LEDGER = "mysql-ledger"
    KAFKA = "kafka"
    FILES = "files"
    ICEBERG = "iceberg"

    @property
    def database(self) -> Literal["postgres", "mysql"] | None:
        """The database server that holds the rows, or None."""
        match self:
            case SinkKind.POSTGRES | SinkKind.POSTGRES_LEDGER:
                return "postgres"
            case SinkKind.MYSQL | SinkKind.MYSQL_LEDGER:
                return "mysql"
            case SinkKind.KAFKA | SinkKind.FILES | SinkKind.ICEBERG:
                return None


HOSTS = ("driver", "worker-1", "worker-1", "worker-2", "worker-2", "master")
"""The hosts whose cable may fail. Those of slots fail more often."""
DATABASE_SINKS = tuple(kind for kind in SinkKind if kind.database)
_SECOND_DRIVERS = ("beside a living one", "after a frozen one", "both killed")
_OVERTAKING: tuple[CrashPoint, ...] = ("overtaken", "persisted", "replayed")
_SAVEPOINT_POINTS: tuple[CrashPoint, ...] = (
    "saved", "collected", "finished", "imported", "copied", "restored",
)  # fmt: skip
# Crash points that a job without other splits and without Spark's batches can reach.
REACHABLE_POINTS: tuple[CrashPoint, ...] = (
    *CRASH_POINTS, "begun", *_OVERTAKING, *_SAVEPOINT_POINTS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come."""

    kind: FaultKind
    variant: str
    """The exact fault, such as the crash point, or the server and what its network does."""
    at_s: float
    """Seconds after the first record."""
    lasts_s: float
    """Seconds until it is healed. 0 if there is nothing to heal."""
    draw: int
    """A number that chooses among what is alive at that moment."""

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind.value} ({self.variant}) at {self.at_s:.1f} s{lasts}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole job with its faults."""

    seed: int
    kinds: tuple[FaultKind, ...]
    """The kinds from which the faults were drawn."""
    graph: Graph
    sinks: tuple[SinkKind, ...]
    unaligned: bool
    backend: Backend
    parallelism: int
    partitions: int
    interval_s: float
    records: int
    """The records of each topic, or the changes of the table."""
    accounts: int
    producing_s: float
    faults: tuple[Fault, ...]
    at_least_once: bool = False
    """A job that is allowed to double rows. Drawn by no seed: a test expects it to be caught."""
    broken: bool = False
    """A sink that loses rows. Drawn by no seed: a test expects it to be caught."""

    @property
    def needs_disks(self) -> bool:
        """True if a fault needs file systems of the schedule's own."""
        return any(f.kind is FaultKind.DISK or f.variant == "full" for f in self.faults)

    @property
    def needs_hosts(self) -> bool:
        """True if the job runs on a Spark cluster of several hosts."""
        return any(fault.kind is FaultKind.HOSTS for fault in self.faults)

    @property
    def needs_libraries(self) -> bool:
        """True if a fault needs a library that stands between processes and libc."""
        return any(fault.kind in {FaultKind.DISK, FaultKind.CLOCK} for fault in self.faults)

    def __str__(self) -> str:
        barriers = "unaligned" if self.unaligned else "aligned"
        cluster = " on hosts" if self.needs_hosts else ""
        sinks = " + ".join(kind.value for kind in self.sinks)
        given = f"{self.partitions} partitions, {self.records} records a topic"
        if self.graph == "changes":
            given = f"{self.records} changes"
        return (
            f"{self.graph} into {sinks}, {barriers}, {self.backend}, "
            f"{self.parallelism} slots{cluster}, {given}, checkpoints each {self.interval_s:.2f} s"
        )


def draw_schedule(seed: int, kinds: Sequence[FaultKind], *, has_mysql: bool = True) -> Schedule:
    """Return the schedule of `seed` with faults of these kinds.

    Consecutive seeds take the kinds in turn, so that a few schedules have a fault of each kind.
    """
    rng = random.Random(f"chaos {seed}")
    count = min(_FAULTS_MAX, max(3, len(kinds)))
    chosen = [kinds[(seed * count + number) % len(kinds)] for number in range(count)]
    graph = rng.choice(GRAPHS)
    needs_database = graph == "changes" or FaultKind.DATABASE in chosen
    sinks = _draw_sinks(rng, needs_database=needs_database, has_mysql=has_mysql)
    if graph == "changes":
        # The table's copy, and each change.
        sinks = (sinks[0], SinkKind.KAFKA)
    unaligned = rng.random() < 0.5
    producing_s = rng.uniform(*_PRODUCING_S)
    return Schedule(
        seed=seed,
        kinds=tuple(kinds),
        graph=graph,
        sinks=sinks,
        unaligned=unaligned,
        backend=rng.choice(("heap", "rocksdb")),
        parallelism=rng.randint(1, PARALLELISM_MAX),
        partitions=rng.randint(1, 4),
        interval_s=rng.choice((0.1, 0.25, 0.6, 1.2)),
        records=rng.randrange(*(_CHANGES if graph == "changes" else _RECORDS)),
        accounts=rng.choice((20, 200, 1_000)),
        producing_s=producing_s,
        faults=_draw_faults(rng, chosen, graph, sinks, producing_s, unaligned=unaligned),
    )


def _draw_sinks(
    rng: random.Random, *, needs_database: bool, has_mysql: bool
) -> tuple[SinkKind, ...]:
    possible = [kind for kind in SinkKind if has_mysql or kind.database != "mysql"]
    first = rng.choice([kind for kind in possible if kind.database] if needs_database else possible)
    if rng.random() < 0.5:
        return (first,)
    return (first, rng.choice(possible))


def _draw_faults(
    rng: random.Random,
    kinds: Sequence[FaultKind],
    graph: Graph,
    sinks: Sequence[SinkKind],
    producing_s: float,
    *,
    unaligned: bool,
) -> tuple[Fault, ...]:
    shuffled = list(kinds)
    rng.shuffle(shuffled)
    if shuffled.count(FaultKind.SAVEPOINT) > 1:
        shuffled = [*(set(shuffled) & {FaultKind.SAVEPOINT}), *_without_savepoints(shuffled)]
    moments = sorted(rng.uniform(_FIRST_FAULT_S, producing_s) for _ in shuffled)
    draw_variant = _variants(graph, sinks, unaligned=unaligned)
    faults: list[Fault] = []
    for at_s, kind in zip(moments, shuffled, strict=True):
        variant = draw_variant[kind](rng)
        faults.append(Fault(kind, variant, at_s, _draw_length(rng, kind), rng.randrange(1_000)))
    return tuple(faults)


def _without_savepoints(kinds: Sequence[FaultKind]) -> list[FaultKind]:
    return [kind for kind in kinds if kind is not FaultKind.SAVEPOINT]


def _draw_length(rng: random.Random, kind: FaultKind) -> float:
    match kind:
        case FaultKind.SLOTS | FaultKind.SAVEPOINT:
            return 0.0
        case FaultKind.POINTS:
            # The point stays armed for this long.
            return 6.0
        case FaultKind.STORAGE:
            # A call fails once, so the fault waits for a checkpoint. A full disk stays full.
            return rng.uniform(1.5, 6.0)
        case FaultKind.HOSTS:
            # The heartbeat timeout of the job lies in this range.
            return rng.uniform(1.5, 10.0)
        case FaultKind.DISK | FaultKind.CLOCK:
            return rng.uniform(1.5, 6.0)
        case FaultKind.DRIVER:
            return rng.uniform(0.0, 1.0)
        case FaultKind.FROZEN | FaultKind.TWO_DRIVERS:
            # The heartbeat timeout of the job lies in this range.
            return rng.uniform(0.5, 7.0)
        case FaultKind.DATABASE | FaultKind.BROKER | FaultKind.NETWORK:
            return rng.uniform(0.2, 3.0)


def _variants(
    graph: Graph, sinks: Sequence[SinkKind], *, unaligned: bool
) -> Mapping[FaultKind, Callable[[random.Random], str]]:
    of_sinks = {kind.database for kind in sinks if kind.database}
    databases = sorted(of_sinks | ({"postgres"} if graph == "changes" else set[str]()))
    servers = [*databases, "kafka"]
    points: list[str] = [*CRASH_POINTS]
    if unaligned:
        # More often than by their number: they lie on the rarest path.
        points += [*_OVERTAKING, *_OVERTAKING]
    if SinkKind.KAFKA in sinks:
        points += ["begun", "begun"]
    return {
        FaultKind.SLOTS: lambda rng: "kill",
        FaultKind.DRIVER: lambda rng: "kill",
        FaultKind.TWO_DRIVERS: lambda rng: rng.choice(
            ("beside a living one", "after a frozen one", "both killed")
        ),
        FaultKind.DATABASE: lambda rng: rng.choice(databases),
        FaultKind.BROKER: lambda rng: "kafka",
        FaultKind.NETWORK: lambda rng: (
            f"{rng.choice(servers)} {rng.choice(('cut', 'refuse', 'pause', 'delay'))}"
        ),
        FaultKind.FROZEN: lambda rng: rng.choice(("slot", "slot", "driver", *servers)),
        FaultKind.STORAGE: lambda rng: rng.choice(("fails", "full")),
        FaultKind.DISK: lambda rng: (
            f"{rng.choice(('checkpoints', 'scratch'))} "
            f"{rng.choice(('full', 'read-only', 'failing', 'failing'))}"
        ),
        FaultKind.CLOCK: lambda rng: (
            f"{rng.choice(('driver', 'slot', 'all'))} {rng.choice(('+3600', '-3600'))}"
        ),
        FaultKind.HOSTS: lambda rng: (
            f"{rng.choice(HOSTS)} {rng.choice(('cut', 'in', 'out', 'loss', 'delay', 'reorder'))}"
        ),
        FaultKind.POINTS: lambda rng: " ".join(rng.choices(points, k=3)),
        FaultKind.SAVEPOINT: lambda rng: rng.choice(("", *_SAVEPOINT_POINTS)) or "without a kill",
    }
