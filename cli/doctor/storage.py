"""The checks of a directory, a bucket or an HDFS against the requirements of checkpoint storage."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from onceflow.core.errors import ConfigError, StorageError
from onceflow.core.spi.connector import Area, Finding
from onceflow.core.storage import FileSystemStorage, HdfsStorage, ObjectStorage, checkpoint_storage
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.filesystems.bucket_settings import is_bucket
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.filesystems.webhdfs import is_hdfs

FREE_MIN_BYTES = 1 << 30
FREE_MIN_SHARE = 0.05
"""The minimum free space, in bytes and as a share. Less than either gives a warning."""
SLOW_SYNC_S = 0.1
"""The sync time above which a warning is shown. A decision syncs several times, so checkpoints wait
for a slow disk."""

_MIB = 1 << 20
_MOUNTS = Path("/proc/self/mounts")


def missing_directories(root: str) -> tuple[Path, ...]:
    """Return the directories of `root` that do not exist, the deepest first.

    Called once, before the checks run. Two checks work in `root` concurrently, and neither knows
    which directories the other has created.

    Raises:
        ConfigError: `root` is not a checkpoint storage.
    """
    if is_bucket(root) or is_hdfs(root):
        checkpoint_storage(root)  # raises ConfigError for an invalid URL
        return ()
    directory = Path(FileSystemStorage(root).root)
    return tuple(path for path in (directory, *directory.parents) if not path.exists())


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove the empty directories among `directories`. The last check to finish removes them."""
    for path in directories:
        with suppress(OSError):
            path.rmdir()


def check_storage(root: str, missing: Sequence[Path]) -> Sequence[Finding]:
    """Test creating, linking, syncing, listing and deleting in `root`, and its free space.

    Directories that the check had to create (`missing`) are removed.
    """
    if is_bucket(root) or is_hdfs(root):
        return check_bucket(root)
    area = Area("storage")
    directory = Path(FileSystemStorage(root).root)
    # The directory may not exist yet. The nearest existing parent shows its file system.
    there = _nearest(directory)
    # Test this before the permissions, which may allow writing even on a read-only mount.
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        mount = _mount_point(there)
        return [
            area.problem(
                f"{there} is on a file system that is mounted read-only, at {mount}",
                f"a directory {directory} that driver and executors may write",
                f"sudo mount -o remount,rw {mount}",
            )
        ]
    if not os.access(there, os.W_OK | os.X_OK):
        return [
            area.problem(
                f"{there} is not writable for user {os.geteuid()}",
                f"a directory {directory} that driver and executors may write",
                f"sudo install -d -o $(id -un) {directory}",
            )
        ]
    scratch = f".onceflow-doctor-{uuid.uuid4().hex}"
    try:
        used = _exercise(area, LocalFileSystem(str(directory)), scratch)
        return [*used, *_durability(area, there), *_space(area, there)]
    except StorageError as error:
        return [
            area.problem(
                str(error),
                "durable writes, hard links and listing",
                f"mount {directory} read-write, on a file system that supports them (ext4,"
                " xfs, NFSv4)",
            )
        ]
    finally:
        shutil.rmtree(directory / scratch, ignore_errors=True)
        remove_empty(missing)


def _exercise(area: Area, fs: LocalFileSystem, scratch: str) -> list[Finding]:
    fs.make_directory(scratch)
    began = time.monotonic()
    first = fs.create_if_absent(f"{scratch}/record", b"first")
    synced_s = time.monotonic() - began
    second = fs.create_if_absent(f"{scratch}/record", b"second")
    if not isinstance(first, filesystem.Created) or second != filesystem.AlreadyExists(b"first"):
        return [
            area.problem(
                f"{fs.location(scratch)}: a file was created twice under one name",
                "storage where only one process can create a file, which the decision log needs",
                "use another file system: ext4, xfs or NFSv4, but no object store mounted by FUSE",
            )
        ]
    fs.write(f"{scratch}/state", (b"x" * _MIB,))
    # RocksDB's files become part of a checkpoint by a hard link, so that they are not copied.
    Path(fs.location(f"{scratch}/source")).write_bytes(b"y")
    linked = fs.adopt(f"{scratch}/linked", Path(fs.location(f"{scratch}/source")))
    if set(fs.list(scratch)) < {"record", "state"}:
        return [area.problem("a listing misses files", "complete listings", "use ext4 or NFSv4")]
    findings = [area.ok(f"{fs.location('')} is writable, synced in {synced_s * 1000:.1f} ms")]
    if not linked:
        findings.append(
            area.warning(
                f"{fs.location(scratch)}: a hard link could not be made",
                "hard links; without them every RocksDB checkpoint is copied",
                "use ext4, xfs or NFSv4, and scratch_dir on the same file system",
            )
        )
    if synced_s > SLOW_SYNC_S:
        findings.append(
            area.warning(
                f"making one file durable takes {synced_s * 1000:.0f} ms",
                f"under {SLOW_SYNC_S * 1000:.0f} ms; checkpoints wait for it several times",
                "use a faster disk, or a longer checkpoint interval",
            )
        )
    return findings


