"""A power cut at any moment loses nothing that checkpoint storage has reported as durable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.power_cuts import CutFailed, Record, cut_at_each_moment, do_nothing
from tests.unit.storage.storage_samples import decision

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import LogMemory
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.storage import FileSystemStorage, JobStorage
from onceflow.core.storage.filesystems import local
from onceflow.core.storage.staging.staged_rows import FileStagingArea

ROWS = pa.RecordBatch.from_pydict({"id": [1, 2, 3]})
KEYED, SST = bytes(range(256)) * 100, b"sst" * 10_000


def storage_of(root: Path) -> FileSystemStorage:
    return FileSystemStorage(str(root / "storage"))


def open_job(root: Path) -> JobStorage:
    return storage_of(root).open("ledger")


def run_drivers(disk: Record) -> None:
    """Run two attempts. Each checkpoint replaces the one before."""
    run_driver(disk, range(2))
    run_driver(disk, range(2, 3))


def run_driver(disk: Record, checkpoints: range) -> None:
    storage = open_job(disk.root)
    log = storage.log.claim("driver")
    disk.promise(f"attempt {log.attempt} is claimed")
    kept: tuple[StateHandle, ...] = ()
    for checkpoint in checkpoints:
        writer = storage.writer(log.attempt, CheckpointId(checkpoint), "balance", 0)
        source = disk.root.parent / "1.sst"
        source.write_bytes(SST)
        shared = writer.write_file("1.sst", source, shared=True)
        handles = (writer.write("keyed", KEYED), shared, writer.write("small", b"inline"))
        log.append(decision(checkpoint, log.attempt, handles))
        disk.promise(f"checkpoint {checkpoint}")
        if checkpoint:
            disk.withdraw(f"checkpoint {checkpoint - 1}")
            log.prune(CheckpointId(checkpoint))
            storage.discard(kept)
        kept = handles


def take_savepoint(disk: Record) -> None:
    """Stage rows, copy them and a state file into a savepoint, and finish it."""
    storage = open_job(disk.root)
    area = storage.open_staged_files("sink")
    transaction = TransactionId("sink", 1, 0, 0)
    staged = area.open()
    staged.write(ROWS)
    staged.seal(transaction)
    disk.promise("rows are staged")
    savepoint = storage_of(disk.root).open_savepoint(str(disk.root / "savepoints" / "first"))
    savepoint.prepare("id")
    handle = savepoint.subtask_writer("balance", 0, 1_000).write("keyed", KEYED)
    area.copy_to(savepoint.staging("sink"), lambda _: True)
    completed = decision(0, 1, (handle,))
    content = Savepoint("id", "ledger", "log", CheckpointKind.PERIODIC, completed, LogMemory())
    savepoint.finish(content)
    disk.promise("savepoint")
    disk.withdraw("rows are staged")
    area.discard(transaction)


def check_savepoint(root: Path, promises: frozenset[str]) -> None:
    if "rows are staged" in promises:
        assert read_staged(open_job(root).open_staged_files("sink")) == [ROWS]
    savepoint = storage_of(root).open_savepoint(str(root / "savepoints" / "first"))
    # The whole savepoint, or none.
    assert savepoint.is_there() or "savepoint" not in promises
    if savepoint.is_there():
        (snapshot,) = savepoint.read().completed.snapshots
        (handle,) = snapshot.operators[0].keyed
        assert savepoint.reader().read(handle) == KEYED
        assert read_staged(savepoint.staging("sink")) == [ROWS]


def read_staged(area: FileStagingArea) -> list[pa.RecordBatch]:
    rows = area.read(TransactionId("sink", 1, 0, 0))
    assert rows is not None
    return [batch for _, batch in rows]


def check_storage(root: Path, promises: frozenset[str]) -> None:
    storage = open_job(root)
    view = storage.log.read()
    by_number = {completed.checkpoint: completed for completed in view.completed}
    promised = [int(text.split()[1]) for text in promises if text.startswith("checkpoint")]
    assert by_number.keys() >= set(promised)
    last = max(by_number, default=None)
    if last is not None:
        assert last >= max(promised, default=0)
        (snapshot,) = by_number[last].snapshots
        contents = [storage.reader().read(handle) for handle in snapshot.operators[0].keyed]
        assert contents == [KEYED, SST, b"inline"]
    attempts = [int(text.split()[1]) for text in promises if text.startswith("attempt")]
    # The next driver goes on: it claims, and decides what follows.
    log = storage.log.claim("the next driver")
    assert log.attempt > max(attempts, default=0)
    storage.sweep(log.view, log.attempt)
    log.append(decision(log.view.next_checkpoint, log.attempt))
    assert open_job(root).log.read().completed[-1].attempt == log.attempt


def test_checkpoints_and_claims_are_there_after_each_cut(tmp_path: Path) -> None:
    assert cut_at_each_moment(tmp_path, run_drivers, check_storage) > 150


def test_staged_rows_and_savepoints_are_whole_after_each_cut(tmp_path: Path) -> None:
    assert cut_at_each_moment(tmp_path, take_savepoint, check_savepoint) > 30


def _sync_names_alone(disk: Record, call: str, path: str, sync: Any = Record.sync) -> None:
    if Path(path).is_dir():
        sync(disk, call, path)


def _make_directory(full: str, *_: object) -> None:
    Path(full).mkdir(parents=True, exist_ok=True)


MISTAKES: dict[str, tuple[object, str, object]] = {
    "bytes of files": (Record, "sync", _sync_names_alone),
    "names of state files": (local, "_sync_name", do_nothing),
    "names of records": (local.LocalFileSystem, "_sync_published", do_nothing),
    "adopted files": (local, "sync_file", do_nothing),
    "new directories": (local, "make_durable_directory", _make_directory),
}


@pytest.mark.parametrize("unsynced", MISTAKES)
def test_a_sync_that_is_left_out_breaks_a_promise(
    tmp_path: Path, unsynced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MISTAKES[unsynced])
    with pytest.raises(CutFailed):
        cut_at_each_moment(tmp_path, run_drivers, check_storage)
