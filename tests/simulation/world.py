"""The world of one schedule: its size, its faults, its servers and its storage."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.simulation.clock import START_S, Clock, Network
from tests.simulation.directories import Directories
from tests.simulation.faults import FaultRates, StandStill, draw_loss, draw_stand_stills
from tests.simulation.oracle import Oracle
from tests.simulation.rarities import BUNDLE_S, Rarities
from tests.simulation.rewinds import RewindPoint, Rewinds, draw_silent
from tests.simulation.savepoints import Kept
from tests.simulation.slots import RULE, RULES
from tests.simulation.storage import Files, SharedLog
from tests.simulation.targets import Staged, Target, TwoPhase, Versioned
from tests.simulation.variant import Variant

from onceflow.core.protocol.checkpoints.alignment import AlignmentMode
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.schedule import CheckpointSettings
from onceflow.core.protocol.committables import CommitInterval, Committable
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.memory import ATTEMPTS_MAX
from onceflow.core.protocol.log.rules import AttemptClaimed, LogRecord
from onceflow.core.protocol.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
)

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


LONG_S = 1e6
LIFETIME_S = 1.5
"""The lifetime of attempts that all die soon: long enough for a checkpoint, not for all rows."""


@dataclass(frozen=True)
class Pipeline:
    """The sinks of the user's present program."""

    sinks: tuple[str, ...]
    retired: frozenset[str] = frozenset()
    """Sinks that write no more, and are handed over to be settled."""


@dataclass(frozen=True)
class Shape:
    """The size and the faults of one schedule; drawn from its seed."""

    partitions: int
    records: int
    keys: int
    parallelism: Sequence[int]
    """The parallelism of attempt 1, 2, … in turn: rescaling between attempts."""
    checkpoints: CheckpointSettings
    restart: RestartStrategy
    mode: AlignmentMode
    targets: Sequence[type[Target]]
    rates: FaultRates
    two_drivers: bool
    rolled_back_by_somebody: bool
    stops: bool
    manual: bool
    sets_clock: bool
    goes_back: bool
    """True if a database is restored from an older copy while the job is down."""
    grows: bool
    """True if partitions appear, and a source is added to the pipeline."""
    relay: bool
    """True if rows go through two exchanges."""
    credits: int
    """The credits of each channel."""
    wires: bool
    """True if rows are under way for a while."""
    slowness: float
    """The slowness of the readers of rows: over 1, the sources are held up."""
    row_s: float = 0.0
    """What each row takes besides, unless it is broadcast."""

    @classmethod
    def draw(cls, rng: random.Random) -> Shape:
        loss = draw_loss(rng)
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
            rates=FaultRates.draw(rng, loss),
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
    if _drawn_starving(seed):
        return CheckpointKind.SAVEPOINT
    rng = random.Random(f"savepoints {seed}")
    kinds = [kind for kind in CheckpointKind if kind.is_savepoint]
    drawn = rng.random() < 0.2
    return rng.choice(kinds) if drawn or Rewinds.draw(seed) else None


def _drawn_starving(seed: int) -> bool:
    """Return True if a relay waits for credits while a savepoint is requested; drawn apart, too."""
    return random.Random(f"starving 1 {seed}").random() < 0.01


def _starving(shape: Shape) -> Shape:
    """Return a shape where rows are so slow that savepoints fail while their barriers wait."""
    settings = replace(
        shape.checkpoints,
        interval_s=0.15,
        timeout_s=0.6,
        tolerable_failures=4,
        overtakes_after_s=0.0,
    )
    return replace(
        shape,
        checkpoints=settings,
        mode=AlignmentMode.ALIGNED,
        records=20,
        relay=True,
        credits=1,
        row_s=0.15,
    )


def _drawn_clock_work(seed: int) -> bool:
    """Drawn apart, as savepoints are, and only where there is one that it could contradict."""
    return bool(_drawn_saves(seed)) and random.Random(f"clock work {seed}").random() < 0.5


def _drawn_last_rows(seed: int) -> bool:
    """Drawn apart, as savepoints are."""
    return random.Random(f"last rows {seed}").random() < 0.25


