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
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TypeAlias

from typing_extensions import assert_never

from onceflow.core import errors
from onceflow.core.crash_points import reach
from onceflow.core.errors import CommitFailed, MessageCorrupt, SlotLost, StorageError
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.decisions import (
    AbortSavepoint,
    AppendDecision,
    CheckpointKind,
    CountFailure,
    Decision,
    DiscardState,
    FailAttempt,
    FinishJob,
    NotifyAbort,
    NotifyComplete,
    TriggerCheckpoint,
    WriteSavepoint,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.messages import (
    Acked,
    CommittedThrough,
    Complete,
    Declined,
    Deploy,
    Failed,
    GloballyCommitted,
    Heartbeat,
    Hello,
    Running,
    Shutdown,
    SlotClosed,
    SlotMessage,
    SourceExhausted,
)
from onceflow.core.protocol.recovery import retain_ledger_from
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.runtime.driver.attempt_context import (
    AppendEnded,
    AttemptContext,
    AttemptEvent,
    BlockersListed,
    CancelRequested,
    CheckpointRequested,
    DiscoveryAnswered,
    GlobalCommitEnded,
    JobCancelled,
    RecoveryEnded,
    SavepointRequested,
    SavepointWritten,
    SlotsEnded,
)
from onceflow.core.runtime.driver.background import Background, CheckpointsCleaner
from onceflow.core.runtime.driver.global_commits import GlobalCommits, committer_ref
from onceflow.core.runtime.driver.job_events import (
    AttemptRunning,
    CheckpointAcked,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointTriggered,
    RecoveredSink,
    SavepointCompleted,
    SinksRecovered,
    SlotJoined,
    SlotLeft,
    SlotReported,
    SlotsDeployed,
    SlotsJoined,
    SplitsDiscovered,
    StateDropped,
    SubtaskCommitted,
)
from onceflow.core.runtime.driver.restore import restored_slots
from onceflow.core.runtime.driver.savepoints import text_of
from onceflow.core.runtime.driver.sink_blockers import BlockerMonitor
from onceflow.core.runtime.driver.slot_pool import SlotPool, cause_of
from onceflow.core.runtime.driver.source_lag import LagMonitor
from onceflow.core.runtime.driver.source_splits import SplitDiscovery
from onceflow.core.runtime.transport.control_plane import (
    SlotConnected,
    SlotGone,
    SlotLink,
    SlotSaid,
)

_log = logging.getLogger("onceflow.runtime.attempt")
_Deferred: TypeAlias = (
    SlotSaid | CheckpointRequested | SavepointRequested | SavepointWritten | GlobalCommitEnded
)


class Attempt:
    """Runs one attempt from the first slot's hello to its end."""

    def __init__(self, context: AttemptContext, events: queue.SimpleQueue[AttemptEvent]) -> None:
        self._context = context
        self._publish = context.publish
        self._plan = context.plan
        self._events = events
        self._coordinator: CheckpointCoordinator | None = None
        self._slots = SlotPool(context.plan, context.storage, context.storage_token)
        self._running: set[int] = set()
        self._finished: FinishJob | None = None
        self._deferred: deque[
            SlotSaid
            | CheckpointRequested
            | SavepointRequested
            | SavepointWritten
            | GlobalCommitEnded
        ] = deque()
        """What the coordinator is told as soon as it listens."""
        self._appending = False
        self._stopping: set[CheckpointId] = set()
        self._background = Background("driver background")
        self._appender = Background("decision log")
        self._savepoint_writer = Background("savepoints")
        self._recovered: Future[tuple[RecoveredSink, ...]] | None = None
        self._sinks_agree = False
        self._cleaner = CheckpointsCleaner(context, self._background)
        self._global_commits = GlobalCommits(context, events.put)
        self._discovery = SplitDiscovery(context, events.put, time.monotonic())
        self._lag = LagMonitor(context.graph, context.publish)
        self._blockers = BlockerMonitor(context, events.put)

    def run(self) -> bool:
        """Run to the end; return True when the job is finished, False when it was stopped.

        Raises:
            OnceflowError: The attempt failed; `.retry` says whether another may be tried.
        """
        self._recovered = self._background.submit(self._recover)
        self._recovered.add_done_callback(lambda _: self._events.put(RecoveryEnded()))
        self._await_slots()
        self._await_recovery()
        self._deploy()
        self._await_running()
        return self._coordinate()

    def cancel(self, reason: str) -> None:
        """Tell every slot to leave at once."""
        self._slots.send_all(Shutdown(reason))

    def unfulfilled(self) -> frozenset[CheckpointKind]:
        """Return what the user asked for and this attempt, now ended, has not brought about."""
        asked = frozenset(e.kind for e in self._deferred if isinstance(e, CheckpointRequested))
        return asked | self._coordinator.requested if self._coordinator else asked

    def unheard(self) -> tuple[SavepointRequested, ...]:
        """Return the requests for savepoints of which the coordinator was not told."""
        return tuple(e for e in self._deferred if isinstance(e, SavepointRequested))

    def close(self) -> None:
        """End what runs beside the attempt, and its committers.

        A committer that hangs is left to itself: this attempt commits and aborts nothing that the
        next one would not. Nor does an append that hangs: it loses against the next claim, or the
        next attempt reads what it has appended.
        """
        self._lag.close()
        self._appender.end(lambda: None, self._plan.settings.cancel_timeout_s)
        self._savepoint_writer.end(lambda: None, self._plan.settings.cancel_timeout_s)
        for uid in self._global_commits.close(self._plan.settings.cancel_timeout_s):
            _log.warning("attempt %d is over and waits for %s", self._plan.attempt, uid)
        if not self._background.end(
            self._context.recovery.close, self._plan.settings.cancel_timeout_s
        ):
            step = self._context.recovery.step.text
            _log.warning("attempt %d is over and waits for %s", self._plan.attempt, step)

    def _recover(self) -> tuple[RecoveredSink, ...]:
        """Runs beside the slots' start: neither needs the other before deployment."""
        self._context.recovery.open()
        return self._context.recovery.recover(self._context.restored)

    def _await_slots(self) -> None:
        deadline = time.monotonic() + self._plan.settings.start_timeout_s
        while len(self._slots) < self._plan.parallelism:
            self._check_recovery()
            self._next_event(deadline, f"{len(self._slots)} of {self._plan.parallelism} slots up")
        self._publish(SlotsJoined())

    def _await_recovery(self) -> None:
        """Wait for the sinks, with heartbeats: they may take longer than slots stay in silence."""
        # Of these the tries of one transaction have the first half.
        limit_s = 2 * self._plan.settings.commit_deadline_s
        while not self._check_recovery():
            self._next_event(None, "")
            step = self._context.recovery.step
            if (taken_s := time.monotonic() - step.began_at) > limit_s:
                raise CommitFailed(
                    f"recovery of job {self._plan.job} has waited {taken_s:.0f} s for {step.text};"
                    " see why the target does not answer, or raise commit_deadline_s"
                    f" ({self._plan.settings.commit_deadline_s:.0f})"
                )

    def _check_recovery(self) -> bool:
        """Return whether every sink agrees with the log; raises why one does not."""
        assert self._recovered is not None
        if not self._recovered.done():
            return False
        sinks = self._recovered.result()
        if not self._sinks_agree:
            self._sinks_agree = True
            self._publish(SinksRecovered(sinks))
        return True

    def _deploy(self) -> None:
        plan, restored = self._plan, self._context.restored
        addresses = tuple(self._slots[slot].hello.data_address for slot in range(plan.parallelism))
        begins = restored_slots(self._context.graph, restored, plan.parallelism)
        for slot, link in self._slots:
            link.send(
                Deploy(
                    addresses,
                    restored.checkpoint,
                    self._context.next_checkpoint,
                    begins[slot].operators,
                    begins[slot].in_flight,
                    self._context.program,
                )
            )
        self._publish(SlotsDeployed())

    def _await_running(self) -> None:
        deadline = time.monotonic() + self._plan.settings.start_timeout_s
        while len(self._running) < self._plan.parallelism:
            self._next_event(deadline, f"{len(self._running)} of {self._plan.parallelism} running")
        self._publish(AttemptRunning())
        self._lag.start(self._context.restored)
        self._context.running()

    def _coordinate(self) -> bool:
        self._coordinator = self._context.coordinator(time.monotonic())
        self._global_commits.start()
        while self._finished is None:
            while self._deferred and self._listening():
                self._on_event(self._deferred.popleft())
            if coordinator := self._listening():
                self._carry_out(coordinator.tick(time.monotonic()))
            self._discovery.ask(self._coordinator.completed[-1], time.monotonic())
            self._blockers.ask(self._coordinator.overdue(time.monotonic()), time.monotonic())
            if self._finished is None:
                self._next_event(None, "")
        self._say_stop()
        self._background.finish(self._plan.settings.cancel_timeout_s)
        return self._finished.checkpoint not in self._stopping

    def _next_event(self, deadline: float | None, waiting_for: str) -> None:
        """Handle the next event, or return after the time until something else is due."""
        interval_s = self._plan.settings.heartbeat_interval_s
        wait_s = interval_s / 2
        coordinator = self._listening()
        if coordinator and (wake_s := coordinator.next_wake_s()) is not None:
            wait_s = max(0.0, min(wait_s, wake_s - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            self._on_event(self._events.get(timeout=wait_s))
        now = time.monotonic()
        self._slots.beat(now)
        if deadline is not None and now > deadline:
            raise SlotLost(
                f"job {self._plan.job}: after {self._plan.settings.start_timeout_s:.0f} s only"
                f" {waiting_for}; are there {self._plan.parallelism} free task slots in the"
                " cluster, and can the executors reach the driver?"
            )

    def _on_event(self, event: AttemptEvent) -> None:
        match event:
            case SlotConnected(link):
                self._admit(link)
            case SlotSaid() | SlotGone() | SlotsEnded():
                self._on_slot(event)
            case CheckpointRequested() | SavepointRequested() | CancelRequested():
                self._on_request(event)
            case DiscoveryAnswered():
                self._on_discovered(event)
            case BlockersListed():
                self._on_blockers(event)
            case AppendEnded() | GlobalCommitEnded() | SavepointWritten():
                if event.attempt == self._plan.attempt:
                    self._on_ended(event)
            case RecoveryEnded():
                pass  # it has woken who waits for it
            case _:
                assert_never(event)

    def _on_slot(self, event: SlotSaid | SlotGone | SlotsEnded) -> None:
        if event.attempt != self._plan.attempt:  # I7
            return
        match event:
            case SlotSaid(_, slot, message):
                self._slots.heard(slot, time.monotonic())
                self._on_message(slot, message)
            case SlotGone(slot, _, reason):
                if slot in self._slots:
                    self._publish(SlotLeft(slot, reason))
                    raise SlotLost(f"slot {slot} is lost: {reason}")
            case SlotsEnded(_, error):
                raise error

    def _on_ended(self, end: AppendEnded | GlobalCommitEnded | SavepointWritten) -> None:
        if isinstance(end, AppendEnded):
            self._on_appended(end)
        elif isinstance(end, SavepointWritten):
            self._on_savepoint(end)
        elif end.error is not None:
            raise end.error
        elif coordinator := self._listening():
            self._slots.send_all(GloballyCommitted(end.sink_id, end.checkpoint))
            who, now_s = committer_ref(end.uid), time.monotonic()
            self._carry_out(coordinator.committed(who, end.checkpoint, now_s))
        else:
            self._deferred.append(end)

    def _on_request(
        self, request: CheckpointRequested | SavepointRequested | CancelRequested
    ) -> None:
        if isinstance(request, CancelRequested):
            raise JobCancelled(f"job {self._plan.job} was cancelled")
        coordinator = self._listening()
        if coordinator is None:
            self._deferred.append(request)
        elif isinstance(request, CheckpointRequested):
            self._carry_out(coordinator.request(request.kind, time.monotonic()))
        elif self._context.savepoints.begin(request.request):
            self._carry_out(coordinator.request_savepoint(request.request, time.monotonic()))

    def _on_savepoint_decision(self, decision: WriteSavepoint | AbortSavepoint) -> None:
        if isinstance(decision, WriteSavepoint):
            self._write_savepoint(decision)
        else:
            self._publish(CheckpointFailed(decision.checkpoint, decision.reason))
            self._context.savepoints.failed(decision.request, decision.reason)

    def _write_savepoint(self, decision: WriteSavepoint) -> None:
        """Copy the state beside the stream, and tell this thread how that ended."""
        context, checkpoint = self._context, decision.completed.checkpoint

        def write() -> None:
            size_bytes, error = 0, ""
            try:
                size_bytes = context.savepoints.write(decision, context.log)
            except Exception as caught:
                _log.exception("savepoint %d of job %s", checkpoint, self._plan.job)
                error = text_of(caught)
            attempt, request = self._plan.attempt, decision.request
            self._events.put(SavepointWritten(attempt, checkpoint, request, size_bytes, error))

        self._savepoint_writer.submit(write)

    def _on_savepoint(self, end: SavepointWritten) -> None:
        coordinator = self._listening()
        if coordinator is None:
            self._deferred.append(end)
            return
        under_way = end.checkpoint in coordinator.pending
        if under_way and not end.error:
            place = self._context.savepoints.place_of(end.request)
            self._publish(SavepointCompleted(end.checkpoint, place, end.size_bytes))
            self._context.savepoints.succeeded(end.request)
        now_s = time.monotonic()
        self._carry_out(coordinator.savepoint_ended(end.checkpoint, now_s, error=end.error))

    def _on_discovered(self, answer: DiscoveryAnswered) -> None:
        offers = self._discovery.answered(answer)
        for slot, offer in offers.items():
            self._slots[slot].send(offer)
        if offers:
            splits = sorted(split.id for offer in offers.values() for split in offer.splits)
            self._publish(SplitsDiscovered(answer.uid, tuple(splits)))
            # They are read once a checkpoint holds them: it does not wait its turn.
            self._on_request(CheckpointRequested(CheckpointKind.MANUAL))

    def _on_blockers(self, answer: BlockersListed) -> None:
        if answer.attempt != self._plan.attempt:
            return
        self._blockers.take(answer)
        if self._coordinator is not None:
            self._coordinator.note_blockers(answer.uid, answer.blockers)

    def _admit(self, link: SlotLink) -> None:
        if self._slots.admit(link, time.monotonic()):
            hello = link.hello
            self._publish(SlotJoined(hello.slot, hello.pid, hello.parent_pid, hello.host))

    def _on_message(self, slot: int, message: SlotMessage) -> None:
        match message:
            case Running():
                self._on_running(slot, message.dropped)
            case Failed():
                self._publish(SlotLeft(slot, f"{message.error_class}: {message.message}"))
                raise cause_of(message, self._plan.attempt, self._events)
            case Heartbeat():
                self._publish(_report_of(message))
            case SlotClosed():
                self._remove(slot)
            case Acked() | Declined() | CommittedThrough() | SourceExhausted():
                if coordinator := self._listening():
                    self._tell_coordinator(coordinator, message)
                else:
                    self._deferred.append(SlotSaid(self._plan.attempt, slot, message))
            case Hello():
                raise MessageCorrupt(f"slot {slot} says Hello on a stream that it has opened")
            case _:
                assert_never(message)

    def _tell_coordinator(
        self,
        coordinator: CheckpointCoordinator,
        message: Acked | Declined | CommittedThrough | SourceExhausted,
    ) -> None:
        now_s = time.monotonic()
        match message:
            case Acked(checkpoint, snapshot):
                self._publish(CheckpointAcked(checkpoint, snapshot.subtask, snapshot.timings))
                self._carry_out(coordinator.acked(self._plan.attempt, checkpoint, snapshot, now_s))
            case Declined(checkpoint, subtask, reason):
                self._carry_out(
                    coordinator.declined(self._plan.attempt, checkpoint, subtask, reason, now_s)
                )
            case CommittedThrough(subtask, checkpoint, _, committed):
                self._publish(SubtaskCommitted(subtask, committed))
                self._carry_out(coordinator.committed(subtask, checkpoint, now_s))
            case SourceExhausted(subtask):
                self._carry_out(coordinator.source_exhausted(subtask, now_s))

    def _on_running(self, slot: int, dropped: tuple[str, ...]) -> None:
        self._running.add(slot)
        if dropped:
            self._publish(StateDropped(dropped))

    def _remove(self, slot: int) -> None:
        if slot in self._slots:
            self._slots.remove(slot)
            self._publish(SlotLeft(slot))

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case TriggerCheckpoint():
                    self._trigger(decision)
                case AppendDecision(completed):
                    self._append(completed)
                case WriteSavepoint() | AbortSavepoint():
                    self._on_savepoint_decision(decision)
                case NotifyComplete(checkpoint, oldest_retained):
                    self._after_complete(checkpoint, oldest_retained)
                case NotifyAbort():
                    self._slots.send_all(decision)
                case DiscardState(handles):
                    self._cleaner.discard(handles)
                case CountFailure() | FailAttempt() | FinishJob():
                    self._on_verdict(decision)

    def _on_verdict(self, verdict: CountFailure | FailAttempt | FinishJob) -> None:
        match verdict:
            case CountFailure(checkpoint, reason):
                self._publish(CheckpointFailed(checkpoint, reason))
            case FailAttempt(reason):
                raise errors.CheckpointError(reason)
            case FinishJob():
                self._finished = verdict

    def _trigger(self, decision: TriggerCheckpoint) -> None:
        if decision.kind is CheckpointKind.STOP:
            self._stopping.add(decision.checkpoint)
        self._publish(CheckpointTriggered(decision.checkpoint, decision.kind))
        self._slots.send_all(decision)

    def _listening(self) -> CheckpointCoordinator | None:
        """Return the coordinator, unless it is to be told nothing now.

        That is before every slot runs, for those that were deployed first may speak already, and
        while a decision is appended.
        """
        return None if self._appending else self._coordinator

    def _append(self, completed: CompletedCheckpoint) -> None:
        """Write the decision beside the heartbeats: storage may be slower than slots are patient.

        The append is the commit point of the whole job.
        """
        log, attempt, tell = self._context.log, self._plan.attempt, self._events.put

        def append() -> None:
            began = time.perf_counter()
            error: BaseException | None = None
            try:
                log.append(completed)
            except BaseException as caught:
                error = caught
            else:
                reach("logged")
            tell(AppendEnded(attempt, completed, (time.perf_counter() - began) * 1000, error))

        self._appending = True
        self._appender.submit(append)

    def _on_appended(self, end: AppendEnded) -> None:
        """Go on from the decision, or without it.

        When nobody knows whether it is in the log (`DecisionUnknown`), the attempt ends: the next
        one reads the log and knows.
        """
        assert self._coordinator is not None
        self._appending = False
        checkpoint, now_s = end.completed.checkpoint, time.monotonic()
        match end.error:
            case None:
                self._publish(CheckpointCompleted(checkpoint, end.append_ms))
                self._carry_out(self._coordinator.logged(checkpoint, now_s))
            case StorageError():
                reason = str(end.error)
                self._carry_out(self._coordinator.append_failed(checkpoint, reason, now_s))
            case error:
                raise error

    def _after_complete(self, checkpoint: CheckpointId, oldest_retained: CheckpointId) -> None:
        assert self._coordinator is not None
        retained = self._coordinator.completed
        log, savepoint = self._context.log.view, self._context.savepoints.last_written
        needed = {
            sink_id: retain_ledger_from(retained, log.committed_last(sink_id), savepoint)
            for sink_id in log.memory.sinks
        }
        self._slots.send_all(Complete(checkpoint, needed))
        self._global_commits.decided(retained[-1])
        self._lag.completed(retained[-1])
        self._cleaner.completed(checkpoint, oldest_retained, retained[-1])

    def _say_stop(self) -> None:
        """Let every slot close in good order; a slot that does not is Spark's to kill.

        Acks still come of checkpoints that were given up: their files are deleted (I9).
        """
        self._slots.send_all(Shutdown(f"job {self._plan.job} is done"))
        deadline = time.monotonic() + self._plan.settings.cancel_timeout_s
        while len(self._slots) and time.monotonic() < deadline:
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                continue
            match event:
                case SlotSaid(slot=slot, message=message):
                    self._on_last_word(slot, message)
                case SlotGone(slot):
                    self._remove(slot)
                case SlotsEnded():
                    self._events.put(event)
                    return
                case CheckpointRequested() | SavepointRequested() | CancelRequested():
                    pass  # whoever asks hears that the job has ended
                case (
                    SlotConnected()
                    | SavepointWritten()
                    | RecoveryEnded()
                    | DiscoveryAnswered()
                    | BlockersListed()
                    | AppendEnded()
                    | GlobalCommitEnded()
                ):
                    pass  # the job is done without it
                case _:
                    assert_never(event)

    def _on_last_word(self, slot: int, message: SlotMessage) -> None:
        """Take in what a slot says when the job is done."""
        match message:
            case SlotClosed():
                self._remove(slot)
            case Heartbeat():
                self._publish(_report_of(message))
            case Acked():
                self._on_message(slot, message)
            case Hello() | Running() | Declined() | CommittedThrough() | SourceExhausted():
                pass
            case Failed():
                pass  # all of its commits are confirmed
            case _:
                assert_never(message)


def _report_of(beat: Heartbeat) -> SlotReported:
    return SlotReported(beat.slot, beat.subtasks, beat.sinks, beat.rss_bytes)
