"""One schedule: a job over a source with splits, windows and sinks, killed and started again."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.simulation_runtime.cluster import SimulatedCluster
from tests.simulation_runtime.network import begin_network
from tests.simulation_runtime.oracle import Oracle
from tests.simulation_runtime.plan import Plan, RequestKind, Run, draw_plan
from tests.simulation_runtime.program import build_program
from tests.simulation_runtime.scheduler import Process, Scheduler, Violation, scheduling
from tests.simulation_runtime.shared import forget_shared
from tests.simulation_runtime.source import SimulatedSource
from tests.simulation_runtime.storage import SimulatedStorage
from tests.simulation_runtime.targets import Target

from onceflow import (
    Checkpointing,
    FixedDelay,
    HeapBackend,
    Job,
    JobState,
    JobStatus,
    Pipeline,
    RuntimeSettings,
)
from onceflow.core import errors
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.integration.traces.events import TracedStep, decode_event
from onceflow.integration.traces.rules import check_trace

STEPS_MAX = 100_000
ANSWER_MAX_S = 900.0
"""The time that the user waits for an answer to a request."""
ASK_AGAIN_S = 5.0
"""After this time the user asks again for a stop with a savepoint."""
_TARGETS = ("raw", "copy", "windows", "late")
_LOSS_NOTICED = (errors.DecisionForgotten, errors.PreparedTransactionLost, errors.StorageBehind)
"""The errors by which a job refuses to go on with a target that was put back."""
_MISTAKES = ("Violation", *(f"{kind}Error" for kind in ("Assertion", "Attribute", "Key", "Type")))
"""Parts of errors by which no fault of a plan can end an attempt."""


@dataclass(slots=True)
class Outcome:
    """The end of a schedule."""

    seed: int
    violation: str = ""
    trace: list[str] = field(default_factory=list[str])
    steps: int = 0
    attempts: int = 0
    kills: int = 0
    checkpoints: int = 0
    savepoints: int = 0
    aborted: int = 0
    """The number of checkpoints that were aborted."""
    rewinds: int = 0
    """The number of decisions by which the job has gone back to a savepoint."""
    put_back: int = 0
    refused: int = 0
    """The number of times that a loss in a target was noticed."""
    late: int = 0
    virtual_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RewindPoint:
    """A savepoint, and the targets when it was taken."""

    place: str
    targets: dict[str, tuple[Any, ...]]


class World:
    """Runs one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed + 1)
        self.run = Scheduler(self.rng, plan.pause_rate)
        self.cluster = SimulatedCluster(self.run)
        self.storage = SimulatedStorage(plan.inline_threshold_bytes, plan.declines)
        self.source = SimulatedSource(plan.splits, discovery_s=plan.discovery_s)
        self.targets = {
            name: Target(slowness_s, plan.failure_rate)
            for name, slowness_s in zip(_TARGETS, plan.slowness_s, strict=True)
        }
        self.outcome = Outcome(plan.seed)
        self._oracle = Oracle(plan, self.targets)
        self._job: Job | None = None
        self._driver: Process | None = None
        self._found: Violation | None = None
        self._state: JobState | None = None
        self._error: Exception | None = None
        self._late_request: RequestKind | None = None
        """The request of the user once the last checkpoint is triggered."""
        self._asking = 0
        """The number of requests of the user that are not answered."""
        self._savepoint: str | None = None
        """With which the last run has stopped."""
        self._backup: tuple[Target, tuple[Any, ...]] | None = None
        self._attempt = 0
        self._rewind_point: RewindPoint | None = None
        self._rewound_to: RewindPoint | None = None
        """The savepoint to which the job has gone back, or is to go back."""
        self._is_rewinding = False
        """True from the time when the targets are put back until the decision to go back."""
        self._before_rewind: dict[str, tuple[Any, ...]] = {}

    def run_all(self) -> Outcome:
        """Run the schedule; return how it ended."""
        begin_network()
        forget_shared()
        outcome = self.outcome
        logging.disable(logging.CRITICAL)
        try:
            with scheduling(self.run):
                try:
                    if self._run_drivers():
                        self._oracle.check_targets()
                    self._check_steps()
                except Violation as violation:
                    outcome.violation = str(violation)
                    outcome.trace = self.run.describe_trace()
                finally:
                    self.run.close()
        finally:
            logging.disable(logging.NOTSET)
        outcome.steps, outcome.late = self.run.steps, len(self.targets["late"].rows)
        outcome.virtual_s = self.run.now_s - 1_000
        return outcome

    def _check_steps(self) -> None:
        """Raise Violation if a process has taken a step that the protocol forbids."""
        trace: defaultdict[str, list[TracedStep]] = defaultdict(list)
        for process, line in self.run.steps_of_protocol:
            trace[process].append(decode_event(process, line))
        for broken in check_trace(trace, are_targets_put_back=self.outcome.put_back > 0):
            raise Violation(str(broken))

    # --- runs -----------------------------------------------------------------------------------

    def _run_drivers(self) -> bool:
        """Return whether the job has read all; if not, it has noticed a loss."""
        runs = list(self.plan.runs)
        for number, run in enumerate(runs):
            is_last = number >= len(self.plan.runs) - 1
            if run.rewinds and self._rewind_point is not None:
                self._rewind(self._rewind_point)
            driver = self._driver = Process(self.run, f"driver {number}")
            self._state = self._job = None
            self._asking = 0
            self.run.spawn(driver, driver.name, partial(self._drive, run))
            self._plan_faults(driver, run, is_last=is_last)
            self.run.run(partial(self._is_over, driver), STEPS_MAX)
            if self._found is not None:
                raise self._found
            if self._error is not None:
                if self.outcome.put_back and isinstance(self._error, _LOSS_NOTICED):
                    self.outcome.refused += 1
                    return False
                raise Violation(f"the job failed: {self._error!r}")
            # The program of the user ends with the job.
            self._kill(driver)
            self._put_back(run)
            if is_last and self._has_user_stopped():
                # The user has stopped it before its end, and starts it again.
                runs.append(replace(run, kills=(), requests=(), final_request=None))
        return True

    def _has_user_stopped(self) -> bool:
        return self._state is JobState.STOPPED

    def _plan_faults(self, driver: Process, run: Run, *, is_last: bool) -> None:
        now = self.run.steps
        if run.end == "kill":
            self.run.at_step(now + run.end_step, partial(self._kill, driver))
        elif run.end != "none":
            stop = partial(self._stop, run, waits=is_last)
            if is_last:
                self._spawn_user(driver, stop)
            else:
                step = now + run.end_step
                self.run.at_step(step, partial(self._spawn_user, driver, stop))
        self._late_request = run.final_request
        for step in run.kills:
            self.run.at_step(now + step, self._kill_slot)
        for step, kind in run.requests:
            ask = partial(self._spawn_user, driver, partial(self._request, kind))
            self.run.at_step(now + step, ask)
        if run.backup_step is not None:
            self.run.at_step(now + run.backup_step, self._back_up)

    def _is_over(self, driver: Process) -> bool:
        has_ended = self._state is not None and not self._asking
        return driver.is_dead or has_ended or self._found is not None

    def _drive(self, run: Run) -> None:
        savepoint = self._savepoint if run.begins_from_savepoint else None
        self._savepoint = None
        try:
            if self._rewound_to is not None and (self._is_rewinding or run.begins_from_savepoint):
                # A supervisor starts the driver again with the arguments of the rewind.
                status = self._wait_for_end(run, savepoint or self._rewound_to.place, rewinds=True)
            else:
                status = self._wait_for_end(run, savepoint)
        except Exception as error:
            self._error = error
            self._state = JobState.FAILED
            return
        self.run.note(f"the job is {status.state.value}")
        if run.end in {"savepoint", "drain"} and status.savepoints:
            self._savepoint = status.savepoints[-1].place
        self._state = status.state

    def _wait_for_end(self, run: Run, savepoint: str | None, *, rewinds: bool = False) -> JobStatus:
        self._job = self._build(run).start(from_savepoint=savepoint, allow_rewind=rewinds)
        try:
            return self._job.wait()
        except errors.SavepointRefused as error:
            # An attempt after that of the savepoint has ended the job.
            self.run.note(error)
            self._give_up_rewind()
            self._job = self._build(run).start()
            return self._job.wait()

    # --- what happens to it ---------------------------------------------------------------------

    def _kill(self, process: Process) -> None:
        if not process.is_dead:
            self.run.note(f"kill {process.name}")
            self.outcome.kills += process is not self._driver or self._state is None
            self.run.kill(process)

    def _kill_slot(self) -> None:
        alive = [process for process in self.cluster.slots if not process.is_dead]
        if alive:
            self._kill(self.rng.choice(alive))

    def _back_up(self) -> None:
        target = self.targets[self.rng.choice(_TARGETS)]
        self._backup = target, target.copy_state()

    def _put_back(self, run: Run) -> None:
        if self._backup is None or run.backup_step is None:
            return
        self._kill_slots()
        target, state = self._backup
        self._backup = None
        target.put_back(state)
        self.outcome.put_back += 1
        self.run.note("a target is put back")

    def _kill_slots(self) -> None:
        for process in self.cluster.slots:
            if not process.is_dead:
                self.run.kill(process)

    def _note_savepoint(self, event: Any) -> None:
        """Copy the targets, if none has committed more than the first savepoint knows of."""
        if self._rewind_point is not None or not any(run.rewinds for run in self.plan.runs):
            return
        cut = (self._attempt, event.checkpoint)
        proofs = [proof for target in self.targets.values() for proof in target.proofs]
        if all((proof.attempt, proof.checkpoint) <= cut for proof in proofs):
            states = {name: target.copy_state() for name, target in self.targets.items()}
            self._rewind_point = RewindPoint(event.place, states)

    def _rewind(self, point: RewindPoint) -> None:
        """Put all targets back to the time of `point`; the next start begins from there."""
        self._kill_slots()
        self._before_rewind = {name: target.copy_state() for name, target in self.targets.items()}
        for name, state in point.targets.items():
            self.targets[name].put_back(state)
        self._rewound_to, self._savepoint, self._is_rewinding = point, None, True
        self.run.note(f"all targets are put back to {point.place}")

    def _give_up_rewind(self) -> None:
        """Give the targets their newer states again, because the rewind is refused."""
        if self._is_rewinding:
            for name, state in self._before_rewind.items():
                self.targets[name].put_back(state)
        self._rewound_to, self._is_rewinding = None, False

    def _spawn_user(self, driver: Process, ask: Callable[[], None]) -> None:
        def ask_and_count() -> None:
            ask()
            self._asking -= 1

        if not driver.is_dead:
            self._asking += 1
            self.run.spawn(driver, "the user", ask_and_count)

    def _stop(self, run: Run, *, waits: bool) -> None:
        """Stop the job as the plan says; `waits`: once it has read all."""
        while self._job is None or (waits and not self._oracle.has_all_rows()):
            if self._state is not None:
                return
            self.run.sleep(0.1)
        with_savepoint = run.end in {"savepoint", "drain"}
        # A stop that follows a savepoint ends with the attempt, so the user asks again.
        timeout_s = ASK_AGAIN_S if with_savepoint else ANSWER_MAX_S
        while self._state is None:
            try:
                self._job.stop(timeout_s, savepoint=with_savepoint, drain=run.end == "drain")
            except errors.SavepointFailed as error:
                self.run.note(error)
            except TimeoutError as error:
                if not with_savepoint:
                    self._found = Violation(f"{run.end} was not answered: {error}")
            except errors.OnceflowError as error:
                self.run.note(error)
                return
            if self.source.bounded:
                return
            self.run.sleep(0.1)

    def _request(self, kind: RequestKind) -> None:
        while self._job is None:
            if self._state is not None:
                return
            self.run.sleep(0.1)
        self.run.note(f"the user asks for a {kind}")
        try:
            match kind:
                case "checkpoint":
                    self._job.checkpoint()
                case "stop":
                    self._job.stop(ANSWER_MAX_S)
                case "savepoint":
                    self._job.savepoint(timeout_s=ANSWER_MAX_S)
                    self.outcome.savepoints += 1
        except TimeoutError as error:
            self._found = Violation(f"a {kind} was not answered: {error}")
        except errors.OnceflowError as error:
            self.run.note(error)

    def _listen(self, event: Any, status: Any) -> None:
        del status
        name = type(event).__name__
        if name == "CheckpointCompleted":
            self.outcome.checkpoints += 1
        if name == "AttemptBegan":
            self.outcome.attempts += 1
            self._attempt = event.attempt
        if name == "CheckpointFailed":
            self.outcome.aborted += 1
        if name == "SavepointCompleted":
            self._note_savepoint(event)
        if self._is_rewinding and name in {"SavepointRestored", "CheckpointCompleted"}:
            self._is_rewinding = False
            self.outcome.rewinds += 1
            self._oracle.forget_event_time()
        if name in {"CheckpointCompleted", "AttemptBegan"} and not self._is_rewinding:
            self._check_decision()
        if name == "AttemptBegan":
            self._oracle.is_draining = False
        if name == "CheckpointTriggered" and event.kind is CheckpointKind.SAVEPOINT_DRAIN:
            self._oracle.is_draining = True
        if name == "CheckpointTriggered" and event.kind is CheckpointKind.FINAL:
            self._ask_late()
        if name == "AttemptEnded" and any(error in event.error for error in _MISTAKES):
            self._found = self._found or Violation(f"an attempt ended by {event.error}")
        if name not in {"SlotReported", "CheckpointAcked", "SubtaskCommitted"}:
            self.run.note(event)

    def _ask_late(self) -> None:
        kind = self._late_request
        if kind is not None and self._driver is not None:
            self._spawn_user(self._driver, partial(self._request, kind))

    def _check_decision(self) -> None:
        log = self._job and self._job._driver._context.owner.log  # pyright: ignore[reportPrivateUsage]
        try:
            if log:
                self._oracle.check_decision(log.view.completed[-1])
        except Violation as violation:
            # The product goes on whatever a listener raises.
            self._found = self._found or violation

    # --- the job --------------------------------------------------------------------------------

    def _build(self, run: Run) -> Pipeline:
        plan = self.plan
        pipeline = Pipeline(
            self.cluster,  # type: ignore[arg-type]
            name="job",
            parallelism=run.parallelism,
            max_parallelism=plan.max_parallelism,
            checkpointing=Checkpointing(
                self.storage,
                interval=plan.interval_s,
                retained=plan.retained,
                unaligned=plan.unaligned,
                tolerable_failures=plan.declines,
            ),
            state_backend=HeapBackend(),
            restart=FixedDelay(attempts=1_000, delay_s=0.1),
            settings=RuntimeSettings(
                stop_on_signals=False, poll_timeout_s=0.1, channel_batches=plan.channel_batches
            ),
            endpoint=None,
            listeners=(self._listen,),
        )
        build_program(pipeline, plan, self.source, self.targets)
        return pipeline


def run_schedule(seed: int, **changes: Any) -> Outcome:
    """Run the schedule of `seed`."""
    return World(replace(draw_plan(seed), **changes)).run_all()
