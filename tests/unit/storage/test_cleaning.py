"""S58 and I9: what is deleted, and what never is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.unit.storage.storage_samples import decision

from onceflow.core.errors import StorageError
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.storage import FileSystemStorage, JobStorage
from onceflow.core.storage.filesystems.local import LocalFileSystem

BIG = bytes(30_000)


@pytest.fixture
def storage(tmp_path: Path) -> JobStorage:
    return FileSystemStorage(str(tmp_path)).open("ledger")


def files(root: Path) -> set[str]:
    job = root / "ledger"
    return {
        str(path.relative_to(job))
        for path in job.rglob("*")
        if path.is_file() and path.relative_to(job).parts[0] not in {"log", "meta.json"}
    }


def private(storage: JobStorage, attempt: int, checkpoint: int, uid: str = "u") -> StateHandle:
    writer = storage.writer(AttemptId(attempt), CheckpointId(checkpoint), uid, 0)
    return writer.write("keyed", BIG)


def shared(storage: JobStorage, tmp_path: Path, attempt: int, name: str = "1.sst") -> StateHandle:
    source = tmp_path / name
    source.write_bytes(BIG)
    writer = storage.writer(AttemptId(attempt), CheckpointId(1), "u", 0)
    return writer.write_file(name, source, shared=True)


def test_discarded_files_and_empty_directories_are_gone_and_nothing_else(
    storage: JobStorage, tmp_path: Path
) -> None:
    one, other = private(storage, 1, 1, "one"), private(storage, 1, 1, "other")
    sst = shared(storage, tmp_path, 1)
    inline = storage.writer(AttemptId(1), CheckpointId(1), "u", 0).write("small", b"x")
    storage.discard([one, inline])
    assert files(tmp_path) == {other.path, sst.path}
    storage.discard([one, other, sst])
    assert files(tmp_path) == set()
    assert not (tmp_path / "ledger/chk-1").exists()
    storage.discard([one, other, sst])


def test_one_file_that_cannot_be_deleted_does_not_keep_the_others(
    storage: JobStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [private(storage, 1, n) for n in range(3)]
    delete = LocalFileSystem.delete

    def failing(self: LocalFileSystem, path: str) -> None:
        if path.endswith(handles[0].path):
            raise StorageError("not this one")
        delete(self, path)

    monkeypatch.setattr(LocalFileSystem, "delete", failing)
    with pytest.raises(StorageError, match="not this one"):
        storage.discard(handles)
    assert files(tmp_path) == {handles[0].path}


def test_one_directory_that_cannot_be_deleted_does_not_keep_the_others_from_a_sweep(
    storage: JobStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [private(storage, 1, n) for n in range(1, 4)]
    stray = shared(storage, tmp_path, 1)
    delete_tree = LocalFileSystem.delete_tree

    def failing(self: LocalFileSystem, path: str) -> None:
        if path == "ledger/chk-1/a1":
            raise StorageError("not this one")
        delete_tree(self, path)

    monkeypatch.setattr(LocalFileSystem, "delete_tree", failing)
    with pytest.raises(StorageError, match="not this one"):
        storage.sweep(storage.log.read(), AttemptId(2))
    assert files(tmp_path) == {handles[0].path}
    assert stray.path not in files(tmp_path)


def test_a_sweep_keeps_what_a_retained_checkpoint_names(
    storage: JobStorage, tmp_path: Path
) -> None:
    """Checkpoints 1 and 2 name a shared file of attempt 1; attempt 2 and 3 must find it."""
    log = storage.log.claim("driver")
    sst, keyed = shared(storage, tmp_path, 1), private(storage, 1, 1)
    log.append(decision(1, 1, (sst, keyed)))
    newer = private(storage, 1, 2)
    log.append(decision(2, 1, (sst, newer)))
    second = storage.log.claim("driver")
    assert storage.sweep(second.view, second.attempt) == ()
    assert files(tmp_path) == {sst.path, keyed.path, newer.path}
    second.prune(CheckpointId(2))
    third = storage.log.claim("driver")
    assert storage.sweep(third.view, third.attempt) == ("ledger/chk-1/a1",)
    assert files(tmp_path) == {sst.path, newer.path}
    third.append(decision(3, 3))
    third.prune(CheckpointId(3))
    fourth = storage.log.claim("driver")
    storage.sweep(fourth.view, fourth.attempt)
    assert files(tmp_path) == set()
    assert storage.sweep(fourth.view, fourth.attempt) == ()


def test_a_sweep_deletes_what_dead_attempts_left(storage: JobStorage, tmp_path: Path) -> None:
    first = storage.log.claim("driver")
    kept = private(storage, 1, 1)
    first.append(decision(1, 1, (kept,)))
    private(storage, 1, 2)
    shared(storage, tmp_path, 1)
    unfinished = tmp_path / f"ledger/shared/.a1@u@0@x@2.sst.{'0' * 32}.tmp"
    unfinished.write_bytes(b"half")
    half_written = tmp_path / f"ledger/chk-3/a1/.u@0@keyed.{'0' * 32}.tmp"
    half_written.parent.mkdir(parents=True)
    half_written.write_bytes(b"half")
    second = storage.log.claim("driver")
    storage.sweep(second.view, second.attempt)
    assert files(tmp_path) == {kept.path}
    assert not (tmp_path / "ledger/chk-2").exists()
    assert not (tmp_path / "ledger/chk-3").exists()


def test_a_sweep_touches_nothing_of_its_own_attempt_in_flight_nor_of_newer_ones(
    storage: JobStorage, tmp_path: Path
) -> None:
    storage.log.claim("driver")
    second = storage.log.claim("driver")
    second.append(decision(5, 2))
    in_flight = private(storage, 2, 6)
    mine_shared = shared(storage, tmp_path, 2)
    newer, newer_shared = private(storage, 3, 4), shared(storage, tmp_path, 3)
    aborted = private(storage, 2, 4)
    assert storage.sweep(second.view, second.attempt) == ("ledger/chk-4/a2",)
    assert files(tmp_path) == {
        in_flight.path,
        mine_shared.path,
        newer.path,
        newer_shared.path,
    }
    assert aborted.path not in files(tmp_path)


def test_a_sweep_leaves_what_is_not_ours(storage: JobStorage, tmp_path: Path) -> None:
    log = storage.log.claim("driver")
    strangers = ["chk-old/a0/x", "savepoint/x", "shared/readme.txt", "chk-1/notes/x"]
    for name in strangers:
        path = tmp_path / "ledger" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    other = FileSystemStorage(str(tmp_path)).open("ledger2")
    kept = private(other, 1, 1)
    assert storage.sweep(log.view, log.attempt) == ()
    assert files(tmp_path) == set(strangers)
    assert (tmp_path / "ledger2" / kept.path).exists()


def test_a_job_that_never_ran_has_nothing_to_sweep(storage: JobStorage) -> None:
    assert storage.sweep(storage.log.read(), AttemptId(1)) == ()


def test_a_sweep_beside_writers_of_the_same_attempt_loses_none_of_their_files(
    storage: JobStorage, tmp_path: Path
) -> None:
    for _ in range(3):
        log = storage.log.claim("driver")
        for number in range(1, 30):
            private(storage, log.attempt, number)
    live = storage.log.claim("driver")
    written: list[StateHandle] = []

    def write(subtask: int) -> None:
        for number in range(1, 40):
            writer = storage.writer(live.attempt, CheckpointId(number), "live", subtask)
            written.append(writer.write("keyed", BIG))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        storage.sweep(live.view, live.attempt)
    for thread in threads:
        thread.join()
    storage.sweep(live.view, live.attempt)
    assert len(written) == 3 * 39
    assert files(tmp_path) == {handle.path for handle in written}


def test_state_of_another_name_for_the_same_checkpoint_number_is_kept_apart(
    storage: JobStorage,
) -> None:
    """A checkpoint number that an attempt never decided is used again by the next one."""
    first, second = private(storage, 1, 7), private(storage, 2, 7)
    assert first.path != second.path
    storage.discard([first])
    assert storage.reader().read(second) == BIG
