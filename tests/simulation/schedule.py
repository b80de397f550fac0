"""Runs one seeded schedule of faults to its end and says whether an invariant broke."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.job import Driver
from tests.simulation.model import Violation
from tests.simulation.variant import Variant
from tests.simulation.world import World

from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.invariant import InvariantViolation

CALM_AFTER_S = 4.0
LIMIT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """How one schedule ended; `violation` is empty when everything held."""

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
        supervisor.run_job()
        if not world.lost:
            supervisor.run_once_more()
            world.check_end()
        elif not world.shape.rolled_back_by_somebody:
            raise Violation("I2 rows are reported lost, and nobody rolled back a transaction")
    except Violation as error:
        violation = str(error)
    except (InvariantViolation, OnceflowError, ValueError, KeyError) as error:
        violation = f"raised {type(error).__name__}: {error}"
    return Outcome(
        seed,
        violation,
        tuple(world.clock.trace),
        len(world.log.decided),
        max((slot.deploy.attempt for slot in world.slots), default=0),
        world.lost,
    )


class _Supervisor:
    """Starts drivers: the first, one after each that dies, sometimes one too many."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._drivers: list[Driver] = []
        self._extra = world.shape.two_drivers
        self._resting = False
        self._dba_at = (
            world.clock.now_s + world.rng.uniform(0.3, 2.0)
            if world.shape.rolled_back_by_somebody
            else None
        )

    def run_job(self) -> None:
        self._watch()
        done = self._world.clock.run(lambda: self._world.finished or self._world.lost, LIMIT_S)
        if not done:
            raise Violation(
                f"I2 the job is not done {LIMIT_S - CALM_AFTER_S:.0f} s after the last fault"
            )

    def run_once_more(self) -> None:
        """Whatever the first run left behind, the next attempt puts right (I3, I9)."""
        world = self._world
        for slot in world.slots:
            slot.kill("the job is done")
        for driver in self._drivers:
            driver.kill("the job is done")
        self._resting, self._extra = True, False
        world.clock.run(lambda: world.calm, LIMIT_S)
        self._resting = False
        world.finished = False
        if not world.clock.run(lambda: world.finished, LIMIT_S):
            raise Violation("I2 the job started once more does not finish")
        world.clock.run(lambda: False, 3.0)

    def _watch(self) -> None:
        world = self._world
        if world.calm:
            world.network.loss = world.network.doubling = world.database.fault_rate = 0.0
        alive = [driver for driver in self._drivers if driver.alive]
        for driver in self._drivers:
            if not driver.alive and driver.slots:
                # Its slots notice by the silence of the driver, each in its own time.
                for slot in driver.slots:
                    delay_s = world.rng.expovariate(1 / 0.2)
                    world.clock.after(delay_s, lambda s=slot: s.kill("driver lost"))  # type: ignore[misc]
                driver.slots = []
        if self._resting:
            alive = self._drivers[-1:]
        if not alive or (self._extra and not world.calm and world.rng.random() < 0.05):
            self._extra = self._extra and not alive
            driver = Driver(world, f"d{len(self._drivers) + 1}")
            self._drivers.append(driver)
            driver.start()
        if self._dba_at is not None and world.clock.now_s >= self._dba_at:
            self._roll_back_one()
        world.clock.after(0.1, self._watch)

    def _roll_back_one(self) -> None:
        """Somebody else rolls a prepared transaction back, behind everybody's back."""
        world = self._world
        if world.database.prepared:
            name = world.rng.choice(sorted(world.database.prepared))
            del world.database.prepared[name]
            world.rolled_back.add(name)
            world.clock.say(f"somebody rolls back {name}")
            self._dba_at = None
