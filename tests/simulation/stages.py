"""The tasks of a simulated slot that take what others send: a relay, and what counts and writes.

Mirrors ReceivingSubtask: mail first, then announcements, then elements if nothing waits for
credits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.channels import KEY_GROUPS, Inputs, Outputs
from tests.simulation.clock import Bell, Gone, Sleep, Steps, Violation
from tests.simulation.committer import Committer, Confirmations, PreCommitter
from tests.simulation.directories import Directory
from tests.simulation.rarities import BUNDLE_ROWS
from tests.simulation.targets import Row, Target, Versioned
from tests.simulation.uploads import Finish

from onceflow.core.protocol.checkpoints import alignment, snapshots
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.checkpoints.in_flight import REPLAYED, Announced, ChannelEnd, Received
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.messages import Acked, CommittedThrough, Declined
from onceflow.core.protocol.splits import key_group_range

if TYPE_CHECKING:
    from tests.simulation.slots import Slot

KEYED = "keyed"
RULES_SEEN = -1
"""Under what the file of state without a key has the number of rules."""
CLOCK, CLOCK_KEY = "clock", -KEY_GROUPS
"""Rows that the clock makes, one after the other: their partition, and the key that counts them."""
CLOCK_ROWS, CLOCK_S = 12, 0.1
"""The number of rows by the clock in all, and the time between two of them."""
LAST, LAST_KEYS = "last", range(-4 * KEY_GROUPS, -3 * KEY_GROUPS)
"""Rows that functions make at the end of the input, one of each key group, and their keys."""
RELAY = "relay"
Mail = Callable[[], None]


class Mailbox(deque[Mail]):
    """The mailbox of one thread, which wakes when a message arrives."""

    def __init__(self, bell: Bell) -> None:
        super().__init__()
        self._bell = bell

    def append(self, mail: Mail) -> None:
        super().append(mail)
        self._bell.ring()


def group_of(chain: str, row: Row) -> int:
    """Return the key group by which `row` comes to its subtask of `chain`."""
    return row[2] % KEY_GROUPS if chain == KEYED else (row[2] * 5 + 3) % KEY_GROUPS


class StageTask(ABC):
    """Takes rows and barriers from any channel that is not blocked."""

    def __init__(self, slot: Slot, chain: str, channels: int, in_order: int = 0) -> None:
        """The last `in_order` of its channels bring what is broadcast."""
        self.slot, self.world, self.chain = slot, slot.world, chain
        self.ref = SubtaskRef(chain, slot.index)
        self.bell = Bell(self.world.clock)
        self.mail = Mailbox(self.bell)
        keyed = channels - in_order
        broadcast = [ChannelEnd(1, keeps_order=True)] * in_order
        self.inputs: Inputs = self.world.variant.inputs([*[ChannelEnd()] * keyed, *broadcast])
        self.inputs.world, self.inputs.bell = self.world, self.bell
        self.release: list[Callable[[int], None]] = [lambda _: None] * channels
        self._alignment = self.world.variant.alignment(
            channels, self.world.alignment_mode, range(keyed, channels)
        )
        self._brought = [0] * channels
        self._ended = False
        self._input_ended = False
        """True if the last rows are made."""
        self._held: tuple[CheckpointId, list[Row], Finish] | None = None
        """A snapshot whose barrier has not come on all channels, with what it overtook below."""
        self._given_up: set[int] = set()
        parallelism = slot.deploy.parallelism
        self.groups = key_group_range(KEY_GROUPS, parallelism, slot.index)
        self.inputs.replay(self._in_flight())

    def _in_flight(self) -> list[Row]:
        rows: list[Row] = []
        for one in self.slot.deploy.in_flight.get(self.chain, ()):
            rows += self.world.files.read_restored(one.handle.path, self.slot)
        return self.world.variant.replayed(self.chain, rows, self.groups)

    def compute(self) -> Steps[None]:
        while True:
            yield 0.004 * self.world.shape.slowness
            if self.mail:
                self.mail.popleft()()
                continue
            now_s, at_s = self.world.clock.now_s, self._alignment.overtakes_at_s
            if at_s is not None and now_s >= at_s:
                yield from self._align(self._alignment.on_time(now_s))
                if self.mail:  # it has come first since: the snapshot may have taken long
                    continue
            clear = self.flush()
            if clear and self.inputs.open():
                for release in self.release:
                    release(self.world.shape.credits)
            if clear and self._alignment.may_emit:
                self.on_time()
            taken = self.inputs.take(elements=clear)
            if taken is None and not self.mail:
                # The time of a barrier may come, and mail while it is aligned.
                waits = self._alignment.overtakes_at_s is None and not self.waits_for_clock
                yield Sleep(self.bell, None if waits else 0.01)
            elif taken is None:
                continue
            elif isinstance(taken, Announced):
                actions = self._alignment.on_announced(taken.channel, taken.barrier, now_s)
                yield from self._align(actions)
            else:
                yield from self._on_element(taken)

    def _on_element(self, received: Received[Row]) -> Steps[None]:
        channel, element = received.channel, received.element
        match element:
            case Barrier():
                yield from self._on_barrier(channel, element)
            case alignment.EndOfStream():
                self._alignment.on_end_of_input(channel)
                if self._alignment.all_ended:
                    self._ended = True
                    self.on_end()
            case row:
                last = row[0] == LAST
                require(last or not self._ended, "I6 a record follows the end of all input")
                if channel != REPLAYED:
                    self.release[channel](1)
                elif self.slot.crashes("in a replay"):
                    return
                if received.input:
                    self.on_rule(row)
                else:
                    if row_s := self.world.shape.row_s:
                        yield row_s
                    self.on_row(row)

    def _on_barrier(self, channel: int, barrier: Barrier) -> Steps[None]:
        passed = min(self._brought)
        self._brought[channel] = barrier.checkpoint
        actions = self._alignment.on_barrier(channel, barrier, self.world.clock.now_s)
        remembered = self._alignment.aborted
        require(all(n > passed for n in remembered), f"I9 aborted {remembered}, passed {passed}")
        yield from self._align(actions)

    def _align(self, actions: Sequence[alignment.AlignmentAction]) -> Steps[None]:
        for action in actions:
            match action:
                case alignment.Block(channel):
                    self.inputs.block(channel)
                case alignment.Unblock(channels):
                    self.inputs.unblock(channels)
                case alignment.TakeSnapshot(barrier=barrier, passed=passed):
                    yield from self._take(barrier, passed)
                case alignment.InFlightComplete(checkpoint):
                    self._complete(checkpoint)
                case alignment.ForgetInFlight(checkpoint):
                    self._forget(checkpoint)
                case alignment.AlignmentAborted(checkpoint, reason):
                    self.decline(checkpoint, reason)

    def _take(self, barrier: Barrier, passed: tuple[int, ...] | None) -> Steps[None]:
        checkpoint = barrier.checkpoint
        require(checkpoint not in self._given_up, f"I9 a snapshot of {checkpoint}, given up before")
        self.world.oracle.check_snapshot(self.slot.deploy.attempt, checkpoint)
        if passed is not None:
            self.inputs.record(checkpoint, passed)
        if barrier.kind.ends_input and not self._input_ended:
            self._input_ended = True
            if self.world.makes_last_rows and not self.slot.crashes("before its last rows"):
                self.make_last_rows()
        finish = yield from self.snapshot(barrier)
        if finish is None:
            return
        overtaken = self.forward(barrier)
        if passed is None:
            self._persist(checkpoint, [], overtaken, finish)
        else:
            self._held = checkpoint, overtaken, finish
            if self.world.variant.acks_before_in_flight:
                self._held = None
                self._persist(checkpoint, [], overtaken, finish)

    def _complete(self, checkpoint: CheckpointId) -> None:
        if self._held is None:  # broken variants, and slots that have died
            return
        (_, overtaken, finish), self._held = self._held, None
        self._persist(
            checkpoint, list(self.inputs.end_recording(checkpoint).get(0, ())), overtaken, finish
        )

    def _forget(self, checkpoint: CheckpointId) -> None:
        self._held = None
        self.inputs.forget(checkpoint)

    def _persist(
        self, checkpoint: CheckpointId, taken: list[Row], overtaken: list[Row], finish: Finish
    ) -> None:
        parts = [(self.chain, True, taken), (KEYED, False, overtaken)]
        self.slot.uploads.begin(self.ref, checkpoint, parts, finish)

    def decline(self, checkpoint: CheckpointId, reason: str) -> None:
        self.slot.report(Declined(checkpoint, self.ref, reason))

    def aborted(self, checkpoint: CheckpointId) -> None:
        self._given_up.add(checkpoint)
        # It only unblocks: no snapshot comes of an abort.
        for _ in self._align(self._alignment.on_abort(checkpoint)):
            raise Violation("an abort takes time")

    @abstractmethod
    def completed(self, checkpoint: CheckpointId) -> None: ...

    @abstractmethod
    def on_row(self, row: Row) -> None: ...

    def on_rule(self, row: Row) -> None:
        """Take in what is broadcast."""
        raise Violation(f"{row} is broadcast to nobody who takes it")

    @abstractmethod
    def snapshot(self, barrier: Barrier) -> Steps[Finish | None]:
        """The synchronous part; None when the slot has died."""

    def flush(self) -> bool:
        return True

    def forward(self, barrier: Barrier) -> list[Row]:
        del barrier
        return []

    def on_end(self) -> None:  # noqa: B027 - optional hook
        """There is nobody to tell."""

    def make_last_rows(self) -> None:  # noqa: B027 - optional hook
        """Make the last rows, like functions whose input has ended."""

    @property
    def waits_for_clock(self) -> bool:
        """True if `on_time` has something to do by and by."""
        return False

    def on_time(self) -> None:  # noqa: B027 - optional hook
        """Nothing happens by the clock."""


class RelayTask(StageTask):
    """Passes rows on by another key."""

    def __init__(self, slot: Slot, channels: int) -> None:
        super().__init__(slot, RELAY, channels)
        self.outputs = Outputs(
            slot.world,
            self.bell,
            lambda: [peer.keyed for peer in slot.deploy.peers],
            slot.index,
            sender=slot.index,
        )
        self._confirmed = Confirmations(0, lambda n: slot.report(CommittedThrough(self.ref, n)))
        self._bundle: list[Row] = []
        self._bundle_ends_s = 0.0

    def on_row(self, row: Row) -> None:
        if not self._bundle:
            self._bundle_ends_s = self.world.now_s + self.world.bundle_s
        self._bundle.append(row)
        if not self.world.bundle_s or len(self._bundle) == BUNDLE_ROWS:
            self._pass_on()

    @property
    def waits_for_clock(self) -> bool:
        return bool(self._bundle)

    def on_time(self) -> None:
        if self._bundle and self.world.now_s >= self._bundle_ends_s:
            self._pass_on()

    def _pass_on(self) -> None:
        rows, self._bundle = self._bundle, []
        for row in rows:
            self.outputs.send_row(row, group_of(KEYED, row))

    def on_end(self) -> None:
        self._pass_on()
        self.outputs.end()

    def make_last_rows(self) -> None:
        self._pass_on()
        for group in self.groups:
            self.outputs.send_row((LAST, 0, LAST_KEYS[group], 0), group)

    def flush(self) -> bool:
        return self.outputs.flush()

    def forward(self, barrier: Barrier) -> list[Row]:
        self._pass_on()
        return self.outputs.forward(barrier)

    def completed(self, checkpoint: CheckpointId) -> None:
        self._confirmed.come(0, checkpoint)

    def snapshot(self, barrier: Barrier) -> Steps[Finish | None]:
        yield 0.001
        checkpoint = barrier.checkpoint

        def finish(in_flight: tuple[snapshots.InFlight, ...]) -> Steps[None]:
            yield 0.001
            done = snapshots.SubtaskSnapshot(self.ref, in_flight=in_flight)
            self.slot.report(Acked(checkpoint, done))

        return finish


class KeyedTask(StageTask):
    """Counts by key and writes to every sink."""

    def __init__(self, slot: Slot, channels: int, in_order: int) -> None:
        super().__init__(slot, KEYED, channels, in_order)
        self._state = _restored(slot, self.groups)
        self._rules = _restored_rules(slot)
        """The number of rules that were broadcast: the same in every subtask."""
        self._base = self._restored_base()
        self._restored_paths = {handle.path for handle in self._base[0]}
        self._left_out = False
        """True if a checkpoint was taken without the files that were restored."""
        """Files of the last checkpoint known to be completed, and what they hold."""
        self._taken: dict[int, tuple[tuple[snapshots.StateHandle, ...], dict[int, int]]] = {}
        self._rows: list[Row] = []
        self._fires_at_s = self.world.now_s + CLOCK_S
        sinks = slot.deploy.sinks
        self.confirmed = Confirmations(
            len(sinks),
            lambda n: slot.report(CommittedThrough(self.ref, n)),
        )
        self.committers = [self._committer(target, who) for who, target in enumerate(sinks)]

    def _restored_base(self) -> tuple[tuple[snapshots.StateHandle, ...], dict[int, int]]:
        """Return files of the restored checkpoint to name again: another subtask may, too."""
        first, last = self.groups.start, self.groups.stop - 1
        own = [
            handle
            for handle in self.slot.deploy.handles
            if handle.key_group_first <= last and first <= handle.key_group_last
        ]
        whole = all(
            handle.shared and handle.key_group_first <= first and last <= handle.key_group_last
            for handle in own
        )
        if not self.world.restoring.reuses_restored or not whole:
            return (), {}
        clipped = [replace(one, key_group_first=first, key_group_last=last) for one in own]
        return tuple(clipped), dict(self._state)

    def _committer(self, target: Target, who: int) -> Committer | PreCommitter:
        def come(through: CheckpointId) -> None:
            self.confirmed.come(who, through)

        if isinstance(target, Versioned):
            return PreCommitter(self.slot, target, come)
        return Committer(self.slot, target, come)

    def on_row(self, row: Row) -> None:
        partition, offset, key, _ = row
        if partition == LAST:
            offset = self._state.get(key, 0) * KEY_GROUPS + LAST_KEYS.index(key)
        self._state[key] = self._state.get(key, 0) + 1
        self._rows.append((partition, offset, key, self._state[key]))

    @property
    def waits_for_clock(self) -> bool:
        fired = self._state.get(CLOCK_KEY, 0)
        return self.world.works_by_clock and 0 in self.groups and fired < CLOCK_ROWS

    def on_time(self) -> None:
        """As timers and windows by the clock do: rows come of state, and nothing is read."""
        if self.waits_for_clock and self.world.now_s >= self._fires_at_s:
            self._fires_at_s = self.world.now_s + CLOCK_S
            self.on_row((CLOCK, self._state.get(CLOCK_KEY, 0), CLOCK_KEY, 0))

    def make_last_rows(self) -> None:
        if self.slot.relay is None:
            for group in self.groups:
                self.on_row((LAST, 0, LAST_KEYS[group], 0))

    def on_rule(self, row: Row) -> None:
        if self.world.alignment_mode is alignment.AlignmentMode.ALIGNED:
            require(row[1] == self._rules, f"I6 rule {row[1]} comes after {self._rules} rules")
        self._rules = row[1] + 1

    # --- the snapshot ---------------------------------------------------------------------------

    def snapshot(self, barrier: Barrier) -> Steps[Finish | None]:
        """Every sink pre-commits; then the stream goes on."""
        world, slot, checkpoint = self.world, self.slot, barrier.checkpoint
        rows, self._rows = self._rows, []
        operators: list[snapshots.OperatorSnapshot] = []
        for committer in self.committers:
            attempt = slot.deploy.attempt if world.variant.attempt_in_name else 1
            sink_id = committer.target.sink_id
            name = TransactionId(sink_id, attempt, checkpoint, slot.index)
            parts = self._parts(name, rows)
            committables = [Committable(transaction, len(part)) for transaction, part in parts]
            queue = committer.queue
            if world.variant.ack_before_prepare:
                pending = (*queue.pending_through(checkpoint), *committables)
                operators.append(snapshots.OperatorSnapshot(sink_id, committables=pending))
                self.slot.begin(self._frozen(barrier, operators)(()))
            if slot.crashes("before prepare"):
                return None
            for number, (transaction, part) in enumerate(parts):
                if number and slot.crashes("between two prepares"):
                    return None
                try:
                    yield from committer.target.pre_commit(transaction, part)
                except Gone:
                    slot.kill(f"{sink_id} is gone at pre-commit")
                    return None
            if slot.crashes("after prepare"):
                return None
            kept = committables[:1] if world.variant.lists_first_only else committables
            queue.pre_committed(checkpoint, kept)
            if world.variant.commit_at_pre_commit:
                for committable in committables:
                    slot.begin(_ignoring_outcome(committer, committable))
            pending = queue.pending_through(checkpoint)
            operators.append(snapshots.OperatorSnapshot(sink_id, committables=pending))
        if world.variant.ack_before_prepare:
            return _acked_before
        return self._frozen(barrier, operators)

    def _parts(self, name: TransactionId, rows: list[Row]) -> list[tuple[TransactionId, list[Row]]]:
        """Return the transactions of one pre-commit, each with the rows of its table."""
        tables: dict[int, list[Row]] = {}
        for row in rows:
            tables.setdefault(row[2] % self.world.tables, []).append(row)
        alike = self.world.variant.names_tables_alike
        return [
            (name if alike else replace(name, sequence=number), part)
            for number, (_, part) in enumerate(sorted(tables.items()))
        ]

    def _frozen(self, barrier: Barrier, sinks: list[snapshots.OperatorSnapshot]) -> Finish:
        """End the synchronous part: return the upload of what changed since the base, or of all."""
        world, slot, checkpoint = self.world, self.slot, barrier.checkpoint
        state, rules = dict(self._state), {RULES_SEEN: self._rules}
        stands_alone = barrier.kind.is_savepoint
        incremental = not stands_alone and world.rng.random() < 0.6
        base, held = self._base
        # As a file of RocksDB: what one checkpoint has without it, no later one has with it.
        self._left_out |= not incremental and not stands_alone
        if not incremental or (self._left_out and self._restored_paths & {h.path for h in base}):
            base, held = (), {}
        changed = {key: n for key, n in state.items() if held.get(key) != n}
        path = f"a{slot.deploy.attempt}/{checkpoint}/{slot.index}"
        shared = self._handle(f"{path}/shared", not stands_alone)
        private = self._handle(f"{path}/own", False)
        handles = (*base, shared)
        if not stands_alone:
            self._taken[checkpoint] = handles, state
            if world.variant.reuse_undecided_files:
                self._base = handles, state
        keyed = snapshots.OperatorSnapshot(KEYED, keyed=handles, raw=(private,))
        written = ((shared, changed), (private, rules))
        return partial(self._upload, barrier, keyed, written, sinks)

    def _upload(
        self,
        barrier: Barrier,
        keyed: snapshots.OperatorSnapshot,
        written: Sequence[tuple[snapshots.StateHandle, dict[int, int]]],
        sinks: list[snapshots.OperatorSnapshot],
        in_flight: tuple[snapshots.InFlight, ...],
    ) -> Steps[None]:
        """The asynchronous part, then the ack."""
        world, slot, checkpoint = self.world, self.slot, barrier.checkpoint
        yield 0.5 if world.rng.random() < world.shape.rates.slow_uploads else 0.02
        directory = world.directories.open(barrier.target, slot) if barrier.target else None
        try:
            for handle, content in written:
                if slot.crashes("in an upload"):
                    return
                yield world.files.ask(lambda h=handle, c=content: self._write(directory, h, c))  # type: ignore[misc]
        except Gone as gone:
            for handle in (*(handle for handle, _ in written), *(one.handle for one in in_flight)):
                self._delete(directory, handle)
            self.decline(checkpoint, f"storage: {gone!r}")
            return
        if directory and not (directory.mark or world.variant.looks_for_mark_once):
            for handle, _ in written:
                directory.delete(handle)
            self.decline(checkpoint, "the savepoint was given up")
            return
        if directory:
            directory.acked.update(handle.path for handle, _ in written)
        world.oracle.check_durable(slot.deploy.attempt, sinks)
        done = snapshots.SubtaskSnapshot(self.ref, (keyed, *sinks), in_flight=in_flight)
        slot.report(Acked(checkpoint, done, in_target=directory is not None))
        slot.crashes("after ack")

    def _write(
        self, directory: Directory | None, handle: snapshots.StateHandle, content: dict[int, int]
    ) -> None:
        if directory is None:
            self.world.files.write(handle.path, content)
        else:
            directory.write(handle, content)

    def _delete(self, directory: Directory | None, handle: snapshots.StateHandle) -> None:
        if directory is None:
            self.world.files.content.pop(handle.path, None)
        else:
            directory.delete(handle)

    def _handle(self, path: str, shared: bool) -> snapshots.StateHandle:
        return snapshots.StateHandle(
            path, path, 1, "", self.groups.start, self.groups.stop - 1, shared=shared
        )

    # --- mail ----------------------------------------------------------------------------------

    def completed(self, checkpoint: CheckpointId) -> None:
        if checkpoint in self._taken:
            self._base = self._taken[checkpoint]
        self._taken = {n: taken for n, taken in self._taken.items() if n > checkpoint}
        self.confirmed.come(len(self.committers), checkpoint)

    def aborted(self, checkpoint: CheckpointId) -> None:
        self._taken.pop(checkpoint, None)
        super().aborted(checkpoint)
        if self.world.variant.roll_back_on_abort:
            for committer in self.committers:
                for one in committer.queue.pending_through(checkpoint):
                    if one.transaction.checkpoint == checkpoint:
                        self.slot.begin(_dropping(committer, one))


def holds_group(handle: snapshots.StateHandle, group: int) -> bool:
    """Return whether `handle` stands for keys of `group`: its file may hold others, too."""
    return handle.key_group_first <= group <= handle.key_group_last


def _restored(slot: Slot, groups: range) -> dict[int, int]:
    state: dict[int, int] = {}
    for handle in slot.deploy.handles:
        for key, count in slot.world.files.read_restored(handle.path, slot).items():
            if key % KEY_GROUPS in groups and holds_group(handle, key % KEY_GROUPS):
                state[key] = max(count, state.get(key, 0))
    return state


def _restored_rules(slot: Slot) -> int:
    copies = slot.deploy.raw
    if not copies:
        return 0
    copy = slot.world.variant.broadcast_copy(slot.index, len(copies))
    if copy >= len(copies):  # broken
        return 0
    return int(slot.world.files.read_restored(copies[copy].path, slot)[RULES_SEEN])


def _acked_before(in_flight: tuple[snapshots.InFlight, ...]) -> Steps[None]:
    """Broken: there is nothing left to upload."""
    del in_flight
    yield 0.001


def _ignoring_outcome(committer: Committer | PreCommitter, committable: Committable) -> Steps[None]:
    yield from committer.target.commit(committable)


def _dropping(committer: Committer | PreCommitter, committable: Committable) -> Steps[None]:
    yield from committer.target.abort(committable)


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)
