"""Tests that a snapshot and the rows in flight are exactly the rows before the barrier.

Checkpoints are given up while their barriers are under way, by a timeout or by who declines. So
barriers of older ones arrive after the next has begun to record.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from onceflow.core.protocol.checkpoints import alignment
from onceflow.core.protocol.checkpoints.decisions import Barrier, CheckpointKind
from onceflow.core.protocol.checkpoints.in_flight import (
    Announced,
    ChannelEnd,
    InputQueues,
    OutputQueue,
    Received,
)
from onceflow.core.protocol.ids import CheckpointId

Element = str | Barrier | alignment.EndOfStream


def barrier(number: int, after_s: float | None = 0.0) -> Barrier:
    return Barrier(CheckpointId(number), CheckpointKind.PERIODIC, 0, overtakes_after_s=after_s)


@pytest.mark.parametrize(
    "stale",
    [
        pytest.param([barrier(1)], id="it-overtook"),
        pytest.param([barrier(1, 60.0)], id="it-had-time-left"),
        pytest.param([barrier(1, None)], id="it-waited-for-all-rows"),
        pytest.param([barrier(1), barrier(2, None), barrier(3, 60.0)], id="several"),
    ],
)
def test_rows_behind_a_barrier_that_was_given_up_are_recorded_for_the_next(
    stale: list[Barrier],
) -> None:
    queues = InputQueues[str]([ChannelEnd(), ChannelEnd()])
    queues.put(0, barrier(9))
    queues.record(CheckpointId(9), passed=())
    rows = [f"row {number}" for number in range(len(stale) + 1)]
    for row, old in zip(rows, stale, strict=False):
        queues.put(1, row)
        queues.put(1, old)
    queues.put(1, rows[-1])
    queues.put(1, barrier(9))
    queues.put(1, "after")
    assert queues.end_recording(CheckpointId(9)) == {0: tuple(rows)}


@pytest.mark.parametrize("is_waiting", [True, False])
def test_an_end_before_the_barrier_is_overtaken_and_one_behind_it_is_not(is_waiting: bool) -> None:
    queues = InputQueues[str]([ChannelEnd(0), ChannelEnd(1), ChannelEnd(2)])
    queues.put(1, barrier(1))
    queues.put(2, alignment.EndOfStream())
    elements: list[Element] = [alignment.EndOfStream(), barrier(1)]
    if is_waiting:
        for element in elements:
            queues.put(0, element)
    queues.record(CheckpointId(1), passed=(2,))
    if not is_waiting:
        for element in elements:
            queues.put(0, element)
    queues.put(1, alignment.EndOfStream())
    assert queues.overtaken_ends == {0}
    assert queues.end_recording(CheckpointId(1)) == {}
    assert queues.overtaken_ends == frozenset()


def test_the_channel_of_a_newer_barrier_records_no_more() -> None:
    queues = InputQueues[str]([ChannelEnd(), ChannelEnd()])
    queues.record(CheckpointId(1), passed=(0,))
    queues.put(1, barrier(2))
    queues.put(1, "after")
    assert queues.end_recording(CheckpointId(1)) == {}


def test_rows_behind_an_old_barrier_that_waits_with_its_sender_are_in_flight() -> None:
    queue = OutputQueue[str]()
    queue.offer("a")
    queue.offer(barrier(1, None))
    queue.offer("b")
    assert queue.overtaken_by(CheckpointId(2)) == ("a", "b")
    queue.release(5)
    assert [queue.next(), queue.next(), queue.next()] == ["a", "b", None]


@pytest.mark.parametrize("block", range(4))
def test_a_snapshot_and_its_rows_in_flight_are_what_was_sent_before_the_barrier(
    block: int,
) -> None:
    """Random senders, wires and abandoned checkpoints, 100 seeds a block."""
    completed = sum(Exchange(seed).run() for seed in range(100 * block, 100 * block + 100))
    assert completed > 100, "the random runs complete checkpoints"


class Exchange:
    """Senders, wires and one receiver; each step moves one thing, drawn from the seed.

    Checkpoints that may overtake are triggered one at a time, as the coordinator does.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seed, self.now_s = seed, 0.0
        self.count = rng.randint(1, 3)
        in_order = rng.choice([0, 0, 1])
        ends = [ChannelEnd()] * self.count + [ChannelEnd(1, keeps_order=True)] * in_order
        self.count += in_order
        self.ends = ends
        self.outputs = [OutputQueue[str]() for _ in ends]
        self.wires: list[deque[Element]] = [deque() for _ in ends]
        self.made = [0] * self.count
        self.to_emit: list[list[Barrier]] = [[] for _ in ends]
        self.queues = InputQueues[str](ends)
        keeping_order = range(self.count - in_order, self.count)
        self.gate = alignment.BarrierAlignment(
            self.count, alignment.AlignmentMode.ALIGNED, keeping_order
        )
        self.state: list[str] = []
        self.before: dict[int, set[str]] = {}
        """By checkpoint: what was made before its barrier."""
        self.with_senders: dict[int, list[str]] = {}
        self.snapshots: dict[int, list[str]] = {}
        self.under_way: int | None = None
        self.last = self.completed = 0

    def run(self) -> int:
        steps = [self.make, self.make, self.emit, self.arrive, self.arrive, self.take, self.take]
        for step in self.rng.choices([*steps, self.coordinate], k=600):
            self.now_s += 0.01
            step()
        return self.completed

    # --- the coordinator ----------------------------------------------------------------------

    def coordinate(self) -> None:
        if self.under_way is None:
            self.last += 1
            self.under_way = self.last
            self.before[self.last], self.with_senders[self.last] = set(), []
            after_s = self.rng.choice([0.0, 0.0, 0.3, None])
            for channel in range(self.count):
                self.to_emit[channel].append(barrier(self.last, after_s))
        elif self.rng.random() < 0.3:
            self.give_up(self.under_way)

    def give_up(self, checkpoint: int) -> None:
        """Give up a checkpoint that timed out or was declined, perhaps after the next one."""
        self.under_way = None
        if self.rng.random() < 0.7:
            self.carry_out(self.gate.on_abort(CheckpointId(checkpoint)))
        for channel in range(self.count):
            if self.rng.random() < 0.5:
                self.to_emit[channel] = []

    # --- the senders --------------------------------------------------------------------------

    def make(self) -> None:
        channel = self.rng.randrange(self.count)
        if self.outputs[channel].waits and self.rng.random() < 0.7:
            return
        row = f"{channel}:{self.made[channel]:04}"
        self.made[channel] += 1
        if self.outputs[channel].offer(row):
            self.wires[channel].append(row)

    def emit(self) -> None:
        channel = self.rng.randrange(self.count)
        if not self.to_emit[channel]:
            return
        sent = self.to_emit[channel].pop(0)
        number, output = sent.checkpoint, self.outputs[channel]
        self.before[number] |= {f"{channel}:{n:04}" for n in range(self.made[channel])}
        if sent.overtakes_after_s is not None and not self.ends[channel].keeps_order:
            self.with_senders[number] += output.overtaken_by(sent.checkpoint)
            self.wires[channel].append(sent)
        elif output.offer(sent):
            self.wires[channel].append(sent)

    def arrive(self) -> None:
        channel = self.rng.randrange(self.count)
        while (element := self.outputs[channel].next()) is not None:
            self.wires[channel].append(element)
        for _ in range(min(len(self.wires[channel]), self.rng.choice([0, 1, 9]))):
            self.queues.put(channel, self.wires[channel].popleft())

    # --- the receiver -------------------------------------------------------------------------

    def take(self) -> None:
        if self.queues.open():
            for output in self.outputs:
                output.release(self.rng.choice([1, 4]))
        self.carry_out(self.gate.on_time(self.now_s))
        match self.queues.take():
            case Announced(channel, announced):
                self.carry_out(self.gate.on_announced(channel, announced, self.now_s))
            case Received(channel, Barrier() as read):
                self.carry_out(self.gate.on_barrier(channel, read, self.now_s))
            case Received(channel, str() as row):
                self.state.append(row)
                self.outputs[channel].release()
            case Received() | None:
                pass

    def carry_out(self, actions: tuple[alignment.AlignmentAction, ...]) -> None:
        for action in actions:
            match action:
                case alignment.Block(channel):
                    self.queues.block(channel)
                case alignment.Unblock(channels):
                    self.queues.unblock(channels)
                case alignment.TakeSnapshot(barrier=taken, passed=passed):
                    self.snapshots[taken.checkpoint] = list(self.state)
                    if passed is None:
                        self.complete(taken.checkpoint, [])
                    else:
                        self.queues.record(taken.checkpoint, passed)
                case alignment.InFlightComplete(checkpoint):
                    recorded = self.queues.end_recording(checkpoint)
                    self.complete(checkpoint, [row for rows in recorded.values() for row in rows])
                case alignment.ForgetInFlight(checkpoint):
                    self.queues.forget(checkpoint)
                case alignment.AlignmentAborted(checkpoint):
                    if self.under_way == checkpoint:
                        self.give_up(checkpoint)

    def complete(self, checkpoint: int, in_flight: list[str]) -> None:
        if self.under_way != checkpoint:
            return  # it was given up, and its ack comes late
        self.under_way = None
        self.completed += 1
        held = self.snapshots[checkpoint] + in_flight + self.with_senders[checkpoint]
        expected = self.before[checkpoint]
        assert sorted(held) == sorted(expected), f"seed {self.seed}, checkpoint {checkpoint}"
        for channel in range(self.count):
            rows = [row for row in held if row.startswith(f"{channel}:")]
            assert rows == sorted(rows), f"seed {self.seed}: channel {channel} is out of order"
