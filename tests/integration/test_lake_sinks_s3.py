"""The lake sinks on an S3 server: one commit a checkpoint, also where the server is killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import deltalake
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.integration.lake_sink_kit import DeltaJob, IcebergJob, LakeJob, one
from tests.support.lake_faults import CommitFaults, FaultyDeltaTable
from tests.support.servers.s3 import EmbeddedS3, S3Factory
from typing_extensions import override

from onceflow.core.errors import PreCommitFailed, SinkError
from onceflow.core.protocol import committables
from onceflow.sinks import DeltaSink, IcebergSink
from onceflow.sinks.lake.data_files import remove_orphans

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

R = TypeVar("R")

_BUCKET = "lake"


class S3IcebergJob(IcebergJob):
    """Writes into a bucket; the SQLite catalog is a file still."""

    server: ClassVar[EmbeddedS3]

    @override
    def make_sink(self, settings: dict[str, Any]) -> IcebergSink:
        sink = super().make_sink(settings)
        environment = self.server.environment
        self.properties |= {
            "warehouse": f"s3://{_BUCKET}/warehouse",
            "s3.endpoint": environment["AWS_ENDPOINT_URL"],
            "s3.access-key-id": environment["AWS_ACCESS_KEY_ID"],
            "s3.secret-access-key": environment["AWS_SECRET_ACCESS_KEY"],
            "s3.region": environment["AWS_REGION"],
        }
        return replace(sink, catalog=self.properties)

    @override
    def data_files(self) -> list[Path]:
        return list((self.server.objects / _BUCKET / "warehouse").rglob("*.parquet"))


class S3DeltaJob(DeltaJob):
    """Writes into a bucket."""

    server: ClassVar[EmbeddedS3]
    url: ClassVar[str] = f"s3://{_BUCKET}/table"

    @property
    def options(self) -> dict[str, str]:
        impatient = {"max_retries": "2", "retry_timeout": "10s"}
        return {**self.server.environment, "AWS_ALLOW_HTTP": "true", **impatient}

    @override
    def make_sink(self, settings: dict[str, Any]) -> DeltaSink:
        return DeltaSink(self.url, storage_options=self.options, **settings)

    @override
    def rows(self) -> list[dict[str, Any]]:
        table = cast("Any", DeltaTable(self.url, storage_options=self.options))
        rows: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
        return sorted(rows, key=lambda row: row["id"])

    @override
    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        batch = cast("Any", pa.Table.from_batches([self.batch(rows)]))
        write_deltalake(self.url, batch, mode="append", storage_options=self.options)

    @override
    def data_files(self) -> list[Path]:
        return list((self.server.objects / _BUCKET / "table").glob("*.parquet"))


@pytest.fixture(params=[S3IcebergJob, S3DeltaJob], ids=["iceberg", "delta"])
def job(
    request: pytest.FixtureRequest,
    s3_server: S3Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> LakeJob:
    monkeypatch.setattr(deltalake, "DeltaTable", FaultyDeltaTable)
    return _make_job(request.param, s3_server(), tmp_path, monkeypatch).open()


@pytest.fixture(params=[S3IcebergJob, S3DeltaJob], ids=["iceberg", "delta"])
def throttled_job(
    request: pytest.FixtureRequest,
    s3_server: S3Factory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> LakeJob:
    """Have a server that takes one request at a time, and answers others with 503 SlowDown."""
    server = s3_server({"max-requests": "1"})
    return _make_job(request.param, server, tmp_path, monkeypatch)


def _make_job(
    kind: type[LakeJob], server: EmbeddedS3, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> LakeJob:
    server.create_bucket(_BUCKET)
    monkeypatch.setattr(kind, "server", server, raising=False)
    return kind(directory)


def test_two_drivers_and_another_writer_make_one_version_of_a_checkpoint(job: LakeJob) -> None:
    prepared = job.prepare(1, one(1))
    outcomes: list[object] = []

    def come_first() -> None:
        job.append(one(7))
        outcomes.append(job.commit(1, prepared))

    CommitFaults.between.append(come_first)
    outcomes.append(job.commit(1, prepared))
    assert outcomes == [committables.Committed(), committables.AlreadyCommitted()]
    assert job.ids() == [1, 7]


def test_aborted_objects_are_deleted_and_committed_ones_never(job: LakeJob) -> None:
    aborted, committed = job.prepare(1, one(1)), job.prepare(1, one(2), subtask=1)
    assert job.commit(1, committed) == committables.Committed()
    with job.committer() as committer:
        assert committer.abort(aborted) == committables.Aborted()
        assert committer.abort(committed) == committables.AlreadyCommitted()
    assert job.ids() == [2]
    assert len(job.data_files()) == 1


def test_orphan_objects_are_deleted_and_described_and_committed_ones_never(job: LakeJob) -> None:
    if isinstance(job, S3DeltaJob):
        table = DeltaTable(job.url, storage_options=job.options)
        table.alter.set_table_properties(
            {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
        )
    orphan = job.prepare(1, one(1))
    job.staging.discard(orphan.transaction)
    waiting, committed = job.prepare(2, one(2), subtask=1), job.prepare(1, one(3))
    assert job.commit(1, committed) == committables.Committed()
    assert len(job.data_files()) == 3
    time.sleep(1.1)  # objects have the time of their writing in whole seconds
    job.open(attempt=2)
    with job.open_table() as opened:
        assert remove_orphans(opened, job.context(2), age_s=0) == 1
    assert len(job.data_files()) == 2
    assert job.commit(2, waiting, attempt=2) == committables.Committed()
    assert job.ids() == [2, 3]


def test_a_server_that_is_away_before_and_in_a_commit_loses_and_doubles_nothing(
    job: LakeJob,
) -> None:
    server: EmbeddedS3 = cast("Any", job).server
    prepared = job.prepare(1, one(1))
    server.kill()
    outcome = job.commit(1, prepared)
    assert isinstance(outcome, committables.RetryLater), outcome
    server.start()
    CommitFaults.between.append(server.kill)
    outcome = job.commit(1, prepared)
    server.start()
    if isinstance(job, S3DeltaJob):
        assert isinstance(outcome, committables.Unknown), outcome
    outcome = job.commit(1, prepared)
    assert outcome in (committables.Committed(), committables.AlreadyCommitted())
    assert job.ids() == [1]


def test_a_server_that_throttles_writers_and_driver_loses_and_doubles_nothing(
    throttled_job: LakeJob,
) -> None:
    """The test repeats refused writes and commits by hand, as the engine does."""
    job = throttled_job

    def try_again(step: Callable[[], R]) -> R:
        deadline = time.monotonic() + 60
        while True:
            try:
                return step()
            except (SinkError, PreCommitFailed):
                assert time.monotonic() < deadline

    def prepare(number: int) -> committables.Committable:
        return try_again(lambda: job.prepare(1, one(number), subtask=number))

    def commit() -> committables.CommitOutcome:
        outcome = job.commit(1, *prepared)
        if isinstance(outcome, committables.RetryLater | committables.Unknown):
            raise SinkError(outcome.reason)
        return outcome

    try_again(job.open)
    with ThreadPoolExecutor(8) as threads:
        prepared = list(threads.map(prepare, range(24)))
    assert try_again(commit) in (committables.Committed(), committables.AlreadyCommitted())
    assert try_again(job.ids) == list(range(24))
