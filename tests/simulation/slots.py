"""A simulated slot: source subtasks, subtasks that take from them, their threads and mail.

Mirrors core/runtime: the same protocol objects are fed the same facts, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.channels import Outputs
from tests.simulation.clock import Bell, Process, Sleep, Steps, Stream, Violation
from tests.simulation.committer import Confirmations, PreCommitter
from tests.simulation.stages import (
    KEYED,
    RELAY,
    KeyedTask,
    Mailbox,
    RelayTask,
    StageTask,
    group_of,
)
from tests.simulation.targets import Row, Target
from tests.simulation.uploads import Uploads

from onceflow.core.errors import PreparedTransactionLost, SlotLost
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.checkpoints.decisions import (
    Barrier,
    CheckpointKind,
    NotifyAbort,
)
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.loops.attempt_facts import SlotGone, SlotMessageReceived
from onceflow.core.protocol.loops.slot import (
    RestoreEnded,
    SlotDecision,
    StartSubtasks,
)
from onceflow.core.protocol.splits import AwaitedSplits, Split

if TYPE_CHECKING:
    from tests.simulation.world import World

SPLITS = "splits"
RULES = "rules"
"""The source whose records come to every subtask that counts."""
RULE = "r0"
"""Its only partition."""


@dataclass
class Deployment:
    """The message of the driver with everything that a slot of one attempt needs."""

    attempt: AttemptId
    parallelism: int
    splits: dict[str, list[dict[str, int]]]
    """The next offset of each partition, by source and slot."""
    handles: tuple[snapshots.StateHandle, ...]
    raw: tuple[snapshots.StateHandle, ...]
    """State without a key, of each old subtask by number."""
    in_flight: dict[str, tuple[snapshots.InFlight, ...]]
    """The rows in flight to be replayed, by chain."""
    sinks: Sequence[Target]
    """The targets that the pipeline writes to."""
    tell: Callable[[SlotMessageReceived | SlotGone], None]
    """Tells whoever drives the job now what a slot has said, or that it is gone."""
    peers: list[Slot] = field(default_factory=list["Slot"])


class Slot(Process):
    """One process of one attempt."""

    def __init__(self, world: World, deployment: Deployment, index: int) -> None:
        super().__init__(world.clock)
        self.world, self.deploy, self.index = world, deployment, index
        self.told = Stream(world.clock, world.network)
        """The messages of the driver."""
        self._said = Stream(world.clock, world.network)
        self.uploads = Uploads(self)
        self._loop = world.variant.slot_loop(1e9, 1e9, world.clock.now_s)
        # What is broadcast takes the last channels.
        uids = sorted(deployment.splits, key=lambda uid: uid == RULES)
        self.sources = [SourceTask(self, uid, number) for number, uid in enumerate(uids)]
        parallelism = deployment.parallelism
        in_order = parallelism if RULES in deployment.splits else 0
        channels = parallelism * sum(uid != RULES for uid in deployment.splits)
        self.relay = RelayTask(self, channels) if world.shape.relay else None
        self.keyed = KeyedTask(self, (parallelism if self.relay else channels) + in_order, in_order)

    @property
    def first(self) -> StageTask:
        """The operator that reads from the sources."""
        return self.relay or self.keyed

    def start(self) -> None:
        deploy = messages.Deploy((), GENESIS, CheckpointId(GENESIS + 1), (), (), b"")
        for fact in (deploy, RestoreEnded()):
            self._carry_out(self._loop.on(fact, self.clock.now_s))

    def _start(self) -> None:
        for source in self.sources:
            source.outputs.open()
            self.begin(source.read())
        if self.relay:
            self.relay.outputs.open()
            self.begin(self.relay.compute())
        self.begin(self.keyed.compute())

    @property
    def stages(self) -> list[StageTask]:
        """The operators behind the sources, in the order of the rows."""
        return [self.relay, self.keyed] if self.relay else [self.keyed]

    @property
    def subtasks(self) -> list[SubtaskRef]:
        return [*(source.ref for source in self.sources), *(stage.ref for stage in self.stages)]

    def kill(self, why: str) -> None:
        self.fail(why)

    def fail(self, why: str, *, for_good: bool = False) -> None:
        """The driver notices by the end of the control stream."""
        if self.alive:
            self.alive = False
            self.clock.say(f"slot {self.deploy.attempt}/{self.index} dies: {why}")
            failed = messages.Failed(self.index, PreparedTransactionLost.__name__, why, "", "never")
            gone = SlotGone(self.index, self.deploy.attempt, why)
            fact = (
                SlotMessageReceived(self.deploy.attempt, self.index, failed) if for_good else gone
            )
            if self.world.asking.slots_notice and not for_good:
                self._break_channels()
            self._said.end(lambda: self.deploy.tell(fact))

    def _break_channels(self) -> None:
        """Have a slot that has lost its channel to this one say so first."""
        for peer in self.deploy.peers:
            if peer.alive:
                peer._send(
                    messages.Failed(peer.index, SlotLost.__name__, "a channel broke", "", "job")
                )

    def crashes(self, where: str) -> bool:
        if self.alive and self.world.draws_crash():
            self.kill(where)
        return not self.alive

    # --- what the slot says, and what it hears, by its loop -----------------------------------

    def report(
        self,
        report: messages.Acked
        | messages.Declined
        | messages.SourceExhausted
        | messages.CommittedThrough,
    ) -> None:
        """Tell the driver; how far commits are the slot's parts have made out by themselves."""
        if isinstance(report, messages.CommittedThrough):
            self._send(report)
        else:
            self._carry_out(self._loop.on(report, self.clock.now_s))

    def hear(self, message: messages.DriverMessage) -> None:
        self._carry_out(self._loop.on(message, self.clock.now_s))

    def _send(self, message: messages.SlotMessage) -> None:
        said = SlotMessageReceived(self.deploy.attempt, self.index, message)
        self._said.send(lambda: self.deploy.tell(said))

    def _carry_out(self, decisions: Sequence[SlotDecision]) -> None:
        for decision in decisions:
            match decision:
                case StartSubtasks():
                    self._start()
                case messages.Acked() | messages.Declined() | messages.SourceExhausted():
                    self._send(decision)
                case Barrier():
                    self._trigger(decision)
                case messages.OfferSplits(uid, splits):
                    task = next(source for source in self.sources if source.uid == uid)
                    task.mail.append(lambda t=task, s=splits: t.offered(s))  # type: ignore[misc]
                case NotifyAbort(checkpoint):
                    self._abort(checkpoint)
                case messages.Complete(checkpoint, needed):
                    self._complete(checkpoint, needed)
                case messages.GloballyCommitted(sink_id, through):
                    self._commit_globally(sink_id, through)
                case messages.Deploy():
                    continue  # what is restored is there already
                case _:
                    raise Violation(f"a slot of the model does not know {decision}")

    def _trigger(self, barrier: Barrier) -> None:
        for source in self.sources:
            source.mail.append(lambda s=source: s.triggered(barrier))  # type: ignore[misc]

    def _complete(self, checkpoint: CheckpointId, needed: Mapping[str, CheckpointId]) -> None:
        if not self.alive:
            return
        for source in self.sources:
            source.mail.append(lambda s=source: s.completed(checkpoint))  # type: ignore[misc]
        if relay := self.relay:
            relay.mail.append(lambda: relay.completed(checkpoint))
        late_s = 0.0
        if self.world.variant.confirms_unheard:  # broken: the mail is posted last, and later
            self.keyed.confirmed.come(len(self.keyed.committers), checkpoint)
            late_s = self.world.rng.expovariate(1 / 0.2)
        self.clock.after(
            late_s, lambda: self.keyed.mail.append(lambda: self.keyed.completed(checkpoint))
        )
        for committer in self.keyed.committers:
            committer.completed(checkpoint, needed[committer.target.sink_id])

    def _commit_globally(self, sink_id: str, through: CheckpointId) -> None:
        for committer in self.keyed.committers:
            if isinstance(committer, PreCommitter) and committer.target.sink_id == sink_id:
                committer.queue.take_committed(through)

    def _abort(self, checkpoint: CheckpointId) -> None:
        for source in self.sources:
            source.mail.append(lambda s=source: s.aborted(checkpoint))  # type: ignore[misc]
        if relay := self.relay:
            relay.mail.append(lambda: relay.aborted(checkpoint))
        self.keyed.mail.append(lambda: self.keyed.aborted(checkpoint))