def _impatient(seed: int, shape: Shape) -> Shape | None:
    """Return a shape where attempts die before they process what waits in channels.

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


def _standing(seed: int, shape: Shape) -> Shape:
    """Return a shape where wires stand still: checkpoints fail while their barriers travel."""
    rng = random.Random(f"shape of stand-stills {seed}")
    settings = replace(
        shape.checkpoints,
        timeout_s=1.0,
        tolerable_failures=rng.choice([1, 4]),
        overtakes_after_s=rng.choice([None, 0.0, 0.0, 0.05]),
    )
    if shape.mode is AlignmentMode.AT_LEAST_ONCE:
        settings = replace(settings, overtakes_after_s=None)
    parallelism = [max(2, number) for number in shape.parallelism]
    return replace(shape, checkpoints=settings, parallelism=parallelism, wires=True)


DECISIONS_MANY = ATTEMPTS_MAX + 2
"""More decisions of one attempt than the log remembers attempts."""


def _patient(seed: int, shape: Shape) -> Shape | None:
    """Return a shape where the first attempt decides so many checkpoints before anything fails."""
    drawn = random.Random(f"patience {seed}").random() < 0.008
    if not drawn or _drawn_saves(seed) or _impatient(seed, shape):
        return None
    rates = shape.rates
    return replace(
        shape,
        checkpoints=replace(shape.checkpoints, interval_s=0.1, timeout_s=1e6, min_pause_s=0.0),
        restart=FixedDelay(attempts=10, delay_s=0.1),
        records=max(shape.records, 20),
        rates=replace(rates, crash_rate=max(rates.crash_rate, 0.02), loss=0.0),
        slowness=1.0,
        stops=False,
        manual=False,
        two_drivers=False,
    )


@dataclass(frozen=True)
class Restoring:
    """The restores of the user, and starts from savepoints. They are drawn apart as well."""

    begins_after_s: float | None
    """The time from a savepoint to a start from it while the job runs; None: never."""
    takes_over: bool
    """True if that start overtakes the running driver; else the driver has died before it."""
    moves: bool
    """True if a job that was stopped with a savepoint begins from it in new storage."""
    goes_back_after_s: float | None
    """How long after a target was copied the job is killed and the copy put back; None: at the
    end of the job."""
    copied_in_doubt: int
    """How much is in doubt, at the least, when a target is copied, if that ever is so."""
    reuses_restored: bool
    """True if subtasks name the files that they have restored again: two may name one file."""

    @classmethod
    def draw(cls, seed: int) -> Restoring:
        rng = random.Random(f"restoring {seed}")
        return cls(
            begins_after_s=rng.choice([0.0, 0.1, 0.3]) if rng.random() < 0.4 else None,
            takes_over=rng.random() < 0.3,
            moves=rng.random() < 0.5,
            goes_back_after_s=rng.choice([0.1, 0.5, 2.0]) if rng.random() < 0.6 else None,
            copied_in_doubt=rng.choice([0, 0, 2, 4]),
            reuses_restored=rng.random() < 0.3,
        )


class Asking:
    """The user's requests at moments on which nothing else depends, drawn apart as well."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(f"wishes {seed}")
        self._is_drawn = rng.random() < 0.06
        self.cancels_after_s = rng.uniform(0.0, 2.0) if self._is_drawn else None
        """The time when the user cancels the job, which is started again; None: never."""
        self.slots_notice = self._is_drawn and rng.random() < 0.5
        """True if a slot's loss is noticed by its peers first."""

    def draw_start_s(self) -> float | None:
        """Return how long a slot takes to dial in, or to restore; None: no time."""
        return self._rng.uniform(0.0, 0.4) if self._is_drawn else None

    def wants_savepoint(self) -> bool:
        """Return whether the user asks for a savepoint now."""
        return self._is_drawn and self._rng.random() < 0.2


def _drawn_rules(seed: int) -> bool:
    """Return True if there is a broadcast stream; drawn apart, as savepoints are."""
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


