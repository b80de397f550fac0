"""The file sink keeps every clause: in a directory, with many files a transaction, and on S3."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.file_sink_kit import S3Server, seen_rows

from onceflow.core.protocol.committables import Committable
from onceflow.core.spi import Sink
from onceflow.integration.conformance import SinkConformance, SinkTarget
from onceflow.sinks import FileSink
from onceflow.sinks.files.layout import SinkPaths, name_of


class DirectoryTarget(SinkTarget):
    """A local directory."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._directory = directory
        self._settings = settings

    def sink(self) -> Sink:
        return FileSink(str(self._directory), **self._settings)

    def rows(self) -> list[dict[str, Any]]:
        return seen_rows(self._directory)

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        good = self.batch(ids)
        keys = pa.array([None, *ids[1:]], pa.int64())
        return pa.RecordBatch.from_arrays([keys, *good.columns[1:]], schema=good.schema)

    def lose(self, committable: Committable) -> None:
        paths = SinkPaths(committable.transaction.sink_id)
        (self._directory / paths.staged / name_of(committable.transaction)).unlink()


class S3Target(DirectoryTarget):
    """A prefix of a bucket."""

    def __init__(self, server: S3Server, name: str) -> None:
        self._server = server
        self._name = name

    def sink(self) -> Sink:
        return FileSink(self._server.url(self._name), storage_options=self._server.options)

    def rows(self) -> list[dict[str, Any]]:
        return seen_rows(f"{self._server.BUCKET}/{self._name}", self._server.file_system())

    def lose(self, committable: Committable) -> None:
        paths = SinkPaths(committable.transaction.sink_id)
        path = f"{self._name}/{paths.staged}/{name_of(committable.transaction)}"
        self._server.file_system().rm_file(f"{self._server.BUCKET}/{path}")

    def secrets(self) -> Sequence[str]:
        return [str(self._server.options["secret"])]


class TestFileSink(SinkConformance):
    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> Iterator[SinkTarget]:
        target = DirectoryTarget(tmp_path / "out")
        yield target
        target.close()


@pytest.mark.slow
class TestPartitionedFileSink(SinkConformance):
    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> Iterator[SinkTarget]:
        target = DirectoryTarget(tmp_path / "out", partition_by=("account",), max_rows_per_file=2)
        yield target
        target.close()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.mark.slow
class TestS3FileSink(SinkConformance):
    @pytest.fixture
    def sink_target(self, server: S3Server) -> Iterator[SinkTarget]:
        target = S3Target(server, secrets.token_hex(8))
        yield target
        target.close()
