"""An upload reports what it has stored. What fails leaves no file and no frozen state behind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from tests.unit.runtime.slot_parts import slot_context

from onceflow.core.errors import StorageError
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot, SnapshotTimings
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import Acked, Declined, PartFailed
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.operators import PendingSnapshot
from onceflow.core.runtime.dataflow.subtask import OvertakenBatches, SnapshotTaken
from onceflow.core.runtime.slot import snapshot_uploads
from onceflow.core.runtime.slot.context import SlotMail
from onceflow.core.runtime.slot.snapshot_uploads import SnapshotUploads
from onceflow.core.state import StateWriter
from onceflow.core.storage import FileStateWriter

_SUBTASK = SubtaskRef("chain", 1)
_LARGE = bytes(200_000)
"""More than is stored inside an ack."""


class _Slot:
    """The uploads of a slot, the second of two."""

    def __init__(self, directory: Path) -> None:
        self.mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
        context = slot_context(directory, self.mail.put)
        context = replace(context, plan=replace(context.plan, parallelism=2))
        self._directory = directory
        self._before = self._list_files()
        self.uploads = SnapshotUploads(context)

    def begin(
        self,
        *pending: PendingSnapshot,
        checkpoint: int = 1,
        flying: tuple[OvertakenBatches, ...] = (),
    ) -> None:
        self.uploads.begin(
            SnapshotTaken(_SUBTASK, CheckpointId(checkpoint), pending, SnapshotTimings(), flying)
        )

    def take(self) -> SlotMail:
        return self.mail.get(timeout=60)

    @property
    def files(self) -> set[str]:
        """The files that uploads have left."""
        return self._list_files() - self._before

    def _list_files(self) -> set[str]:
        return {str(path) for path in self._directory.rglob("*") if path.is_file()}


@pytest.fixture
def slot(tmp_path: Path) -> _Slot:
    return _Slot(tmp_path / "checkpoints")


def _pending(
    upload: Callable[[StateWriter], None], discard: Callable[[], None] = lambda: None
) -> PendingSnapshot:
    def run(writer: StateWriter) -> OperatorSnapshot:
        upload(writer)
        return OperatorSnapshot("op", (writer.write("keyed", _LARGE),))

    return PendingSnapshot("op", run, discard)


def _nothing(writer: StateWriter) -> None:
    del writer


def _flying(chain: str, *, sent: bool) -> OvertakenBatches:
    rows = pa.record_batch([pa.array([1, 2])], names=["x"])
    return OvertakenBatches(chain, 1, sent, (Batch(rows),))


def test_rows_in_flight_are_stored_for_the_slots_that_may_own_them(
    slot: _Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((10.0, 10.0123456))
    monkeypatch.setattr(snapshot_uploads, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    slot.begin(_pending(_nothing), flying=(_flying("a", sent=True), _flying("b", sent=False)))
    acked = slot.take()
    assert isinstance(acked, Acked)
    held, waiting = acked.snapshot.in_flight
    assert [(one.chain, one.sent, one.input) for one in (held, waiting)] == [
        ("a", True, 1),
        ("b", False, 1),
    ]
    # The rows that this subtask holds have its keys; those that wait may have any.
    assert (held.handle.key_group_first, held.handle.key_group_last) == (64, 127)
    assert (waiting.handle.key_group_first, waiting.handle.key_group_last) == (0, 127)
    assert held.handle.name != waiting.handle.name
    in_flight_bytes = held.handle.size_bytes + waiting.handle.size_bytes
    timings = acked.snapshot.timings
    assert timings.in_flight_bytes == in_flight_bytes > 0
    assert timings.size_bytes == len(_LARGE) + in_flight_bytes
    assert timings.uploaded_bytes >= len(_LARGE)
    assert timings.async_ms == 12.346


def test_two_snapshots_are_uploaded_at_once_and_those_that_wait_end_with_the_slot(
    slot: _Slot,
) -> None:
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()
    may_end = threading.Event()

    def wait(number: int) -> Callable[[StateWriter], None]:
        def run(writer: StateWriter) -> None:
            del writer
            begun.put(number)
            may_end.wait(60)

        return run

    for number in range(3):
        slot.begin(_pending(wait(number)), checkpoint=number + 1)
    assert {begun.get(timeout=60), begun.get(timeout=60)} == {0, 1}
    with pytest.raises(queue.Empty):
        begun.get(timeout=0.05)
    assert not slot.uploads.close(0.01)
    may_end.set()
    assert slot.uploads.close(60)
    assert {type(slot.take()) for _ in range(2)} == {Acked}
    assert begun.empty()


def test_an_upload_that_hangs_is_waited_for_though_a_later_one_is_done(slot: _Slot) -> None:
    may_end = threading.Event()

    def hang(writer: StateWriter) -> None:
        del writer
        may_end.wait(60)

    slot.begin(_pending(hang))
    slot.begin(_pending(_nothing), checkpoint=2)
    assert isinstance(slot.take(), Acked)
    slot.begin(_pending(_nothing), checkpoint=3)
    assert isinstance(slot.take(), Acked)
    assert not slot.uploads.close(0.01)
    may_end.set()
    assert slot.uploads.close(60)


def test_a_snapshot_whose_rows_in_flight_cannot_be_stored_leaves_no_file(
    slot: _Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FileStateWriter.write

    def refuse(writer: FileStateWriter, name: str, *arguments: object, **others: object) -> object:
        if name.endswith("-to-b"):
            raise StorageError("the disk is full")
        return write(writer, name, _LARGE if "in-flight" in name else arguments[0], **others)  # type: ignore[arg-type]

    monkeypatch.setattr(FileStateWriter, "write", refuse)
    discarded: list[str] = []
    slot.begin(
        _pending(_nothing, lambda: discarded.append("first")),
        _pending(_nothing, lambda: discarded.append("second")),
        flying=(_flying("a", sent=True), _flying("b", sent=False)),
    )
    declined = slot.take()
    assert declined == Declined(CheckpointId(1), _SUBTASK, "the disk is full")
    assert slot.uploads.close(60)
    assert slot.files == set()
    assert discarded == ["first", "second"]


def test_files_that_cannot_be_deleted_are_deleted_after_a_later_upload(
    slot: _Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandon, refusals = FileStateWriter.abandon, ["first", "second"]

    def refuse(writer: FileStateWriter) -> None:
        if refusals:
            raise StorageError(refusals.pop())
        abandon(writer)

    def fail(writer: StateWriter) -> None:
        writer.write("more", _LARGE)
        raise StorageError("the disk is full")

    monkeypatch.setattr(FileStateWriter, "abandon", refuse)
    # A slot declines first and deletes then. It discards what was frozen last.
    discarded: queue.SimpleQueue[int] = queue.SimpleQueue()
    for checkpoint in (1, 2):
        slot.begin(_pending(fail, partial(discarded.put, checkpoint)), checkpoint=checkpoint)
        assert isinstance(slot.take(), Declined)
        assert discarded.get(timeout=60) == checkpoint
    slot.begin(_pending(_nothing), checkpoint=3)
    assert isinstance(slot.take(), Acked)
    assert slot.uploads.close(60)
    (kept,) = slot.files
    assert "keyed" in kept


def test_a_bug_of_a_backend_ends_the_slot(slot: _Slot) -> None:
    def fail(_: object = None) -> None:
        raise ValueError("a bug")

    def refuse(_: StateWriter) -> None:
        raise StorageError("the disk is full")

    slot.begin(_pending(fail))
    failed = slot.take()
    assert isinstance(failed, PartFailed)
    assert str(failed.error) == "a bug"
    slot.begin(_pending(refuse, fail), checkpoint=2)
    assert isinstance(slot.take(), Declined)
    assert isinstance(slot.take(), PartFailed)
