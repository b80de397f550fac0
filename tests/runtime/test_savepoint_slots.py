"""Savepoints: slots that reach the directory write their state there, else the driver copies it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Literal

import pytest
from tests.support.counting_source import CountingSource
from tests.support.far_slots import FarSlotsStorage
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.leftovers import find_savepoint_leftovers

from onceflow import FileSystemStorage, HeapBackend, JobState, LocalProcesses, RocksDBBackend
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.errors import SavepointFailed, SavepointRefused, StorageError
from onceflow.core.protocol.checkpoints.snapshots import handles_of
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.core.runtime.cluster.process_host import Link, ProcessKilled
from onceflow.core.state import StateBackend
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.integration.conformance.processes import Processes

FORMS = pytest.mark.parametrize(
    ("backend", "form"),
    [
        pytest.param(HeapBackend(), "canonical", id="heap"),
        pytest.param(RocksDBBackend(), "canonical", id="rocksdb"),
        pytest.param(RocksDBBackend(), "native", id="rocksdb-native"),
    ],
)
Form = Literal["canonical", "native"]


def _source(directory: Path) -> CountingSource:
    return CountingSource(6_000, pause_s=0.002, ends_with=str(directory / "read all"))


def _paths_of(directory: SavepointDirectory) -> list[str]:
    return [handle.path for handle in handles_of(directory.read().completed.snapshots)]


@FORMS
def test_slots_write_the_state_of_a_savepoint_and_nothing_of_it_into_checkpoint_storage(
    tmp_path: Path, backend: StateBackend, form: Form
) -> None:
    source = _source(tmp_path)
    pipeline, sink = ledger(
        LocalProcesses(), tmp_path, source, backend=backend, interval=None, inline_threshold_bytes=0
    )
    job = pipeline.start()
    job.wait_for(records=500)
    place = job.savepoint(str(tmp_path / "kept"), form=form)
    paths = _paths_of(FileSystemStorage(str(tmp_path)).open_savepoint(place))
    assert paths
    assert [path for path in paths if "@slot@" not in path] == []
    assert not list((tmp_path / "checkpoints" / "ledger").glob("chk-*"))
    assert not Path(place, "_writing").exists()
    job.cancel(60)
    (tmp_path / "read all").touch()
    again, _ = ledger(LocalProcesses(), tmp_path / "new", source, sink=sink, backend=backend)
    status = again.start(from_savepoint=place, allow_rewind=True).wait(60)
    assert status.state is JobState.FINISHED
    assert_exactly_once(sink, source)


@FORMS
def test_the_driver_copies_the_state_of_slots_whose_own_disk_has_the_savepoints_path(
    tmp_path: Path, backend: StateBackend, form: Form
) -> None:
    """The slots' disk has a directory of that path; what they wrote there would be lost."""
    source, disk = _source(tmp_path), tmp_path / "disk"
    kept = tmp_path / "kept"
    Path(f"{disk}/{kept}").mkdir(parents=True)
    storage = FarSlotsStorage(
        str(tmp_path / "checkpoints"), inline_threshold_bytes=0, disk=str(disk)
    )
    pipeline, sink = ledger(
        LocalProcesses(), tmp_path, source, backend=backend, interval=None, storage=storage
    )
    job = pipeline.start()
    job.wait_for(records=500)
    place = job.savepoint(str(kept), form=form)
    paths = _paths_of(storage.open_savepoint(place))
    assert paths
    assert [path for path in paths if "@slot@" in path] == []
    assert [path for path in disk.rglob("*") if path.is_file()] == []
    job.cancel(60)
    (tmp_path / "read all").touch()
    again, _ = ledger(LocalProcesses(), tmp_path / "new", source, sink=sink, backend=backend)
    status = again.start(from_savepoint=place, allow_rewind=True).wait(60)
    assert status.state is JobState.FINISHED
    assert_exactly_once(sink, source)


@pytest.mark.parametrize("point", ["saved"])
def test_a_slot_that_dies_with_its_state_in_the_directory_fails_the_savepoint_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: CrashPoint
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(VARIABLE, str(points))
    source = _source(tmp_path)
    cluster = LocalProcesses(tmp_path / "logs")
    pipeline, sink = ledger(cluster, tmp_path, source, inline_threshold_bytes=0)
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    (points / point).touch()
    kept = tmp_path / "kept"
    with pytest.raises(SavepointFailed, match="attempt 1 has ended"):
        job.savepoint(str(kept), timeout_s=60)
    place = job.savepoint(str(kept), timeout_s=60)
    assert [str(path) for path in kept.iterdir()] == [place]
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_directory_that_hangs_while_its_files_are_deleted_holds_up_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, dispose = threading.Event(), SavepointDirectory.dispose

    def collect(*_: object) -> None:
        raise StorageError("the directory is away")

    def dispose_late(directory: SavepointDirectory) -> None:
        assert answers.wait(60)
        dispose(directory)

    monkeypatch.setattr(SavepointDirectory, "collect", collect)
    monkeypatch.setattr(SavepointDirectory, "dispose", dispose_late)
    source = _source(tmp_path)
    pipeline, sink = ledger(LocalProcesses(), tmp_path, source, inline_threshold_bytes=0)
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    kept = tmp_path / "kept"
    with pytest.raises(SavepointFailed, match="the directory is away"):
        job.savepoint(str(kept), timeout_s=30)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2, timeout_s=30)
    answers.set()
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert list(kept.iterdir()) == []
    assert_exactly_once(sink, source)


def _save_and_die(link: Link, directory: str) -> None:
    """Take a savepoint in a process that is armed to die meanwhile."""
    del link
    fork_own_host()
    source = _source(Path(directory))
    pipeline, _ = ledger(LocalProcesses(), Path(directory), source, inline_threshold_bytes=0)
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    job.savepoint(str(Path(directory) / "kept"), timeout_s=60)


@pytest.mark.parametrize(("point", "is_whole"), [("collected", False), ("finished", True)])
def test_a_driver_that_dies_while_it_finishes_a_savepoint_leaves_a_whole_one_or_none(
    tmp_path: Path, onceflow_processes: Processes, point: CrashPoint, is_whole: bool
) -> None:
    onceflow_processes.arm(point)
    driver = onceflow_processes.start(_save_and_die, str(tmp_path))
    with pytest.raises(ProcessKilled):
        driver.result()
    (place,) = (tmp_path / "kept").iterdir()
    source = _source(tmp_path)
    (tmp_path / "read all").touch()
    pipeline, sink = ledger(LocalProcesses(), tmp_path, source, inline_threshold_bytes=0)
    if is_whole:
        assert find_savepoint_leftovers(tmp_path / "kept") == []
        job = pipeline.start(from_savepoint=str(place), allow_rewind=True)
    else:
        with pytest.raises(SavepointRefused, match="is not finished: its job writes it now"):
            pipeline.start(from_savepoint=str(place)).wait(60)
        SavepointDirectory.dispose(FileSystemStorage(str(tmp_path)).open_savepoint(str(place)))
        job = pipeline.start()
    assert job.wait(60).state is JobState.FINISHED
    ids = {row["id"] for row in sink.rows()}
    assert ids == set(range(source.records))
    if not is_whole:
        assert_exactly_once(sink, source)
