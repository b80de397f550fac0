"""A slot of a world: production's loop, source barriers and commit queues.

A slot reads one split and writes each row to every sink. The rows that a sink has received since
the last barrier are in an open transaction, which no other process sees. So the slot reads rows in
the step that takes a barrier: the explorer chooses how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.exploration import calls
from tests.exploration.calls import Ended, Thread
from tests.exploration.canonical import copy_of
from tests.exploration.ports import COMMITTERS, NoReply, SinkOfWorld
from tests.simulation.variant import Variant

from onceflow.core import errors
from onceflow.core.commit.queue import CommitQueue, CommitRetryPolicy, StepFailed, WaitUntil
from onceflow.core.commit.whole_checkpoints import PreCommits
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.decisions import Barrier, NotifyAbort
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot, SubtaskSnapshot
from onceflow.core.protocol.committables import CommitOutcome, Committable, Committed, Lost, Unknown
from onceflow.core.protocol.ids import (
    GENESIS,
    AttemptId,
    CheckpointId,
    SubtaskRef,
    TransactionId,
)
from onceflow.core.protocol.loops import slot as loops
from onceflow.core.protocol.loops.slot import DriverLost, SlotDecision

SOURCE = "source"
SINK = "sink"
"""The chain of the sink subtasks in worlds with an exchange."""
SPLITS = "splits"
NEVER_S = 1e9

# --- steps and effects ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receive:
    """Take a message of the driver."""

    message: messages.DriverMessage | DriverLost


@dataclass(frozen=True, slots=True)
class TakeBarrier:
    """Read `rows` rows, then take the barrier that is held."""

    rows: int


@dataclass(frozen=True, slots=True)
class EndInput:
    """Read all rows that are left, and report the end."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the request of a thread."""

    thread: str
    answer: Any


@dataclass(frozen=True, slots=True)
class Send:
    """The effect that a message goes to the driver."""

    message: messages.SlotMessage


@dataclass(frozen=True, slots=True)
class Leave:
    """The effect that the process has ended, and its stream with it."""

    reason: str


Effect: TypeAlias = Send | Leave


def encode_position(split: int, position: int) -> bytes:
    return f"{split}:{position}".encode()


def parse_position(element: bytes) -> tuple[int, int]:
    split, position = element.decode().split(":")
    return int(split), int(position)


# --- procedures ----------------------------------------------------------------------------------


def commit_one(asked: calls.Calls, kind: str, committable: Committable) -> CommitOutcome:
    """Ask a committer to commit one transaction."""
    committer = COMMITTERS[kind](asked, committable.transaction.sink_id)
    return committer.commit(committable)


def roll_back(asked: calls.Calls, transaction: TransactionId) -> None:
    """Roll back a transaction, as no slot of production does at an abort."""
    asked.ask(calls.RollBack(transaction))


def pre_commit(
    asked: calls.Calls, attempt: AttemptId, transactions: tuple[tuple[TransactionId, Any], ...]
) -> tuple[Committable, ...]:
    """Prepare the rows of each sink, as writers do: read the fence first."""
    for transaction, rows in transactions:
        if not asked.ask(calls.CheckFence(transaction.sink_id, attempt)):
            raise errors.Fenced(f"{transaction.sink_id} belongs to a newer attempt")
        try:
            asked.ask(calls.Prepare(transaction, rows))
        except NoReply as error:
            raise errors.CommitFailed(str(error)) from None
    return tuple(Committable(transaction, len(rows)) for transaction, rows in transactions)


# --- the slot ------------------------------------------------------------------------------------


class _SinkState:
    """One sink of the slot: its open rows, and the transactions that it has prepared."""

    def __init__(self, sink: SinkOfWorld, variant: Variant) -> None:
        self.sink = sink
        self.open: tuple[int, ...] = ()
        policy = CommitRetryPolicy(deadline_s=NEVER_S)
        self.commits: CommitQueue | None = None
        self.whole: PreCommits | None = None
        if sink.kind == "versions":
            self.whole = variant.pre_commits()
        else:
            self.commits = variant.queue(policy)

    def pre_committed(self, checkpoint: CheckpointId, made: Sequence[Committable]) -> None:
        own = [c for c in made if c.transaction.sink_id == self.sink.sink_id]
        waiting = self.commits or self.whole
        assert waiting is not None
        waiting.pre_committed(checkpoint, own)

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        waiting = self.commits or self.whole
        assert waiting is not None
        return waiting.pending_through(checkpoint)


