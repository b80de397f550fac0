"""Tests the permissions of files in checkpoint storage, which do not depend on the umask."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.storage import FileSystemStorage
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.staging.staged_rows import FileStagingArea

ROWS = pa.record_batch({"id": [1, 2, 3]})
NOBODY = 65534


@contextmanager
def umask(mask: int) -> Generator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes_below(root: Path) -> dict[str, set[int]]:
    """The modes of all directories and of all files, the root included."""
    everything = [root, *root.rglob("*")]
    return {
        kind: {stat.S_IMODE(path.stat().st_mode) for path in everything if path.is_dir() == is_dir}
        for kind, is_dir in (("directories", True), ("files", False))
    }


def use(storage: FileSystemStorage, local_file: Path) -> None:
    """Leave one of everything that a job keeps."""
    job = storage.open("ledger")
    job.log.claim("driver")
    job.probe_write(AttemptId(1))
    assert job.log_id
    writer = job.writer(AttemptId(1), CheckpointId(1), "balance", 0)
    writer.write("state", bytes(100_000))
    local_file.write_bytes(b"sst" * 100_000)
    local_file.chmod(0o644)
    writer.write_file("000001.sst", local_file, shared=True)
    rows = job.staging("sink").open()
    rows.write(ROWS)
    rows.seal(TransactionId("sink", AttemptId(1), CheckpointId(1), 0, 0))


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_may_read_checkpoint_storage_whatever_the_umask(
    tmp_path: Path, mask: int
) -> None:
    root = tmp_path / "deep" / "root"
    with umask(mask):
        use(FileSystemStorage(str(root)), tmp_path / "local.sst")
    assert modes_below(tmp_path / "deep") == {"directories": {0o700}, "files": {0o600}}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_group_shares_checkpoint_storage_where_that_is_asked_for(
    tmp_path: Path, mask: int
) -> None:
    root = tmp_path / "root"
    with umask(mask):
        use(
            FileSystemStorage(str(root), file_mode=0o660, directory_mode=0o2770),
            tmp_path / "local.sst",
        )
    assert modes_below(root) == {"directories": {0o2770}, "files": {0o660}}


def test_rows_staged_without_a_job_are_as_private(tmp_path: Path) -> None:
    with umask(0o022):
        rows = FileStagingArea.in_directory(str(tmp_path / "root"), "sink").open()
        rows.write(ROWS)
        rows.seal(TransactionId("sink", AttemptId(1), CheckpointId(1), 0, 0))
    assert modes_below(tmp_path / "root") == {"directories": {0o700}, "files": {0o600}}


def test_files_that_a_sink_makes_for_readers_go_by_the_umask(tmp_path: Path) -> None:
    with umask(0o022):
        LocalFileSystem(str(tmp_path / "product")).write("day/part", [b"rows"])
    assert modes_below(tmp_path / "product") == {"directories": {0o755}, "files": {0o644}}


@pytest.mark.parametrize("mode", [0o400, 0o1000, -1])
def test_modes_that_lock_the_owner_out_are_refused(mode: int) -> None:
    with pytest.raises(ConfigError, match="file_mode"):
        FileSystemStorage("/unused", file_mode=mode)
    with pytest.raises(ConfigError, match="directory_mode"):
        FileSystemStorage("/unused", directory_mode=mode)


def test_a_slot_of_another_user_is_told_which_modes_to_set(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("running as somebody else needs root")
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(path.stat().st_mode | 0o055)
    probe = FileSystemStorage(str(tmp_path / "root")).open("ledger").probe_write(AttemptId(1))
    script = (
        "import os, sys\n"
        f"from onceflow.core.storage import FileSystemStorage\n"
        f"os.setuid({NOBODY})\n"
        f"FileSystemStorage({str(tmp_path / 'root')!r}).open('ledger').probe_read({probe.path!r})\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "SettingsRefused: checkpoint storage: cannot read" in other.stderr
    assert "directory_mode=0o2770, file_mode=0o660" in other.stderr
