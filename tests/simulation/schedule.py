"""Runs one seeded schedule of faults to its end and says whether an invariant broke."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.simulation.clock import Violation
from tests.simulation.faults import Faults, Moments
from tests.simulation.job import Driver
from tests.simulation.older_copies import OlderCopy, check_kept_savepoint, check_older_copy
from tests.simulation.rarities import remembering
from tests.simulation.rewinds import may_go_back, put_targets_back
from tests.simulation.variant import Variant
from tests.simulation.world import World

from onceflow.core.errors import InvariantViolation, OnceflowError
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind

CALM_AFTER_S = 4.0
AGAIN_S = 0.7
"""How long after a savepoint the next one is asked for, where rows take long."""
LIMIT_S = 60.0
SLOW_LIMIT_S = 240.0
"""Where attempts die all the time, or the first one lives long."""


@dataclass(frozen=True)
class Outcome:
    """The end of one schedule; `violation` is empty if everything held."""

    seed: int
    violation: str
    trace: tuple[str, ...]
    decisions: int
    attempts: int
    lost: bool


def run_schedule(seed: int, variant: Variant) -> Outcome:
    """Run schedule `seed` under `variant`; the same seed gives the same run."""
    world = World(seed, variant, CALM_AFTER_S)
    supervisor = _Supervisor(world)
    violation = ""
    try:
        with remembering(world.rarities.attempts_remembered):
            supervisor.run_job()
            if not world.lost:
                supervisor.run_once_more()
        if not world.lost:
            world.oracle.ended()
            supervisor.start_from_older_storage()
        elif not (world.rolled_back or world.went_back):
            raise Violation("I2 rows are reported lost, and nobody has taken any away")
    except Violation as error:
        violation = str(error)
    except (InvariantViolation, OnceflowError, ValueError, KeyError) as error:
        violation = f"raised {type(error).__name__}: {error}"
    return Outcome(
        seed,
        violation,
        tuple(world.clock.trace),
        len(world.oracle.decided),
        world.claimed,
        world.lost,
    )


class _Supervisor:
    """Everybody outside: starts drivers, asks for things, and has faults injected."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._drivers: list[Driver] = []
        self._extra = world.shape.two_drivers
        now_s = world.now_s
        moments = Moments.draw(world)
        self._stop_at = moments.stop_at
        self._manual_at = moments.manual_at
        self._faults = Faults(world, moments, self._kill_all)
        self._retire_at = now_s + world.retirement.at_s if world.retirement else None
        self._save_at = now_s + 0.4 if world.saves else None
        self._begin_at: float | None = None
        """The time when the user starts from the last savepoint, while the job runs."""
        restoring = world.restoring
        self._begins = restoring.begins_after_s is not None and world.rewinds is None
        self._asked: set[tuple[Driver, CheckpointKind]] = set()
        self._cancel_at: float | None = None
        if world.asking.cancels_after_s is not None:
            self._cancel_at = now_s + world.asking.cancels_after_s
        self._manual_after: int | None = None
        self._older_copy: OlderCopy | None = None

    def run_job(self) -> None:
        """Run until the job is finished; what was stopped is started again."""
        self._watch()
        while True:
            self._run()
            if self._world.lost:
                return
            if self._goes_back_once_done():
                continue
            if not self._world.stopped:
                return
            self._stop_at = self._save_at = None
            self._world.begins_from_savepoint = self._world.kept is not None
            self._start_again()
            if self._world.restoring.moves and self._stands_alone():
                self._world.move()

    def _stands_alone(self) -> bool:
        """Return whether the job has ended with its last savepoint: then it needs no log."""
        kept = self._world.kept
        ends = (CheckpointKind.SAVEPOINT_STOP, CheckpointKind.SAVEPOINT_DRAIN)
        return (
            kept is not None
            and kept.savepoint.kind in ends
            and kept.savepoint.completed.attempt == self._world.finished_by
        )

    def _goes_back_once_done(self) -> bool:
        """Put the targets back to the savepoint, and start from it, if the user does so now."""
        world, point = self._world, self._world.rewind_point
        if world.rewinds is None or not world.rewinds.once_done or not point:
            return False
        if not may_go_back(world, point):
            return False
        self._stop_at = self._save_at = self._manual_at = None
        self._start_again()
        put_targets_back(world, point)
        return True

    def run_once_more(self) -> None:
        """Whatever the first run left behind, the next attempt puts right (I3, I9)."""
        self._world.clock.run(lambda: self._world.calm, LIMIT_S)
        self._save_at = None
        self._faults.end_growth()
        # What the log has settled it asks for no more: the user can drop it.
        self._world.pipeline = replace(self._world.pipeline, retired=frozenset())
        self._start_again()
        self._faults.put_copies_back()
        self._run()
        self._world.clock.run(lambda: False, 3.0)

    def start_from_older_storage(self) -> None:
        """Somebody starts the job from what is behind its targets; they say so."""
        if self._older_copy is not None:
            check_older_copy(self._world, self._older_copy)
        if self._world.kept is not None:
            check_kept_savepoint(self._world, self._world.kept)

    def _run(self) -> None:
        world = self._world
        hurried = world.lifetime_s is None and not (world.waits or world.starves)
        limit_s = LIMIT_S if hurried else SLOW_LIMIT_S
        if not world.clock.run(lambda: world.finished or world.lost, limit_s):
            raise Violation(f"I2 the job is not done after {limit_s:.0f} s")

    def _kill_all(self, why: str) -> None:
        for slot in self._world.slots:
            slot.kill(why)
        for driver in self._drivers:
            driver.kill(why)

    def _start_again(self) -> None:
        world = self._world
        self._kill_all("the job is done")
        self._extra = False
        if world.shape.grows:
            world.sources.setdefault("added", ["a0", "a1"])
        world.finished = world.stopped = False
        world.rewound = None

    # --- every tenth of a second -----------------------------------------------------------------

    def _watch(self) -> None:
        world = self._world
        world.look()
        if world.calm:
            world.calm_down()
        if self._retire_at is not None and world.now_s >= self._retire_at:
            self._retire()
        if not world.finished:
            self._begin_from_savepoint()
            self._start_drivers()
        self._ask()
        self._faults.inject()
        decided_by_copy = world.rarities.decided_by_copy
        if self._older_copy is None and len(world.oracle.decided) >= decided_by_copy:
            self._older_copy = OlderCopy.take(world)
        world.clock.after(0.1, self._watch)

    def _start_drivers(self) -> None:
        world = self._world
        alive = any(driver.alive for driver in self._drivers)
        if not alive or (self._extra and not world.calm and world.rng.random() < 0.05):
            self._extra = self._extra and not alive
            self._start_driver()

    def _begin_from_savepoint(self) -> None:
        """Start the job from its last savepoint, after the running driver has died or over it."""
        world = self._world
        if self._begins and world.kept is not None and self._begin_at is None:
            self._begin_at = world.now_s + (world.restoring.begins_after_s or 0.0)
        if not self._begins or self._begin_at is None or world.now_s < self._begin_at:
            return
        self._begins = False
        world.begins_from_savepoint = True
        world.clock.say("the user starts from the savepoint")
        if not world.restoring.takes_over:
            for driver in self._drivers:
                driver.kill("its machine is gone")
        self._start_driver()

    def _retire(self) -> None:
        """Start the job without a sink, after the running one or over it."""
        world = self._world
        self._retire_at = None
        world.retire()
        if not world.finished:
            if world.rng.random() < 0.5:
                for driver in self._drivers:
                    driver.kill("a new version takes its place")
            self._start_driver()

    def _start_driver(self) -> None:
        driver = Driver(self._world, f"d{len(self._drivers) + 1}")
        self._drivers.append(driver)
        driver.start()

    def _ask(self) -> None:
        """Ask every driver once: what it was asked it must not forget."""
        world = self._world
        if self._stop_at is not None and world.now_s >= self._stop_at:
            self._request(CheckpointKind.STOP)
        if self._manual_at is not None and world.now_s >= self._manual_at:
            if self._manual_after is None:
                self._manual_after = len(world.oracle.decided)
            self._request(CheckpointKind.MANUAL)
            if len(world.oracle.decided) > self._manual_after:
                self._manual_at = None
        if world.saves and self._save_at is not None and world.now_s >= self._save_at:
            self._request(world.saves)
            if world.starves and not world.calm:
                self._save_at = world.now_s + AGAIN_S
                self._asked.clear()
        self._ask_at_any_moment()
        asks = self._stop_at is not None or self._manual_at is not None
        world.input_ends = not asks and not world.waits

    def _ask_at_any_moment(self) -> None:
        world = self._world
        running = [driver for driver in self._drivers if driver.alive and not world.finished]
        asks = not (world.calm or world.waits) and world.lifetime_s is None
        if asks and world.asking.wants_savepoint():
            for driver in running:
                driver.request(CheckpointKind.SAVEPOINT)
        if self._cancel_at is not None and world.now_s >= self._cancel_at:
            self._cancel_at = None
            for driver in running:
                driver.cancel()

    def _request(self, kind: CheckpointKind) -> None:
        for driver in self._drivers:
            if driver.alive and (driver, kind) not in self._asked:
                self._asked.add((driver, kind))
                driver.request(kind)
