"""The loop of one attempt: it decides the driver's actions, from the first hello to the end.

    gathering --all slots, sinks agree--> starting --all run--> coordinating --job done--> leaving
        +-------------+-------------------------+------------------+
        +--a slot fails by the loss of another--> investigating    |            |
        +--anything else goes wrong, or the user cancels--> over <-+------------+

The caller passes facts to `on` and the time to `tick`. Both return decisions as a tuple, which the
caller carries out in order. The caller calls `tick` after each fact, and when `wait_s` is over.

Invariants:
    a fact of another attempt changes nothing (I7)
    the coordinator receives facts in their order; the loop queues them while it waits for an append
    every request goes to the coordinator, ends the attempt, or is in `unanswered`
    after CloseAttempt and EndAttempt nothing is decided any more
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from typing_extensions import assert_never

from onceflow.core import errors
from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import (
    AbortSavepoint,
    AppendDecision,
    Barrier,
    CheckpointKind,
    CountFailure,
    Decision,
    DiscardState,
    FailAttempt,
    FinishJob,
    NotifyAbort,
    NotifyComplete,
    SavepointRequest,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import CheckpointId, committer_ref
from onceflow.core.protocol.loops.attempt_facts import (
    AdmitSlot,
    AppendEnded,
    AskBeside,
    AttemptDecision,
    AttemptFact,
    BlockersListed,
    CancelRequested,
    CheckpointRequested,
    CloseAttempt,
    DeploySlots,
    DiscoveryAnswered,
    DismissSlot,
    EndAttempt,
    EnterRunning,
    GlobalCommitEnded,
    JobCancelled,
    LookAtRecovery,
    OutboxesMeasured,
    RecoveryEnded,
    RecoveryStep,
    ReleaseSlot,
    Request,
    SavepointBegun,
    SavepointWritten,
    SendHeartbeats,
    SlotGone,
    SlotMessageReceived,
    SlotsComplete,
    SlotsEnded,
    TakeDiscovered,
    is_of_another_attempt,
)
from onceflow.core.protocol.loops.attempt_phases import (
    AttemptPhase,
    Coordinating,
    Gathering,
    Investigating,
    Leaving,
    Over,
    Starting,
)
from onceflow.core.protocol.loops.slots import AttemptSettings, DriverPauses, SlotRoster, slot_error
from onceflow.core.protocol.messages import (
    Acked,
    CommittedThrough,
    Declined,
    Failed,
    GloballyCommitted,
    Heartbeat,
    Hello,
    OfferSplits,
    Running,
    Shutdown,
    SlotClosed,
    SlotMessage,
    SourceExhausted,
)
from onceflow.core.protocol.splits import SplitOffers

INVESTIGATION_S: Final = 0.3
"""The time for which the loop looks for the loss of one slot behind the failure of another."""


_ForCoordinator: TypeAlias = (
    Acked
    | Declined
    | CommittedThrough
    | SourceExhausted
    | CheckpointRequested
    | SavepointWritten
    | GlobalCommitEnded
)


class AttemptLoop:
    """The loop that decides the driver's actions in one attempt.

    `coordinator` is called with the present time when every slot runs, and returns the checkpoint
    coordinator. `offers` has the splits of each source that may get new splits. The time limit for
    the connections of slots begins with the first `tick`. Times are of a monotonic clock.
    """

    def __init__(
        self,
        settings: AttemptSettings,
        coordinator: Callable[[float], CheckpointCoordinator],
        offers: Mapping[str, SplitOffers],
    ) -> None:
        self._settings = settings
        self._build_coordinator = coordinator
        self._offers = offers
        self._phase: AttemptPhase = Gathering()
        self._slots = SlotRoster(settings)
        self._pauses = DriverPauses(settings)
        self._running: set[int] = set()
        self._coordinator: CheckpointCoordinator | None = None
        self._deferred: deque[_ForCoordinator | SavepointRequest] = deque()
        """The facts that the coordinator receives as soon as it accepts them."""
        self._left: list[Request] = []
        """The requests that arrived after the end of the attempt was certain."""
        self._stopping: set[CheckpointId] = set()
        self._beat_at_s = float("-inf")
        self._decisions: list[AttemptDecision] = []

    @property
    def completed(self) -> tuple[CompletedCheckpoint, ...]:
        """The retained checkpoints, oldest first; none before every slot runs."""
        return self._coordinator.completed if self._coordinator else ()

    @property
    def unanswered(self) -> tuple[Request, ...]:
        """The requests that this attempt has neither fulfilled nor refused, for the next attempt.

        Excludes begun savepoints: they end with the attempt, and the code that began them reports
        it.
        """
        # A request is in exactly one of three sets: not yet passed to the coordinator, passed to
        # it, or received after the end.
        waiting = (*self._deferred, *self._left)
        kinds = {fact.kind for fact in waiting if isinstance(fact, CheckpointRequested)}
        if self._coordinator:
            kinds |= self._coordinator.requested
        # Sort them: otherwise a replay of the simulator by its seed would differ from run to run.
        checkpoints = map(CheckpointRequested, sorted(kinds, key=lambda kind: kind.value))
        others = (f for f in waiting if isinstance(f, (SavepointRequest, CancelRequested)))
        return (*checkpoints, *others)

    def wait_s(self, now_s: float) -> float:
        """Return the time until the next action is due if no fact arrives."""
        # Wait for half an interval, so that a beat is late by no more than that.
        wait_s = self._settings.heartbeat_interval_s / 2
        phase = self._phase
        match phase:
            case Gathering() | Starting():
                return wait_s
            case Coordinating(coordinator, waits_for):
                wake_s = None if waits_for else coordinator.next_wake_s()
                return wait_s if wake_s is None else max(0.0, min(wait_s, wake_s - now_s))
            case Investigating(deadline_s=deadline_s) | Leaving(deadline_s=deadline_s):
                return max(0.0, deadline_s - now_s)
            case Over():
                return 0.0
            case _:
                assert_never(phase)

    def on(self, fact: AttemptFact, now_s: float) -> tuple[AttemptDecision, ...]:
        """Process one fact and return the decisions."""
        self._notice_pause(now_s)
        phase = self._phase
        match phase:
            case Gathering() | Starting() | Coordinating():
                self._hear(fact, now_s)
                self._inform_coordinator(now_s)
            case Investigating():
                self._investigate(phase, fact)
            case Leaving():
                self._hear_last(phase, fact, now_s)
            case Over():
                self._keep_request(fact)
            case _:
                assert_never(phase)
        return self._take_decisions()

    def tick(self, now_s: float) -> tuple[AttemptDecision, ...]:
        """Return the decisions that are due at `now_s`."""
        self._notice_pause(now_s)
        phase = self._phase
        match phase:
            case Gathering():
                self._beat(now_s)
                self._gather(phase, now_s)
            case Starting():
                self._beat(now_s)
                self._start(phase, now_s)
            case Coordinating():
                self._beat(now_s)
                self._inform_coordinator(now_s)
                self._coordinate(phase, now_s)
            case Investigating():
                if now_s >= phase.deadline_s:
                    self._end(phase.error)
            case Leaving():
                if not len(self._slots) or now_s >= phase.deadline_s:
                    self._close(phase)
            case Over():
                pass  # the attempt has ended
            case _:
                assert_never(phase)
        return self._take_decisions()

    def _notice_pause(self, now_s: float) -> None:
        if self._pauses.turn(now_s):
            self._slots.excuse(now_s)

    # --- while the attempt works ------------------------------------------------------------------

    def _hear(self, fact: AttemptFact, now_s: float) -> None:  # noqa: C901, PLR0912 - dispatches
        if is_of_another_attempt(fact, self._settings.attempt):
            return
        match fact:
            case Hello():
                self._admit(fact, now_s)
            case SlotMessageReceived(_, slot, message):
                self._slots.hear(slot, now_s)
                self._hear_slot(slot, message, now_s)
            case SlotGone(slot, _, reason):
                if slot in self._slots:
                    self._decide(fact)
                    self._end(errors.SlotLost(f"slot {slot} is lost: {reason}"))
            case SlotsEnded(_, error):
                self._end(error)
            case OutboxesMeasured(waiting_s):
                if lost := self._slots.find_lost(waiting_s, now_s):
                    self._end(lost)
            case CheckpointRequested() | SavepointRequest() | SavepointWritten():
                self._deferred.append(fact)
            case CancelRequested():
                self._end(JobCancelled(f"job {self._settings.job} was cancelled"))
            case SavepointBegun():
                self._begin_savepoint(fact, now_s)
            case RecoveryEnded():
                self._on_recovered(fact)
            case RecoveryStep():
                self._check_recovery(fact, now_s)
            case AppendEnded():
                self._on_appended(fact, now_s)
            case GlobalCommitEnded():
                if fact.error is None:
                    self._deferred.append(fact)
                else:
                    self._end(fact.error)
            case DiscoveryAnswered():
                self._on_discovered(fact)
            case BlockersListed():
                self._decide(fact)
                if self._coordinator:
                    self._coordinator.note_blockers(fact.uid, fact.blockers)
            case _:
                assert_never(fact)

    def _admit(self, hello: Hello, now_s: float) -> None:
        attempt = self._settings.attempt
        if hello.attempt != attempt:
            self._decide(DismissSlot(hello, f"attempt {hello.attempt} has ended; {attempt} runs"))
        # Check before the slot is admitted: other code would read state wrongly, and its uploads to
        # other storage would never be found.
        elif refusal := self._slots.find_refusal(hello):
            self._end(refusal)
        else:
            self._slots.admit(hello, now_s)
            self._decide(AdmitSlot(hello))

    def _hear_slot(self, slot: int, message: SlotMessage, now_s: float) -> None:
        match message:
            case Running():
                self._running.add(slot)
                if message.dropped:
                    self._decide(message)
            case Failed():
                self._decide(message)
                error = slot_error(message)
                if isinstance(error, errors.SlotLost):
                    # A slot that lost a channel often reports before the end of the other slot is
                    # known. The error for the user must name that other slot, because it is the
                    # cause.
                    self._phase = Investigating(message, error, now_s + INVESTIGATION_S)
                else:
                    self._end(error)
            case Heartbeat():
                self._decide(message)
            case SlotClosed():
                self._release(slot)
            case Acked() | Declined() | CommittedThrough() | SourceExhausted():
                self._deferred.append(message)
            case Hello():
                text = f"slot {slot} sent Hello twice on one stream"
                self._end(errors.MessageCorrupt(text))
            case _:
                assert_never(message)

    def _on_recovered(self, end: RecoveryEnded) -> None:
        if end.error is not None:
            self._end(end.error)
        elif isinstance(self._phase, Gathering):
            self._phase.sinks_agree = True
            self._decide(end)

    def _check_recovery(self, step: RecoveryStep, now_s: float) -> None:
        """End the attempt if one step of recovery takes too long."""
        deadline_s = self._settings.commit_deadline_s
        # The retries of one transaction have the first half of this time.
        if (taken_s := now_s - step.began_at_s) > 2 * deadline_s:
            self._end(
                errors.CommitFailed(
                    f"recovery of job {self._settings.job} has waited {taken_s:.0f} s for"
                    f" {step.text}. Find out why the target does not answer, or raise"
                    f" commit_deadline_s ({deadline_s:.0f})"
                )
            )

    def _on_appended(self, end: AppendEnded, now_s: float) -> None:
        """Go on after an append, with the decision or without it.

        If the outcome is unknown (`DecisionUnknown`), the attempt ends: the next attempt reads the
        log and finds out.
        """
        phase = self._phase
        if not isinstance(phase, Coordinating):
            raise InvariantViolation(f"an append ended that was never started: {end.completed}")
        phase.waits_for = None
        checkpoint = end.completed.checkpoint
        match end.error:
            case None:
                self._decide(end)
                self._pass_on(phase.coordinator.on_logged(checkpoint, now_s), now_s)
            case errors.StorageError() as error:
                # The decision is certainly not in the log. The checkpoint fails, and the attempt
                # goes on unless too many have failed.
                failed = phase.coordinator.on_append_failure(checkpoint, str(error), now_s)
                self._pass_on(failed, now_s)
            case error:
                self._end(error)

    def _on_discovered(self, answer: DiscoveryAnswered) -> None:
        if answer.error is not None:
            self._end(answer.error)
            return
        offers = self._offers[answer.uid].offer(answer.splits)
        messages = {slot: OfferSplits(answer.uid, splits) for slot, splits in offers.items()}
        self._decide(TakeDiscovered(answer.uid, messages))
        if offers:
            # New splits are read once a checkpoint contains them, so request one now, not at the
            # interval.
            self._deferred.append(CheckpointRequested(CheckpointKind.MANUAL))

    # --- the coordinator ------------------------------------------------------------------------

    def _inform_coordinator(self, now_s: float) -> None:
        """Pass queued facts to the coordinator, until it waits for an outcome.

        Slots that were deployed first may send messages before all slots run.
        """
        while self._deferred:
            phase = self._phase
            if not isinstance(phase, Coordinating) or phase.waits_for is not None:
                return
            fact = self._deferred[0]
            # The request stays in the queue until the savepoint's directory exists. If the attempt
            # ends before, `unanswered` still returns it for the next attempt.
            if isinstance(fact, SavepointRequest):
                phase.waits_for = fact
                self._decide(fact)
                return
            self._deferred.popleft()
            self._inform(phase.coordinator, fact, now_s)

    def _inform(
        self, coordinator: CheckpointCoordinator, fact: _ForCoordinator, now_s: float
    ) -> None:
        attempt = self._settings.attempt
        match fact:
            case Acked(checkpoint, snapshot):
                self._decide(fact)
                in_target = fact.in_target
                decisions = coordinator.on_ack(
                    attempt, checkpoint, snapshot, now_s, in_target=in_target
                )
            case Declined(checkpoint, subtask, reason):
                decisions = coordinator.on_decline(attempt, checkpoint, subtask, reason, now_s)
            case CommittedThrough(subtask, checkpoint):
                self._decide(fact)
                decisions = coordinator.on_committed(subtask, checkpoint, now_s)
            case SourceExhausted(subtask):
                decisions = coordinator.on_source_end(subtask, now_s)
            case CheckpointRequested(kind):
                decisions = coordinator.request(kind, now_s)
            case SavepointWritten(_, checkpoint):
                # The requester of an aborted savepoint has already been told that it failed.
                if checkpoint in coordinator.pending and not fact.error:
                    self._decide(fact)
                decisions = coordinator.on_savepoint_end(checkpoint, now_s, error=fact.error)
            case GlobalCommitEnded(_, uid, sink_id, checkpoint):
                self._decide(fact)
                # Decide this before the coordinator receives the fact: slots drop the data that
                # they keep for this checkpoint, and the fact may end the job.
                self._decide(GloballyCommitted(sink_id, checkpoint))
                decisions = coordinator.on_committed(committer_ref(uid), checkpoint, now_s)
            case _:
                assert_never(fact)
        self._pass_on(decisions, now_s)

    def _begin_savepoint(self, begun: SavepointBegun, now_s: float) -> None:
        phase = self._phase
        if not isinstance(phase, Coordinating) or phase.waits_for != begun.request:
            raise InvariantViolation(f"savepoint {begun.request.id} was started without a request")
        phase.waits_for = None
        self._deferred.popleft()
        if begun.stands:
            self._pass_on(phase.coordinator.request_savepoint(begun.request, now_s), now_s)

    def _pass_on(self, decisions: Iterable[Decision], now_s: float) -> None:
        """Decide the coordinator's decisions, and what follows from them for this loop."""
        for decision in decisions:
            match decision:
                case Barrier(checkpoint, kind):
                    if kind is CheckpointKind.STOP:
                        self._stopping.add(checkpoint)
                    self._decide(decision)
                case AppendDecision():
                    assert isinstance(self._phase, Coordinating)
                    self._phase.waits_for = decision
                    self._decide(decision)
                case (
                    WriteSavepoint()
                    | AbortSavepoint()
                    | NotifyComplete()
                    | NotifyAbort()
                    | DiscardState()
                    | CountFailure()
                ):
                    self._decide(decision)
                case FailAttempt(reason):
                    self._end(errors.CheckpointError(reason))
                case FinishJob(checkpoint):
                    self._leave(is_finished=checkpoint not in self._stopping, now_s=now_s)
                case _:
                    assert_never(decision)

    # --- the time -------------------------------------------------------------------------------

    def _beat(self, now_s: float) -> None:
        if now_s - self._beat_at_s >= self._settings.heartbeat_interval_s:
            # Count from now, not from the time it was due: after a long pause there is one beat,
            # not one for each missed.
            self._beat_at_s = now_s
            self._decide(SendHeartbeats())

    def _gather(self, phase: Gathering, now_s: float) -> None:
        if phase.deadline_s is None:
            phase.deadline_s = now_s + self._settings.start_timeout_s
        if not phase.has_all_slots:
            if now_s > phase.deadline_s:
                self._end(self._too_late(f"{len(self._slots)} of {{}} slots up"))
            elif len(self._slots) >= self._settings.parallelism:
                phase.has_all_slots = True
                self._decide(SlotsComplete())
        if not phase.has_all_slots:
            return
        if phase.sinks_agree:
            self._decide(DeploySlots())
            self._phase = Starting(now_s + self._settings.start_timeout_s)
        else:
            # Recovery runs with heartbeats: sinks may take longer than slots tolerate silence.
            self._decide(LookAtRecovery())

    def _start(self, phase: Starting, now_s: float) -> None:
        if now_s > phase.deadline_s:
            self._end(self._too_late(f"{len(self._running)} of {{}} running"))
        elif len(self._running) >= self._settings.parallelism:
            self._coordinator = self._build_coordinator(now_s)
            self._phase = Coordinating(self._coordinator)
            self._decide(EnterRunning())
            self._inform_coordinator(now_s)
            self._coordinate(self._phase, now_s)

    def _too_late(self, waiting_for: str) -> errors.SlotLost:
        settings = self._settings
        return errors.SlotLost(
            f"job {settings.job}: after {settings.start_timeout_s:.0f} s only"
            f" {waiting_for.format(settings.parallelism)}; check that the cluster has"
            f" {settings.parallelism} free task slots and that the executors can reach the driver"
        )

    def _coordinate(self, phase: Coordinating, now_s: float) -> None:
        if phase.waits_for is None:
            self._pass_on(phase.coordinator.tick(now_s), now_s)
        # The coordinator may just have ended the attempt or the job.
        if self._phase is phase:
            coordinator = phase.coordinator
            self._decide(AskBeside(coordinator.completed[-1], coordinator.overdue(now_s)))

    # --- the end --------------------------------------------------------------------------------

    def _investigate(self, phase: Investigating, fact: AttemptFact) -> None:
        """Look for the slot that was lost first; requests received meanwhile are kept."""
        self._keep_request(fact)
        if is_of_another_attempt(fact, self._settings.attempt):
            return
        # Ignore the end of the slot that reported the failure: it explains nothing.
        if isinstance(fact, SlotGone) and fact.slot != phase.failed.slot:
            text = (
                f"slot {fact.slot} is lost: {fact.reason}. The loss was first noticed as:"
                f" {phase.error}"
            )
            self._end(errors.SlotLost(text))

    def _hear_last(self, phase: Leaving, fact: AttemptFact, now_s: float) -> None:
        """Process `fact` while the slots shut down. Spark kills a slot that does not end."""
        if is_of_another_attempt(fact, self._settings.attempt):
            return
        match fact:
            case SlotMessageReceived(_, slot, message):
                self._hear_last_word(phase, slot, message, now_s)
            case SlotGone(slot):
                self._release(slot)
            case SlotsEnded():
                self._close(phase)
            case CheckpointRequested() | SavepointRequest() | CancelRequested():
                self._keep_request(fact)  # the requester is told that the job has ended
            case (
                Hello()
                | OutboxesMeasured()
                | SavepointBegun()
                | RecoveryEnded()
                | RecoveryStep()
                | AppendEnded()
                | SavepointWritten()
                | GlobalCommitEnded()
                | DiscoveryAnswered()
                | BlockersListed()
            ):
                pass  # the job is done without it
            case _:
                assert_never(fact)

    def _hear_last_word(
        self, phase: Leaving, slot: int, message: SlotMessage, now_s: float
    ) -> None:
        match message:
            case SlotClosed():
                self._release(slot)
            case Heartbeat():
                self._decide(message)
            case Acked():
                # The ack's files were written and belong to no checkpoint: the coordinator decides
                # to delete them.
                self._inform(phase.coordinator, message, now_s)
            case Hello() | Running() | Declined() | CommittedThrough() | SourceExhausted():
                pass  # the job is done without it
            case Failed():
                pass  # all of its commits are confirmed
            case _:
                assert_never(message)

    def _keep_request(self, fact: AttemptFact) -> None:
        if isinstance(fact, (CheckpointRequested, SavepointRequest, CancelRequested)):
            self._left.append(fact)

    def _release(self, slot: int) -> None:
        if slot in self._slots:
            self._slots.release(slot)
            self._decide(ReleaseSlot(slot))

    def _leave(self, *, is_finished: bool, now_s: float) -> None:
        assert self._coordinator is not None
        # A slot that hangs must not delay the end of a finished job.
        deadline_s = now_s + self._settings.cancel_timeout_s
        self._phase = Leaving(self._coordinator, is_finished, deadline_s)
        self._decide(Shutdown(f"job {self._settings.job} is done"))

    def _close(self, phase: Leaving) -> None:
        self._decide(CloseAttempt(phase.is_finished))
        self._phase = Over()

    def _end(self, error: BaseException) -> None:
        self._decide(EndAttempt(self._pauses.explain(error)))
        self._phase = Over()

    def _decide(self, decision: AttemptDecision) -> None:
        # After the end nothing is decided: further calls in the same step have no effect.
        if not isinstance(self._phase, Over):
            self._decisions.append(decision)

    def _take_decisions(self) -> tuple[AttemptDecision, ...]:
        decisions, self._decisions = tuple(self._decisions), []
        return decisions