def _drawn_interval(seed: int, sink_id: str) -> CommitInterval | None:
    """Draw the interval at which versions are made of several decisions.

    The number keeps it out of the schedules that `caught` names for what is rarely caught.
    """
    if random.Random(f"gathering 1433 {seed}").random() >= 0.25:
        return None
    rng = random.Random(f"gathering {seed} {sink_id}")
    return CommitInterval(*rng.choice([(2, None), (4, None), (None, 0.3), (3, 0.4)]))


class World:
    """Everything that one schedule runs in."""

    def __init__(self, seed: int, variant: Variant, calm_after_s: float) -> None:
        self.rng = random.Random(seed)
        self.variant = variant
        self.lifetime_s: float | None = None
        """After which each attempt loses a slot, also when faults have stopped."""
        self.stand_stills: tuple[StandStill, ...] = ()
        self.starves = _drawn_starving(seed) and variant.mode is None
        """True if rows take so long that savepoints are given up, and asked for again."""
        self.waits = False
        """True if sources stand still, and nothing goes wrong, until many decisions are made."""
        self.shape = shape = self._drawn_shape(seed)
        self.restoring = Restoring.draw(seed)
        self.asking = Asking(seed)
        self.rarities = Rarities.draw(seed)
        self.bundle_s = BUNDLE_S if self.rarities.bundles else 0.0
        """For how long the relay keeps rows at the most, to pass several on at once."""
        if self.starves:
            self.bundle_s = LONG_S
        self.records = shape.records
        self.alignment_mode = variant.mode or shape.mode
        self.clock = Clock(self.rng)
        self.files: Files = Files(self.clock)
        self.directories = Directories(seed)
        self.oracle = Oracle(self)
        self.log = SharedLog(self.clock, self._logged)
        self.log.overwrites = variant.overwrites
        self.network = Network(shape.rates.loss, shape.rates.doubling)
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
        self.targets = {name: self._target(seed, name, kind) for name, kind in kinds.items()}
        """The target of every sink that the job ever writes to, by sink id."""
        variant.prepare(self)
        if not self.waits:
            self._let_servers_fail()
        self.slots: list[Slot] = []
        self.finished = self.stopped = self.lost = False
        self.finished_by = 0
        """The attempt that has finished the job."""
        self.input_ends = not (shape.stops or shape.manual)
        """True if sources may come to their end: not before the user has got what was asked for."""
        self.claimed = 0
        self.went_back = False
        self.kept: Kept | None = None
        """The last savepoint."""
        self.rewinds = self._drawn_rewinds(seed)
        self.rewind_point: RewindPoint | None = None
        self.rewound: Kept | None = None
        """The savepoint from which the user starts with leave to go back; None: without leave."""
        self.has_gone_back = False
        self.silent = draw_silent(self)
        """The sinks whose targets do not tell what they have committed."""
        self.saves = _drawn_saves(seed)
        """The kind of savepoint that the user requests, if any."""
        self.works_by_clock = _drawn_clock_work(seed)
        """True if rows are made by the clock, too."""
        self.makes_last_rows = self.lifetime_s is None and _drawn_last_rows(seed)
        """True if rows are made at the end of the input, too: that takes another checkpoint."""
        self.begins_from_savepoint = False
        self.rolled_back: set[TransactionId] = set()
        """The transactions that somebody else has rolled back."""
        self._calm_after_s = calm_after_s
        self._calm_at = self.clock.now_s + calm_after_s

    def _drawn_shape(self, seed: int) -> Shape:
        shape = Shape.draw(self.rng)
        if self.variant.mode is not None:
            aligned = replace(shape.checkpoints, overtakes_after_s=None)
            shape = replace(shape, checkpoints=aligned)
        if self.starves:
            return _starving(shape)
        if impatient := _impatient(seed, shape):
            self.lifetime_s = LIFETIME_S
            shape = impatient
        elif stand_stills := draw_stand_stills(seed, START_S):
            self.stand_stills = stand_stills
            return _standing(seed, shape)
        if patient := _patient(seed, shape):
            self.waits = True
            shape = patient
        return shape

    def _drawn_rewinds(self, seed: int) -> Rewinds | None:
        """Return None, too, where a target has what it is put back to from elsewhere."""
        shape = self.shape
        others = shape.goes_back or shape.rolled_back_by_somebody or self.retirement is not None
        if others or self.waits or self.starves or self.lifetime_s is not None:
            return None
        return Rewinds.draw(seed)

    def _target(self, seed: int, sink_id: str, kind: type[Target]) -> Target:
        target = kind(self.clock, sink_id, self.oracle.committed)
        target.overtaken_rate = self.shape.rates.overtaken_commits
        if isinstance(target, Versioned):
            target.on_version = self.oracle.version
            target.interval = _drawn_interval(seed, sink_id)
        return target

    def retire(self) -> None:
        """The user changes the pipeline: whoever starts from now on starts with the new one."""
        assert self.retirement is not None
        gone, new = self.retirement.sink_id, self.retirement.successor
        kept = [new if sink_id == gone else sink_id for sink_id in self.pipeline.sinks]
        retired = frozenset({gone} if self.retirement.handed_over else ())
        self.pipeline = Pipeline(tuple(s for s in kept if s), retired)
        self.clock.say(f"{gone} is removed from the pipeline, which writes to {kept}")

    def decide_by_hand(self, target: Target, forgotten: Iterable[Committable]) -> None:
        """A person finds out what became of checkpoints that the log has forgotten."""
        for committable in forgotten:
            transaction = committable.transaction
            self.clock.say(f"a person decides what becomes of {transaction}")
            target.finish_by_hand(transaction, decided=self.oracle.stays_decided(transaction))

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
        return not self.waits and self.clock.now_s >= self._calm_at

    def _let_servers_fail(self) -> None:
        self.files.fault_rate = self.log.fault_rate = self.shape.rates.storage_faults
        self.log.slow_rate = self.rarities.slow_log
        for target in self.targets.values():
            target.fault_rate = self.shape.rates.database_faults
            target.slow_rate = self.shape.rates.slow_commits

    def calm_down(self) -> None:
        self.network.loss = self.network.doubling = 0.0
        self.files.fault_rate = self.log.fault_rate = self.log.slow_rate = 0.0
        for target in self.targets.values():
            target.fault_rate = target.slow_rate = 0.0

    def _logged(self, record: LogRecord) -> None:
        """The chain has one record more, whether or not anybody is told."""
        if isinstance(record, AttemptClaimed):
            self.claimed = max(self.claimed, record.attempt)
        self.oracle.appended(record)

    def stands_until_s(self, sender: int, receiver: int) -> float:
        """Return the time at which what slot `sender` sends slot `receiver` moves on."""
        return max(
            (
                still.ends_s
                for still in self.stand_stills
                if (still.sender, still.receiver) == (sender, receiver)
                and still.begins_s <= self.now_s < still.ends_s
            ),
            default=self.now_s,
        )

    @property
    def records_open(self) -> int:
        """The number of records of each partition that can be read now."""
        return self.records // 2 if self.waits else self.records

    def look(self) -> None:
        """Let faults begin where they have waited for many decisions."""
        if self.waits and len(self.oracle.decided) >= DECISIONS_MANY:
            self.clock.say(f"{DECISIONS_MANY} decisions are made")
            self.waits = False
            self._calm_at = self.clock.now_s + self._calm_after_s
            self._let_servers_fail()

    def move(self) -> None:
        """The user gives the job new storage: without its log, and without its files."""
        files, log = Files(self.clock), SharedLog(self.clock, self._logged)
        files.fault_rate, log.fault_rate = self.files.fault_rate, self.log.fault_rate
        log.overwrites, log.slow_rate = self.variant.overwrites, self.log.slow_rate
        self.files, self.log = files, log
        if self.kept is not None:
            self.oracle.moved(self.kept.savepoint.completed)
        self.clock.say("the job is given new storage")

    def draws_crash(self) -> bool:
        if self.waits:
            return False
        return not self.calm and self.rng.random() < self.shape.rates.crash_rate

    def log_fails(self) -> bool:
        return (
            not self.calm and not self.waits and self.rng.random() < self.shape.rates.storage_faults
        )

    def key_of(self, partition: str, offset: int) -> int:
        return (sum(map(ord, partition)) * 7 + offset * 3) % self.shape.keys
