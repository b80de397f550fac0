"""A slot of a world with an exchange: a source subtask, and a sink subtask behind channels.

Perhaps only the first slots have a sink subtask. Each source sends its rows in turn to all sink
subtasks. Production's queues and its alignment are between them. Barriers may overtake rows that
wait in a sink's channels. Senders have a credit for each row.

If no barrier may overtake, a sink processes each element when it arrives. Otherwise elements arrive
when they are sent, and the explorer chooses when the sink processes them. The explorer does not
delay arrivals: a sink cannot distinguish a late arrival from a slow sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.exploration.calls import Ended, Thread
from tests.exploration.canonical import copy_of
from tests.exploration.procedures import Plan
from tests.exploration.slot import (
    SINK,
    SOURCE,
    SPLITS,
    Answer,
    EndInput,
    Receive,
    SlotProcess,
    TakeBarrier,
    encode_position,
    pre_commit,
)
from tests.simulation.variant import Variant

from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints import alignment, in_flight
from onceflow.core.protocol.checkpoints.alignment import AlignmentMode, EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier, NotifyAbort
from onceflow.core.protocol.checkpoints.snapshots import (
    InFlight,
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef


@dataclass(frozen=True, slots=True)
class Row:
    """A row in a channel."""

    number: int


Element: TypeAlias = Row | Barrier | EndOfStream


@dataclass(frozen=True, slots=True)
class EmitRow:
    """Read the next row and send it."""


@dataclass(frozen=True, slots=True)
class EmitBarrier:
    """Send the barrier that is held to all sinks, and ack."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Take an element from the network into the channel of one sender."""

    channel: int
    element: Element


@dataclass(frozen=True, slots=True)
class Compute:
    """Process the next announcement or element; it is the turn of one of the channels."""

    turn: int


@dataclass(frozen=True, slots=True)
class SendElement:
    """The effect that an element goes to the sink of another slot."""

    slot: int
    element: Element


def encode_rows(rows: Sequence[Row]) -> bytes:
    return ",".join(str(row.number) for row in rows).encode()


def parse_rows(part: InFlight) -> list[Row]:
    return [Row(int(number)) for number in part.handle.inline.decode().split(",")]


@dataclass(frozen=True, slots=True)
class _Quiet:
    """The bell and the dice that broken queues of the simulator have."""

    @property
    def rng(self) -> _Quiet:
        return self

    def ring(self) -> None:
        """Wake no thread: there is none."""

    def randrange(self, stop: int) -> int:
        del stop
        return 0


