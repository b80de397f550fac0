"""A simulated slot: a source subtask, a keyed subtask with its sink, and the slot's committer.

Mirrors core/runtime: the same protocol objects are fed the same facts, in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.model import DatabaseGone, Row, Violation

from onceflow.core.protocol.alignment import (
    AlignmentAborted,
    AlignmentAction,
    Barrier,
    BarrierAlignment,
    Block,
    TakeSnapshot,
    Unblock,
)
from onceflow.core.protocol.assignment import key_group_range, owner_of
from onceflow.core.protocol.commits import CommitRetryPolicy, Done, GiveUp, RetryAt, WaitUntil
from onceflow.core.protocol.committables import Committable, Committed, Lost, Unknown
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.snapshots import OperatorSnapshot, StateHandle, SubtaskSnapshot

if TYPE_CHECKING:
    from tests.simulation.world import World

KEY_GROUPS = 8
SINK = "sim"
END = "end"
Element = Row | Barrier | str
Fact = Callable[[CheckpointCoordinator, float], Sequence[object]]


@dataclass
class Deployment:
    """What the driver sends: everything that a slot of one attempt needs."""

    attempt: AttemptId
    parallelism: int
    splits: list[dict[int, int]]
    """Of each slot: partition -> next offset."""
    handles: tuple[StateHandle, ...]
    report: Callable[[int, Fact | str], None]
    """A fact for the coordinator, or why the slot is gone."""
    peers: list[Slot] = field(default_factory=list["Slot"])


class Slot:
    """One process. `kill` ends it at any step; nothing of it survives but the world's models."""

    def __init__(self, world: World, deployment: Deployment, index: int) -> None:
        self.world, self.deploy, self.index = world, deployment, index
        self.alive = True
        self.source = SubtaskRef("source", index)
        self.keyed = SubtaskRef("keyed", index)
        variant = world.variant
        self.positions = dict(deployment.splits[index])

        self.reading, self.last_trigger = True, 0
        self.late: deque[Barrier] = deque()
        self.inputs: list[deque[Element]] = [deque() for _ in range(deployment.parallelism)]
        self.blocked: set[int] = set()
        self.alignment = BarrierAlignment(deployment.parallelism, variant.mode)
        groups = key_group_range(KEY_GROUPS, deployment.parallelism, index)
        self.groups = groups
        self.state: dict[int, int] = {}
        for handle in deployment.handles:
            for key, count in world.files.read(handle.path).items():
                if int(key) % KEY_GROUPS in groups:
                    self.state[int(key)] = max(count, self.state.get(int(key), 0))
        self.base: tuple[StateHandle, ...] = ()
        self.base_state: dict[int, int] = {}
        self.taken: dict[int, tuple[tuple[StateHandle, ...], dict[int, int]]] = {}
        self.open_rows: list[Row] = []
        self.queue = variant.queue(CommitRetryPolicy(deadline_s=30.0))
        self.committing = False

    def start(self) -> None:
        self._later(self._poll)
        self._later(self._take)

    def kill(self, why: str) -> None:
        if self.alive:
            self.alive = False
            self.world.clock.say(f"slot {self} dies: {why}")
            # The driver notices by the end of the control stream, whatever else is lost.
            self.world.clock.after(0.01, lambda: self.deploy.report(self.index, why))

    def __str__(self) -> str:
        return f"{self.deploy.attempt}/{self.index}"

    # --- the source ---------------------------------------------------------------------------

    def _poll(self) -> None:
        world = self.world
        open_partitions = [p for p, at in self.positions.items() if at < world.records]
        if self.late:
            self._emit_barrier(self.late.popleft())
        if self.reading and open_partitions:
            partition = world.rng.choice(open_partitions)
            offset = self.positions[partition]
            self.positions[partition] = offset + 1
            key = world.key_of(partition, offset)
            owner = owner_of(key % KEY_GROUPS, KEY_GROUPS, self.deploy.parallelism)
            self._send(owner, (partition, offset, key, 0))
        elif self.reading:
            self.reading = False
            for target in range(self.deploy.parallelism):
                self._send(target, END)
        if not self.reading and not open_partitions:
            # Again and again: a message may be lost.
            self._report(lambda c, now_s: c.source_exhausted(self.source, now_s))
        self._later(self._poll, 0.01 if self.reading else 0.2)

    def trigger(self, barrier: Barrier) -> None:
        if self._fenced_off() or barrier.checkpoint <= self.last_trigger:
            return
        self.last_trigger = barrier.checkpoint
        if self.world.variant.snapshot_late and self.reading:
            self.late.append(barrier)  # broken: the position is taken after one more record
            splits = tuple(_split(p, at + 1) for p, at in sorted(self.positions.items()))
        else:
            shift = self.world.variant.position_shift
            splits = tuple(
                _split(p, max(0, at + shift)) for p, at in sorted(self.positions.items())
            )
            self._emit_barrier(barrier)
        if barrier.kind is CheckpointKind.STOP:
            self.reading = False
        snapshot = OperatorSnapshot("source", lists={"splits": splits})
        done = SubtaskSnapshot(self.source, (snapshot,))
        attempt, checkpoint = self.deploy.attempt, barrier.checkpoint
        self._report(lambda c, now_s: c.acked(attempt, checkpoint, done, now_s))

    def _emit_barrier(self, barrier: Barrier) -> None:
        for target in range(self.deploy.parallelism):
            self._send(target, barrier)

    def _send(self, target: int, element: Element) -> None:
        """FIFO within a channel: the order of sending is the order of the queue."""
        self.deploy.peers[target].inputs[self.index].append(element)

    # --- the keyed subtask --------------------------------------------------------------------

    def _take(self) -> None:
        ready = [c for c, q in enumerate(self.inputs) if q and c not in self.blocked]
        if ready:
            channel = self.world.rng.choice(ready)
            element = self.inputs[channel].popleft()
            now_s = self.world.clock.now_s
            if isinstance(element, Barrier):
                self._align(self.alignment.on_barrier(channel, element, now_s))
            elif isinstance(element, str):
                self.alignment.on_end_of_input(channel)
            else:
                partition, offset, key, _ = element
                self.state[key] = self.state.get(key, 0) + 1
                self.open_rows.append((partition, offset, key, self.state[key]))
        if self.alive:
            self._later(self._take, 0.004)

    def _align(self, actions: Sequence[AlignmentAction]) -> None:
        for action in actions:
            match action:
                case Block(channel):
                    self.blocked.add(channel)
                case Unblock(channels):
                    self.blocked.difference_update(channels)
                case TakeSnapshot(barrier=barrier):
                    self._snapshot(barrier)
                case AlignmentAborted(checkpoint, reason):
                    self._decline(checkpoint, reason)

    def _decline(self, checkpoint: CheckpointId, reason: str) -> None:
        attempt = self.deploy.attempt
        self._report(lambda c, now_s: c.declined(attempt, checkpoint, self.keyed, reason, now_s))

    def _snapshot(self, barrier: Barrier) -> None:
        world, variant, checkpoint = self.world, self.world.variant, barrier.checkpoint
        attempt = self.deploy.attempt if variant.attempt_in_name else 1
        transaction = TransactionId(SINK, attempt, checkpoint, self.index)
        rows, self.open_rows = self.open_rows, []
        committable = Committable(transaction, len(rows)) if rows else None
        if variant.ack_before_prepare:
            pending = self.queue.pending_through(checkpoint)
            pending = (*pending, committable) if committable else pending
            self._ack(checkpoint, pending, delay_s=0.0)
        if not self._crashed("before prepare"):
            if committable:
                try:
                    world.database.prepare(transaction, rows)
                except DatabaseGone:
                    self.kill("the database is gone at prepare")
                    return
            if self._crashed("after prepare"):
                return
            self.queue.pre_committed(checkpoint, committable)
            if committable and variant.commit_at_pre_commit:
                world.database.commit(committable)
            if not variant.ack_before_prepare:
                self._ack(checkpoint, self.queue.pending_through(checkpoint))

    def _ack(
        self, checkpoint: CheckpointId, pending: tuple[Committable, ...], delay_s: float = 0.05
    ) -> None:
        """The asynchronous part: write a file with what changed, then ack."""
        changed = {k: n for k, n in self.state.items() if self.base_state.get(k) != n}
        path = f"a{self.deploy.attempt}/{checkpoint}/{self.index}"
        first, last = self.groups.start, self.groups.stop - 1
        handle = StateHandle(path, path, 1, "", first, last, shared=True)
        handles = (*self.base, handle)
        state = dict(self.state)

        def upload() -> None:
            if not self.alive or self._crashed("before upload"):
                return
            self.world.files.write(path, changed)
            self.taken[checkpoint] = (handles, state)
            if self.world.variant.reuse_undecided_files:
                self.base, self.base_state = handles, state
            snapshot = OperatorSnapshot("keyed", keyed=handles, committables=pending)
            self.world.check_durable(self.deploy.attempt, pending, handles)
            done = SubtaskSnapshot(self.keyed, (snapshot,))
            attempt = self.deploy.attempt
            self._report(lambda c, now_s: c.acked(attempt, checkpoint, done, now_s))
            self._crashed("after ack")

        if delay_s:
            self.world.clock.after(self.world.rng.uniform(0, delay_s), upload)
        else:
            upload()

    # --- what the driver says -----------------------------------------------------------------

    def complete(self, checkpoint: CheckpointId) -> None:
        if self._fenced_off():
            return
        self.queue.completed(checkpoint)
        if checkpoint in self.taken:
            self.base, self.base_state = self.taken[checkpoint]
            if len(self.base) > 3:
                self.base, self.base_state = (), {}
        self.taken = {n: t for n, t in self.taken.items() if n > checkpoint}
        self._report(lambda c, now_s: c.committed(self.source, checkpoint, now_s))
        if not self.committing:
            self.committing = True
            self._later(self._commit)

    def abort(self, checkpoint: CheckpointId) -> None:
        self.taken.pop(checkpoint, None)
        self._align(self.alignment.on_abort(checkpoint))
        if self.world.variant.roll_back_on_abort:
            for committable in self.queue.pending_through(checkpoint):
                if committable.transaction.checkpoint == checkpoint:
                    self.world.database.abort(committable)

    def _commit(self) -> None:
        world, variant = self.world, self.world.variant
        step = self.queue.next_commit(world.clock.now_s)
        if step is None:
            self.committing = False
            through = self.queue.committed_through
            self._report(lambda c, now_s: c.committed(self.keyed, through, now_s))
            return
        if isinstance(step, WaitUntil):
            self._later(self._commit, step.at_s - world.clock.now_s + 0.001)
            return
        if self._crashed("before commit"):
            return
        outcome = world.database.commit(step)
        if self._crashed("after commit"):
            return
        if variant.lost_is_committed and isinstance(outcome, Lost):
            outcome = Committed()
        if variant.unknown_is_committed and isinstance(outcome, Unknown):
            outcome = Committed()
        match self.queue.outcome(step, outcome, world.clock.now_s):
            case Done() | RetryAt():
                self._later(self._commit)
            case GiveUp(kind, message):
                self.kill(f"{kind}: {message}")

    # --- plumbing -----------------------------------------------------------------------------

    def _crashed(self, where: str) -> bool:
        if self.alive and self.world.draws_crash():
            self.kill(where)
        return not self.alive

    def _fenced_off(self) -> bool:
        return not self.alive

    def _later(self, step: Callable[[], None], delay_s: float = 0.005) -> None:
        def event() -> None:
            if self.alive:
                step()

        self.world.clock.after(delay_s * self.world.rng.uniform(0.2, 2.0), event)

    def _report(self, fact: Fact) -> None:
        self.world.network.send(lambda: self.deploy.report(self.index, fact))


def _split(partition: int, offset: int) -> bytes:
    return f"{partition}:{offset}".encode()


def parse_splits(elements: tuple[bytes, ...]) -> dict[int, int]:
    """Return partition -> next offset."""
    found: dict[int, int] = {}
    for element in elements:
        partition, offset = element.decode().split(":")
        if int(partition) in found:
            raise Violation(f"I6 partition {partition} is in one checkpoint twice")
        found[int(partition)] = int(offset)
    return found
