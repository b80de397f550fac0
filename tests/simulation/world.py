"""What one schedule runs in: how big and how nasty it is, its servers and its storage."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.simulation.clock import Clock, Network
from tests.simulation.oracle import Oracle
from tests.simulation.savepoints import Kept
from tests.simulation.slots import RULE, RULES
from tests.simulation.storage import Files, SharedLog
from tests.simulation.targets import Staged, Target, TwoPhase, Versioned
from tests.simulation.variant import Variant

from onceflow.core.protocol.alignment import AlignmentMode
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log import AttemptClaimed, LogRecord
from onceflow.core.protocol.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
)
from onceflow.core.protocol.schedule import CheckpointSettings

if TYPE_CHECKING:
    from tests.simulation.slots import Slot

RESTARTS: tuple[RestartStrategy, ...] = (
    ExponentialDelay(initial_delay_s=0.1, max_delay_s=1.0, reset_after_s=1.0, attempts=3),
    ExponentialDelay(initial_delay_s=0.05, max_delay_s=0.5, same_mistakes=None),
    ExponentialDelay(initial_delay_s=0.05, max_delay_s=0.5, same_mistakes=2),
    FixedDelay(attempts=3, delay_s=0.1),
    FailureRate(failures=2, interval_s=2.0, delay_s=0.1),
    NoRestart(),
)


LIFETIME_S = 1.5
"""Of an attempt where all die soon: enough for a checkpoint, and not for all rows that wait."""


@dataclass(frozen=True)
class Pipeline:
    """What the user has written down by now, as far as it is about sinks."""

    sinks: tuple[str, ...]
    retired: frozenset[str] = frozenset()
    """Sinks that write no more, and are handed over to be settled."""


@dataclass(frozen=True)
class Shape:
    """How big and how nasty one schedule is; drawn from its seed."""

    partitions: int
    records: int
    keys: int
    parallelism: Sequence[int]
    """Of attempt 1, 2, … in turn: rescaling between attempts."""
    checkpoints: CheckpointSettings
    restart: RestartStrategy
    mode: AlignmentMode
    targets: Sequence[type[Target]]
    crash_rate: float
    loss: float
    doubling: float
    database_faults: float
    storage_faults: float
    slow_commits: float
    overtaken_commits: float
    slow_uploads: float
    two_drivers: bool
    rolled_back_by_somebody: bool
    stops: bool
    manual: bool
    sets_clock: bool
    goes_back: bool
    """Whether a database is restored from an older copy while the job is down."""
    grows: bool
    """Whether partitions appear, and a source is added to the pipeline."""
    relay: bool
    """Whether rows go through two exchanges."""
    credits: int
    """Of each channel."""
    wires: bool
    """Whether rows are under way for a while."""
    slowness: float
    """Of who takes rows: over 1 the sources are held up."""
    row_s: float = 0.0
    """What each row takes besides, unless it is broadcast."""

    @classmethod
    def draw(cls, rng: random.Random) -> Shape:
        loss = rng.choice([0.0, 0.0, 0.02, 0.1])
        manual = rng.random() < 0.2
        checkpoints = CheckpointSettings(
            interval_s=None if manual and rng.random() < 0.5 else 0.15,
            # What is never lost needs no timeout.
            timeout_s=1.0 if loss or rng.random() < 0.5 else 1e6,
            min_pause_s=rng.choice([0.0, 0.0, 0.05]),
            max_concurrent=rng.choice([1, 2, 3]),
            tolerable_failures=rng.choice([0, 2]),
            retained=rng.choice([1, 1, 2]),
            overtakes_after_s=rng.choice([None, None, 0.0, 0.0, 0.05]),
        )
        slowness = rng.choice([1.0, 1.0, 3.0])
        mode = AlignmentMode.ALIGNED
        if rng.random() < 0.05:
            mode = AlignmentMode.AT_LEAST_ONCE
            checkpoints = replace(checkpoints, overtakes_after_s=None)
        return cls(
            partitions=rng.randint(1, 3),
            records=rng.choice([4, 10, 20, 40]),
            keys=rng.randint(1, 6),
            parallelism=[rng.randint(1, 3) for _ in range(3)],
            checkpoints=checkpoints,
            restart=rng.choice(RESTARTS),
            mode=mode,
            targets=rng.choices([TwoPhase, Staged, Versioned], k=rng.choice([1, 1, 2])),
            crash_rate=rng.choice([0.0, 0.005, 0.02, 0.05]),
            loss=loss,
            doubling=rng.choice([0.0, 0.1]),
            database_faults=rng.choice([0.0, 0.0, 0.03, 0.1]),
            storage_faults=rng.choice([0.0, 0.0, 0.03]),
            slow_commits=rng.choice([0.0, 0.0, 0.3]),
            overtaken_commits=rng.choice([0.0, 0.2]),
            slow_uploads=rng.choice([0.0, 0.3, 0.6]),
            two_drivers=rng.random() < 0.25,
            rolled_back_by_somebody=rng.random() < 0.03,
            stops=rng.random() < 0.2,
            manual=manual,
            sets_clock=rng.random() < 0.2,
            goes_back=rng.random() < 0.1,
            grows=rng.random() < 0.3,
            relay=rng.random() < 0.3,
            credits=rng.choice([1, 2, 4]),
            wires=rng.random() < 0.3,
            slowness=slowness,
        )


def _drawn_saves(seed: int) -> CheckpointKind | None:
    """Drawn apart, so that a schedule without savepoints is what it is without them."""
    rng = random.Random(f"savepoints {seed}")
    kinds = [kind for kind in CheckpointKind if kind.is_savepoint]
    return rng.choice(kinds) if rng.random() < 0.2 else None


def _impatient(seed: int, shape: Shape) -> Shape | None:
    """Where attempts die too soon to work off what waits in channels; drawn apart, as savepoints.

    A savepoint takes as long as that does: who asks for one in every attempt gets nowhere.
    """
    drawn = random.Random(f"impatience {seed}").random() < 0.02
    settings = shape.checkpoints
    if not drawn or settings.overtakes_after_s is None or settings.interval_s is None:
        return None
    if _drawn_saves(seed):
        return None
    # Whoever dies needs no timeout, which would end even more attempts.
    settings = replace(settings, timeout_s=1e6)
    records = min(shape.records, 10)
    return replace(shape, checkpoints=settings, records=records, credits=4, row_s=0.2)


def _drawn_rules(seed: int) -> bool:
    """Whether there is a broadcast stream; drawn apart, as savepoints are."""
    return random.Random(f"rules {seed}").random() < 0.4


@dataclass(frozen=True)
class Retirement:
    """A sink that the user removes, or gives another sink id, while the job is up or down."""

    sink_id: str
    successor: str | None
    at_s: float
    handed_over: bool
    """At once: what is not is refused, as long as something may be in doubt."""


def _drawn_retirement(seed: int, sinks: Sequence[str]) -> Retirement | None:
    """Drawn apart, as savepoints are."""
    rng = random.Random(f"retirement {seed}")
    if rng.random() >= 0.25:
        return None
    sink_id = rng.choice(sinks)
    renamed = len(sinks) == 1 or rng.random() < 0.5
    at_s = rng.uniform(0.3, 2.5)
    return Retirement(sink_id, f"{sink_id}-new" if renamed else None, at_s, rng.random() < 0.5)


class World:
    """Everything that one schedule runs in."""

    def __init__(self, seed: int, variant: Variant, calm_after_s: float) -> None:
        self.rng = random.Random(seed)
        self.shape = shape = Shape.draw(self.rng)
        self.variant = variant
        if variant.mode is not None:
            aligned = replace(shape.checkpoints, overtakes_after_s=None)
            self.shape = shape = replace(shape, checkpoints=aligned)
        self.lifetime_s: float | None = None
        """After which each attempt loses a slot, also when faults have stopped."""
        if impatient := _impatient(seed, shape):
            self.shape, self.lifetime_s = impatient, LIFETIME_S
            shape = impatient
        self.records = shape.records
        self.alignment_mode = variant.mode or shape.mode
        self.clock = Clock(self.rng)
        self.files: Files = Files(self.clock)
        self.oracle = Oracle(self)
        self.log = SharedLog(self.clock, self._logged)
        self.log.overwrites = variant.overwrites
        self.network = Network(shape.loss, shape.doubling)
        self.sources = {"source": [f"p{number}" for number in range(shape.partitions)]}
        if _drawn_rules(seed):
            self.sources[RULES] = [RULE]
        self.tables = 1 + seed % 3
        """Into how many transactions a writer divides the rows of one pre-commit."""
        kinds = {f"sink{number}": kind for number, kind in enumerate(shape.targets)}
        self.pipeline = Pipeline(tuple(kinds))
        self.retirement = _drawn_retirement(seed, self.pipeline.sinks)
        if self.retirement and self.retirement.successor:
            kinds[self.retirement.successor] = kinds[self.retirement.sink_id]
        self.targets: dict[str, Target] = {}
        """By sink id, of every sink that the job ever writes to."""
        for sink_id, kind in kinds.items():
            target = kind(self.clock, sink_id, self.oracle.committed)
            target.fault_rate, target.slow_rate = shape.database_faults, shape.slow_commits
            target.overtaken_rate = shape.overtaken_commits
            if isinstance(target, Versioned):
                target.on_version = self.oracle.version
            self.targets[sink_id] = target
        variant.prepare(self)
        self.files.fault_rate = self.log.fault_rate = shape.storage_faults
        self.slots: list[Slot] = []
        self.finished = self.stopped = self.lost = False
        self.input_ends = not (shape.stops or shape.manual)
        """Whether sources may come to their end: not before the user has got what was asked for."""
        self.claimed = 0
        self.went_back = False
        self.kept: Kept | None = None
        """The last savepoint."""
        self.saves = _drawn_saves(seed)
        """What kind of savepoint the user asks for, if any."""
        self.begins_from_savepoint = False
        self.rolled_back: set[TransactionId] = set()
        """What somebody else has rolled back."""
        self._calm_at = self.clock.now_s + calm_after_s

    def retire(self) -> None:
        """The user changes the pipeline: whoever starts from now on starts with the new one."""
        assert self.retirement is not None
        gone, new = self.retirement.sink_id, self.retirement.successor
        kept = [new if sink_id == gone else sink_id for sink_id in self.pipeline.sinks]
        retired = frozenset({gone} if self.retirement.handed_over else ())
        self.pipeline = Pipeline(tuple(s for s in kept if s), retired)
        self.clock.say(f"{gone} is removed from the pipeline, which writes to {kept}")

    def hand_over(self) -> None:
        """The user does what the refused start has said."""
        assert self.retirement is not None
        retired = frozenset({self.retirement.sink_id})
        self.pipeline = replace(self.pipeline, retired=retired)

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @property
    def calm(self) -> bool:
        """Faults have stopped: from now on everything must come right."""
        return self.clock.now_s >= self._calm_at

    def calm_down(self) -> None:
        self.network.loss = self.network.doubling = 0.0
        self.files.fault_rate = self.log.fault_rate = 0.0
        for target in self.targets.values():
            target.fault_rate = target.slow_rate = 0.0

    def _logged(self, record: LogRecord) -> None:
        """The chain has one record more, whether or not anybody is told."""
        if isinstance(record, AttemptClaimed):
            self.claimed = max(self.claimed, record.attempt)
        self.oracle.appended(record)

    def draws_crash(self) -> bool:
        return not self.calm and self.rng.random() < self.shape.crash_rate

    def log_fails(self) -> bool:
        return not self.calm and self.rng.random() < self.shape.storage_faults

    def key_of(self, partition: str, offset: int) -> int:
        return (sum(map(ord, partition)) * 7 + offset * 3) % self.shape.keys
