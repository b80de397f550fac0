"""Disks that are full, read-only or not ours: real ones, no fakes."""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.storage.storage_samples import decision, finish, start_python

from onceflow.core.errors import ConfigError, StorageError
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.storage import ClaimedLog, FileSystemStorage, JobStorage


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=200", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs root; the file size limit's tests cover the rest")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def files_in(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def opened(root: Path) -> tuple[JobStorage, ClaimedLog]:
    storage = FileSystemStorage(str(root)).open("ledger")
    log = storage.log.claim("test")
    log.append(decision(0, log.attempt))
    return storage, log


def test_a_full_disk_refuses_state_by_name_and_shows_no_part_of_it(small_disk: Path) -> None:
    storage, log = opened(small_disk)
    before = files_in(small_disk)
    writer = storage.writer(log.attempt, CheckpointId(1), "balance", 0)
    with pytest.raises(StorageError) as raised:
        writer.write("keyed", bytes(2 << 20))
    message = str(raised.value)
    assert "disk full" in message
    assert "chk-1/a1/balance@0@keyed" in message
    assert "nothing of it is committed" in message
    assert files_in(small_disk) == before


def test_a_full_disk_refuses_a_decision_and_the_next_one_stands(small_disk: Path) -> None:
    storage, log = opened(small_disk)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    before = files_in(small_disk)
    with pytest.raises(StorageError, match=r"disk full.*nothing of it is committed"):
        log.append(decision(1, log.attempt, filler=bytes(10_000)))
    assert files_in(small_disk) == before
    assert storage.log.read().completed == (decision(0, log.attempt),)
    ballast.unlink()
    log.append(decision(2, log.attempt))
    assert storage.log.read().completed[-1] == decision(2, log.attempt)


def test_a_disk_out_of_inodes_refuses_a_decision(small_disk: Path) -> None:
    storage, log = opened(small_disk)
    litter: list[Path] = []
    while True:
        try:
            path = small_disk / f"litter-{len(litter)}"
            path.touch()
            litter.append(path)
        except OSError:
            break
    with pytest.raises(StorageError, match="disk full"):
        log.append(decision(1, log.attempt))
    for path in litter[:3]:
        path.unlink()
    log.append(decision(1, log.attempt))
    assert storage.log.read() == log.view


def test_records_that_grow_against_a_full_disk_never_leave_a_part(small_disk: Path) -> None:
    """Many writers at once run the disk full at every moment there is."""
    storage, log = opened(small_disk)
    errors: list[BaseException] = []
    stop = threading.Event()

    def write(subtask: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            writer = storage.writer(log.attempt, CheckpointId(number), "balance", subtask)
            try:
                storage.discard([writer.write("keyed", os.urandom(150_000))])
            except StorageError as error:
                if "disk full" not in str(error):
                    errors.append(error)
                writer.abandon()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    appended = [decision(0, log.attempt)]
    for number in range(1, 60):
        completed = decision(number, log.attempt, filler=os.urandom(50_000))
        try:
            log.append(completed)
        except StorageError as error:
            errors.extend([] if "disk full" in str(error) else [error])
        else:
            # Decisions that were refused leave gaps: fewer than three may be left.
            appended = [one for one in (*appended, completed) if one.checkpoint >= number - 2]
            try:
                log.prune(CheckpointId(number - 2))
            except StorageError as error:  # the next one prunes
                errors.extend([] if "disk full" in str(error) else [error])
        assert storage.log.read().completed[-len(appended) :] == tuple(appended)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert not {name for name in files_in(small_disk) if "/chk-" in name or ".tmp" in name}


ONE = AttemptId(1)

LIMITED = """
import resource, sys
from onceflow.core.errors import StorageError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileSystemStorage
from tests.unit.storage.storage_samples import decision
storage = FileSystemStorage(sys.argv[1]).open("ledger")
log = storage.log.claim("test")
log.append(decision(0, log.attempt))
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
for write in (
    lambda: log.append(decision(1, log.attempt, filler=bytes(60_000))),
    lambda: storage.writer(log.attempt, CheckpointId(1), "u", 0).write("k", bytes(60_000)),
):
    try:
        write()
    except StorageError as error:
        print(error)
    else:
        print("written")
"""


def test_a_file_size_limit_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    code, out, err = finish(start_python(LIMITED, str(tmp_path)))
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 2
    assert "000000000003.json" in lines[0]
    assert "chk-1/a1/u@0@k" in lines[1]
    assert all("ulimit" in line and "nothing of it is committed" in line for line in lines)
    assert {name for name in files_in(tmp_path) if name.startswith("ledger/log")} == {
        "ledger/log/000000000001.json",
        "ledger/log/000000000002.json",
    }
    assert not any(".tmp" in name or "chk-1" in name for name in files_in(tmp_path))


def test_a_read_only_disk_is_named_and_still_readable(small_disk: Path) -> None:
    storage, log = opened(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"mount it writable") as raised:
        log.append(decision(1, log.attempt))
    assert str(small_disk) in str(raised.value)
    with pytest.raises(StorageError, match="Read-only file system"):
        storage.probe_write(ONE)
    with pytest.raises(StorageError, match="Read-only file system"):
        FileSystemStorage(str(small_disk)).open("other").log.claim("test")
    assert storage.log.read() == log.view


@pytest.fixture
def readable_by_all() -> Iterator[Path]:
    """Return a directory that all users can read. Pytest makes `tmp_path` private at each start."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def test_a_directory_of_another_user_is_refused_with_what_to_do(readable_by_all: Path) -> None:
    root = readable_by_all
    readable = FileSystemStorage(str(root), file_mode=0o644, directory_mode=0o755)
    readable.open("ledger").log.claim("test")
    script = """
import os, sys
from onceflow.core.errors import StorageError
from onceflow.core.storage import FileSystemStorage
storage = FileSystemStorage(sys.argv[1]).open("ledger")
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
else:
    os.chmod(sys.argv[1] + "/ledger", 0o500)
    os.chmod(sys.argv[1] + "/ledger/log", 0o500)
for call in (lambda: storage.probe_write(1), lambda: storage.log.claim("other user")):
    try:
        call()
    except StorageError as error:
        print(error)
print(storage.log.read().last_sequence)
"""
    if os.getuid() == 0:
        for directory in (root, root.parent):
            directory.chmod(directory.stat().st_mode | 0o055)
    code, out, err = finish(start_python(script, str(root)))
    if os.getuid() != 0:
        for name in ("ledger", "ledger/log"):
            (root / name).chmod(0o700)
    assert code == 0, err
    *refusals, last = out.splitlines()
    assert len(refusals) == 2
    assert all(
        "give the user of this process read and write access there" in line for line in refusals
    )
    assert last == "1"


def test_a_file_where_the_root_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = FileSystemStorage(str(tmp_path / "file")).open("ledger")
    with pytest.raises(StorageError, match="a file is at the path of a directory"):
        storage.probe_write(ONE)


def test_a_slot_that_sees_another_directory_reads_no_token(tmp_path: Path) -> None:
    driver = FileSystemStorage(str(tmp_path / "driver")).open("ledger")
    slot = FileSystemStorage(str(tmp_path / "slot")).open("ledger")
    probe = driver.probe_write(ONE)
    assert slot.probe_read(probe.path) == ""
    assert FileSystemStorage(str(tmp_path / "driver")).open("ledger").probe_read(probe.path) == (
        probe.token
    )
    assert not (tmp_path / "slot").exists()


def test_probes_of_earlier_attempts_are_swept_and_those_of_later_ones_stay(tmp_path: Path) -> None:
    """An older driver may still clean up when the slots of a newer one come to look."""
    storage = FileSystemStorage(str(tmp_path)).open("ledger")
    old, own, newer = (storage.probe_write(AttemptId(attempt)) for attempt in (1, 2, 3))
    storage.sweep(storage.log.read(), AttemptId(2))
    assert storage.probe_read(old.path) == ""
    assert [storage.probe_read(one.path) for one in (own, newer)] == [own.token, newer.token]


@pytest.mark.parametrize(
    ("root", "directory"),
    [
        ("file:///data/check%20points", "/data/check points"),
        ("file:/data", "/data"),
        ("file://localhost/data", "/data"),
        ("/data/a?b#c", "/data/a?b#c"),
        ("relative", str(Path.cwd() / "relative")),
    ],
)
def test_a_root_is_a_path_or_a_file_url(root: str, directory: str) -> None:
    assert FileSystemStorage(root).root == directory


@pytest.mark.parametrize("root", ["s3://key:secret@bucket/x", "hdfs://host/x", "file://host/x", ""])
def test_another_root_is_refused_without_showing_its_password(root: str) -> None:
    with pytest.raises(ConfigError, match=r"file:///path") as raised:
        FileSystemStorage(root)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("size_bytes", [-1, 1_000_001])
def test_an_inline_threshold_out_of_range_is_refused(size_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"inline_threshold_bytes={size_bytes}"):
        FileSystemStorage("/data", inline_threshold_bytes=size_bytes)


def test_a_description_crosses_to_a_slot_and_opens_the_same_directory(tmp_path: Path) -> None:
    described = FileSystemStorage(f"file://{tmp_path}", inline_threshold_bytes=7)
    arrived = pickle.loads(pickle.dumps(described))
    assert arrived == described
    assert str(arrived.open("ledger")) == f"{tmp_path}/ledger"
    assert list(tmp_path.iterdir()) == [], "opening touches nothing"