class SourceTask:
    """Reads its splits, and begins every barrier."""

    def __init__(self, slot: Slot, uid: str, number: int) -> None:
        self.slot, self.world, self.uid = slot, slot.world, uid
        self.ref = SubtaskRef(uid, slot.index)
        self.bell = Bell(slot.clock)
        self.mail = Mailbox(self.bell)
        self.positions = dict(slot.deploy.splits[uid][slot.index])
        self._reading, self._ended = True, False
        self._late: list[Barrier] = []
        self._barriers = slot.world.variant.source_barriers()
        self._awaited = AwaitedSplits()
        relay, self._is_broadcast = slot.world.shape.relay, uid == RULES
        self._below = RELAY if relay and not self._is_broadcast else KEYED
        if relay and self._is_broadcast:
            number = 1
        self.outputs = Outputs(
            slot.world,
            self.bell,
            lambda: [
                peer.keyed if self._is_broadcast else peer.first for peer in slot.deploy.peers
            ],
            number * slot.deploy.parallelism + slot.index,
            sender=slot.index,
            keeps_order=self._is_broadcast,
        )
        self._confirmed = Confirmations(
            0, lambda n: slot.report(messages.CommittedThrough(self.ref, n))
        )

    def read(self) -> Steps[None]:
        pause: float | Sleep = 0.01
        while True:
            yield pause
            pause = 0.01
            while self.mail:
                self.mail.popleft()()
            clear = self.outputs.flush()
            while barrier := self._barriers.next(self.world.now_s, clear=clear):
                self._snapshot(barrier)
            if not self._reading:
                if self._ended:
                    # Again and again: the message may be lost.
                    self.slot.report(messages.SourceExhausted(self.ref))
                pause = Sleep(self.bell, 0.2 if clear else 0.02)
                continue
            if not clear:
                pause = Sleep(self.bell, 0.02)
                continue
            open_ones = [p for p, at in self.positions.items() if at < self.world.records_open]
            if open_ones:
                # One poll gives several rows.
                for _ in range(self.world.rng.randint(1, 2)):
                    self._emit_record(self.world.rng.choice(sorted(open_ones)))
            elif self.world.input_ends:
                self._reading, self._ended = False, True
                self.outputs.end()
            else:
                pause = Sleep(self.bell, 0.05)
            for barrier in self._late:
                self.outputs.forward(barrier)
            self._late.clear()

    def triggered(self, barrier: Barrier) -> None:
        self._barriers.on_triggered(barrier, self.world.now_s)

    def _snapshot(self, barrier: Barrier) -> None:
        checkpoint = barrier.checkpoint
        if barrier.kind is CheckpointKind.SAVEPOINT_DRAIN and not self._ended:
            self._reading, self._ended = False, True
            self.outputs.end()
        elif barrier.kind.stops_sources:
            self._reading = False
        variant = self.world.variant
        elements = [
            encode_split(p, max(0, at + variant.position_shift))
            for p, at in sorted(self.positions.items())
        ]
        elements += [split.position for split in self._awaited.snapshot(checkpoint)]
        overtaken: list[Row] = []
        if variant.snapshot_late and self._reading:
            self._late.append(barrier)  # broken: one more record comes before it
        else:
            overtaken = self.outputs.forward(barrier)
        snapshot = snapshots.OperatorSnapshot(self.uid, lists={SPLITS: tuple(elements)})

        def finish(in_flight: tuple[snapshots.InFlight, ...]) -> Steps[None]:
            yield 0.001
            done = snapshots.SubtaskSnapshot(self.ref, (snapshot,), in_flight=in_flight)
            self.slot.report(messages.Acked(checkpoint, done))

        parts = [(self._below, False, overtaken)]
        self.slot.uploads.begin(self.ref, checkpoint, parts, finish)

    def offered(self, splits: Sequence[Split]) -> None:
        """These have appeared: read them once a decision holds them."""
        if self.world.variant.reads_undecided_splits:
            self.positions |= dict.fromkeys((split.id for split in splits), 0)
        else:
            self._awaited.add_offer(splits)

    def completed(self, checkpoint: CheckpointId) -> None:
        decided = self._awaited.take_decided(checkpoint)
        self.positions |= parse_splits([split.position for split in decided])
        self._confirmed.come(0, checkpoint)

    def aborted(self, checkpoint: CheckpointId) -> None:
        self._barriers.on_abort(checkpoint)
        self._awaited.drop_snapshot(checkpoint)

    def _emit_record(self, partition: str) -> None:
        if not self._is_broadcast:
            self.world.oracle.check_read(partition, self.slot.deploy)
        offset = self.positions[partition]
        if offset == self.world.records:
            return
        self.positions[partition] = offset + 1
        row = (partition, offset, self.world.key_of(partition, offset), 0)
        if self._is_broadcast:
            self.outputs.broadcast(row)
        else:
            self.outputs.send_row(row, group_of(self._below, row))


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
