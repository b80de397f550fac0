"""The HTTP sink of the examples against a real server that loses replies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from examples.http_sink import HttpSink
from tests.support.document_service import DocumentService

from onceflow.core.errors import ConfigError, Fenced, SinkError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, WriterContext
from onceflow.core.storage.staging.staged_rows import FileStagingArea

_SCHEMA = pa.schema([pa.field("id", pa.int64())])


@pytest.fixture
def service() -> Iterator[DocumentService]:
    with DocumentService.running() as service:
        yield service


class _Job:
    def __init__(self, sink: HttpSink, directory: Path) -> None:
        self.sink = sink
        self.staging = FileStagingArea.in_directory(str(directory), "job.http")

    def check(self, log_id: str = "log-1", attempt: int = 1) -> None:
        self.sink.open(
            CommitterContext("job", "http", "job.http", AttemptId(attempt), log_id, self.staging),
            _SCHEMA,
        )

    def committer(self) -> Committer:
        return self.sink.committer(
            CommitterContext("job", "http", "job.http", AttemptId(1), "log-1", self.staging)
        )

    def prepare(self, checkpoint: int, *ids: int) -> committables.Committable:
        context = WriterContext(
            "job", "http", "job.http", 0, 1, AttemptId(1), CheckpointId(1), _SCHEMA, self.staging
        )
        writer = self.sink.writer(context)
        writer.write(pa.RecordBatch.from_pylist([{"id": one} for one in ids], _SCHEMA))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        return committable


@pytest.fixture
def job(service: DocumentService, tmp_path: Path) -> _Job:
    job = _Job(HttpSink(service.url), tmp_path)
    job.check()
    return job


def test_rows_arrive_at_their_commit_and_once(service: DocumentService, job: _Job) -> None:
    first, second = job.prepare(1, 1, 2), job.prepare(2, 3)
    assert service.ids() == []
    committer = job.committer()
    assert len(committer.in_doubt()) == 2
    assert committer.commit(first) == committables.Committed()
    assert committer.commit(first) == committables.AlreadyCommitted()
    assert committer.abort(first) == committables.AlreadyCommitted()
    assert committer.abort(second) == committables.Aborted()
    assert isinstance(committer.commit(second), committables.Lost)
    assert service.ids() == [1, 2]


def test_request_whose_reply_was_lost_is_repeated_and_carried_out_once(
    service: DocumentService, job: _Job
) -> None:
    committable = job.prepare(1, 1, 2)
    service.lose_replies = 2
    committer = job.committer()
    assert isinstance(committer.commit(committable), committables.RetryLater)
    assert service.ids() == [1, 2]
    # It is applied, whatever this process heard.
    assert list(committer.in_doubt()) == []
    assert isinstance(committer.commit(committable), committables.RetryLater)
    assert committer.commit(committable) == committables.AlreadyCommitted()
    assert service.ids() == [1, 2]
    assert job.staging.transactions() == []


def test_service_that_fails_or_is_away_is_asked_again(service: DocumentService, job: _Job) -> None:
    committable = job.prepare(1, 1)
    service.refuse_with = 503
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, committables.RetryLater)
    assert "503" in outcome.reason
    service.refuse_with = 0
    away = _Job(HttpSink("http://127.0.0.1:9/rows"), Path(job.staging.fs.location("")))
    assert isinstance(away.committer().commit(committable), committables.RetryLater)
    with pytest.raises(SinkError):
        away.committer().in_doubt()
    assert job.committer().commit(committable) == committables.Committed()


def test_other_job_is_refused_and_the_token_never_printed(
    service: DocumentService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS_TOKEN", "hunter2")
    sink = HttpSink(service.url, token="${env:ROWS_TOKEN}")
    job = _Job(sink, tmp_path)
    job.check()
    assert service.tokens == {"Bearer hunter2"}
    assert "TOKEN" not in repr(sink)
    with pytest.raises(ConfigError, match="another job"):
        job.check("log-2", attempt=9)


def test_attempt_that_is_not_newer_is_refused_however_many_there_were(job: _Job) -> None:
    for attempt in (2, 3, 5, 6, 7, 11):
        job.check(attempt=attempt)
        for older in (attempt, attempt - 1, 1):
            with pytest.raises(Fenced, match="not newer"):
                job.check(attempt=older)
