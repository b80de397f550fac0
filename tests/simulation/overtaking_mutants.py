"""Broken variants of barriers that overtake rows, and of what becomes of these rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.channels import Inputs
from tests.simulation.targets import Row
from tests.simulation.variant import Variant

from onceflow.core.protocol.checkpoints import alignment
from onceflow.core.protocol.checkpoints.coordinator import (
    CheckpointCoordinator,
    _Pending,  # pyright: ignore[reportPrivateUsage]
)
from onceflow.core.protocol.checkpoints.decisions import Barrier, CheckpointKind
from onceflow.core.protocol.checkpoints.in_flight import Announced, OutputQueue, Received
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import CheckpointId


class _KeepsNothing(Inputs):
    """The barrier overtakes what waits in channels, and nobody persists it."""

    def end_recording(self, checkpoint: CheckpointId) -> dict[int, tuple[Row, ...]]:
        super().end_recording(checkpoint)
        return {}


class _StopsRecordingAtOnce(Inputs):
    """Does not record rows between the snapshot and a channel's barrier."""

    def record(self, checkpoint: CheckpointId, passed: Sequence[int]) -> None:
        super().record(checkpoint, passed)
        assert self._recording is not None
        self._recording.open.clear()


class _RecordsOn(Inputs):
    """Records rows behind a channel's barrier, too."""

    def put(self, channel: int, element: Row | Barrier | alignment.EndOfStream) -> bool:
        recording = self._recording
        result = super().put(channel, element)
        if (
            recording is not None
            and channel not in recording.open
            and not isinstance(element, (Barrier, alignment.EndOfStream))
        ):
            recording.batches[channel].append(element)
        return result


class _OldBarrierEndsRecording(Inputs):
    """Stops recording at a barrier of an abandoned checkpoint."""

    def put(self, channel: int, element: Row | Barrier | alignment.EndOfStream) -> bool:
        recording = self._recording
        result = super().put(channel, element)
        if recording is not None and isinstance(element, Barrier):
            recording.open.discard(channel)
        return result


class _RecordsAligned(Inputs):
    """Records rows that wait behind a barrier that was read as if they were before it."""

    def record(self, checkpoint: CheckpointId, passed: Sequence[int]) -> None:
        super().record(checkpoint, ())
        assert self._recording is not None
        self._recording.open.difference_update(passed)


class _ForgetsWhatIsReplayed(Inputs):
    """A snapshot leaves out what is still to be replayed."""

    def record(self, checkpoint: CheckpointId, passed: Sequence[int]) -> None:
        super().record(checkpoint, passed)
        assert self._recording is not None
        self._recording.replayed.clear()


class _OutputKeepsNothing(OutputQueue[Row]):
    """The barrier overtakes what waits for credits, and nobody persists it."""

    def overtaken_by(self, checkpoint: CheckpointId) -> tuple[Row, ...]:
        super().overtaken_by(checkpoint)
        return ()


class _ReadsOnWhileSnapshotIsDue(alignment.BarrierAlignment):
    """The time of a barrier comes, and it forgets on which channels that was read."""

    def on_time(self, now_s: float) -> tuple[alignment.AlignmentAction, ...]:
        return tuple(
            alignment.TakeSnapshot(a.barrier, a.alignment_ms, passed=())
            if isinstance(a, alignment.TakeSnapshot)
            else a
            for a in super().on_time(now_s)
        )


class _OpensBeforeItReplays(Inputs):
    """Senders get credits, and go on, while what was in flight is still to be taken."""

    def open(self) -> bool:
        replayed, self._replayed = self._replayed, type(self._replayed)()
        opens = super().open()
        self._replayed = replayed
        return opens


class _ReadsNoBarrierBeforeItReplays(Inputs):
    """A barrier that has to be read before it overtakes waits for all that is replayed."""

    def take(
        self, *, elements: bool = True, up_to_barriers: bool = False
    ) -> Announced | Received[Row] | None:
        in_order = self._in_order
        if self._replayed:
            self._in_order = []
        taken = super().take(elements=elements, up_to_barriers=up_to_barriers)
        self._in_order = in_order
        return taken


class _LastWaits(CheckpointCoordinator):
    """The barrier that is to end the job waits for all rows, however long they take."""

    def _trigger(self, kind: CheckpointKind, now_s: float) -> Barrier:
        trigger = super()._trigger(kind, now_s)
        return replace(trigger, overtakes_after_s=None) if kind.ends_job else trigger


class _EndsInFlight(CheckpointCoordinator):
    """A checkpoint that is to end the job does so whatever its barrier has overtaken."""

    def _complete(self, pending: _Pending) -> CompletedCheckpoint:
        return replace(super()._complete(pending), final=pending.trigger.kind.ends_job)


class _OvertakesWhatIsBroadcast(alignment.BarrierAlignment):
    """A snapshot is taken before what keeps order has been read up to the barrier."""

    def _may_overtake(self, announced: object) -> bool:
        del announced
        return True


def _own_copy(index: int, copies: int) -> int:
    """Return the copy of the same number, which there may be none of."""
    del copies
    return index


def _everybody(chain: str, rows: list[Row], groups: range) -> list[Row]:
    del chain, groups
    return rows


def _backwards(chain: str, rows: list[Row], groups: range) -> list[Row]:
    kept = Variant().replayed(chain, rows, groups)
    return kept[::-1]


class _EmitsWhatIsOver(alignment.SourceBarriers):
    """A barrier that waits its turn at a source is emitted after a newer one has overtaken it."""

    def next(self, now_s: float, *, clear: bool) -> Barrier | None:
        held = list(self._held)
        barrier = super().next(now_s, clear=clear)
        if barrier is not None:
            self._held = [one for one in held if one[0].checkpoint != barrier.checkpoint]
        return barrier


OVERTAKING_MUTANTS: tuple[Variant, ...] = (
    Variant("overtakes rows in channels and persists none", inputs=_KeepsNothing),
    Variant("overtakes rows without credits and persists none", output_queue=_OutputKeepsNothing),
    Variant("persists rows on both sides of a channel", barrier_waits_its_turn=True),
    Variant("records nothing after the snapshot", inputs=_StopsRecordingAtOnce),
    Variant("records rows after the barrier", inputs=_RecordsOn),
    Variant("an old barrier ends the recording of the next", inputs=_OldBarrierEndsRecording),
    Variant("records rows behind an aligned barrier", inputs=_RecordsAligned),
    Variant("waits again for barriers that were read", alignment=_ReadsOnWhileSnapshotIsDue),
    Variant("acks before all barriers have come", acks_before_in_flight=True),
    Variant("replays in another order", replayed=_backwards),
    Variant("replays all rows in every subtask", replayed=_everybody),
    Variant("forgets what it has not replayed", inputs=_ForgetsWhatIsReplayed),
    Variant("overtakes what is broadcast", alignment=_OvertakesWhatIsBroadcast),
    Variant("gives broadcast state to those that had it alone", broadcast_copy=_own_copy),
    Variant("gives credits before it has replayed", inputs=_OpensBeforeItReplays),
    Variant("reads no barrier before it has replayed", inputs=_ReadsNoBarrierBeforeItReplays),
    Variant("the last barrier waits for all rows", coordinator=_LastWaits),
    Variant("a source emits a barrier after a newer one", source_barriers=_EmitsWhatIsOver),
    Variant("ends the job with rows in flight", coordinator=_EndsInFlight),
)
