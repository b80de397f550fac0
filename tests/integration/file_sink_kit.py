"""A file sink's writers and committers without a runtime, and an S3 server as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from typing_extensions import Self

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, OnBadRow, SinkWriter, WriterContext
from onceflow.sinks import FileSink

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string()),
        pa.field("amount", pa.int64()),
    ]
)


def rows(ids: Iterable[int]) -> pa.RecordBatch:
    """Return one row for each id."""
    numbers = list(ids)
    return pa.record_batch(
        [
            pa.array(numbers, pa.int64()),
            pa.array([f"acct-{number % 3}" for number in numbers]),
            pa.array([number * 10 for number in numbers], pa.int64()),
        ],
        schema=SCHEMA,
    )


@dataclass
class FileJob:
    """A sink under one sink id; closes every writer and committer that it made."""

    sink: FileSink
    sink_id: str = "job.files"
    log_id: str = "log-1"
    schema: pa.Schema = field(default_factory=lambda: SCHEMA)
    on_bad_row: OnBadRow = OnBadRow.FAIL
    _open: ExitStack = field(default_factory=ExitStack)

    def check(self, attempt: int = 1) -> Self:
        self.sink.check(self.committer_context(attempt), self.schema)
        return self

    def committer_context(self, attempt: int = 1) -> CommitterContext:
        return CommitterContext("job", "files", self.sink_id, AttemptId(attempt), self.log_id)

    def writer(self, attempt: int = 1, subtask: int = 0) -> SinkWriter:
        writer = self.sink.writer(
            WriterContext(
                job="job",
                uid="files",
                sink_id=self.sink_id,
                subtask=subtask,
                parallelism=2,
                attempt=AttemptId(attempt),
                first_checkpoint=CheckpointId(1),
                schema=self.schema,
                on_bad_row=self.on_bad_row,
            )
        )
        self._open.callback(writer.close)
        return writer

    def committer(self, attempt: int = 1) -> Committer:
        committer = self.sink.committer(self.committer_context(attempt))
        self._open.callback(committer.close)
        return committer

    def prepare(
        self, checkpoint: int, ids: Iterable[int], attempt: int = 1, subtask: int = 0
    ) -> Committable:
        """Return what a writer of its own pre-committed; the writer is closed."""
        writer = self.writer(attempt, subtask)
        writer.write(rows(ids))
        committable = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        assert committable is not None
        return committable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()


def in_doubt(committer: Committer) -> list[str]:
    """Return the names of what is in doubt, sorted."""
    return sorted(str(committable.transaction) for committable in committer.in_doubt())


def seen_rows(directory: str | Path, file_system: Any = None) -> list[dict[str, Any]]:
    """Return every row that a reader of the directory as a table sees."""
    there = file_system.exists if file_system is not None else os.path.exists
    if not there(str(directory)):
        return []
    found = ds.dataset(
        str(directory), format="parquet", partitioning="hive", filesystem=file_system
    )
    return found.to_table().to_pylist() if found.files else []


def seen_ids(directory: str | Path, file_system: Any = None) -> list[int]:
    """Return all ids that a reader of the directory sees, sorted, doubles kept."""
    return sorted(row["id"] for row in seen_rows(directory, file_system))


def public_files(directory: Path) -> list[str]:
    """Return the files that a reader of the directory sees, relative to it, sorted."""
    return sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and "_onceflow" not in path.parts
    )


def hidden_files(directory: Path, below: str) -> Sequence[str]:
    """Return the names in one of the sink's own directories, whatever the sink id, sorted."""
    return sorted(
        path.name
        for path in directory.glob(f"_onceflow/*/{below}/*")
        if not path.name.startswith(".")
    )


class S3Server:
    """moto's S3 as a process of its own: keeps objects in memory, answers on the loopback."""

    BUCKET = "lake"

    def __init__(self) -> None:
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.endpoint = self._wait_for_endpoint()
        try:
            self.file_system().mkdir(self.BUCKET)
        except BaseException:
            self.close()
            raise

    @property
    def options(self) -> dict[str, Any]:
        """What a sink needs to reach it."""
        return {
            "key": "some-key",
            "secret": "open-sesame-of-the-lake",
            "endpoint_url": self.endpoint,
        }

    def file_system(self) -> Any:
        """Return fsspec's file system of it, which remembers no listing."""
        import s3fs

        return s3fs.S3FileSystem(**self.options, use_listings_cache=False)

    def url(self, name: str) -> str:
        """Return the url of a directory called `name`."""
        return f"s3://{self.BUCKET}/{name}"

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def _wait_for_endpoint(self) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            text = Path(self._log.name).read_text(encoding="utf-8")
            found = re.search(r"http://127\.0\.0\.1:\d+", text)
            if found:
                return found[0]
            assert self._process.poll() is None, text
            time.sleep(0.05)
        raise AssertionError("moto did not say where it listens within 60 s")
