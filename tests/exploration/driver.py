"""A driver of a world: production's claims, recovery, attempt loop and global commits.

    begin --claimed, restore point--> attempt --loop ends--> closing --threads have ended--> begin
      |                                                         +--the job is done--> finished
      +--fenced--> over

Its threads are those of production: one claims and begins, one recovers and sweeps, one appends,
and one for each sink commits whole checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tests.exploration import calls, procedures, savepoints
from tests.exploration.calls import Ended, Thread
from tests.exploration.procedures import Begun, Coordinators, Plan
from tests.exploration.savepoints import Known, Saving
from tests.exploration.slot import NEVER_S, SOURCE, SPLITS, Answer
from tests.simulation.variant import Variant
from typing_extensions import assert_never

from onceflow.core import errors
from onceflow.core.commit.queue import CommitRetryPolicy, StepFailed, WaitUntil
from onceflow.core.commit.whole_checkpoints import GlobalCommit
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import (
    AbortSavepoint,
    AppendDecision,
    Barrier,
    CheckpointKind,
    CountFailure,
    DiscardState,
    NotifyAbort,
    NotifyComplete,
    SavepointRequest,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, retain_ledger_from
from onceflow.core.protocol.committables import CommitOutcome, Committed, Lost, Unknown
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.loops import attempt_facts
from onceflow.core.protocol.loops.attempt_facts import AttemptDecision, AttemptFact
from onceflow.core.protocol.loops.slots import AttemptSettings

# --- steps and effects ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin to run."""


@dataclass(frozen=True, slots=True)
class Hear:
    """Take a message of a slot, or the end of its stream."""

    fact: attempt_facts.SlotMessageReceived | attempt_facts.SlotGone


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """Take the user's request for a checkpoint."""


@dataclass(frozen=True, slots=True)
class RequestSavepoint:
    """Take the user's request for a savepoint."""


@dataclass(frozen=True, slots=True)
class TimeOut:
    """Let the time pass at which a pending checkpoint is given up."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Let the time pass at which something else is due."""


@dataclass(frozen=True, slots=True)
class SendAll:
    """The effect that a message goes to each slot of the attempt."""

    message: messages.DriverMessage


@dataclass(frozen=True, slots=True)
class Deployed:
    """The effect that the slots of an attempt begin, from a decision."""

    attempt: AttemptId
    restored: CompletedCheckpoint
    message: messages.Deploy


@dataclass(frozen=True, slots=True)
class AttemptOver:
    """The effect that the slots of the attempt are told to leave."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The effect that the job has finished, or was stopped."""

    attempt: AttemptId
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Fenced:
    """The effect that the driver gives up the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The effect that the driver ends with an error that no restart is for."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The effect that the job does not start from the savepoint."""

    reason: str


@dataclass(frozen=True, slots=True)
class SavepointAnswered:
    """The effect that the user is told whether the savepoint is written."""

    is_written: bool


@dataclass(frozen=True, slots=True)
class Note:
    """The effect that the trace says something."""

    text: str


DriverEffect: TypeAlias = (
    SendAll
    | Deployed
    | AttemptOver
    | Finished
    | Fenced
    | GaveUp
    | Refused
    | SavepointAnswered
    | Note
)

# --- the driver ----------------------------------------------------------------------------------


