"""Savepoints that are asked for while the job ends, or that fail while they are finished."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onceflow.core.errors import SavepointFailed, StorageError
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, StateForm, WriteSavepoint
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log.memory import LogMemory
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.runtime.driver.savepoints import AskedSavepoint, Savepoints
from onceflow.core.storage import FileSystemStorage
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory

COMPLETED = CompletedCheckpoint(CheckpointId(1), AttemptId(1), 1, 128, (), 0, 0)


def _memory_at(_: CompletedCheckpoint) -> LogMemory:
    return LogMemory()


LOG: Any = SimpleNamespace(view=SimpleNamespace(memory_at=_memory_at))


def _begun(directory: Path) -> tuple[Savepoints, AskedSavepoint, Path]:
    storage = FileSystemStorage(str(directory))
    savepoints = Savepoints("ledger", storage, storage.open("ledger"), None, "heap", 60.0)
    asked = savepoints.ask(CheckpointKind.SAVEPOINT, None, StateForm.CANONICAL)
    assert savepoints.begin(asked.request)
    return savepoints, asked, Path(str(asked.directory))


def test_a_savepoint_may_be_asked_for_while_the_last_one_gets_its_proofs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FileSystemStorage(str(tmp_path))
    savepoints = Savepoints("ledger", storage, storage.open("ledger"), None, "heap", 60.0)
    last = savepoints.ask(CheckpointKind.SAVEPOINT_STOP, None, StateForm.CANONICAL)
    written: Any = SimpleNamespace(completed=None, memory=None)
    last.written = written
    copied: list[object] = []

    def copy_staged(asked: object, *_: object) -> None:
        copied.append(asked)
        savepoints.ask(CheckpointKind.SAVEPOINT, None, StateForm.CANONICAL)

    monkeypatch.setattr(savepoints, "_copy_staged", copy_staged)
    savepoints.add_proofs()
    assert copied == [last]
    savepoints.fail_all("the job has ended")


def test_a_savepoint_that_has_failed_is_not_whole_even_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails while the driver copies its state: nothing writes its metadata afterwards."""
    savepoints, asked, place = _begun(tmp_path)
    collect = SavepointDirectory.collect

    def collect_and_fail(directory: SavepointDirectory, *arguments: Any) -> Savepoint:
        savepoints.record_failure(asked.request, "not written within 600 s")
        savepoints.clean_up(asked.request)
        return collect(directory, *arguments)

    def finish(*_: object) -> None:
        raise AssertionError("the metadata of a failed savepoint is written")

    monkeypatch.setattr(SavepointDirectory, "collect", collect_and_fail)
    monkeypatch.setattr(SavepointDirectory, "finish", finish)
    with pytest.raises(StorageError, match="has failed meanwhile"):
        savepoints.write(WriteSavepoint(asked.request, COMPLETED), LOG)
    with pytest.raises(SavepointFailed, match="not written within 600 s"):
        asked.done.result(0)
    assert not place.exists()


def test_a_failure_is_reported_once_the_metadata_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails while the metadata is written, and again between that and the answer."""
    savepoints, asked, place = _begun(tmp_path)
    finish = SavepointDirectory.finish

    def finish_late(directory: SavepointDirectory, savepoint: Savepoint) -> None:
        finish(directory, savepoint)
        savepoints.record_failure(asked.request, "not written within 600 s")
        savepoints.clean_up(asked.request)
        assert place.joinpath("_metadata").exists()
        assert not asked.done.done(), "a driver that dies now has reported nothing"

    with monkeypatch.context() as patch:
        patch.setattr(SavepointDirectory, "finish", finish_late)
        savepoints.write(WriteSavepoint(asked.request, COMPLETED), LOG)
    with pytest.raises(SavepointFailed, match="not written within 600 s"):
        asked.done.result(0)
    assert not place.exists()

    savepoints, asked, place = _begun(tmp_path)
    savepoints.write(WriteSavepoint(asked.request, COMPLETED), LOG)
    assert place.joinpath("_metadata").exists()
    assert savepoints.last_written == COMPLETED
    asked.done.add_done_callback(lambda _: there.append(place.exists()))
    there: list[bool] = []
    savepoints.fail_begun("attempt 1 has ended")
    assert savepoints.last_written is None, "proofs are kept for a savepoint that is deleted"
    with pytest.raises(SavepointFailed, match="attempt 1 has ended; ask again"):
        asked.done.result(0)
    assert there == [False]


def test_a_savepoint_whose_last_write_never_ends_is_answered_with_what_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    savepoints, asked, place = _begun(tmp_path)

    def hang(*_: object) -> None:
        savepoints.fail_all("the job has ended")
        with pytest.raises(SavepointFailed, match="a whole savepoint may be in"):
            asked.done.result(0)

    monkeypatch.setattr(SavepointDirectory, "finish", hang)
    savepoints.write(WriteSavepoint(asked.request, COMPLETED), LOG)
    assert not place.exists(), "deleted as soon as the write has ended"


@pytest.mark.parametrize("is_written", [False, True])
def test_files_that_an_ended_attempt_has_not_deleted_are_deleted_when_the_job_ends(
    tmp_path: Path, is_written: bool
) -> None:
    savepoints, asked, place = _begun(tmp_path)
    if is_written:
        savepoints.write(WriteSavepoint(asked.request, COMPLETED), LOG)
    savepoints.record_failure(asked.request, "not written within 600 s")
    assert asked.done.done() is not is_written, "whole files are deleted before the answer"
    assert place.exists()
    savepoints.fail_all("the job has ended")
    with pytest.raises(SavepointFailed, match="not written within 600 s"):
        asked.done.result(0)
    assert not place.exists()