class SlotProcess:
    """One process of one attempt."""

    def __init__(
        self,
        attempt: AttemptId,
        index: int,
        rows: int,
        sinks: Sequence[SinkOfWorld],
        variant: Variant,
    ) -> None:
        self.attempt, self.index, self.rows = attempt, index, rows
        self.variant = variant
        self.ref = SubtaskRef(SOURCE, index)
        self.refs: tuple[SubtaskRef, ...] = (self.ref,)
        self.loop = variant.slot_loop(NEVER_S, NEVER_S, 0.0)
        self.barriers = variant.source_barriers()
        self.sinks = [_SinkState(sink, variant) for sink in sinks]
        self.position: int = 0
        self.runs = self.reads = False
        self.has_reported_end = False
        self.has_failed = self.is_closing = self.is_over = False
        self.threads: dict[str, Thread] = {}
        self.taken: tuple[Barrier, int] | None = None
        """The barrier whose transactions are being prepared, and the position at it."""
        self.mail: list[messages.Complete | NotifyAbort] = []
        """The messages for the subtask, which receives them between two batches."""
        self.heard = GENESIS
        self.reported = GENESIS
        self._effects: list[Effect] = []

    # --- what the explorer asks ------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        """True if the subtasks run, and the slot has neither failed nor been told to leave."""
        return self.runs and not self.has_failed and not self.is_closing

    @property
    def choices(self) -> tuple[TakeBarrier | EndInput, ...]:
        """The steps that the subtask may take by itself now."""
        if not self.is_working or "task" in self.threads:
            return ()
        left = self.rows - self.position if self.reads else 0
        found: list[TakeBarrier | EndInput] = []
        if copy_of(self.barriers).next(0.0, clear=True) is not None:
            found += [TakeBarrier(rows) for rows in range(left + 1)]
        if self.reads and not self.has_reported_end:
            found.append(EndInput())
        return tuple(found)

    @property
    def requests(self) -> dict[str, calls.Request]:
        """The requests that wait for their answers, by thread."""
        return {name: t.request for name, t in self.threads.items() if t.request is not None}

    def step(self, event: Receive | TakeBarrier | EndInput | Answer) -> tuple[Effect, ...]:
        """Take one step; return its effects on others."""
        match event:
            case Receive(message):
                self._tell(message)
            case TakeBarrier(rows):
                self._take_barrier(rows)
            case EndInput():
                self._read(self.rows - self.position)
                self.has_reported_end = True
                self._tell(messages.SourceExhausted(self.ref))
            case Answer(thread, answer):
                self._go_on(thread, self.threads.pop(thread).run(answer))
        self._close_if_idle()
        effects, self._effects = tuple(self._effects), []
        return effects

    # --- the loop and its decisions --------------------------------------------------------------

    def _tell(self, fact: loops.SlotFact) -> None:
        for decision in self.loop.on(fact, 0.0):
            self._carry_out(decision)

    def _carry_out(self, decision: SlotDecision) -> None:
        match decision:
            case messages.Deploy():
                self._restore(decision)
                self._tell(loops.RestoreEnded())
            case loops.StartSubtasks():
                self.runs = self.reads = True
                self._send(messages.Running())
            case Barrier():
                self.barriers.on_triggered(decision, 0.0)
            case messages.Complete():
                self.mail.append(decision)
                self._read_mail()
                for state in self.sinks:
                    if state.commits is not None:
                        state.commits.note_decision(decision.checkpoint)
                        self._commit_next(state)
                self._report_progress()
            case NotifyAbort():
                self.mail.append(decision)
                self._read_mail()
            case messages.GloballyCommitted(sink_id, checkpoint):
                for state in self.sinks:
                    if state.whole is not None and state.sink.sink_id == sink_id:
                        state.whole.take_committed(checkpoint)
            case messages.Acked() | messages.Declined() | messages.SourceExhausted():
                self._send(decision)
            case messages.PartFailed(error):
                name = type(error).__name__
                self._send(messages.Failed(self.index, name, str(error), "", "job"))
            case loops.CloseParts():
                self.is_closing = True
            case loops.SayClosed():
                self._send(messages.SlotClosed())
            case loops.EndSlot(reason) | loops.ExitHard(reason):
                self._leave(reason)
            case loops.BeginClosing():
                pass
            case _:
                raise AssertionError(f"a slot of the explorer does not know {decision}")

    def _restore(self, deploy: messages.Deploy) -> None:
        positions = dict(map(parse_position, deploy.operators[0].lists[SPLITS]))
        self.position = positions[self.index]

    def _abort(self, mail: NotifyAbort) -> None:
        self.barriers.on_abort(mail.checkpoint)
        if self.variant.roll_back_on_abort:
            self._roll_back(mail.checkpoint)

    def _read_mail(self) -> None:
        if "task" in self.threads:
            return
        for mail in self.mail:
            match mail:
                case messages.Complete(checkpoint):
                    self.heard = max(self.heard, checkpoint)
                case NotifyAbort():
                    self._abort(mail)
        self.mail.clear()

    def _close_if_idle(self) -> None:
        if self.is_closing and not self.threads and not self.is_over:
            self._tell(loops.PartsClosed(in_time=True))

    def _leave(self, reason: str) -> None:
        self.is_over = True
        self.threads.clear()
        self._effects.append(Leave(reason))

    def _send(self, message: messages.SlotMessage) -> None:
        self._effects.append(Send(message))

    def _fail(self, error: BaseException) -> None:
        self.has_failed = True
        self._tell(messages.PartFailed(error))

    # --- the subtask -----------------------------------------------------------------------------

    def _read(self, rows: int) -> None:
        first = self.index * self.rows + self.position
        self.position += rows
        for state in self.sinks:
            state.open = (*state.open, *range(first, first + rows))

    def _take_barrier(self, rows: int) -> None:
        self._read(rows)
        barrier = self.barriers.next(0.0, clear=True)
        assert barrier is not None
        if barrier.kind.stops_sources:
            self.reads = False
        self.taken = barrier, self.position
        if self.variant.ack_before_prepare:
            self._acknowledge(self._name_transactions(barrier.checkpoint))
        named = self._name_transactions(barrier.checkpoint)
        for state in self.sinks:
            state.open = ()
        self._go_on("task", Thread(pre_commit, (self.attempt, named)).run())

    def _name_transactions(
        self, checkpoint: CheckpointId
    ) -> tuple[tuple[TransactionId, tuple[int, ...]], ...]:
        attempt = self.attempt if self.variant.attempt_in_name else 1
        return tuple(
            (TransactionId(state.sink.sink_id, attempt, checkpoint, self.index), state.open)
            for state in self.sinks
            if state.open
        )

    def _pre_committed(self, made: tuple[Committable, ...]) -> None:
        assert self.taken is not None
        checkpoint = self.taken[0].checkpoint
        for state in self.sinks:
            state.pre_committed(checkpoint, made)
        if not self.variant.ack_before_prepare:
            self._acknowledge(())
        self.taken = None
        self._read_mail()
        self._report_progress()
        for state in self.sinks:
            if self.variant.commit_at_pre_commit and state.commits is not None:
                state.commits.note_decision(checkpoint)
            self._commit_next(state)

    def _acknowledge(self, early: tuple[tuple[TransactionId, tuple[int, ...]], ...]) -> None:
        assert self.taken is not None
        barrier, position = self.taken
        position = min(self.rows, max(0, position + self.variant.position_shift))
        lists: dict[str, tuple[bytes, ...]] = {SPLITS: (encode_position(self.index, position),)}
        operators = [OperatorSnapshot(SOURCE, lists=lists)]
        for state in self.sinks:
            listed = [*state.pending_through(barrier.checkpoint)]
            own = (t for t in early if t[0].sink_id == state.sink.sink_id)
            listed += [Committable(transaction, len(rows)) for transaction, rows in own]
            operators.append(OperatorSnapshot(state.sink.sink_id, committables=tuple(listed)))
        snapshot = SubtaskSnapshot(self.ref, tuple(operators))
        self._tell(messages.Acked(barrier.checkpoint, snapshot))

    def _roll_back(self, checkpoint: CheckpointId) -> None:
        for state in self.sinks:
            for waiting in state.pending_through(checkpoint):
                name = f"abort {waiting.transaction}"
                self._go_on(name, Thread(roll_back, (waiting.transaction,)).run())

    # --- commits ---------------------------------------------------------------------------------

    def _commit_next(self, state: _SinkState) -> None:
        """Begin the next commit, if one is due and none is running."""
        name = f"commit {state.sink.sink_id}"
        if state.commits is None or name in self.threads or self.is_closing or self.has_failed:
            return
        step = state.commits.next_commit(0.0)
        if isinstance(step, WaitUntil):
            step = state.commits.next_commit(step.at_s)
        if isinstance(step, Committable):
            self._go_on(name, Thread(commit_one, (state.sink.kind, step)).run())

    def _committed(self, state: _SinkState, outcome: CommitOutcome) -> None:
        assert state.commits is not None
        head = state.commits.next_commit(NEVER_S)
        assert isinstance(head, Committable)
        if self.variant.unknown_is_committed and isinstance(outcome, Unknown):
            outcome = Committed()
        if self.variant.lost_is_committed and isinstance(outcome, Lost):
            outcome = Committed()
        ended = state.commits.outcome(head, outcome, 0.0)
        if isinstance(ended, StepFailed):
            lost = ended.kind == "lost"
            error = errors.PreparedTransactionLost if lost else errors.CommitFailed
            self._fail(error(ended.message))
            return
        self._report_progress()
        self._commit_next(state)

    def _report_progress(self) -> None:
        """Report up to which decision all sinks have committed, as `SlotCommits` does."""
        through = [s.commits.committed_through for s in self.sinks if s.commits is not None]
        confirmed = min([self.heard, *through])
        if confirmed > self.reported:
            self.reported = confirmed
            for ref in self.refs:
                self._send(messages.CommittedThrough(ref, confirmed))

    def _go_on(self, name: str, thread: Thread | Ended) -> None:
        if isinstance(thread, Thread):
            self.threads[name] = thread
            return
        if self.is_over or name.startswith("abort "):
            return
        if name == "task":
            if thread.error is not None:
                self._fail(thread.error)
            else:
                self._pre_committed(thread.result)
            return
        assert thread.error is None, thread.error
        state = next(s for s in self.sinks if name == f"commit {s.sink.sink_id}")
        self._committed(state, thread.result)
