"""Uploads to storage that stops taking files, or stops deleting them: real ones, no fakes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.runtime.slot_parts import slot_context
from tests.unit.runtime.storage_faults import mounted, remount

from onceflow.core.errors import StorageError
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot, SnapshotTimings
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import Acked, Declined
from onceflow.core.runtime.dataflow.operators import PendingSnapshot
from onceflow.core.runtime.dataflow.subtask import SnapshotTaken
from onceflow.core.runtime.slot.context import SlotMail
from onceflow.core.runtime.slot.snapshot_uploads import SnapshotUploads
from onceflow.core.state import RocksDBBackend, StateContext, StateWriter, ValueStateDescriptor

SUBTASK = SubtaskRef("balance", 0)


def taken(checkpoint: int, *pending: PendingSnapshot) -> SnapshotTaken:
    return SnapshotTaken(SUBTASK, CheckpointId(checkpoint), pending, SnapshotTimings())


def uploaded(mail: queue.SimpleQueue[SlotMail]) -> CheckpointId:
    report = mail.get(timeout=60)
    assert isinstance(report, Acked), report
    return report.checkpoint


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as disk:
        yield disk


def files_in(disk: Path) -> list[str]:
    return sorted(path.name for path in disk.rglob("*") if path.is_file())


def test_a_checkpoint_is_declined_at_once_when_its_files_can_be_neither_written_nor_deleted(
    disk: Path,
) -> None:
    """And what it had written goes with the next snapshot that storage takes."""
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    context = slot_context(disk, mail.put)
    before = files_in(disk)
    uploads = SnapshotUploads(context)

    def write(writer: StateWriter) -> OperatorSnapshot:
        return OperatorSnapshot("balance", (writer.write("keyed", bytes(200_000)),))

    def write_in_a_bad_moment(writer: StateWriter) -> OperatorSnapshot:
        write(writer)
        remount(disk, "ro")
        return OperatorSnapshot("balance", (writer.write("more", bytes(200_000)),))

    bad, good = (PendingSnapshot("balance", how) for how in (write_in_a_bad_moment, write))
    uploads.begin(taken(1, bad))
    declined = mail.get(timeout=60)
    assert isinstance(declined, Declined)
    assert declined.checkpoint == CheckpointId(1)
    assert "Read-only file system" in declined.reason
    assert len(files_in(disk)) == len(before) + 1
    remount(disk, "rw")
    uploads.begin(taken(2, good))
    assert uploaded(mail) == CheckpointId(2)
    assert uploads.close(10.0)
    assert len(files_in(disk)) == len(before) + 1, "the second snapshot's"
    assert list(disk.rglob("chk-1/**/*keyed*")) == []


def test_an_upload_that_is_under_way_at_the_end_ends_as_soon_as_it_is_done(tmp_path: Path) -> None:
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    begun, may_end = threading.Event(), threading.Event()
    uploads = SnapshotUploads(slot_context(tmp_path, mail.put))

    def write(writer: StateWriter) -> OperatorSnapshot:
        begun.set()
        may_end.wait(20)
        return OperatorSnapshot("balance", (writer.write("keyed", b"state"),))

    uploads.begin(taken(1, PendingSnapshot("x", write)))
    assert begun.wait(60)
    threading.Timer(0.2, may_end.set).start()
    assert uploads.close(10.0)
    assert uploaded(mail) == CheckpointId(1)


def test_the_end_does_not_wait_for_ever_for_an_upload_that_hangs(tmp_path: Path) -> None:
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    hangs = threading.Event()
    uploads = SnapshotUploads(slot_context(tmp_path, mail.put))

    def hang(writer: StateWriter) -> OperatorSnapshot:
        hangs.wait(20)
        raise StorageError("late")

    uploads.begin(taken(1, PendingSnapshot("x", hang)))
    assert not uploads.close(0.1)
    hangs.set()
    assert isinstance(mail.get(timeout=60), Declined)


def test_copies_of_databases_do_not_pile_up_in_the_slot_while_checkpoints_are_declined(
    tmp_path: Path,
) -> None:
    """The first operator's upload fails; the second one's snapshot is never asked to upload."""
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    uploads = SnapshotUploads(slot_context(tmp_path, mail.put))
    context = StateContext("balance", 0, range(128), 128, tmp_path / "state")
    store = RocksDBBackend().open(context, (), slot_context(tmp_path, mail.put).storage.reader())
    value = store.value_state(ValueStateDescriptor[int]("value", int))

    def refuse(writer: StateWriter) -> OperatorSnapshot:
        raise StorageError("the disk is full")

    for checkpoint in range(1, 6):
        store.set_current_key("key")
        value.set(checkpoint)
        frozen = store.snapshot(CheckpointId(checkpoint))

        def upload(writer: StateWriter) -> OperatorSnapshot:
            raise AssertionError("the upload of the operator before has failed")

        uploads.begin(
            taken(
                checkpoint,
                PendingSnapshot("first", refuse),
                PendingSnapshot("balance", upload, frozen.discard),
            )
        )
        assert isinstance(mail.get(timeout=60), Declined)
    assert uploads.close(60.0)
    # Writes what the last snapshot has left, and links its copy if somebody still wants that.
    store.snapshot(CheckpointId(6)).discard()
    assert list((tmp_path / "state").rglob("copy-*")) == []
    store.close()
