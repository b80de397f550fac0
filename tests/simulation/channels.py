"""Channels between simulated tasks: bounded by credits, with rows under way between two slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from tests.simulation.clock import Bell
from tests.simulation.targets import Row

from onceflow.core.protocol.checkpoints import in_flight
from onceflow.core.protocol.checkpoints.alignment import EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.splits import owner_of

if TYPE_CHECKING:
    from tests.simulation.world import World

KEY_GROUPS = 8
Element = Row | Barrier | EndOfStream


class Receiver(Protocol):
    """The receiver of a channel's rows."""

    inputs: Inputs
    release: list[Callable[[int], None]]


class Inputs(in_flight.InputQueues[Row]):
    """Takes from any channel that it may take from, at random."""

    world: World
    bell: Bell

    @property
    def replaying(self) -> bool:
        return bool(self._replayed)

    def put(self, channel: int, element: Element) -> bool:
        self.bell.ring()
        return super().put(channel, element)

    def take(
        self, *, elements: bool = True, up_to_barriers: bool = False
    ) -> in_flight.Announced | in_flight.Received[Row] | None:
        self._turn = self.world.rng.randrange(self.channels)
        return super().take(elements=elements, up_to_barriers=up_to_barriers)


class Outputs:
    """The sending ends of one task's channels, one to each subtask of the stage that follows."""

    def __init__(
        self,
        world: World,
        bell: Bell,
        receivers: Callable[[], Sequence[Receiver]],
        channel: int,
        *,
        sender: int,
        keeps_order: bool = False,
    ) -> None:
        """`sender` is the slot that sends, and `channel` the one of each receiver."""
        self._world, self._receivers, self._channel = world, receivers, channel
        self._sender, self._keeps_order = sender, keeps_order
        self._bell = bell
        self._queues: list[in_flight.OutputQueue[Row]] = []
        self._wires: list[deque[Element]] = []

    def open(self) -> None:
        """Connect, when every receiver is there."""
        for receiver in self._receivers():
            queue = self._world.variant.output_queue()
            self._queues.append(queue)
            self._wires.append(deque())
            receiver.release[self._channel] = partial(self._released, queue)

    def _released(self, queue: in_flight.OutputQueue[Row], count: int) -> None:
        queue.release(count)
        self._bell.ring()

    def send_row(self, row: Row, group: int) -> None:
        self.send(owner_of(group, KEY_GROUPS, len(self._queues)), row)

    def broadcast(self, row: Row) -> None:
        for target in range(len(self._queues)):
            self.send(target, row)

    def send(self, target: int, element: Element) -> None:
        if self._queues[target].offer(element):
            self._put(target, element)

    def forward(self, barrier: Barrier) -> list[Row]:
        """Send `barrier` to all; return the rows that it overtakes here."""
        overtaken: list[Row] = []
        for target, queue in enumerate(self._queues):
            if barrier.overtakes_after_s is None or self._keeps_order:
                self.send(target, barrier)
                continue
            overtaken += queue.overtaken_by(barrier.checkpoint)
            if self._world.variant.barrier_waits_its_turn:  # broken: and its rows are persisted
                self.send(target, barrier)
            else:
                self._put(target, barrier)
        return overtaken

    def end(self) -> None:
        for target in range(len(self._queues)):
            self.send(target, EndOfStream())

    def flush(self) -> bool:
        """Send what may be sent; return whether more rows may be made."""
        for target, queue in enumerate(self._queues):
            while (element := queue.next()) is not None:
                self._put(target, element)
        return not any(queue.waits for queue in self._queues)

    def _put(self, target: int, element: Element) -> None:
        """FIFO within a channel: the order of sending is the order of the queue."""
        receiver, wire, world = self._receivers()[target], self._wires[target], self._world
        if not world.shape.wires:
            receiver.inputs.put(self._channel, element)
            return
        wire.append(element)

        def arrive() -> None:
            if (until_s := world.stands_until_s(self._sender, target)) > world.now_s:
                way_s = world.rng.expovariate(1 / 0.01)
                world.clock.after(until_s - world.now_s + way_s, arrive)
                return
            receiver.inputs.put(self._channel, wire.popleft())

        world.clock.after(world.rng.expovariate(1 / 0.01), arrive)
