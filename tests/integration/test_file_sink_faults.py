"""The file sink on disks that are full or read-only: real ones, no fakes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.integration import file_sink_kit
from tests.integration.sink_kit import SCHEMA, committables

from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import AlreadyCommitted, Committed, RetryLater, Unknown
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import FileSink


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=100", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _many(first: int, count: int, text_bytes: int = 12) -> pa.RecordBatch:
    """Rows that do not compress: about 30 bytes each, or more with longer texts."""
    noise = np.random.default_rng(first)
    return pa.record_batch(
        [
            pa.array(range(first, first + count), pa.int64()),
            pa.array([noise.bytes(text_bytes).hex() for _ in range(count)]),
            pa.array(noise.integers(0, 2**62, count)),
        ],
        schema=SCHEMA,
    )


def test_full_disk_fails_the_checkpoint_and_what_was_staged_before_is_committed(
    small_disk: Path,
) -> None:
    with file_sink_kit.FileJob(FileSink(str(small_disk / "out"))) as job:
        first = job.check().prepare(1, range(10))
        writer = job.writer()
        writer.write(_many(1000, 60_000))
        with pytest.raises(
            PreCommitFailed, match=r"No space left on device.*free space"
        ) as failure:
            writer.pre_commit(CheckpointId(2))
        assert not isinstance(failure.value, BadRow)
        assert file_sink_kit.hidden_files(small_disk / "out", "open") != [], "the first one's"
        committer = job.committer()
        assert committables(committer.in_doubt()) == ["job.files/1/1/0/0"]
        assert committer.commit(first) == Committed()
        # The disk has room again, for what was written of the second is gone.
        job.check(attempt=2)
        again = job.prepare(2, range(1000, 1010), attempt=2)
        assert job.committer().commit(again) == Committed()
    assert file_sink_kit.seen_ids(small_disk / "out") == [*range(10), *range(1000, 1010)]


def test_disk_that_fills_up_while_rows_are_written_is_named(small_disk: Path) -> None:
    with file_sink_kit.FileJob(FileSink(str(small_disk / "out"))) as job:
        writer = job.check().writer()
        with pytest.raises(SinkError, match="No space left on device"):
            for first in range(0, 40_000, 10_000):
                writer.write(_many(first, 10_000, text_bytes=2_000))
        assert file_sink_kit.hidden_files(small_disk / "out", "open") == []


def test_commit_waits_for_a_full_disk_and_is_whole_afterwards(small_disk: Path) -> None:
    """Without room for a single directory entry more; the rows themselves are there already."""
    out = small_disk / "out"
    with file_sink_kit.FileJob(FileSink(str(out), partition_by=("account",))) as job:
        committable = job.check().prepare(1, range(9))
        ballast = [small_disk / f"ballast-{number}" for number in range(100)]
        taken = 0
        try:
            for path in ballast:
                path.touch()
                taken += 1
        except OSError:
            pass
        committer = job.committer()
        outcome = committer.commit(committable)
        assert isinstance(outcome, (RetryLater, Unknown)), outcome
        assert "No space left on device" in outcome.reason
        assert committables(committer.in_doubt()) == ["job.files/1/1/0/0"]
        for path in ballast[:taken]:
            path.unlink()
        assert committer.commit(committable) == Committed()
        assert committer.commit(committable) == AlreadyCommitted()
    assert file_sink_kit.seen_ids(out) == list(range(9))


_CHILD = """
import resource, signal, sys
from tests.integration.file_sink_kit import FileJob
from tests.integration.test_file_sink_faults import _many
from onceflow.core.errors import PreCommitFailed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import FileSink

rows = _many(0, 30_000)
# From here on: and nothing else may be written meanwhile, such as compiled modules.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with FileJob(FileSink(sys.argv[1])) as job:
    writer = job.check().writer()
    writer.write(rows)
    try:
        writer.pre_commit(CheckpointId(1))
    except PreCommitFailed as error:
        print(error)
"""


def test_file_that_may_not_grow_fails_the_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert "File too large" in done.stdout
    assert "ulimit -f" in done.stdout
    assert file_sink_kit.hidden_files(tmp_path / "out", "open") == []
    assert file_sink_kit.hidden_files(tmp_path / "out", "staged") == []


def test_read_only_disk_is_refused_at_start(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with (
        file_sink_kit.FileJob(FileSink(str(small_disk / "out"))) as job,
        pytest.raises(ConfigError, match=r"Read-only file system; mount it writable"),
    ):
        job.check()


def test_file_in_the_place_of_the_directory_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with (
        file_sink_kit.FileJob(FileSink(str(tmp_path / "out"))) as job,
        pytest.raises(ConfigError, match="a file is at the path of a directory"),
    ):
        job.check()


def test_disk_that_turns_read_only_keeps_commits_waiting(small_disk: Path) -> None:
    out = small_disk / "out"
    with file_sink_kit.FileJob(FileSink(str(out))) as job:
        committable = job.check().prepare(1, range(5))
        committer = job.committer()
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        try:
            outcome = committer.commit(committable)
            assert isinstance(outcome, RetryLater)
            assert "Read-only file system" in outcome.reason
            assert isinstance(committer.abort(committable), RetryLater)
            committer.prune(CheckpointId(9))
            assert file_sink_kit.public_files(out) == []
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        assert committer.commit(committable) == Committed()
    assert file_sink_kit.seen_ids(out) == list(range(5))


def test_directory_that_vanished_is_lost_and_never_called_committed(tmp_path: Path) -> None:
    with file_sink_kit.FileJob(FileSink(str(tmp_path / "out"))) as job:
        committable = job.check().prepare(1, range(5))
        shutil.rmtree(tmp_path / "out")
        outcome = job.committer().commit(committable)
        assert type(outcome).__name__ == "Lost"
        assert committables(job.committer().in_doubt()) == []


def test_damaged_manifest_is_named_and_neither_committed_nor_called_lost(tmp_path: Path) -> None:
    with file_sink_kit.FileJob(FileSink(str(tmp_path / "out"))) as job:
        committable = job.check().prepare(1, range(5))
        (manifest,) = (tmp_path / "out/_onceflow/job.files/staged").iterdir()
        whole = manifest.read_bytes()
        manifest.write_bytes(whole[:-20])
        committer = job.committer()
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "is damaged" in outcome.reason
        manifest.write_bytes(whole)
        assert committer.commit(committable) == Committed()
    assert file_sink_kit.seen_ids(tmp_path / "out") == list(range(5))


def test_empty_partition_directory_that_a_reader_removes_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with file_sink_kit.FileJob(FileSink(str(out), partition_by=("account",))) as job:
        committer = job.check().committer()
        for checkpoint in (1, 2):
            committable = job.prepare(checkpoint, range(checkpoint * 9, checkpoint * 9 + 9))
            assert committer.commit(committable) == Committed()
            if checkpoint == 1:
                for path in out.glob("account=*"):
                    shutil.rmtree(path)
    assert file_sink_kit.seen_ids(out) == list(range(18, 27))


def test_rows_after_a_failed_write_are_refused(tmp_path: Path) -> None:
    with file_sink_kit.FileJob(FileSink(str(tmp_path / "out"), partition_by=("account",))) as job:
        writer = job.check().writer()
        bad = pa.record_batch([pa.array([1]), pa.array([""]), pa.array([1])], schema=SCHEMA)
        with pytest.raises(BadRow):
            writer.write(bad)
        with pytest.raises(SinkError, match="has failed before"):
            writer.write(file_sink_kit.rows([2]))
