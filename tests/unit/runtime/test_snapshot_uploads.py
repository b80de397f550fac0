"""Uploads to storage that stops taking files, or stops deleting them: real ones, no fakes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.runtime.storage_faults import mounted, remount

from onceflow.core.errors import StorageError
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import OperatorSnapshot, SnapshotTimings, SubtaskSnapshot
from onceflow.core.runtime.dataflow.operators import PendingSnapshot
from onceflow.core.runtime.slot.snapshot_uploads import SnapshotUploads
from onceflow.core.state import StateWriter
from onceflow.core.storage import FileSystemStorage

SUBTASK = SubtaskRef("balance", 0)


class Reports:
    """Keeps what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, CheckpointId | None]] = []
        self.reason = ""
        self._more = threading.Condition()

    def snapshot_uploaded(self, checkpoint: CheckpointId, snapshot: SubtaskSnapshot) -> None:
        self._hear("uploaded", checkpoint)

    def snapshot_declined(self, subtask: SubtaskRef, checkpoint: CheckpointId, reason: str) -> None:
        self.reason = reason
        self._hear("declined", checkpoint)

    def upload_failed(self, error: BaseException) -> None:
        self._hear(type(error).__name__, None)

    def wait_for(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.heard) >= count, 10), self.heard

    def _hear(self, what: str, checkpoint: CheckpointId | None) -> None:
        with self._more:
            self.heard.append((what, checkpoint))
            self._more.notify_all()


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
    reports = Reports()
    storage = FileSystemStorage(str(disk)).open("ledger")
    before = files_in(disk)
    uploads = SnapshotUploads(storage, AttemptId(1), reports)

    def write(writer: StateWriter) -> OperatorSnapshot:
        return OperatorSnapshot("balance", (writer.write("keyed", bytes(200_000)),))

    def write_in_a_bad_moment(writer: StateWriter) -> OperatorSnapshot:
        write(writer)
        remount(disk, "ro")
        return OperatorSnapshot("balance", (writer.write("more", bytes(200_000)),))

    bad, good = (PendingSnapshot("balance", how) for how in (write_in_a_bad_moment, write))
    uploads.begin(SUBTASK, CheckpointId(1), (bad,), SnapshotTimings())
    reports.wait_for(1)
    assert reports.heard == [("declined", CheckpointId(1))]
    assert "Read-only file system" in reports.reason
    assert len(files_in(disk)) == len(before) + 1
    remount(disk, "rw")
    uploads.begin(SUBTASK, CheckpointId(2), (good,), SnapshotTimings())
    reports.wait_for(2)
    assert reports.heard[1] == ("uploaded", CheckpointId(2))
    assert uploads.close(10.0)
    assert len(files_in(disk)) == len(before) + 1, "the second snapshot's"
    assert list(disk.rglob("chk-1/**/*keyed*")) == []


def test_a_report_that_cannot_be_made_is_a_failure_and_not_silence(tmp_path: Path) -> None:
    class Mute(Reports):
        def snapshot_uploaded(self, checkpoint: CheckpointId, snapshot: SubtaskSnapshot) -> None:
            "\ud83d".encode()

    reports = Mute()
    uploads = SnapshotUploads(
        FileSystemStorage(str(tmp_path)).open("ledger"), AttemptId(1), reports
    )
    uploads.begin(SUBTASK, CheckpointId(1), (), SnapshotTimings())
    reports.wait_for(1)
    assert reports.heard == [("UnicodeEncodeError", None)]
    assert uploads.close(10.0)


def test_an_upload_that_is_under_way_at_the_end_ends_as_soon_as_it_is_done(tmp_path: Path) -> None:
    reports, begun, may_end = Reports(), threading.Event(), threading.Event()
    uploads = SnapshotUploads(
        FileSystemStorage(str(tmp_path)).open("ledger"), AttemptId(1), reports
    )

    def write(writer: StateWriter) -> OperatorSnapshot:
        begun.set()
        may_end.wait(20)
        return OperatorSnapshot("balance", (writer.write("keyed", b"state"),))

    uploads.begin(SUBTASK, CheckpointId(1), (PendingSnapshot("x", write),), SnapshotTimings())
    assert begun.wait(10)
    threading.Timer(0.2, may_end.set).start()
    assert uploads.close(10.0)
    assert reports.heard == [("uploaded", CheckpointId(1))]


def test_the_end_does_not_wait_for_ever_for_an_upload_that_hangs(tmp_path: Path) -> None:
    reports, hangs = Reports(), threading.Event()
    uploads = SnapshotUploads(
        FileSystemStorage(str(tmp_path)).open("ledger"), AttemptId(1), reports
    )

    def hang(writer: StateWriter) -> OperatorSnapshot:
        hangs.wait(20)
        raise StorageError("late")

    uploads.begin(SUBTASK, CheckpointId(1), (PendingSnapshot("x", hang),), SnapshotTimings())
    assert not uploads.close(0.1)
    hangs.set()
    reports.wait_for(1)
