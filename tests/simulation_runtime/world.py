"""One schedule: a job over a source with splits, windows and sinks, killed and started again."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.simulation_runtime.cluster import SimulatedCluster, clear_programs
from tests.simulation_runtime.network import begin_network
from tests.simulation_runtime.oracle import DecisionOracle, check_targets
from tests.simulation_runtime.scheduler import Process, Scheduler, Violation, scheduling
from tests.simulation_runtime.source import RECORDS, Record, SimulatedSource, SplitRecords
from tests.simulation_runtime.storage import SimulatedStorage
from tests.simulation_runtime.targets import SimulatedSink, Target

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    Job,
    JobState,
    OutputTag,
    Pipeline,
    RuntimeSettings,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
    sum_,
)

STEPS_MAX = 400_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What a schedule is about."""

    seed: int
    splits: dict[str, SplitRecords]
    is_bounded: bool
    discovery_s: float | None
    parallelisms: tuple[int, ...]
    """One for each start of a driver."""
    max_parallelism: int
    interval_s: float
    retained: int
    unaligned: bool
    delay_s: float
    inline_threshold_bytes: int
    slowness_s: tuple[float, float, float]
    failure_rate: float
    kills: int
    pause_rate: float


@dataclass(slots=True)
class Outcome:
    """How a schedule ended."""

    seed: int
    violation: str = ""
    trace: list[str] = field(default_factory=list[str])
    steps: int = 0
    attempts: int = 0
    kills: int = 0
    checkpoints: int = 0
    late: int = 0
    virtual_s: float = 0.0


def draw_plan(seed: int) -> Plan:
    """Return the plan of `seed`."""
    rng = random.Random(seed)
    splits: dict[str, SplitRecords] = {}
    number = 0
    for name in range(rng.randint(1, 4)):
        at, appears_s = rng.randint(0, 500), 1_000.0
        records: list[Record] = []
        for _ in range(rng.randint(0, 14)):
            at += rng.choice((0, 1, 100, 400, 1_000 - at % 1_000, 999 - at % 1_000))
            appears_s += rng.choice((0.0, 0.01, 0.1, 0.3))
            age = rng.choice((0, 0, 0, 0, 0, 50, 2_000))
            time = None if rng.random() < 0.1 else at - age
            records.append(Record(number, rng.randint(0, 3), time, appears_s, age > 50))
            number += 1
        splits[f"split-{name}"] = SplitRecords(1_000.0, records)
    return Plan(
        seed=seed,
        splits=splits,
        is_bounded=True,
        discovery_s=None,
        parallelisms=tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3))),
        max_parallelism=rng.choice((3, 8, 128, 32_768)),
        interval_s=rng.choice((0.05, 0.2, 0.5)),
        retained=rng.randint(1, 2),
        unaligned=rng.random() < 0.3,
        delay_s=0.05,
        inline_threshold_bytes=rng.choice((0, 20_000)),
        slowness_s=tuple(rng.choice((0.0, 0.0, 0.02, 0.3)) for _ in range(3)),  # type: ignore[arg-type]
        failure_rate=rng.choice((0.0, 0.0, 0.1)),
        kills=rng.choice((0, 1, 1, 2, 3)),
        pause_rate=rng.choice((0.0, 0.05, 0.3)),
    )


