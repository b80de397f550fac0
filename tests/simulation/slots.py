"""A simulated slot: source subtasks, a keyed subtask with its sinks, their threads and mail.

Mirrors core/runtime: the same protocol objects are fed the same facts, in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.clock import Gone, Process, Steps, Violation
from tests.simulation.committer import Committer, Confirmations, PreCommitter
from tests.simulation.targets import Row, Target, Versioned

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.alignment import (
    AlignmentAborted,
    AlignmentAction,
    Barrier,
    Block,
    TakeSnapshot,
    Unblock,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.snapshots import OperatorSnapshot, StateHandle, SubtaskSnapshot
from onceflow.core.protocol.splits import AwaitedSplits, Split, key_group_range, owner_of

if TYPE_CHECKING:
    from tests.simulation.world import World

KEY_GROUPS = 8
KEYED = "keyed"
END = "end"
SPLITS = "splits"
Element = Row | Barrier | str
Mail = Callable[[], None]
Fact = Callable[[CheckpointCoordinator, float], Sequence[object]]


@dataclass(frozen=True)
class SlotFailed:
    """Why a slot is gone; `for_good` when no attempt can do better."""

    reason: str
    for_good: bool = False


@dataclass
class Deployment:
    """What the driver sends: everything that a slot of one attempt needs."""

    attempt: AttemptId
    parallelism: int
    splits: dict[str, list[dict[str, int]]]
    """By source and slot: partition -> next offset."""
    handles: tuple[StateHandle, ...]
    report: Callable[[int, Fact | SlotFailed], None]
    peers: list[Slot] = field(default_factory=list["Slot"])


class Slot(Process):
    """One process of one attempt."""

    def __init__(self, world: World, deployment: Deployment, index: int) -> None:
        super().__init__(world.clock)
        self.world, self.deploy, self.index = world, deployment, index
        self.uploads = 0
        """How many are under way."""
        self.sources = [
            SourceTask(self, uid, number) for number, uid in enumerate(deployment.splits)
        ]
        self.keyed = KeyedTask(self)

    def start(self) -> None:
        for source in self.sources:
            self.begin(source.read())
        self.begin(self.keyed.compute())

    @property
    def subtasks(self) -> list[SubtaskRef]:
        return [*(source.ref for source in self.sources), self.keyed.ref]

    def kill(self, why: str) -> None:
        self.fail(why)

    def fail(self, why: str, *, for_good: bool = False) -> None:
        """The driver notices by the end of the control stream, whatever else is lost."""
        if self.alive:
            self.alive = False
            self.clock.say(f"slot {self.deploy.attempt}/{self.index} dies: {why}")
            failed = SlotFailed(why, for_good)
            self.clock.after(0.01, lambda: self.deploy.report(self.index, failed))

    def crashes(self, where: str) -> bool:
        if self.alive and self.world.draws_crash():
            self.kill(where)
        return not self.alive

    def report(self, fact: Fact) -> None:
        self.world.network.send(lambda: self.deploy.report(self.index, fact))

    # --- what the driver says, on the thread that reads the control stream -------------------

    def trigger(self, barrier: Barrier) -> None:
        for source in self.sources:
            source.mail.append(lambda s=source: s.triggered(barrier))  # type: ignore[misc]

    def complete(self, checkpoint: CheckpointId, needed: Mapping[str, CheckpointId]) -> None:
        if not self.alive:
            return
        for source in self.sources:
            source.mail.append(lambda s=source: s.completed(checkpoint))  # type: ignore[misc]
        late_s = 0.0
        if self.world.variant.confirms_unheard:  # broken: the mail is posted last, and later
            self.keyed.confirmed.come(len(self.keyed.committers), checkpoint)
            late_s = self.world.rng.expovariate(1 / 0.2)
        self.clock.after(
            late_s, lambda: self.keyed.mail.append(lambda: self.keyed.completed(checkpoint))
        )
        for committer in self.keyed.committers:
            committer.completed(checkpoint, needed[committer.target.sink_id])

    def globally_committed(self, sink_id: str, through: CheckpointId) -> None:
        for committer in self.keyed.committers:
            if isinstance(committer, PreCommitter) and committer.target.sink_id == sink_id:
                committer.queue.committed(through)

    def abort(self, checkpoint: CheckpointId) -> None:
        for source in self.sources:
            source.mail.append(lambda s=source: s.aborted(checkpoint))  # type: ignore[misc]
        self.keyed.mail.append(lambda: self.keyed.aborted(checkpoint))


class SourceTask:
    """Reads its splits, and begins every barrier."""

    def __init__(self, slot: Slot, uid: str, number: int) -> None:
        self.slot, self.world, self.uid, self.number = slot, slot.world, uid, number
        self.ref = SubtaskRef(uid, slot.index)
        self.mail: deque[Mail] = deque()
        self.positions = dict(slot.deploy.splits[uid][slot.index])
        self._reading, self._ended, self._last = True, False, 0
        self._late: list[Barrier] = []
        self._awaited = AwaitedSplits()
        self._confirmed = Confirmations(
            0, lambda n: slot.report(lambda c, now_s: c.committed(self.ref, n, now_s))
        )

    def read(self) -> Steps[None]:
        while True:
            yield 0.01 if self._reading else 0.05
            while self.mail:
                self.mail.popleft()()
            if not self._reading:
                if self._ended:
                    # Again and again: the message may be lost.
                    self.slot.report(lambda c, now_s: c.source_exhausted(self.ref, now_s))
                continue
            open_ones = [p for p, at in self.positions.items() if at < self.world.records]
            if open_ones:
                self._emit_record(self.world.rng.choice(sorted(open_ones)))
            elif self.world.input_ends:
                self._reading, self._ended = False, True
                self._emit(END)
            for barrier in self._late:
                self._emit(barrier)
            self._late.clear()

    def triggered(self, barrier: Barrier) -> None:
        checkpoint = barrier.checkpoint
        if checkpoint <= self._last:
            return
        self._last = checkpoint
        if barrier.kind is CheckpointKind.SAVEPOINT_DRAIN and self._reading:
            self._reading, self._ended = False, True
            self._emit(END)
        elif barrier.kind.stops_sources:
            self._reading = False
        variant = self.world.variant
        elements = [
            encode_split(p, max(0, at + variant.position_shift))
            for p, at in sorted(self.positions.items())
        ]
        elements += [split.position for split in self._awaited.snapshot(checkpoint)]
        if variant.snapshot_late and self._reading:
            self._late.append(barrier)  # broken: one more record comes before it
        else:
            self._emit(barrier)
        snapshot = OperatorSnapshot(self.uid, lists={SPLITS: tuple(elements)})
        done, attempt = SubtaskSnapshot(self.ref, (snapshot,)), self.slot.deploy.attempt
        self.slot.report(lambda c, now_s: c.acked(attempt, checkpoint, done, now_s))

    def offered(self, splits: Sequence[Split]) -> None:
        """These have appeared: read them once a decision holds them."""
        if self.world.variant.reads_undecided_splits:
            self.positions |= dict.fromkeys((split.id for split in splits), 0)
        else:
            self._awaited.offered(splits)

    def completed(self, checkpoint: CheckpointId) -> None:
        decided = self._awaited.completed(checkpoint)
        self.positions |= parse_splits([split.position for split in decided])
        self._confirmed.come(0, checkpoint)

    def aborted(self, checkpoint: CheckpointId) -> None:
        self._last = max(self._last, checkpoint)
        self._awaited.aborted(checkpoint)

    def _emit_record(self, partition: str) -> None:
        self.world.oracle.check_read(partition)
        offset = self.positions[partition]
        self.positions[partition] = offset + 1
        key = self.world.key_of(partition, offset)
        owner = owner_of(key % KEY_GROUPS, KEY_GROUPS, self.slot.deploy.parallelism)
        self._send(owner, (partition, offset, key, 0))

    def _emit(self, element: Barrier | str) -> None:
        for target in range(self.slot.deploy.parallelism):
            self._send(target, element)

    def _send(self, target: int, element: Element) -> None:
        """FIFO within a channel: the order of sending is the order of the queue."""
        channel = self.number * self.slot.deploy.parallelism + self.slot.index
        self.slot.deploy.peers[target].keyed.inputs[channel].append(element)


class KeyedTask:
    """Counts by key, behind channels from every source subtask, and writes to every sink."""

    def __init__(self, slot: Slot) -> None:
        self.slot, self.world = slot, slot.world
        parallelism = slot.deploy.parallelism
        self.ref = SubtaskRef(KEYED, slot.index)
        self.mail: deque[Mail] = deque()
        channels = parallelism * len(slot.deploy.splits)
        self.inputs: list[deque[Element]] = [deque() for _ in range(channels)]
        self._blocked: set[int] = set()
        self._ended = False
        self._alignment = self.world.variant.alignment(channels, self.world.alignment_mode)
        self._brought = [0] * channels
        self._groups = key_group_range(KEY_GROUPS, parallelism, slot.index)
        self._state = _restored(slot, self._groups)
        self._base: tuple[tuple[StateHandle, ...], dict[int, int]] = ((), {})
        """Files of the last checkpoint known to be completed, and what they hold."""
        self._taken: dict[int, tuple[tuple[StateHandle, ...], dict[int, int]]] = {}
        self._given_up: set[int] = set()
        self._rows: list[Row] = []
        sinks = list(self.world.targets.values())
        self.confirmed = Confirmations(
            len(sinks),
            lambda n: slot.report(lambda c, now_s: c.committed(self.ref, n, now_s)),
        )
        self.committers = [self._committer(target, who) for who, target in enumerate(sinks)]

    def _committer(self, target: Target, who: int) -> Committer | PreCommitter:
        def come(through: CheckpointId) -> None:
            self.confirmed.come(who, through)

        if isinstance(target, Versioned):
            return PreCommitter(self.slot, target, come)
        return Committer(self.slot, target, come)

    def compute(self) -> Steps[None]:
        while True:
            yield 0.004
            if self.mail:
                self.mail.popleft()()
                continue
            ready = [c for c, q in enumerate(self.inputs) if q and c not in self._blocked]
            if not ready:
                yield 0.01
                continue
            channel = self.world.rng.choice(ready)
            element = self.inputs[channel].popleft()
            if isinstance(element, Barrier):
                yield from self._on_barrier(channel, element)
            elif isinstance(element, str):
                self._alignment.on_end_of_input(channel)
                self._ended = self._alignment.all_ended
            else:
                require(not self._ended, "I6 a record follows the end of all input")
                partition, offset, key, _ = element
                self._state[key] = self._state.get(key, 0) + 1
                self._rows.append((partition, offset, key, self._state[key]))

    def _on_barrier(self, channel: int, barrier: Barrier) -> Steps[None]:
        passed = min(self._brought)
        self._brought[channel] = barrier.checkpoint
        actions = self._alignment.on_barrier(channel, barrier, self.world.clock.now_s)
        remembered = self._alignment.aborted
        require(all(n > passed for n in remembered), f"I9 aborted {remembered}, passed {passed}")
        yield from self._align(actions)

    def _align(self, actions: Sequence[AlignmentAction]) -> Steps[None]:
        for action in actions:
            match action:
                case Block(channel):
                    self._blocked.add(channel)
                case Unblock(channels):
                    self._blocked.difference_update(channels)
                case TakeSnapshot(barrier=barrier):
                    yield from self._snapshot(barrier)
                case AlignmentAborted(checkpoint, reason):
                    self._decline(checkpoint, reason)

    def _decline(self, checkpoint: CheckpointId, reason: str) -> None:
        attempt = self.slot.deploy.attempt
        self.slot.report(lambda c, now_s: c.declined(attempt, checkpoint, self.ref, reason, now_s))

    # --- the snapshot ---------------------------------------------------------------------------

    def _snapshot(self, barrier: Barrier) -> Steps[None]:
        """The synchronous part: every sink pre-commits; then the stream goes on."""
        world, slot, checkpoint = self.world, self.slot, barrier.checkpoint
        require(checkpoint not in self._given_up, f"I9 a snapshot of {checkpoint}, given up before")
        world.oracle.check_snapshot(slot.deploy.attempt, checkpoint)
        rows, self._rows = self._rows, []
        operators: list[OperatorSnapshot] = []
        for committer in self.committers:
            attempt = slot.deploy.attempt if world.variant.attempt_in_name else 1
            sink_id = committer.target.sink_id
            transaction = TransactionId(sink_id, attempt, checkpoint, slot.index)
            committable = Committable(transaction, len(rows)) if rows else None
            queue = committer.queue
            if world.variant.ack_before_prepare:
                early = (committable,) if committable else ()
                pending = (*queue.pending_through(checkpoint), *early)
                operators.append(OperatorSnapshot(sink_id, committables=pending))
                self._begin_upload(barrier, operators)
            if slot.crashes("before prepare"):
                return
            if committable is not None:
                try:
                    yield from committer.target.pre_commit(transaction, rows)
                except Gone:
                    slot.kill(f"{sink_id} is gone at pre-commit")
                    return
            if slot.crashes("after prepare"):
                return
            queue.pre_committed(checkpoint, [committable] if committable else [])
            if committable is not None and world.variant.commit_at_pre_commit:
                slot.begin(_ignoring_outcome(committer, committable))
            pending = queue.pending_through(checkpoint)
            operators.append(OperatorSnapshot(sink_id, committables=pending))
        if not world.variant.ack_before_prepare:
            self._begin_upload(barrier, operators)

    def _begin_upload(self, barrier: Barrier, sinks: list[OperatorSnapshot]) -> None:
        self.slot.uploads += 1
        self.slot.begin(self._upload(barrier, dict(self._state), sinks))

    def _upload(
        self, barrier: Barrier, state: dict[int, int], sinks: list[OperatorSnapshot]
    ) -> Steps[None]:
        """The asynchronous part: what changed since the base, or everything; then the ack."""
        world, slot, checkpoint = self.world, self.slot, barrier.checkpoint
        stands_alone = barrier.kind.is_savepoint
        incremental = not stands_alone and world.rng.random() < 0.6
        base, held = self._base if incremental else ((), {})
        changed = {key: n for key, n in state.items() if held.get(key) != n}
        path = f"a{slot.deploy.attempt}/{checkpoint}/{slot.index}"
        shared = self._handle(f"{path}/shared", not stands_alone)
        private = self._handle(f"{path}/own", False)
        handles = (*base, shared)
        if not stands_alone:
            self._taken[checkpoint] = handles, state
            if world.variant.reuse_undecided_files:
                self._base = handles, state
        yield 0.5 if world.rng.random() < world.shape.slow_uploads else 0.02
        written: list[str] = []
        try:
            for handle, content in ((shared, changed), (private, {})):
                if slot.crashes("in an upload"):
                    return
                yield world.files.ask(lambda h=handle, c=content: world.files.write(h.path, c))  # type: ignore[misc]
                written.append(handle.path)
        except Gone as gone:
            world.files.content.pop(shared.path, None)
            world.files.content.pop(private.path, None)
            self._decline(checkpoint, f"storage: {gone!r}")
            slot.uploads -= 1
            return
        keyed = OperatorSnapshot(KEYED, keyed=handles, raw=(private,))
        world.oracle.check_durable(slot.deploy.attempt, sinks)
        done = SubtaskSnapshot(self.ref, (keyed, *sinks))
        attempt = slot.deploy.attempt
        slot.report(lambda c, now_s: c.acked(attempt, checkpoint, done, now_s))
        slot.uploads -= 1
        slot.crashes("after ack")

    def _handle(self, path: str, shared: bool) -> StateHandle:
        return StateHandle(
            path, path, 1, "", self._groups.start, self._groups.stop - 1, shared=shared
        )

    # --- mail ----------------------------------------------------------------------------------

    def completed(self, checkpoint: CheckpointId) -> None:
        if checkpoint in self._taken:
            self._base = self._taken[checkpoint]
        self._taken = {n: taken for n, taken in self._taken.items() if n > checkpoint}
        self.confirmed.come(len(self.committers), checkpoint)

    def aborted(self, checkpoint: CheckpointId) -> None:
        self._given_up.add(checkpoint)
        self._taken.pop(checkpoint, None)
        # It only unblocks: no snapshot comes of an abort.
        for _ in self._align(self._alignment.on_abort(checkpoint)):
            raise Violation("an abort takes time")
        if self.world.variant.roll_back_on_abort:
            for committer in self.committers:
                for one in committer.queue.pending_through(checkpoint):
                    if one.transaction.checkpoint == checkpoint:
                        self.slot.begin(_dropping(committer, one))


def _restored(slot: Slot, groups: range) -> dict[int, int]:
    world, state = slot.world, dict[int, int]()
    for handle in slot.deploy.handles:
        if handle.path not in world.files.content and slot.deploy.attempt < world.claimed:
            raise SlotLost("a newer attempt has deleted what this one restores")
        for key, count in world.files.read(handle.path).items():
            if key % KEY_GROUPS in groups:
                state[key] = max(count, state.get(key, 0))
    return state


def _ignoring_outcome(committer: Committer | PreCommitter, committable: Committable) -> Steps[None]:
    yield from committer.target.commit(committable)


def _dropping(committer: Committer | PreCommitter, committable: Committable) -> Steps[None]:
    yield from committer.target.abort(committable)


def encode_split(partition: str, offset: int) -> bytes:
    return f"{partition}:{offset}".encode()


def parse_splits(elements: Sequence[bytes]) -> dict[str, int]:
    """Return partition -> next offset."""
    found: dict[str, int] = {}
    for element in elements:
        partition, offset = element.decode().rsplit(":", 1)
        if partition in found:
            raise Violation(f"I6 partition {partition} is in one checkpoint twice")
        found[partition] = int(offset)
    return found


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)