class ExchangeSlot(SlotProcess):
    """A slot whose rows go through an exchange."""

    def __init__(
        self,
        attempt: AttemptId,
        index: int,
        variant: Variant,
        plan: Plan,
    ) -> None:
        has_sink = index < plan.sink_slots
        super().__init__(attempt, index, plan.rows, plan.sinks if has_sink else (), variant)
        slots = self.slots = plan.slots
        self.sink_slots, self.overtakes = plan.sink_slots, plan.overtakes
        self.sink = SubtaskRef(SINK, index)
        self.refs = (self.ref, self.sink) if has_sink else (self.ref,)
        mode = variant.mode or AlignmentMode.ALIGNED
        self.alignment = variant.alignment(slots, mode, ())
        queues: Any = in_flight.InputQueues[Row]
        if variant.inputs is not Variant().inputs:
            queues = variant.inputs
        self.inputs: in_flight.InputQueues[Row] = queues([in_flight.ChannelEnd()] * slots)
        if variant.inputs is not Variant().inputs:
            broken: Any = self.inputs
            broken.world = broken.bell = _Quiet()
        self.actions: deque[alignment.AlignmentAction] = deque()
        """The work that follows when the snapshot is complete."""
        self.held: tuple[Barrier, tuple[Committable, ...]] | None = None
        """A barrier that has overtaken rows, until it has come on all channels."""
        self.passed: tuple[int, ...] | None = None

    @property
    def choices(self) -> tuple[object, ...]:  # type: ignore[override]
        """The steps that the subtasks may take by themselves now."""
        if not self.is_working:
            return ()
        found: list[object] = []
        if self.reads and self.position < self.rows:
            found.append(EmitRow())
        if self.reads and self.position == self.rows and not self.has_reported_end:
            found.append(EndInput())
        if copy_of(self.barriers).next(0.0, clear=True) is not None:
            found.append(EmitBarrier())
        if "task" not in self.threads:
            found += map(Compute, self._find_turns())
        return tuple(found)

    @staticmethod
    def _set_turn(inputs: Any, turn: int) -> None:
        inputs._turn = turn

    def _find_turns(self) -> list[int]:
        """Return the turns that lead to different elements; only the first if one is announced."""
        turns: dict[object, int] = {}
        for turn in range(self.slots):
            inputs = copy_of(self.inputs)
            self._set_turn(inputs, turn)
            if (taken := inputs.take()) is not None:
                turns.setdefault((type(taken), taken.channel), turn)
        return list(turns.values())

    def step(self, event: object) -> tuple[object, ...]:  # type: ignore[override]
        """Take one step; return its effects on others."""
        match event:
            case EmitRow():
                number = self.index * self.rows + self.position
                target = (self.index + self.position + 1) % self.sink_slots
                self.position += 1
                self._emit(target, Row(number))
            case EndInput():
                for target in range(self.sink_slots):
                    self._emit(target, EndOfStream())
                self.has_reported_end = True
                self._tell(messages.SourceExhausted(self.ref))
            case EmitBarrier():
                self._emit_barrier()
            case Deliver(channel, element):
                self.inputs.put(channel, element)
                if not self.overtakes:
                    self._compute_all()
            case Compute(turn):
                self._set_turn(self.inputs, turn)
                self._compute()
            case Receive() | TakeBarrier() | Answer():
                return super().step(event)
            case _:
                raise AssertionError(event)
        self._close_if_idle()
        # The turn says only in which order channels are read, and each `Compute` chooses it.
        self._set_turn(self.inputs, 0)
        effects, self._effects = tuple(self._effects), []
        return effects

    # --- the source ------------------------------------------------------------------------------

    def _emit(self, slot: int, element: Element) -> None:
        self._effects.append(SendElement(slot, element))  # type: ignore[arg-type]

    def _emit_barrier(self) -> None:
        barrier = self.barriers.next(0.0, clear=True)
        assert barrier is not None
        if barrier.kind.stops_sources:
            self.reads = False
        for target in range(self.sink_slots):
            self._emit(target, barrier)
        position = min(self.rows, max(0, self.position + self.variant.position_shift))
        lists: dict[str, tuple[bytes, ...]] = {SPLITS: (encode_position(self.index, position),)}
        snapshot = SubtaskSnapshot(self.ref, (OperatorSnapshot(SOURCE, lists=lists),))
        self._tell(messages.Acked(barrier.checkpoint, snapshot))

    # --- the sink --------------------------------------------------------------------------------

    def _restore(self, deploy: messages.Deploy) -> None:
        super()._restore(deploy)
        if self.index == 0:  # rows without a key would have no owner; here it is the first sink
            for part in deploy.in_flight:
                self.inputs.replay(parse_rows(part))

    def _compute_all(self) -> None:
        while "task" not in self.threads and not self.has_failed and self._compute():
            pass

    def _compute(self) -> bool:
        taken = self.inputs.take()
        match taken:
            case None:
                return False
            case in_flight.Announced(channel, barrier):
                self.actions += self.alignment.on_announced(channel, barrier, 0.0)
            case in_flight.Received(channel, element):
                match element:
                    case Barrier():
                        self.actions += self.alignment.on_barrier(channel, element, 0.0)
                    case EndOfStream():
                        self.alignment.on_end_of_input(channel)
                    case Row(number):
                        for state in self.sinks:
                            state.open = tuple(sorted((*state.open, number)))
        self._align()
        return True

    def _align(self) -> None:
        while self.actions and "task" not in self.threads:
            match self.actions.popleft():
                case alignment.Block(channel):
                    self.inputs.block(channel)
                case alignment.Unblock(channels):
                    self.inputs.unblock(channels)
                case alignment.TakeSnapshot(barrier=barrier, passed=passed):
                    self._take_snapshot(barrier, passed)
                case alignment.InFlightComplete(checkpoint):
                    self._complete_in_flight(checkpoint)
                case alignment.ForgetInFlight(checkpoint):
                    self.held = None
                    self.inputs.forget(checkpoint)
                case alignment.AlignmentAborted(checkpoint, reason):
                    self._tell(messages.Declined(checkpoint, self.sink, reason))

    def _take_snapshot(self, barrier: Barrier, passed: tuple[int, ...] | None) -> None:
        if passed is not None:
            self.inputs.record(barrier.checkpoint, passed)
        self.taken, self.passed = (barrier, 0), passed
        named = self._name_transactions(barrier.checkpoint)
        for state in self.sinks:
            state.open = ()
        self._go_on("task", Thread(pre_commit, (self.attempt, named)).run())

    def _acknowledge(self, early: object) -> None:
        """Ack the sink's part, or keep it until all rows in flight are known."""
        del early
        assert self.taken is not None
        barrier = self.taken[0]
        listed = tuple(c for s in self.sinks for c in s.pending_through(barrier.checkpoint))
        if self.passed is not None and not self.variant.acks_before_in_flight:
            self.held = barrier, listed
        else:
            self._acknowledge_sink(barrier.checkpoint, listed, ())

    def _complete_in_flight(self, checkpoint: CheckpointId) -> None:
        if self.held is None:
            return
        (_, listed), self.held = self.held, None
        rows = self.inputs.end_recording(checkpoint).get(0, ())
        self._acknowledge_sink(checkpoint, listed, rows)

    def _acknowledge_sink(
        self, checkpoint: CheckpointId, listed: tuple[Committable, ...], rows: Sequence[Row]
    ) -> None:
        operators = tuple(
            OperatorSnapshot(
                state.sink.sink_id,
                committables=tuple(
                    c for c in listed if c.transaction.sink_id == state.sink.sink_id
                ),
            )
            for state in self.sinks
        )
        handle = StateHandle("rows", "", len(rows), "", inline=encode_rows(rows))
        parts = (InFlight(SINK, True, handle),) if rows else ()
        snapshot = SubtaskSnapshot(self.sink, operators, in_flight=parts)
        self._tell(messages.Acked(checkpoint, snapshot))

    def _abort(self, mail: NotifyAbort) -> None:
        super()._abort(mail)
        self.actions += self.alignment.on_abort(mail.checkpoint)
        self._align()
        if not self.overtakes:
            self._compute_all()

    def _go_on(self, name: str, thread: Thread | Ended) -> None:
        super()._go_on(name, thread)
        if name == "task" and isinstance(thread, Ended) and not self.has_failed:
            self._align()
            if not self.overtakes:
                self._compute_all()