class World:
    """Runs one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed + 1)
        self.run = Scheduler(self.rng, plan.pause_rate)
        self.cluster = SimulatedCluster(self.run)
        self.storage = SimulatedStorage(plan.inline_threshold_bytes)
        self.source = SimulatedSource(
            plan.splits, is_bounded=plan.is_bounded, discovery_s=plan.discovery_s
        )
        self.targets = {
            name: Target(slowness_s, plan.failure_rate)
            for name, slowness_s in zip(("raw", "copy", "windows"), plan.slowness_s, strict=True)
        }
        self.targets["late"] = Target()
        self.outcome = Outcome(plan.seed)
        self._records = [one for split in plan.splits.values() for one in split.records]
        self._oracle = DecisionOracle(plan.splits, round(plan.delay_s * 1_000))
        self._job: Job | None = None
        self._found: Violation | None = None
        self._state: JobState | None = None
        self._error: BaseException | None = None

    def run_all(self) -> Outcome:
        """Run the schedule; return how it ended."""
        begin_network()
        clear_programs()
        outcome = self.outcome
        logging.disable(logging.CRITICAL)
        try:
            with scheduling(self.run):
                try:
                    self._run_drivers()
                    check_targets(self._records, self.targets)
                except Violation as violation:
                    outcome.violation = str(violation)
                    outcome.trace = self.run.describe_trace()
                finally:
                    self.run.close()
        finally:
            logging.disable(logging.NOTSET)
        outcome.steps = self.run.steps
        outcome.virtual_s = self.run.now_s - 1_000
        return outcome

    def _run_drivers(self) -> None:
        for number, parallelism in enumerate(self.plan.parallelisms):
            is_last = number == len(self.plan.parallelisms) - 1
            driver = Process(self.run, f"driver {number}")
            self._state = None
            self.run.spawn(driver, driver.name, partial(self._drive, parallelism))
            if not is_last:
                step = self.run.steps + self.rng.randint(1, 2_000)
                self.run.at_step(step, partial(self._kill, driver))
            for _ in range(self.plan.kills):
                step = self.run.steps + self.rng.randint(1, 2_000)
                self.run.at_step(step, self._kill_slot)
            self.run.run(partial(self._is_over, driver), STEPS_MAX)
            if self._found is not None:
                raise self._found
            if self._error is not None:
                raise Violation(f"the job failed: {self._error!r}")
            if self._state is not None:
                return

    def _is_over(self, driver: Process) -> bool:
        return driver.is_dead or self._state is not None or self._found is not None

    def _drive(self, parallelism: int) -> None:
        self._job = self._build(parallelism).start()
        try:
            status = self._job.wait()
        except Exception as error:
            self._error = error
            self._state = JobState.FAILED
            return
        self.run.note(f"the job is {status.state.value}")
        self._state = status.state

    def _kill(self, process: Process) -> None:
        if not process.is_dead:
            self.run.note(f"kill {process.name}")
            self.outcome.kills += 1
            self.run.kill(process)

    def _kill_slot(self) -> None:
        alive = [process for process in self.cluster.slots if not process.is_dead]
        if alive:
            self._kill(self.rng.choice(alive))

    def _check_decision(self) -> None:
        log = self._job and self._job._driver._owner.log  # pyright: ignore[reportPrivateUsage]
        try:
            if log:
                self._oracle.check(log.view.completed[-1])
        except Violation as violation:
            # The product goes on whatever a listener raises.
            self._found = self._found or violation

    def _build(self, parallelism: int) -> Pipeline:
        plan = self.plan
        pipeline = Pipeline(
            self.cluster,  # type: ignore[arg-type]
            name="job",
            parallelism=parallelism,
            max_parallelism=plan.max_parallelism,
            checkpointing=Checkpointing(
                self.storage,
                interval=plan.interval_s,
                retained=plan.retained,
                unaligned=plan.unaligned,
            ),
            state_backend=HeapBackend(),
            restart=FixedDelay(attempts=1_000, delay_s=0.1),
            settings=RuntimeSettings(stop_on_signals=False, poll_timeout_s=0.1),
            endpoint=None,
            listeners=(self._listen,),
        )
        watermarks = WatermarkStrategy("at", max_out_of_orderness=plan.delay_s)
        records = pipeline.read(self.source, uid="records", watermarks=watermarks)
        records.write(self._sink("raw"), uid="raw")
        records.write(self._sink("copy"), uid="copy")
        timed = records.filter(_has_time, uid="timed")
        late = OutputTag("late", RECORDS)
        windows = timed.key_by("key").window(TumblingEventTimeWindows(1.0), late=late)
        counted = windows.aggregate(n=count(), ids=sum_("bit"), uid="counted")
        counted.write(self._sink("windows"), uid="windows")
        counted.side_output(late).write(self._sink("late"), uid="late")
        return pipeline

    def _sink(self, name: str) -> SimulatedSink:
        return SimulatedSink(self.targets[name])

    def _listen(self, event: Any, status: Any) -> None:
        del status
        name = type(event).__name__
        if name == "CheckpointCompleted":
            self.outcome.checkpoints += 1
            self._check_decision()
        if name == "AttemptBegan":
            self.outcome.attempts += 1
        if name not in {"SlotReported", "CheckpointAcked", "SubtaskCommitted"}:
            self.run.note(event)


def _has_time(record: Any) -> bool:
    return record["at"] is not None


def run_schedule(seed: int, **changes: Any) -> Outcome:
    """Run the schedule of `seed`."""
    return World(replace(draw_plan(seed), **changes)).run_all()
