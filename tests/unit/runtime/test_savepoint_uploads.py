"""Uploads of one slot into the directory of a savepoint, which it may not reach, or lose."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest
from tests.unit.runtime.slot_parts import slot_context

from onceflow import FileSystemStorage
from onceflow.core.protocol.checkpoints.decisions import SavepointTarget
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot, SnapshotTimings
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import Acked, Declined
from onceflow.core.runtime.dataflow.operators import PendingSnapshot
from onceflow.core.runtime.dataflow.subtask import SnapshotTaken
from onceflow.core.runtime.slot.context import SlotMail
from onceflow.core.runtime.slot.snapshot_uploads import SnapshotUploads
from onceflow.core.state import StateWriter
from onceflow.core.storage.filesystems.filesystem import StorageRefused
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory

SUBTASK = SubtaskRef("balance", 0)


def _upload(
    directory: Path, target: SavepointTarget, writes: list[PendingSnapshot]
) -> Acked | Declined:
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    uploads = SnapshotUploads(slot_context(directory, mail.put))
    taken = SnapshotTaken(SUBTASK, CheckpointId(1), tuple(writes), SnapshotTimings(), target=target)
    uploads.begin(taken)
    report = mail.get(timeout=60)
    assert isinstance(report, (Acked, Declined)), report
    assert uploads.close(10.0)
    return report


def _write(writer: StateWriter) -> OperatorSnapshot:
    return OperatorSnapshot("balance", (writer.write("keyed", bytes(200_000)),))


def _directory(path: Path) -> SavepointDirectory:
    return FileSystemStorage(str(path)).open_savepoint(str(path))


def _files(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def test_a_slot_that_reads_the_drivers_mark_writes_into_the_savepoint(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    target = _directory(kept).prepare("the id")
    acked = _upload(tmp_path / "checkpoints", target, [PendingSnapshot("balance", _write)])
    assert isinstance(acked, Acked)
    assert acked.in_target
    (handle,) = acked.snapshot.operators[0].keyed
    assert _files(kept) == ["_writing", handle.path]
    assert _files(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("seen", ["nothing", "another savepoint", "cannot be written"])
def test_a_slot_that_does_not_reach_the_directory_uploads_to_checkpoint_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    kept = tmp_path / "kept"
    target = SavepointTarget(str(kept), "the id")
    match seen:
        case "another savepoint":
            _directory(kept).prepare("another id")
        case "cannot be written":
            _directory(kept).prepare("the id")

            def refuse(_: SavepointDirectory) -> None:
                raise StorageRefused("the file system is read-only")

            monkeypatch.setattr(SavepointDirectory, "check_writable", refuse)
        case _:
            pass
    before = _files(kept)
    acked = _upload(tmp_path / "checkpoints", target, [PendingSnapshot("balance", _write)])
    assert isinstance(acked, Acked)
    assert not acked.in_target
    assert _files(kept) == before
    assert len(_files(tmp_path / "checkpoints")) == 1


def test_a_slot_deletes_what_it_has_written_into_a_savepoint_that_failed_meanwhile(
    tmp_path: Path,
) -> None:
    """The driver has deleted all that was there, and the slot goes on writing."""
    kept = tmp_path / "kept"
    directory = _directory(kept)

    def write_late(writer: StateWriter) -> OperatorSnapshot:
        directory.dispose()
        return _write(writer)

    declined = _upload(
        tmp_path / "checkpoints",
        directory.prepare("the id"),
        [PendingSnapshot("balance", write_late)],
    )
    assert isinstance(declined, Declined)
    assert "has given up savepoint" in declined.reason
    assert not kept.exists()


def test_a_directory_that_does_not_answer_holds_up_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More subtasks wait for the savepoint's directory than there are threads for uploads."""
    answers = threading.Event()

    def hang(_: SavepointDirectory, __: str) -> bool:
        answers.wait(60)
        return False

    monkeypatch.setattr(SavepointDirectory, "has_mark", hang)
    mail: queue.SimpleQueue[SlotMail] = queue.SimpleQueue()
    uploads = SnapshotUploads(slot_context(tmp_path / "checkpoints", mail.put))
    target = SavepointTarget(str(tmp_path / "kept"), "the id")
    pending = (PendingSnapshot("balance", _write),)
    for index in range(3):
        subtask = SubtaskRef("balance", index)
        uploads.begin(
            SnapshotTaken(subtask, CheckpointId(1), pending, SnapshotTimings(), target=target)
        )
    uploads.begin(SnapshotTaken(SUBTASK, CheckpointId(2), pending, SnapshotTimings()))
    try:
        first = mail.get(timeout=20)
    finally:
        answers.set()
    assert isinstance(first, Acked), first
    assert first.checkpoint == CheckpointId(2)
    assert uploads.close(10.0)
