"""One attempt of a job: claim, recover, deploy, run the coordinator, end.

Runs on the job driver's own thread. Everything that happens elsewhere (slots, Spark, the user)
comes in as an event; the coordinator decides, and this file carries the decisions out. Nothing here
knows what a checkpoint means.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core import errors
from onceflow.core.crash_points import reach
from onceflow.core.errors import ConfigError, OnceflowError, SlotLost, StorageError
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.decisions import (
    AppendDecision,
    CheckpointFailed,
    CheckpointKind,
    Decision,
    DiscardState,
    FailAttempt,
    FinishJob,
    NotifyAbort,
    NotifyComplete,
    TriggerCheckpoint,
)
from onceflow.core.protocol.ids import GENESIS, CheckpointId, SubtaskRef
from onceflow.core.protocol.recovery import proofs_needed_from
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.runtime.chain_builder import SlotPlan
from onceflow.core.runtime.control_plane import (
    ControlEvent,
    SlotConnected,
    SlotGone,
    SlotLink,
    SlotSaid,
)
from onceflow.core.runtime.messages import (
    Abort,
    Acked,
    Cancel,
    CommittedThrough,
    Complete,
    Declined,
    Deploy,
    DriverMessage,
    Failed,
    Goodbye,
    Heartbeat,
    Running,
    SlotMessage,
    SourceExhausted,
    Stop,
    Trigger,
)
from onceflow.core.runtime.progress import Progress
from onceflow.core.runtime.restore import restored_operators
from onceflow.core.runtime.sink_recovery import RecoveryCounts, SinkRecovery
from onceflow.core.runtime.slot import versions
from onceflow.core.storage import ClaimedLog, JobStorage

_log = logging.getLogger("onceflow.runtime.attempt")


@dataclass(frozen=True, slots=True)
class StageEnded:
    """Spark's barrier stage is over."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The user asks for a checkpoint, or to stop with one."""

    kind: CheckpointKind


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The user asks to leave at once, without a checkpoint."""


AttemptEvent: TypeAlias = ControlEvent | StageEnded | CheckpointRequested | CancelRequested


class JobCancelled(OnceflowError):
    """Raised inside an attempt when the user has cancelled the job."""

    retry = "never"


@dataclass(frozen=True, slots=True)
class AttemptParts:
    """What an attempt is given by the job driver."""

    plan: SlotPlan
    log: ClaimedLog
    storage: JobStorage
    storage_token: str
    recovery: SinkRecovery
    restored: CompletedCheckpoint
    next_checkpoint: CheckpointId
    coordinator: Callable[[float], CheckpointCoordinator]
    """Builds the coordinator as of the time given, once every slot runs."""
    progress: Progress
    running: Callable[[], None]
    """Called once, when every slot runs."""


class Attempt:
    """Runs one attempt from the first slot's hello to its end."""

    def __init__(self, parts: AttemptParts, events: queue.SimpleQueue[AttemptEvent]) -> None:
        self._parts = parts
        self._plan = parts.plan
        self._events = events
        self._coordinator: CheckpointCoordinator | None = None
        self._links: dict[int, SlotLink] = {}
        self._running: set[int] = set()
        self._heard_at: dict[int, float] = {}
        self._beat_at = 0.0
        self._finished: FinishJob | None = None
        self._early: list[SlotSaid | CheckpointRequested] = []
        self._stopping: set[CheckpointId] = set()
        self._swept = False
        self._background = ThreadPoolExecutor(1, thread_name_prefix="driver background")
        self._recovered: Future[RecoveryCounts] | None = None

    def run(self) -> bool:
        """Run to the end; return True when the job is finished, False when it was stopped.

        Raises:
            OnceflowError: The attempt failed; `.retry` says whether another may be tried.
        """
        try:
            self._recovered = self._background.submit(self._recover)
            self._await_slots()
            self._deploy()
            self._await_running()
            return self._coordinate()
        finally:
            self._background.shutdown(wait=True, cancel_futures=True)

    def cancel(self, reason: str) -> None:
        """Tell every slot to leave at once."""
        self._send_all(Cancel(reason))

    # --- starting -----------------------------------------------------------------------------

    def _recover(self) -> RecoveryCounts:
        """Runs beside the slots' start: neither needs the other before deployment."""
        self._parts.recovery.check()
        return self._parts.recovery.recover(self._parts.restored)

    def _await_slots(self) -> None:
        deadline = time.monotonic() + self._plan.settings.start_timeout_s
        while len(self._links) < self._plan.parallelism:
            self._check_recovery(wait=False)
            self._next_event(deadline, f"{len(self._links)} of {self._plan.parallelism} slots up")
        self._parts.progress.slots_up()

    def _check_recovery(self, *, wait: bool) -> None:
        assert self._recovered is not None
        if wait or self._recovered.done():
            counts = self._recovered.result()
            self._parts.progress.recovered(counts.sinks)

    def _deploy(self) -> None:
        self._check_recovery(wait=True)
        plan, restored = self._plan, self._parts.restored
        addresses = tuple(self._links[slot].hello.data_address for slot in range(plan.parallelism))
        for slot, link in self._links.items():
            link.send(
                Deploy(
                    plan.attempt,
                    addresses,
                    restored.checkpoint,
                    self._parts.next_checkpoint,
                    restored_operators(plan.graph, restored, plan.parallelism, slot),
                )
            )
        self._parts.progress.deployed()

    def _await_running(self) -> None:
        deadline = time.monotonic() + self._plan.settings.start_timeout_s
        while len(self._running) < self._plan.parallelism:
            self._next_event(deadline, f"{len(self._running)} of {self._plan.parallelism} running")
        self._parts.progress.running()
        self._parts.running()

    # --- running ------------------------------------------------------------------------------

    def _coordinate(self) -> bool:
        self._coordinator = self._parts.coordinator(time.time())
        for event in self._early:
            self._on_event(event)
        while self._finished is None:
            self._carry_out(self._coordinator.tick(time.time()))
            if self._finished is None:
                self._next_event(None, "")
        self._say_stop()
        return self._finished.checkpoint not in self._stopping

    def _next_event(self, deadline: float | None, waiting_for: str) -> None:
        """Handle the next event, or return after the time until something else is due."""
        interval_s = self._plan.settings.heartbeat_interval_s
        wait_s = interval_s / 2
        wake_s = self._coordinator.next_wake_s() if self._coordinator else None
        if wake_s is not None:
            wait_s = max(0.0, min(wait_s, wake_s - time.time()))
        with contextlib.suppress(queue.Empty):
            self._on_event(self._events.get(timeout=wait_s))
        now = time.monotonic()
        if now - self._beat_at >= interval_s:
            self._beat_at = now
            self._send_all(Heartbeat(self._plan.attempt, -1))
            self._check_heartbeats(now)
        if deadline is not None and now > deadline:
            raise SlotLost(
                f"job {self._plan.job}: after {self._plan.settings.start_timeout_s:.0f} s only"
                f" {waiting_for}; are there {self._plan.parallelism} free task slots in the"
                " cluster, and can the executors reach the driver?"
            )

    def _check_heartbeats(self, now: float) -> None:
        timeout_s = self._plan.settings.heartbeat_timeout_s
        for slot, heard_at in self._heard_at.items():
            if now - heard_at > timeout_s:
                raise SlotLost(
                    f"slot {slot} (process {self._links[slot].hello.pid}) has been silent for"
                    f" {now - heard_at:.0f} s; heartbeat_timeout_s={timeout_s}"
                )

    def _on_event(self, event: AttemptEvent) -> None:
        match event:
            case SlotConnected(link):
                self._connected(link)
            case SlotSaid(slot, message):
                if message.attempt == self._plan.attempt:  # I7
                    self._heard_at[slot] = time.monotonic()
                    self._on_message(slot, message)
            case SlotGone(slot, attempt, reason):
                if attempt == self._plan.attempt and slot in self._links:
                    raise SlotLost(f"slot {slot} is lost: {reason}")
            case StageEnded(error):
                raise stage_error(error)
            case CheckpointRequested():
                if self._coordinator is None:
                    self._early.append(event)
                else:
                    self._carry_out(self._coordinator.request(event.kind, time.time()))
            case CancelRequested():
                raise JobCancelled(f"job {self._plan.job} was cancelled")

    def _connected(self, link: SlotLink) -> None:
        hello = link.hello
        if hello.attempt != self._plan.attempt:
            link.send(Cancel(f"attempt {hello.attempt} is over; {self._plan.attempt} runs"))
            return
        if hello.versions != versions():
            raise ConfigError(
                f"slot {hello.slot} on {hello.host} runs {hello.versions} and the driver runs"
                f" {versions()}; install the same versions on every executor"
            )
        if hello.storage_probe != self._parts.storage_token:
            raise ConfigError(
                f"slot {hello.slot} on {hello.host} does not see the checkpoint storage of the"
                f" driver ({self._parts.storage}): use a directory that every executor shares"
            )
        self._links[hello.slot] = link
        self._heard_at[hello.slot] = time.monotonic()
        self._parts.progress.slot_connected(hello)

    def _on_message(self, slot: int, message: SlotMessage) -> None:
        now_s = time.time()
        coordinator = self._coordinator
        match message:
            case Running():
                self._running.add(slot)
            case Failed():
                raise slot_error(message)
            case Heartbeat():
                self._parts.progress.heartbeat(message)
            case Goodbye():
                self._links.pop(slot, None)
            case _ if coordinator is None:
                # A slot that was deployed first may speak before the last one runs.
                self._early.append(SlotSaid(slot, message))
            case Acked(attempt, checkpoint, snapshot):
                self._parts.progress.acked(checkpoint, snapshot)
                self._carry_out(coordinator.acked(attempt, checkpoint, snapshot, now_s))
            case Declined(attempt, checkpoint, subtask, reason):
                self._carry_out(coordinator.declined(attempt, checkpoint, subtask, reason, now_s))
            case CommittedThrough(_, subtask, checkpoint, _):
                self._parts.progress.committed(subtask, checkpoint)
                self._carry_out(coordinator.committed(subtask, checkpoint, now_s))
            case SourceExhausted(_, subtask):
                self._carry_out(coordinator.source_exhausted(subtask, now_s))
            case _:
                pass

    # --- carrying decisions out ---------------------------------------------------------------

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case TriggerCheckpoint():
                    self._trigger(decision)
                case AppendDecision(completed):
                    self._append(completed)
                case NotifyComplete(checkpoint, oldest_retained):
                    self._after_complete(checkpoint, oldest_retained)
                case NotifyAbort(checkpoint, reason):
                    self._send_all(Abort(checkpoint, reason))
                case DiscardState(handles):
                    self._in_background(self._parts.storage.discard, handles)
                case CheckpointFailed(checkpoint, reason):
                    self._parts.progress.checkpoint_failed(checkpoint, reason)
                case FailAttempt(reason):
                    raise errors.CheckpointError(reason)
                case FinishJob():
                    self._finished = decision

    def _trigger(self, decision: TriggerCheckpoint) -> None:
        if decision.kind is CheckpointKind.STOP:
            self._stopping.add(decision.checkpoint)
        self._parts.progress.triggered(decision.checkpoint)
        barrier = Barrier(decision.checkpoint, decision.kind, decision.triggered_at_ms)
        self._send_all(Trigger(barrier))

    def _append(self, completed: CompletedCheckpoint) -> None:
        """Write the decision: the commit point of the whole job.

        When nobody knows whether it is in the log (`DecisionUnknown`), the attempt ends: the next
        one reads the log and knows.
        """
        assert self._coordinator is not None
        began = time.perf_counter()
        try:
            self._parts.log.append(completed)
        except StorageError as error:
            more = self._coordinator.append_failed(completed.checkpoint, str(error), time.time())
        else:
            reach("logged")
            append_ms = (time.perf_counter() - began) * 1000
            self._parts.progress.decided(completed, append_ms)
            more = self._coordinator.logged(completed.checkpoint, time.time())
        self._carry_out(more)

    def _after_complete(self, checkpoint: CheckpointId, oldest_retained: CheckpointId) -> None:
        assert self._coordinator is not None
        retained = self._coordinator.completed
        self._send_all(Complete(checkpoint, proofs_needed_from(retained)))
        # Records go before the files that they name: a crash in between leaves no dangling name.
        self._in_background(self._parts.log.prune, oldest_retained)
        if not self._swept and checkpoint > GENESIS:
            self._swept = True
            self._in_background(self._sweep_sinks, retained[-1])
            # A slot of an older attempt may have written after the sweep at the start.
            self._in_background(self._parts.storage.sweep, self._parts.log.view, self._plan.attempt)

    def _sweep_sinks(self, completed: CompletedCheckpoint) -> None:
        self._parts.progress.swept(self._parts.recovery.sweep(completed).sinks)

    def _in_background(self, work: Callable[..., object], *arguments: object) -> None:
        """Do `work`, which correctness does not wait for, on one other thread, in order."""

        def logged() -> None:
            try:
                work(*arguments)
            except Exception:
                _log.exception("cleaning up after job %s", self._plan.job)

        self._background.submit(logged)

    # --- ending -------------------------------------------------------------------------------

    def _say_stop(self) -> None:
        """Let every slot close in good order; a slot that does not is Spark's to kill."""
        self._send_all(Stop(f"job {self._plan.job} is done"))
        deadline = time.monotonic() + self._plan.settings.cancel_timeout_s
        while self._links and time.monotonic() < deadline:
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                continue
            match event:
                case SlotSaid(slot, Goodbye()) | SlotGone(slot):
                    self._links.pop(slot, None)
                case SlotSaid(message=Heartbeat() as last):
                    self._parts.progress.heartbeat(last)
                case StageEnded():
                    self._events.put(event)
                    return
                case _:
                    pass

    def _send_all(self, message: DriverMessage) -> None:
        for link in list(self._links.values()):
            link.send(message)


