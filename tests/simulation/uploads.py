"""The uploads of a simulated slot beside the stream. Mirrors SnapshotUploads.

Uploads begin in the order of the snapshots, two at a time, and end in any: one of checkpoint n may
end after that of n + 1, and so may its ack be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.simulation.clock import Gone, Steps
from tests.simulation.targets import Row

from onceflow.core.protocol.checkpoints.snapshots import InFlight, StateHandle
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import Declined

if TYPE_CHECKING:
    from tests.simulation.slots import Slot

THREADS = 2

Finish = Callable[[tuple[InFlight, ...]], Steps[None]]
"""Uploads the rest of a snapshot whose rows in flight are durable, and acks it."""


class Uploads:
    """The threads that upload one snapshot each at a time, for all subtasks of one slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._waiting: deque[Steps[None]] = deque()
        self._idle = THREADS
        self.under_way = 0
        """How many have not ended, those that wait for a thread among them."""

    def begin(
        self,
        ref: SubtaskRef,
        checkpoint: CheckpointId,
        parts: Sequence[tuple[str, bool, list[Row]]],
        finish: Finish,
    ) -> None:
        """Upload a snapshot: `parts` are what its barrier overtook, by the chain it was to."""
        self.under_way += 1
        self._waiting.append(self._upload(ref, checkpoint, parts, finish))
        if self._idle:
            self._idle -= 1
            self._slot.begin(self._work())

    def _work(self) -> Steps[None]:
        while self._waiting and self._slot.alive:
            yield from self._waiting.popleft()
            self.under_way -= 1
        self._idle += 1

    def _upload(
        self,
        ref: SubtaskRef,
        checkpoint: CheckpointId,
        parts: Sequence[tuple[str, bool, list[Row]]],
        finish: Finish,
    ) -> Steps[None]:
        slot = self._slot
        files, attempt = slot.world.files, slot.deploy.attempt
        done: list[InFlight] = []
        try:
            for chain, sent, rows in parts:
                if not rows:
                    continue
                path = f"a{attempt}/{checkpoint}/{slot.index}/{ref.chain}-{chain}-{sent}"
                done.append(InFlight(chain, sent, StateHandle(path, path, len(rows), "")))
                yield files.ask(lambda p=path, r=rows: files.write(p, tuple(r)))  # type: ignore[misc]
                if slot.crashes("with rows in flight"):
                    return
        except Gone as gone:
            for one in done:
                files.content.pop(one.handle.path, None)
            reason = f"storage: {gone!r}"
            slot.report(Declined(checkpoint, ref, reason))
        else:
            yield from finish(tuple(done))
