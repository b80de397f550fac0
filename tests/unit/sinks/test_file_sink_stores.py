"""The file sink without a server: objects in memory, and directories behind fsspec."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tests.integration.file_sink_kit import FileJob, rows, seen_ids
from tests.integration.sink_kit import committables

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.fsspec import RemoteDirectory, secrets_of
from onceflow.core.storage.filesystems.local import Advice, LocalFileSystem
from onceflow.sinks import FileSink
from onceflow.sinks.files import list_committed_files

_MEMORY: Any = fsspec.core.url_to_fs("memory://x")[0]
_KIND: Any = _MEMORY.__class__


@pytest.fixture
def job() -> Iterator[FileJob]:
    with FileJob(FileSink(f"memory://{uuid.uuid4().hex}", partition_by=("account",))) as job:
        yield job.check()


def _root(job: FileJob) -> str:
    return "/" + job.sink.url.removeprefix("memory://")


def _objects(job: FileJob, below: str) -> list[str]:
    directory = f"{_root(job)}/_onceflow/{job.sink_id}/{below}"
    return sorted(path.rpartition("/")[2] for path in _MEMORY.find(directory))


def _seen(job: FileJob) -> list[int]:
    return seen_ids(_root(job), _MEMORY)


# -- an object store -------------------------------------------------------------------------------


def test_objects_are_seen_after_their_commit_and_nothing_is_left_behind(job: FileJob) -> None:
    committable = job.prepare(1, range(9))
    assert _seen(job) == []
    committer = job.committer()
    assert committer.commit(committable) == Committed()
    assert _seen(job) == list(range(9))
    assert _objects(job, "open") == []
    assert _objects(job, "staged") == []
    assert committer.commit(committable) == AlreadyCommitted()
    assert _seen(job) == list(range(9))


def test_aborted_objects_are_gone_and_were_never_seen(job: FileJob) -> None:
    committable = job.prepare(1, range(9))
    committer = job.committer()
    assert committer.abort(committable) == Aborted()
    assert _objects(job, "open") == []
    assert committables(committer.in_doubt()) == []
    assert isinstance(committer.commit(committable), Lost)
    assert _seen(job) == []


def test_staged_object_that_vanished_is_lost_and_nothing_of_the_transaction_is_seen(
    job: FileJob,
) -> None:
    committable = job.prepare(1, range(9))
    _MEMORY.rm_file(f"{_root(job)}/_onceflow/job.files/open/{_objects(job, 'open')[1]}")
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, Lost)
    assert "of 3 rows is gone" in outcome.reason
    assert _seen(job) == []


def _begin(fs: Any, source: str, target: str) -> None:
    fs.pipe_file(target, b"beg")


def test_copy_that_is_still_under_way_is_not_called_committed(
    job: FileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Azure does: the call returns, and the object grows."""
    committable = job.prepare(1, range(9))
    committer = job.committer()
    with monkeypatch.context() as patch:
        patch.setattr(_KIND, "cp_file", _begin)
        outcome = committer.commit(committable)
    assert isinstance(outcome, Unknown)
    assert "is not complete: 3 of" in outcome.reason
    assert committables(committer.in_doubt()) == ["job.files/1/1/0/0"]
    assert list_committed_files(job.sink.url, job.sink_id).paths() == []
    assert committer.commit(committable) == Committed()
    assert _seen(job) == list(range(9))


