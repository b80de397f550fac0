"""The HTTP sink of the examples against a real server that loses replies."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import pyarrow as pa
import pytest
from examples.http_sink import HttpSink

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, WriterContext
from onceflow.core.storage.staging import FileStagingArea

_SCHEMA = pa.schema([pa.field("id", pa.int64())])


class _Service(ThreadingHTTPServer):
    """Documents that can be created once, as the example's docstring describes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.documents: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.lose_replies = 0
        self.refuse_with = 0
        self.tokens: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/rows"

    def rows(self) -> list[int]:
        documents = [text for name, text in self.documents.items() if "owner" not in name]
        lines = b"".join(documents).splitlines()
        return sorted(json.loads(line)["id"] for line in lines)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        service = self.service
        service.tokens.add(str(self.headers["Authorization"]))
        if service.refuse_with:
            self._answer(service.refuse_with)
            return
        with service.lock:
            created = service.documents.setdefault(self.name, body) is body
            losing = service.lose_replies > 0
            service.lose_replies -= losing
        if losing:
            self.close_connection = True
            return
        self._answer(201 if created or self.headers["If-None-Match"] != "*" else 412)

    def do_HEAD(self) -> None:
        self._answer(200 if self.name in self.service.documents else 404)

    def do_GET(self) -> None:
        self._answer(200, self.service.documents[self.name])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's
        pass

    @property
    def service(self) -> _Service:
        return cast("_Service", self.server)

    @property
    def name(self) -> str:
        return unquote(self.path.rpartition("/")[2])

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def service() -> Iterator[_Service]:
    with _Service() as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        yield service
        service.shutdown()
        thread.join(30)


class _Job:
    def __init__(self, sink: HttpSink, directory: Path) -> None:
        self.sink = sink
        self.staging = FileStagingArea.in_directory(str(directory), "job.http")

    def check(self, log_id: str = "log-1") -> None:
        self.sink.check(
            CommitterContext("job", "http", "job.http", AttemptId(1), log_id, self.staging),
            _SCHEMA,
        )

    def committer(self) -> Committer:
        return self.sink.committer(
            CommitterContext("job", "http", "job.http", AttemptId(1), "log-1", self.staging)
        )

    def prepare(self, checkpoint: int, *ids: int) -> Committable:
        context = WriterContext(
            "job", "http", "job.http", 0, 1, AttemptId(1), CheckpointId(1), _SCHEMA, self.staging
        )
        writer = self.sink.writer(context)
        writer.write(pa.RecordBatch.from_pylist([{"id": one} for one in ids], _SCHEMA))
        committable = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        assert committable is not None
        return committable


@pytest.fixture
def job(service: _Service, tmp_path: Path) -> _Job:
    job = _Job(HttpSink(service.url), tmp_path)
    job.check()
    return job


def test_rows_arrive_at_their_commit_and_once(service: _Service, job: _Job) -> None:
    first, second = job.prepare(1, 1, 2), job.prepare(2, 3)
    assert service.rows() == []
    committer = job.committer()
    assert len(committer.in_doubt()) == 2
    assert committer.commit(first) == Committed()
    assert committer.commit(first) == AlreadyCommitted()
    assert committer.abort(first) == AlreadyCommitted()
    assert committer.abort(second) == Aborted()
    assert isinstance(committer.commit(second), Lost)
    assert service.rows() == [1, 2]


def test_request_whose_reply_was_lost_is_repeated_and_carried_out_once(
    service: _Service, job: _Job
) -> None:
    committable = job.prepare(1, 1, 2)
    service.lose_replies = 2
    committer = job.committer()
    assert isinstance(committer.commit(committable), RetryLater)
    assert service.rows() == [1, 2]
    # It is applied, whatever this process heard.
    assert list(committer.in_doubt()) == []
    assert isinstance(committer.commit(committable), RetryLater)
    assert committer.commit(committable) == AlreadyCommitted()
    assert service.rows() == [1, 2]
    assert job.staging.transactions() == []


def test_service_that_fails_or_is_away_is_asked_again(service: _Service, job: _Job) -> None:
    committable = job.prepare(1, 1)
    service.refuse_with = 503
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "503" in outcome.reason
    service.refuse_with = 0
    away = _Job(HttpSink("http://127.0.0.1:9/rows"), Path(job.staging.fs.location("")))
    assert isinstance(away.committer().commit(committable), RetryLater)
    with pytest.raises(SinkError):
        away.committer().in_doubt()
    assert job.committer().commit(committable) == Committed()


def test_other_job_is_refused_and_the_token_never_printed(
    service: _Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS_TOKEN", "hunter2")
    sink = HttpSink(service.url, token="${env:ROWS_TOKEN}")
    job = _Job(sink, tmp_path)
    job.check()
    job.check()
    assert service.tokens == {"Bearer hunter2"}
    assert "TOKEN" not in repr(sink)
    with pytest.raises(ConfigError, match="another job"):
        job.check("log-2")
