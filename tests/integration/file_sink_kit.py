"""A file sink's writers and committers without a runtime, and an S3 server as a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from tests.integration import sink_kit
from tests.integration.sink_kit import Job
from tests.support.servers.s3 import ACCESS_KEY, SECRET_KEY, start_s3

from onceflow.sinks import FileSink

PARTITIONS = 3
rows = partial(sink_kit.rows, accounts=PARTITIONS)
"""Return one row for each id; by account they go into as many directories."""


@dataclass
class FileJob(Job[FileSink]):
    """A file sink under one sink id; closes every writer and committer that it made."""

    sink_id: str = "job.files"
    accounts: int = PARTITIONS


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
    """A bucket on a real S3 server of its own, and what reads it as the sink's readers do.

    Skips the test where the server cannot be had and need not be: see `start_s3`.
    """

    BUCKET = "lake"

    def __init__(self) -> None:
        self._server = start_s3()
        self._server.create_bucket(self.BUCKET)
        self.endpoint = self._server.endpoint

    @property
    def options(self) -> dict[str, Any]:
        """The sink's storage options, with s3fs's names."""
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.endpoint}

    def file_system(self) -> Any:
        """Return fsspec's file system of it, which remembers no listing."""
        import s3fs

        return s3fs.S3FileSystem(**self.options, use_listings_cache=False)

    def url(self, name: str) -> str:
        """Return the url of a directory called `name`."""
        return f"s3://{self.BUCKET}/{name}"

    def close(self) -> None:
        self._server.stop()
