"""An attempt of a job: recover the sinks, deploy the slots, run checkpoints until the end.

An attempt runs on the job driver's own thread. Everything that happens on other threads or in other
processes (slots, Spark, the user) arrives as an event. `protocol.loops.attempt` decides what
follows, and this module carries out its decisions. This module knows no rules about checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from typing_extensions import assert_never

from onceflow.core.crash_points import reach
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.decisions import (
    AbortSavepoint,
    AppendDecision,
    Barrier,
    CountFailure,
    DiscardState,
    NotifyAbort,
    NotifyComplete,
    SavepointRequest,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, retain_ledger_from
from onceflow.core.protocol.loops.attempt import AttemptLoop
from onceflow.core.protocol.loops.attempt_facts import (
    AdmitSlot,
    Announced,
    AppendEnded,
    AskBeside,
    AttemptDecision,
    AttemptFact,
    BlockersListed,
    CloseAttempt,
    DeploySlots,
    DismissSlot,
    EndAttempt,
    EnterRunning,
    GlobalCommitEnded,
    LookAtRecovery,
    OutboxesMeasured,
    RecoveryEnded,
    ReleaseSlot,
    Request,
    SavepointBegun,
    SavepointWritten,
    SendHeartbeats,
    SlotGone,
    SlotsComplete,
    TakeDiscovered,
)
from onceflow.core.protocol.loops.slots import AttemptSettings
from onceflow.core.protocol.messages import Deploy
from onceflow.core.runtime.driver.attempt_context import AttemptContext, AttemptEvent, SlotPool
from onceflow.core.runtime.driver.background import Background, CheckpointsCleaner
from onceflow.core.runtime.driver.global_commits import GlobalCommits
from onceflow.core.runtime.driver.restore import assign_state
from onceflow.core.runtime.driver.savepoints import text_of
from onceflow.core.runtime.driver.sink_blockers import BlockerMonitor
from onceflow.core.runtime.driver.source_lag import LagMonitor
from onceflow.core.runtime.driver.source_splits import SplitDiscovery
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.slot.context import versions
from onceflow.core.runtime.transport.addresses import host_of, leads_to_loopback
from onceflow.core.runtime.transport.control_plane import SlotConnected, SlotLink

_log = logging.getLogger("onceflow.runtime.attempt")


class Attempt:
    """Runs one attempt from the first slot's hello to its end."""

    def __init__(self, context: AttemptContext, events: queue.SimpleQueue[AttemptEvent]) -> None:
        self._context = context
        self._publish = context.publish
        self._plan = context.plan
        self._trace = context.log.trace
        self._events = events
        self._slots = SlotPool()
        self._dialled: SlotLink | None = None
        """The slot that connected last."""
        self._is_finished: bool | None = None
        """True if the job is finished, False if it was stopped, None before `CloseAttempt`."""
        self._background = Background("driver background")
        self._appender = Background("decision log")
        self._savepoint_writer = Background("savepoints")
        self._recovered: Future[tuple[job_events.RecoveredSink, ...]] | None = None
        self._cleaner = CheckpointsCleaner(context, self._background)
        self._global_commits = GlobalCommits(context, events.put)
        self._discovery = SplitDiscovery(context, events.put, time.monotonic())
        self._lag = LagMonitor(context.graph, context.publish)
        self._blockers = BlockerMonitor(context, events.put)
        offers = self._discovery.build_offers(context.restored, context.plan.parallelism)
        self._loop = AttemptLoop(_make_settings(context), context.coordinator, offers)

    def run(self) -> bool:
        """Run the attempt to its end. Return True if the job is finished, False if it was stopped.

        Raises:
            OnceflowError: The attempt failed; `.retry` says whether another attempt may be tried.
        """
        # Recovery runs while the slots start, so that a slow database and slow executors are waited
        # for at the same time.
        self._recovered = self._background.submit(self._recover)
        self._recovered.add_done_callback(self._report_recovery)
        while True:
            self._carry_out(self._loop.tick(time.monotonic()))
            if self._is_finished is not None:
                self._trace.record("ending")
                self._cleaner.clean_at_end(self._loop.completed[-1])
                # Finish the deletions here: `close` alone would drop them, and the next start of
                # the job would have to search for those files.
                is_tidy = self._background.finish(self._plan.settings.cancel_timeout_s)
                self._trace.record("ended", is_finished=self._is_finished, is_tidy=is_tidy)
                return self._is_finished
            wait_s = self._loop.wait_s(time.monotonic())
            # This thread runs again within `wait_s`; the health check reports it otherwise.
            self._context.promise(wait_s)
            with contextlib.suppress(queue.Empty):
                self._take(self._events.get(timeout=wait_s))

    @property
    def unanswered(self) -> tuple[Request, ...]:
        """The user's requests that this attempt neither carried out nor refused.

        Read after its end.
        """
        return self._loop.unanswered

    def close(self) -> None:
        """End the attempt's background threads and its committers.

        A committer that hangs is abandoned: it commits and aborts only what the next attempt would
        commit and abort, too. An append that hangs is abandoned as well: either the next claim
        makes it fail, or the next attempt reads the appended decision.
        """
        self._lag.close()
        self._appender.end(lambda: None, self._plan.settings.cancel_timeout_s)
        self._savepoint_writer.end(lambda: None, self._plan.settings.cancel_timeout_s)
        for uid in self._global_commits.close(self._plan.settings.cancel_timeout_s):
            _log.warning("attempt %d has ended and still waits for %s", self._plan.attempt, uid)
        if not self._background.end(
            self._context.recovery.close, self._plan.settings.cancel_timeout_s
        ):
            step = self._context.recovery.step.text
            _log.warning("attempt %d has ended and still waits for %s", self._plan.attempt, step)

    def _recover(self) -> tuple[job_events.RecoveredSink, ...]:
        """Open and recover the sinks while the slots start.

        Deployment needs both to be complete.
        """
        self._context.recovery.open()
        return self._context.recovery.recover(self._context.restored)

    def _report_recovery(self, recovered: Future[tuple[job_events.RecoveredSink, ...]]) -> None:
        self._events.put(RecoveryEnded(self._plan.attempt, recovered.exception()))

    # --- events and decisions -------------------------------------------------------------------

    def _take(self, event: AttemptEvent) -> None:
        if isinstance(event, SlotConnected):
            self._dialled = event.link
            self._tell(event.link.hello)
        else:
            self._tell(event)

    def _tell(self, fact: AttemptFact) -> None:
        self._carry_out(self._loop.on(fact, time.monotonic()))

    def _carry_out(self, decisions: Iterable[AttemptDecision]) -> None:
        for decision in decisions:
            self._do(decision)

    def _do(self, decision: AttemptDecision) -> None:  # noqa: C901, PLR0912, PLR0915 - dispatches
        match decision:
            case AdmitSlot(hello):
                self._admit()
                self._publish(
                    job_events.SlotJoined(hello.slot, hello.pid, hello.parent_pid, hello.host)
                )
            case DismissSlot(_, reason):
                self._dismiss(reason)
            case ReleaseSlot(slot):
                self._slots.remove(slot)
                self._publish(job_events.SlotLeft(slot))
            case SendHeartbeats():
                self._slots.send_all(messages.Heartbeat())
                # The connection of a frozen slot stays open, but the slot takes no heartbeat from
                # its outbox. The age of the outbox shows that.
                self._tell(OutboxesMeasured(self._slots.waiting_s(time.monotonic())))
            case LookAtRecovery():
                self._tell(self._context.recovery.step)
            case DeploySlots():
                self._deploy()
            case EnterRunning():
                self._publish(job_events.AttemptRunning(self._global_commits.uids))
                self._lag.start(self._context.restored)
                self._context.running()
                self._global_commits.start()
            case AskBeside(decided, overdue):
                self._discovery.ask(decided, time.monotonic())
                self._blockers.ask(overdue, time.monotonic())
            case TakeDiscovered():
                self._offer(decision)
            case SavepointRequest():
                self._tell(SavepointBegun(decision, self._context.savepoints.begin(decision)))
            case SavepointWritten(_, checkpoint, request, size_bytes):
                location = self._context.savepoints.find_location(request)
                # Publish before answering the request: a caller that gets the answer may read the
                # status next.
                self._publish(job_events.SavepointCompleted(checkpoint, location, size_bytes))
                self._context.savepoints.record_success(request)
            case Barrier(checkpoint, kind):
                self._trace.record("triggered", checkpoint=checkpoint, kind=kind.value)
                self._publish(job_events.CheckpointTriggered(checkpoint, kind))
                self._slots.send_all(decision)
            case AppendDecision(completed):
                self._append(completed)
            case WriteSavepoint():
                self._write_savepoint(decision)
            case AbortSavepoint(request, checkpoint, reason):
                self._publish(job_events.CheckpointFailed(checkpoint, reason))
                savepoints = self._context.savepoints
                savepoints.record_failure(request, reason)
                # On another thread, so that a directory that hangs holds up no checkpoint.
                self._savepoint_writer.submit(partial(savepoints.clean_up, request))
            case NotifyComplete():
                self._after_complete(decision)
            case NotifyAbort(checkpoint):
                self._trace.record("aborted", checkpoint=checkpoint)
                self._slots.send_all(decision)
            case messages.GloballyCommitted() | messages.Shutdown():
                self._slots.send_all(decision)
            case DiscardState(handles):
                self._cleaner.discard(handles)
            case CountFailure(checkpoint, reason):
                self._publish(job_events.CheckpointFailed(checkpoint, reason))
            case CloseAttempt(is_finished):
                self._is_finished = is_finished
            case EndAttempt(error):
                raise error
            case _:
                self._announce(decision)

    def _announce(self, fact: Announced) -> None:  # noqa: C901 - dispatches
        match fact:
            case SlotsComplete():
                self._publish(job_events.SlotsJoined())
            case RecoveryEnded():
                assert self._recovered is not None
                self._publish(job_events.SinksRecovered(self._recovered.result()))
            case messages.Running(dropped):
                self._publish(job_events.StateDropped(dropped))
            case messages.Heartbeat(slot, subtasks, rss_bytes, sinks, waits):
                self._publish(job_events.SlotReported(slot, subtasks, sinks, rss_bytes, waits))
            case messages.Acked(checkpoint, snapshot, record_times):
                self._publish(
                    job_events.CheckpointAcked(
                        checkpoint, snapshot.subtask, snapshot.timings, record_times
                    )
                )
            case messages.CommittedThrough(subtask, _, _, committed):
                self._publish(job_events.SubtaskCommitted(subtask, committed))
            case GlobalCommitEnded(_, uid, _, checkpoint):
                self._publish(
                    job_events.CheckpointCommitted(
                        uid, checkpoint, versions=fact.versions, files=fact.files
                    )
                )
            case AppendEnded(_, completed, append_ms):
                self._publish(job_events.CheckpointCompleted(completed.checkpoint, append_ms))
            case BlockersListed():
                self._blockers.take(fact)
            case SlotGone(slot, _, reason):
                self._publish(job_events.SlotLeft(slot, reason))
            case messages.Failed(slot, error_class, message):
                self._publish(job_events.SlotLeft(slot, f"{error_class}: {message}"))
            case _:
                assert_never(fact)

    def _admit(self) -> None:
        assert self._dialled is not None
        self._slots.admit(self._dialled)

    def _dismiss(self, reason: str) -> None:
        assert self._dialled is not None
        self._dialled.send(messages.Shutdown(reason))

    def _deploy(self) -> None:
        plan, restored = self._plan, self._context.restored
        addresses = tuple(self._slots[slot].hello.data_address for slot in range(plan.parallelism))
        # The driver assigns the state, not the slots: the assignment depends on the state of all
        # slots, so each slot would have to read the whole record of the checkpoint.
        begins = assign_state(self._context.graph, restored, plan.parallelism)
        everyone, _ = self._context.graph.subtasks(plan.parallelism)
        self._trace.record("deployed", checkpoint=restored.checkpoint, subtasks=map(str, everyone))
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
        self._publish(job_events.SlotsDeployed())

    def _offer(self, discovered: TakeDiscovered) -> None:
        uid, offers = discovered.uid, discovered.offers
        self._discovery.take(uid, offers)
        for slot, offer in offers.items():
            self._slots[slot].send(offer)
        if offers:
            splits = sorted(split.id for offer in offers.values() for split in offer.splits)
            self._publish(job_events.SplitsDiscovered(uid, tuple(splits)))

    def _write_savepoint(self, decision: WriteSavepoint) -> None:
        """Copy the state on another thread; report the outcome as an event."""
        context, checkpoint = self._context, decision.completed.checkpoint
        job = self._plan.job
        subtasks = (str(snapshot.subtask) for snapshot in decision.completed.snapshots)
        self._trace.record("saving", checkpoint=checkpoint, subtasks=subtasks)

        def write() -> None:
            size_bytes, error = 0, ""
            try:
                # An error fails this savepoint only: the checkpoint that it copies is decided, and
                # the job goes on.
                size_bytes = context.savepoints.write(decision, context.log)
            except Exception as caught:
                fields = {"checkpoint": checkpoint}
                _log.exception("savepoint %d of job %s", checkpoint, job, extra=fields)
                error = text_of(caught)
            attempt, request = self._plan.attempt, decision.request
            self._events.put(SavepointWritten(attempt, checkpoint, request, size_bytes, error))

        self._savepoint_writer.submit(write)

    def _append(self, completed: CompletedCheckpoint) -> None:
        """Append the decision on another thread, so that slow storage does not delay heartbeats.

        The append is the commit point of the whole job.
        """
        log, attempt, tell = self._context.log, self._plan.attempt, self._events.put

        def append() -> None:
            began = time.perf_counter()
            error: BaseException | None = None
            try:
                log.append(completed)
            except BaseException as caught:
                # Catch every error, also KeyboardInterrupt: the attempt's thread waits for this
                # event, and nothing else ends that wait.
                error = caught
            else:
                # From here on the checkpoint is decided, even if this process dies.
                reach("logged")
            tell(AppendEnded(attempt, completed, (time.perf_counter() - began) * 1000, error))

        self._appender.submit(append)

    def _after_complete(self, decision: NotifyComplete) -> None:
        checkpoint, retained = decision.checkpoint, self._loop.completed
        log, savepoint = self._context.log.view, self._context.savepoints.last_written
        needed = {
            sink_id: retain_ledger_from(retained, log.list_committed_last(sink_id), savepoint)
            for sink_id in log.memory.sinks
        }
        self._trace.record("completed", checkpoint=checkpoint)
        # Notify the slots first: their commits make rows visible. Global commits may take longer.
        # Clean up last.
        self._slots.send_all(messages.Complete(checkpoint, needed))
        self._global_commits.commit_decided(retained[-1])
        self._lag.measure_by(retained[-1])
        self._context.retain(retained)
        self._cleaner.clean_after(checkpoint, decision.oldest_retained, retained[-1])


def _make_settings(context: AttemptContext) -> AttemptSettings:
    plan = context.plan
    return AttemptSettings(
        job=plan.job,
        attempt=plan.attempt,
        parallelism=plan.parallelism,
        versions=versions(),
        storage=str(context.storage),
        storage_token=context.storage_token,
        one_machine=plan.loopback or leads_to_loopback(host_of(plan.driver_address)),
        start_timeout_s=plan.settings.start_timeout_s,
        heartbeat_interval_s=plan.settings.heartbeat_interval_s,
        heartbeat_timeout_s=plan.settings.heartbeat_timeout_s,
        commit_deadline_s=plan.settings.commit_deadline_s,
        cancel_timeout_s=plan.settings.cancel_timeout_s,
    )
