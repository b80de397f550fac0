"""The file sink on an S3 server: large objects, conditional creation, and a server that is away."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.integration import file_sink_kit
from tests.integration.sink_kit import SCHEMA, committables, eventually

from onceflow.core.errors import ConfigError, Fenced, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import FileSink
from onceflow.sinks.files import list_committed_files
from onceflow.sinks.files import writer as writer_module


@pytest.fixture(scope="module")
def server() -> Iterator[file_sink_kit.S3Server]:
    server = file_sink_kit.S3Server()
    yield server
    server.close()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return where this try of the test writes; a second try finds nothing of the first."""
    return f"{request.node.name}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def job(server: file_sink_kit.S3Server, name: str) -> Iterator[file_sink_kit.FileJob]:
    sink = FileSink(server.url(name), partition_by=("account",), storage_options=server.options)
    with file_sink_kit.FileJob(sink) as job:
        yield job.check()


def _seen(server: file_sink_kit.S3Server, name: str) -> list[int]:
    return file_sink_kit.seen_ids(f"{server.BUCKET}/{name}", server.file_system())


def test_objects_are_seen_after_their_commit_and_nothing_is_left_behind(
    server: file_sink_kit.S3Server, name: str, job: file_sink_kit.FileJob
) -> None:
    first, second = job.prepare(1, range(9)), job.prepare(2, range(9, 18))
    assert _seen(server, name) == []
    committer = job.committer()
    assert committables(committer.in_doubt()) == ["job.files/1/1/0/0", "job.files/1/2/0/0"]
    assert committer.commit(first) == Committed()
    assert committer.commit(first) == AlreadyCommitted()
    assert committer.abort(second) == Aborted()
    assert isinstance(committer.commit(second), Lost)
    assert committables(committer.in_doubt()) == []
    assert _seen(server, name) == list(range(9))
    listed = list_committed_files(job.sink.url, job.sink_id, storage_options=server.options)
    assert len(listed.paths()) == 3
    left = server.file_system().find(f"{server.BUCKET}/{name}/_onceflow/job.files/open")
    assert left == []


def test_objects_that_a_reader_deleted_stay_away(
    server: file_sink_kit.S3Server, name: str, job: file_sink_kit.FileJob
) -> None:
    committable = job.prepare(1, range(9))
    committer = job.committer()
    committer.commit(committable)
    fs = server.file_system()
    for path in fs.glob(f"{server.BUCKET}/{name}/account=*/*"):
        fs.rm_file(path)
    assert committer.commit(committable) == AlreadyCommitted()
    assert _seen(server, name) == []


def _uploads(server: file_sink_kit.S3Server) -> list[Any]:
    found: Any = server.file_system().call_s3("list_multipart_uploads", Bucket=server.BUCKET)
    return list(found.get("Uploads", []))


def _uploaded_parts(server: file_sink_kit.S3Server) -> int:
    """Return how many parts of uploads that are under way have arrived."""
    fs = server.file_system()
    parts = 0
    for upload in _uploads(server):
        found: Any = fs.call_s3(
            "list_parts", Bucket=server.BUCKET, Key=upload["Key"], UploadId=upload["UploadId"]
        )
        parts += len(found.get("Parts", []))
    return parts


def test_large_object_is_uploaded_in_parts_and_given_up_without_a_trace(
    server: file_sink_kit.S3Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "ROW_GROUP_BYTES", 2**20)
    noise = np.random.default_rng(1)
    count = 60_000
    big = pa.record_batch(
        [
            pa.array(range(count), pa.int64()),
            pa.array([noise.bytes(100).hex() for _ in range(count)]),
            pa.array(noise.integers(0, 2**62, count)),
        ],
        schema=SCHEMA,
    )
    options = {**server.options, "default_block_size": 5 * 2**20}
    sink = FileSink(server.url(name), compression="none", storage_options=options)
    with file_sink_kit.FileJob(sink) as job:
        writer = job.check().writer()
        for first in range(0, count, 10_000):
            writer.write(big.slice(first, 10_000))
        (committable,) = writer.pre_commit(CheckpointId(1))
        for first in range(0, count, 10_000):
            writer.write(big.slice(first, 10_000))
        # A part that is on its way when its upload is given up may stay at the server. The client
        # sends the first at once, and keeps the last until more comes, or the end.
        eventually(lambda: _uploaded_parts(server) == 1)
        assert len(_uploads(server)) == 1, "the second checkpoint's, under way"
        writer.close()
        assert _uploads(server) == []
        assert job.committer().commit(committable) == Committed()
    assert _seen(server, name) == list(range(count))


def test_of_many_who_claim_one_attempt_on_s3_one_wins(job: file_sink_kit.FileJob) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def claim() -> None:
        barrier.wait()
        try:
            job.check(attempt=2)
        except Fenced:
            outcomes.append("fenced")
        else:
            outcomes.append("claimed")

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["claimed", "fenced", "fenced", "fenced"]


def test_second_job_under_one_sink_id_is_refused_on_s3(job: file_sink_kit.FileJob) -> None:
    with (
        file_sink_kit.FileJob(job.sink, log_id="log-2") as other,
        pytest.raises(ConfigError, match="in another checkpoint storage"),
    ):
        other.check(attempt=9)


def test_missing_bucket_is_refused_at_start(server: file_sink_kit.S3Server) -> None:
    sink = FileSink("s3://no-such-bucket/x", storage_options=server.options)
    with file_sink_kit.FileJob(sink) as job, pytest.raises(ConfigError, match="create the bucket"):
        job.check()


def test_server_that_is_away_is_asked_again_and_no_secret_is_told() -> None:
    server = file_sink_kit.S3Server()
    options = {**server.options, "retry_timeout_s": 1}
    with file_sink_kit.FileJob(FileSink(server.url("x"), storage_options=options)) as job:
        writer = job.check().writer()
        committable = job.prepare(1, range(3))
        server.close()
        outcome = job.committer().commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "Connection refused" in outcome.reason
        writer.write(file_sink_kit.rows([1]))
        with pytest.raises(SinkError, match="Connection refused") as failure:
            writer.pre_commit(CheckpointId(2))
        with pytest.raises(SinkError, match="Connection refused") as second:
            job.check(attempt=2)
        for text in (outcome.reason, str(failure.value), str(second.value), repr(job.sink)):
            assert str(options["secret"]) not in text