def subtasks_of(plan: SlotPlan) -> tuple[frozenset[SubtaskRef], frozenset[SubtaskRef]]:
    """Return (all subtasks, those that read a source) of an attempt."""
    chains = plan.graph.chains()
    everyone = frozenset(SubtaskRef(c.id, i) for c in chains for i in range(plan.parallelism))
    sources = {chain.id for chain in chains if chain.input is None}
    return everyone, frozenset(ref for ref in everyone if ref.chain in sources)


def slot_error(failed: Failed) -> OnceflowError:
    """Return the error that a slot reported, as its own class where there is one."""
    text = f"slot {failed.slot}: {failed.message}"
    known = getattr(errors, failed.error_class, None)
    if isinstance(known, type) and issubclass(known, OnceflowError):
        return known(text)
    return SlotLost(f"{text}\n{failed.trace}")


def stage_error(error: BaseException | None) -> OnceflowError:
    """Return the reason why Spark's stage ended before the job did."""
    if error is None:
        return SlotLost("every slot returned before the job was done")
    text = str(error)
    if "SPARK-24819" in text or ("barrier execution mode" in text and "slots" in text):
        return ConfigError(
            "Spark has too few free task slots for the pipeline's parallelism: " + text[:400]
        )
    return SlotLost(f"Spark ended the slots: {text[:2000]}")