class DriverProcess:
    """One driver process, from its start to its end."""

    def __init__(
        self, plan: Plan, owner: str, variant: Variant, *, from_savepoint: bool = False
    ) -> None:
        self.plan, self.owner, self.variant = plan, owner, variant
        self.known: Known | None = () if from_savepoint else None
        """The progress of the start from a savepoint; None if the job starts without one."""
        self.saving: Saving | None = None
        self.phase = "begin"
        self.view: LogView | None = None
        """The log as this driver has claimed it, with its own appends."""
        self.loop: Any = None
        self.now_s = 0.0
        self.threads: dict[str, Thread] = {}
        self.whole: dict[str, Any] = {}
        self.deployed = 0
        """The attempt whose slots were begun last."""
        self.appending: CompletedCheckpoint | None = None
        self.targets_agree = self.is_swept = self.is_done = self.is_stopped = False
        self.swept_at_end = False
        """True once a sweep that failed is tried again at the end of the job."""
        self.failure: BaseException | None = None
        self._effects: list[DriverEffect] = []

    @property
    def requests(self) -> dict[str, calls.Request]:
        """The requests that wait for their answers, by thread."""
        return {name: t.request for name, t in self.threads.items() if t.request is not None}

    @property
    def attempt(self) -> int:
        return self.view.attempt if self.view is not None else 0

    @property
    def sends_to(self) -> int:
        """The attempt whose slots receive what the driver sends."""
        return self.deployed

    @property
    def choices(self) -> tuple[RequestCheckpoint | Wait, ...]:
        """The steps that the driver may take by itself, and that cost no fault."""
        if self.phase != "attempt":
            return ()
        found: list[RequestCheckpoint | Wait] = []
        coordinator = self._coordinator
        if coordinator is not None and not self.is_done:
            idle = not coordinator.pending and not coordinator.requested
            # The last decision's number says how many there were, in whatever attempt.
            assert self.view is not None
            if idle and self.view.next_checkpoint <= self.plan.checkpoints:
                found.append(RequestCheckpoint())
            wake_s = coordinator.next_wake_s()
            if wake_s is not None and not coordinator.pending and wake_s > self.now_s:
                found.append(Wait())
        elif self.loop is not None and 0 < self.loop.wait_s(self.now_s) < 1.0:
            found.append(Wait())
        return tuple(found)

    @property
    def may_be_asked(self) -> bool:
        """True if the user may request a savepoint."""
        return self.phase == "attempt" and self._coordinator is not None and not self.is_done

    @property
    def may_time_out(self) -> bool:
        """True if a checkpoint is pending whose time may pass."""
        coordinator = self._coordinator
        appends = "append" in self.threads
        return self.phase == "attempt" and not appends and bool(coordinator and coordinator.pending)

    @property
    def _coordinator(self) -> CheckpointCoordinator | None:
        return self.loop._coordinator if self.loop is not None else None

    def step(
        self, event: Start | Hear | RequestCheckpoint | RequestSavepoint | TimeOut | Wait | Answer
    ) -> tuple[DriverEffect, ...]:
        """Take one step; return its effects on others."""
        match event:
            case Start():
                self._begin()
            case Hear(fact):
                self._tell(fact)
            case RequestCheckpoint():
                self._tell(attempt_facts.CheckpointRequested(CheckpointKind.MANUAL))
            case RequestSavepoint():
                assert self.plan.savepoint is not None
                self._tell(SavepointRequest("s1", self.plan.savepoint))
            case TimeOut() | Wait():
                self._advance()
            case Answer(thread, answer):
                self._go_on(thread, self.threads.pop(thread).run(answer))
        self._turn()
        effects, self._effects = tuple(self._effects), []
        return effects

    # --- the beginning and the end of attempts ---------------------------------------------------

    def _begin(self) -> None:
        self.phase, self.loop, self.now_s, self.whole = "begin", None, 0.0, {}
        self.is_swept = self.is_done = False
        procedure: Any = procedures.claim
        arguments: tuple[Any, ...] = self.plan, self.owner, self.view
        if self.known is not None:
            procedure, arguments = procedures.claim_from_savepoint, (*arguments, self.known)
        self._go_on("claim", Thread(procedure, arguments).run())

    def _claimed(self, end: Ended) -> None:
        end = self._note_progress(end)
        if end.error is not None:
            self._fail(end.error)
            return
        self.view = end.result
        procedure: Any = procedures.find_restore_point
        arguments: tuple[Any, ...] = self.plan, self.view, not self.targets_agree
        if self.known is not None:
            procedure = procedures.find_restore_point_from_savepoint
            arguments = (*arguments, self.known)
        self._go_on("restore point", Thread(procedure, arguments).run())

    def _restored(self, end: Ended) -> None:
        end = self._note_progress(end)
        if end.error is not None:
            self._fail(end.error)
            return
        self.view, self.targets_agree = end.result, True
        self._run()

    def _note_progress(self, end: Ended) -> Ended:
        """Keep what a procedure has learnt about the savepoint, and return how it has ended."""
        begun = end.result
        if not isinstance(begun, Begun):
            return end
        self.known, self.view = begun.known, begun.view
        self.targets_agree = self.targets_agree or begun.targets_agree
        return Ended(begun.view, begun.error)

    def _fail(self, error: BaseException) -> None:
        """Stop if another driver owns the job, and begin again otherwise. Mirrors `RestartLoop`."""
        self.phase, self.failure = "closing", error
        if isinstance(error, errors.Fenced):
            self._stop(error)
        elif self.view is None:
            self._restart()
        else:
            self._go_on("check", Thread(procedures.check_owned, (self.view,)).run())

    def _restart(self) -> None:
        error, self.failure = self.failure, None
        if isinstance(error, errors.SavepointRefused):
            self.phase = "over"
            self._effects.append(Refused(str(error)))
            return
        if getattr(error, "retry", "") == "never":
            # A driver that has lost the job may give up for any reason; `check_owned` names it if
            # the log can be read.
            self.phase = "over"
            self._effects.append(GaveUp(AttemptId(self.attempt), str(error)))
            return
        self._note(f"begins again, after {type(error).__name__}")
        self._begin()

    def _run(self) -> None:
        plan, view = self.plan, self.view
        assert view is not None
        self.phase = "attempt"
        self._note(f"has claimed attempt {view.attempt}")
        build = Coordinators(plan, view, self.variant)
        self.loop = self.variant.attempt_loop(self._settings(view.attempt), build, {})
        for index in range(plan.slots):
            self._tell(messages.Hello(view.attempt, index, index, 0, "", "", {}))
        self._go_on("sinks", Thread(procedures.recover, (plan, view)).run())

    def _settings(self, attempt: AttemptId) -> AttemptSettings:
        return AttemptSettings(
            job="job",
            attempt=attempt,
            parallelism=self.plan.slots,
            versions={},
            storage="",
            storage_token="",
            one_machine=True,
            start_timeout_s=NEVER_S,
            heartbeat_interval_s=NEVER_S,
            heartbeat_timeout_s=4 * NEVER_S,
            commit_deadline_s=NEVER_S,
            cancel_timeout_s=NEVER_S,
        )

    def _stop(self, error: BaseException) -> None:
        self.phase, self.loop, self.whole, self.failure = "over", None, {}, None
        self._effects.append(Fenced(str(error)))

    def _close(self, reason: str) -> None:
        """End the attempt: tell its slots to leave, and wait for the threads."""
        self._fail_savepoint("the attempt has ended")
        self.phase, self.loop, self.whole = "closing", None, {}
        self._effects.append(AttemptOver(reason))

    # --- facts and decisions ---------------------------------------------------------------------

    def _tell(self, fact: AttemptFact) -> None:
        if self.phase == "attempt":
            self._carry_out(self.loop.on(fact, self.now_s))

    def _turn(self) -> None:
        """Call `tick` until nothing new is due, and go on once all threads have ended."""
        if self.phase == "attempt":
            self._carry_out(self.loop.tick(self.now_s))
        if self.phase == "closing" and not self.threads.keys() - {"savepoint"}:
            if self.is_done and not self.is_swept and not self.swept_at_end and self.variant.sweep:
                # Mirrors `CheckpointsCleaner.clean_at_end`.
                self.swept_at_end = True
                self._go_on("sinks", Thread(procedures.sweep, (self.plan, self.view)).run())
            elif self.is_done:
                self.phase = "finished"
                self._effects.append(Finished(AttemptId(self.attempt), self.is_stopped))
            elif self.failure is not None:
                self._fail(self.failure)

    def _advance(self) -> None:
        coordinator = self._coordinator
        wake_s = coordinator.next_wake_s() if coordinator is not None else None
        self.now_s = wake_s if wake_s is not None else self.now_s + self.loop.wait_s(self.now_s)

    def _carry_out(self, decisions: Iterable[AttemptDecision]) -> None:
        for decision in decisions:
            if self.phase != "attempt":
                return
            self._do(decision)

    def _do(self, decision: AttemptDecision) -> None:
        match decision:
            case attempt_facts.SendHeartbeats():
                self._tell(attempt_facts.OutboxesMeasured({}))
            case attempt_facts.LookAtRecovery():
                self._tell(attempt_facts.RecoveryStep("", self.now_s))
            case attempt_facts.DeploySlots():
                self._deploy()
            case Barrier(checkpoint, kind):
                self._note(f"triggers checkpoint {checkpoint} ({kind.value})")
                self._send_all(decision)
            case NotifyAbort(checkpoint):
                self._note(f"aborts checkpoint {checkpoint}")
                self._send_all(decision)
            case messages.GloballyCommitted() | messages.Shutdown():
                self._send_all(decision)
            case AppendDecision(completed):
                if self.variant.whole_before_decision:
                    self._commit_whole(completed)
                self.appending = completed
                self._go_on("append", Thread(procedures.append, (self.view, completed)).run())
            case NotifyComplete():
                self._complete(decision)
            case attempt_facts.CloseAttempt(is_finished):
                self.is_done, self.is_stopped = True, not is_finished
                self._close("the job is done")
            case attempt_facts.EndAttempt(error):
                self._note(f"ends attempt {self.attempt}: {type(error).__name__}")
                self.failure = error
                self._close(str(error))
            case (
                attempt_facts.AdmitSlot()
                | attempt_facts.DismissSlot()
                | attempt_facts.ReleaseSlot()
                | attempt_facts.EnterRunning()
            ):
                pass  # slots connect with their attempt
            case (
                attempt_facts.SlotsComplete()
                | attempt_facts.RecoveryEnded()
                | messages.Running()
                | messages.Heartbeat()
                | messages.Acked()
                | messages.CommittedThrough()
                | attempt_facts.GlobalCommitEnded()
                | attempt_facts.AppendEnded()
                | attempt_facts.BlockersListed()
                | attempt_facts.SlotGone()
                | messages.Failed()
                | CountFailure()
            ):
                pass  # nobody reads what is published
            case attempt_facts.AskBeside() | DiscardState():
                pass  # no source finds new splits, and no state has files
            case SavepointRequest():
                self.saving = Saving(decision)
                self._tell(attempt_facts.SavepointBegun(decision, stands=True))
            case WriteSavepoint(_, completed):
                assert self.saving is not None
                self.saving = replace(self.saving, completed=completed, stage="copying")
                self._go_on("savepoint", Thread(savepoints.copy_state, ()).run())
            case attempt_facts.SavepointWritten():
                self.saving = None
                self._effects.append(SavepointAnswered(True))
            case AbortSavepoint(_, _, reason):
                self._fail_savepoint(reason)
            case attempt_facts.TakeDiscovered():
                raise AssertionError(f"no world has discovery: {decision}")
            case _:
                assert_never(decision)

    def _deploy(self) -> None:
        assert self.view is not None
        restored = self.view.completed[-1]
        operator = messages.RestoredOperator(
            SOURCE, lists={SPLITS: procedures.positions_of(restored)}
        )
        deploy = messages.Deploy(
            (),
            restored.checkpoint,
            self.view.next_checkpoint,
            (operator,),
            restored.in_flight("sink"),
            b"",
        )
        self.whole = {
            sink.sink_id: self.variant.global_queue(
                sink.sink_id, CommitRetryPolicy(deadline_s=NEVER_S), restored.checkpoint
            )
            for sink in self.plan.sinks
            if sink.kind == "versions"
        }
        self.deployed = self.attempt
        self._effects.append(Deployed(AttemptId(self.attempt), restored, deploy))

    def _send_all(self, message: messages.DriverMessage) -> None:
        self._effects.append(SendAll(message))

    def _complete(self, decision: NotifyComplete) -> None:
        """Tell the slots, commit whole checkpoints, and sweep once. Mirrors `_after_complete`."""
        log, retained = self.view, self.loop.completed
        assert log is not None
        needed = {
            sink_id: retain_ledger_from(retained, log.list_committed_last(sink_id))
            for sink_id in log.memory.sinks
        }
        self._send_all(messages.Complete(decision.checkpoint, needed))
        if not self.variant.whole_before_decision:
            self._commit_whole(retained[-1])
        if not self.is_swept and "sinks" not in self.threads and self.variant.sweep:
            self.is_swept = True
            self._go_on("sinks", Thread(procedures.sweep, (self.plan, log)).run())

    # --- threads ---------------------------------------------------------------------------------

    def _go_on(self, name: str, thread: Thread | Ended) -> None:
        if isinstance(thread, Thread):
            self.threads[name] = thread
            return
        match name:
            case "claim":
                self._claimed(thread)
            case "restore point":
                self._restored(thread)
            case "check" if isinstance(thread.error, errors.Fenced):
                self._stop(thread.error)
            case "check":
                self._restart()
            case "append":
                self._appended(thread)
            case "sinks":
                self._recovered(thread)
            case "savepoint":
                self._continue_saving(thread)
            case sink_id:
                self._whole_committed(sink_id, thread)

    def _recovered(self, end: Ended) -> None:
        if isinstance(end.error, errors.PreparedTransactionLost):
            self._note("finds a decided transaction lost")
        if self.is_done:
            self.is_swept = self.is_swept and end.error is None
            return
        if self.phase != "attempt" or self.loop is None:
            return
        if self.is_swept:
            # A sweep that has failed is tried again after the next decision.
            self.is_swept = end.error is None
        else:
            self._tell(attempt_facts.RecoveryEnded(AttemptId(self.attempt), end.error))

    def _appended(self, end: Ended) -> None:
        completed, self.appending = self.appending, None
        assert completed is not None
        error = end.error
        if error is None:
            self.view = end.result
        elif isinstance(error, self.variant.taken_for_refused):
            error = errors.StorageError(str(error))
        self._tell(attempt_facts.AppendEnded(AttemptId(self.attempt), completed, 0.0, error))

    # --- savepoints ------------------------------------------------------------------------------

    def _continue_saving(self, end: Ended) -> None:
        """Go on with the savepoint after one request. Mirrors `Savepoints.write`."""
        saving = self.saving
        if saving is None:
            return
        completed = saving.completed
        assert completed is not None
        if saving.stage == "deleting":
            self.saving = None
            # If the deletion has failed, the user is told to look.
            if end.error is None:
                self._effects.append(SavepointAnswered(False))
        elif saving.failure and saving.stage == "copying":
            self.saving = None
        elif saving.failure:
            self._delete_savepoint()
        elif saving.stage == "copying" and end.error is None:
            assert self.view is not None
            memory = self.variant.memory_at(self.view, completed)
            self.saving = replace(saving, stage="finishing")
            savepoint = savepoints.content_of(saving, memory)
            self._go_on("savepoint", Thread(savepoints.finish, (savepoint,)).run())
        else:
            error = "" if end.error is None else str(end.error)
            self._tell(
                attempt_facts.SavepointWritten(
                    AttemptId(self.attempt), completed.checkpoint, saving.request, 0, error
                )
            )

    def _fail_savepoint(self, reason: str) -> None:
        """Answer a savepoint that is certainly not whole; delete one that may be."""
        saving = self.saving
        if saving is None or saving.failure:
            return
        self.saving = savepoints.note_failure(saving, reason)
        if saving.stage in {"acks", "copying"}:
            self._effects.append(SavepointAnswered(False))
            if "savepoint" not in self.threads:
                self.saving = None
        elif "savepoint" not in self.threads:
            self._delete_savepoint()

    def _delete_savepoint(self) -> None:
        assert self.saving is not None
        self.saving = replace(self.saving, stage="deleting")
        self._go_on("savepoint", Thread(savepoints.delete, ()).run())

    # --- commits ---------------------------------------------------------------------------------

    def _commit_whole(self, completed: CompletedCheckpoint) -> None:
        for sink_id, queue in self.whole.items():
            queue.add_decision(completed, self.now_s)
            self._commit_next(sink_id)

    def _commit_next(self, sink_id: str) -> None:
        queue = self.whole.get(sink_id)
        if queue is None or sink_id in self.threads:
            return
        step = queue.next_commit(self.now_s)
        if isinstance(step, WaitUntil):
            step = queue.next_commit(step.at_s)
        if isinstance(step, GlobalCommit):
            self._go_on(sink_id, Thread(procedures.commit_whole, (sink_id, step)).run())
        elif step is None:
            self._tell(
                attempt_facts.GlobalCommitEnded(
                    AttemptId(self.attempt), sink_id, sink_id, queue.committed_through
                )
            )

    def _whole_committed(self, sink_id: str, end: Ended) -> None:
        queue = self.whole.get(sink_id)
        if queue is None:
            return
        assert end.error is None, end.error
        outcome: CommitOutcome = end.result
        if self.variant.unknown_is_committed and isinstance(outcome, Unknown):
            outcome = Committed()
        if self.variant.lost_is_committed and isinstance(outcome, Lost):
            outcome = Committed()
        head = queue.next_commit(NEVER_S)
        ended = queue.outcome(head, outcome, self.now_s)
        if isinstance(ended, StepFailed):
            lost = ended.kind == "lost"
            error = (errors.PreparedTransactionLost if lost else errors.CommitFailed)(ended.message)
            fact = attempt_facts.GlobalCommitEnded(
                AttemptId(self.attempt), sink_id, sink_id, queue.committed_through, error
            )
            self._tell(fact)
            return
        self._commit_next(sink_id)

    def _note(self, text: str) -> None:
        self._effects.append(Note(text))