def test_failure_between_two_copies_is_unknown_and_then_finished(
    job: FileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    committable = job.prepare(1, range(9))
    committer = job.committer()
    copy = _KIND.cp_file
    taken: list[str] = []

    def second_fails(fs: Any, source: str, target: str) -> None:
        taken.append(target)
        if len(taken) == 2:
            raise ConnectionError("connection reset, password is hunter2")
        copy(fs, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(_KIND, "cp_file", second_fails)
        assert isinstance(committer.commit(committable), Unknown)
    # What is seen in part can only be finished.
    assert committer.abort(committable) == AlreadyCommitted()
    assert _seen(job) == list(range(9))


def test_committed_objects_whose_cleaning_failed_are_not_in_doubt_and_cleaned_by_pruning(
    job: FileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    committable = job.prepare(1, range(9))
    committer = job.committer()

    def refuse(fs: Any, path: str) -> None:
        raise ConnectionError("reset")

    with monkeypatch.context() as patch:
        patch.setattr(_KIND, "rm_file", refuse)
        assert committer.commit(committable) == Committed()
        committer.prune(CheckpointId(2))
    assert len(_objects(job, "open")) == 3
    assert _objects(job, "committed") == ["1-1-0-0"], "the proof stays while something is staged"
    assert committables(committer.in_doubt()) == []
    committer.prune(CheckpointId(2))
    assert _objects(job, "open") == []
    assert _objects(job, "staged") == []
    assert _objects(job, "committed") == []
    assert _seen(job) == list(range(9))


def test_store_that_cannot_be_reached_is_asked_again(
    job: FileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    committable = job.prepare(1, range(9))
    committer = job.committer()

    def refuse(fs: Any, path: str, **options: Any) -> None:
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(_KIND, "cat_file", refuse)
        assert isinstance(committer.commit(committable), RetryLater)
        assert isinstance(committer.abort(committable), RetryLater)
    assert committer.commit(committable) == Committed()


# -- a file system with rename, behind fsspec ------------------------------------------------------


@pytest.fixture
def directory_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileJob]:
    """The sink as on HDFS or SFTP, whose part fsspec's local directories play."""

    def open_files(location: FileLocation, advice: Advice) -> RemoteDirectory:
        return RemoteDirectory(f"file://{tmp_path}/out", str(tmp_path), {})

    monkeypatch.setattr(FileLocation, "open", open_files)
    with FileJob(FileSink("hdfs://name/out", partition_by=("account",))) as job:
        yield job.check()


def test_directories_behind_fsspec_publish_by_rename(
    directory_job: FileJob, tmp_path: Path
) -> None:
    job, out = directory_job, tmp_path / "out"
    first, second = job.prepare(1, range(9)), job.prepare(2, range(9, 18))
    assert seen_ids(out) == []
    committer = job.committer()
    assert committables(committer.in_doubt()) == ["job.files/1/1/0/0", "job.files/1/2/0/0"]
    assert committer.commit(first) == Committed()
    assert committer.commit(first) == AlreadyCommitted()
    assert committer.abort(second) == Aborted()
    assert seen_ids(out) == list(range(9))
    with pytest.raises(Exception, match="attempt 1 of the same job"):
        job.check(1)
    (out / "_onceflow/job.files/staged/x.deadbeef.unfinished").touch()
    job.check(2)
    assert not list(out.rglob("*.unfinished"))
    committer.prune(CheckpointId(2))
    assert list_committed_files("hdfs://name/out", "job.files").whole_before == 2


# -- targets and secrets ---------------------------------------------------------------------------


def test_files_that_another_committer_publishes_meanwhile_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileJob(FileSink(str(tmp_path))) as job:
        committable = job.check().prepare(1, range(9))
        other, size = job.committer(), LocalFileSystem.size

        def publish_first(self: LocalFileSystem, path: str) -> int | None:
            monkeypatch.setattr(LocalFileSystem, "size", size)
            assert other.commit(committable) == Committed()
            return size(self, path)

        # The first size that is asked for is that of a staged file.
        monkeypatch.setattr(LocalFileSystem, "size", publish_first)
        assert job.committer().commit(committable) == AlreadyCommitted()
        assert seen_ids(str(tmp_path)) == list(range(9))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "names no directory"),
        ("s3://", "names no bucket"),
        ("ftp://host/x", r"does not know how ftp:// makes a file visible.*publish='rename'"),
        ("http://host/x", "does not know how"),
        ("s3:/bucket/x", "a url has two slashes, as in s3://"),
        ("file://data/out", "names the host 'data': write file:///data/out"),
    ],
)
def test_url_that_cannot_work_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FileSink(url)


@pytest.mark.parametrize("url", ["/data/out", "file:///data/out", "file:/data/out"])
def test_a_local_directory_may_be_written_as_spark_writes_it(url: str) -> None:
    assert FileSink(url).url == "/data/out"


def test_unknown_protocol_works_when_the_user_says_how_it_publishes() -> None:
    assert FileSink("ftp://host/x", publish="rename").settings.location.publish == "rename"


@pytest.mark.skipif(find_spec("paramiko") is not None, reason="its package is installed")
def test_protocol_without_its_package_says_so() -> None:
    with (
        FileJob(FileSink("sftp://host/x")) as job,
        pytest.raises(ConfigError, match=r"sftp://host/x needs a package that is not installed"),
    ):
        job.check()


def test_no_secret_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKE_SECRET", "from-the-environment")
    options = {
        "key": "the-key-id",
        "client_kwargs": {"aws_secret_access_key": "nested-secret"},
        "secret": "${env:LAKE_SECRET}",
        "endpoint_url": "http://127.0.0.1:1",
    }
    sink = FileSink("sftp://user:p4ssw0rd@host/data", storage_options=options)
    again: FileSink = pickle.loads(pickle.dumps(sink))
    assert again == sink
    shown = f"{sink!r} {sink.settings!r} {sink.settings.location}"
    for secret in ("p4ssw0rd", "nested-secret", "the-key-id", "LAKE_SECRET"):
        assert secret not in shown
    assert b"from-the-environment" not in pickle.dumps(sink)
    assert secrets_of(options) == ["${env:LAKE_SECRET}", "nested-secret", "the-key-id"]


def test_secret_in_a_clients_error_is_blotted_out(
    job: FileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onceflow.core.storage.filesystems.fsspec import ObjectStore

    store = ObjectStore("memory://x", "memory://x", {"password": "hunter2"})

    def fail(fs: Any, path: str, **options: Any) -> bytes:
        raise ConnectionError("refused for hunter2")

    monkeypatch.setattr(_KIND, "cat_file", fail)
    with pytest.raises(Exception, match=r"refused for \*\*\*") as failure:
        store.read("a")
    assert failure.value.__cause__ is None


def test_rows_are_kept_until_the_writer_is_told(job: FileJob) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    writer.close()
    assert _objects(job, "open") == []
