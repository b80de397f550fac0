"""The check of a bucket or an HDFS against the requirements of checkpoint storage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from onceflow.core.errors import ConfigError, StorageError
from onceflow.core.spi.connector import Area, Finding
from onceflow.core.storage import HdfsStorage, ObjectStorage
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.filesystems.webhdfs import is_hdfs

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
        return _exercise(area, files, scratch)
    except StorageError as error:
        reason, _, remedy = str(error).rpartition("; ")
        return [
            area.problem(
                reason or str(error),
                "a bucket in which objects can be created if absent, written, listed and deleted",
                remedy if reason else "check that the store answers, and check the credentials",
            )
        ]
    finally:
        # Delete by name, so that other objects below the prefix are not touched.
        for name in ("record", "state", "rivals"):
            files.delete_quietly(f"{scratch}/{name}")
        with suppress(StorageError):
            files.delete_directory_if_empty(scratch)


def _exercise(area: Area, files: filesystem.CreatesAtomically, scratch: str) -> list[Finding]:
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