def _durability(area: Area, directory: Path) -> list[Finding]:
    """Return a warning if synced data is only in memory, or may be only in the disk's cache."""
    mount_point = str(_mount_point(directory))
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()] if _MOUNTS.exists() else []
    mounted = [(mount[2], mount[3].split(",")) for mount in mounts if mount[1] == mount_point]
    # The last entry counts: a later mount covers earlier ones.
    kind, options = mounted[-1] if mounted else ("", [""])
    covered = "a disk: in memory, checkpoints survive a process but not a restart of the machine"
    if kind in {"tmpfs", "ramfs"}:
        return [
            area.warning(f"{mount_point} is in memory ({kind})", covered, "use a directory on disk")
        ]
    if {"nobarrier", "barrier=0"} & set(options):
        return [
            area.warning(
                f"{mount_point} is mounted without barriers",
                "write barriers; without them a power cut loses the contents of the disk's cache",
                f"sudo mount -o remount,barrier {mount_point}",
            )
        ]
    return []


def _space(area: Area, directory: Path) -> list[Finding]:
    usage = shutil.disk_usage(directory)
    free = f"{usage.free / (1 << 30):.1f} GiB of {usage.total / (1 << 30):.1f} GiB are free"
    if usage.free < FREE_MIN_BYTES or usage.free < usage.total * FREE_MIN_SHARE:
        return [
            area.warning(
                free,
                "at least 1 GiB and 5 %, and several times the job's state",
                f"df -h {directory}; delete what is not needed, or enlarge it",
            )
        ]
    return [area.ok(free)]


def _mount_point(path: Path) -> Path:
    """Return the mount point of the file system of `path`."""
    return next(
        candidate for candidate in (path.resolve(), *path.resolve().parents) if candidate.is_mount()
    )


def _nearest(path: Path) -> Path:
    """Return `path` if it exists, or its nearest existing parent."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


SLOW_CREATE_S = 0.5
"""The creation time above which a warning is shown. Each decision is one creation and two queries,
so checkpoints wait for a slow store."""

_RIVALS = 8
"""The number of concurrent writers that try to create one object. Only one may succeed."""
_LARGE_BYTES = 16 * 1024 * 1024


def check_bucket(url: str) -> Sequence[Finding]:
    """Create, write in parts, list, read and delete objects below `url`. Leave none behind."""
    area = Area("storage")
    try:
        files = (HdfsStorage(url) if is_hdfs(url) else ObjectStorage(url)).files()
    except ConfigError as error:
        return [area.problem(str(error), "a bucket that can be reached", "see docs/checkpoints.md")]
    scratch = f".onceflow-doctor-{uuid.uuid4().hex}"
    try:
        return _exercise_bucket(area, files, scratch)
    except StorageError as error:
        reason, remedy = str(error), "check that the store answers, and check the credentials"
        if isinstance(error, filesystem.StorageRefused):
            reason, _, remedy = reason.rpartition("; ")
        needed = "a bucket in which objects can be created if absent, written, listed and deleted"
        return [area.problem(reason, needed, remedy)]
    finally:
        # Delete by name, so that other objects below the prefix are not touched.
        for name in ("record", "state", "rivals"):
            files.delete_quietly(f"{scratch}/{name}")
        with suppress(StorageError):
            files.delete_directory_if_empty(scratch)


def _exercise_bucket(
    area: Area, files: filesystem.CreatesAtomically, scratch: str
) -> list[Finding]:
    began = time.monotonic()
    first = files.create_if_absent(f"{scratch}/record", b"first")
    created_s = time.monotonic() - began
    second = files.create_if_absent(f"{scratch}/record", b"second")
    if not isinstance(first, filesystem.Created) or second != filesystem.AlreadyExists(b"first"):
        return [_not_atomic(area, files)]

    def rival(number: int) -> filesystem.CreateOutcome:
        return files.create_if_absent(f"{scratch}/rivals", b"%d" % number)

    # Create concurrently: some stores check the condition first and write later.
    with ThreadPoolExecutor(_RIVALS) as threads:
        outcomes = list(threads.map(rival, range(_RIVALS)))
    if sum(isinstance(outcome, filesystem.Created) for outcome in outcomes) > 1:
        return [_not_atomic(area, files)]
    began = time.monotonic()
    files.write(f"{scratch}/state", (bytes(1 << 20) for _ in range(_LARGE_BYTES >> 20)))
    rate = _LARGE_BYTES / (time.monotonic() - began) / 1e6
    # A gateway may report success for an incomplete multipart upload.
    if files.size(f"{scratch}/state") != _LARGE_BYTES:
        return [area.problem("an object has another size than was written", "whole objects", "")]
    if set(files.list(scratch)) != {"record", "rivals", "state"}:
        return [area.problem("a listing misses objects", "complete listings", "another store")]
    findings = [
        area.ok(
            f"{files.location('')} creates if absent in {created_s * 1000:.0f} ms, takes"
            f" {rate:.0f} MB/s in parts"
        )
    ]
    if created_s > SLOW_CREATE_S:
        findings.append(
            area.warning(
                f"creating one object takes {created_s * 1000:.0f} ms",
                f"under {SLOW_CREATE_S * 1000:.0f} ms; every checkpoint waits for it",
                "use a bucket in the same region, or a longer checkpoint interval",
            )
        )
    return findings


def _not_atomic(area: Area, files: filesystem.CreatesAtomically) -> Finding:
    return area.problem(
        f"{files.location('')}: an object was created twice under one name",
        "storage where only one process can create an object (If-None-Match), which the"
        " decision log needs",
        "update the store, or use one with conditional writes: Amazon S3, MinIO, R2, Ceph",
    )
