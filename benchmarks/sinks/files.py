"""Files beside a plain Parquet writer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from benchmarks.sinks.alone import Clock, Loaded
from benchmarks.sinks.place import Effect, Place, Way
from benchmarks.sinks.rows import SCHEMA, Rows
from benchmarks.stage import BenchmarkError
from onceflow.sinks import FileSink


class FilesPlace(Place):
    """Directories below one."""

    name = "files"
    bare = "Parquet, one file, fsync"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    @override
    def ways(self) -> Mapping[str, Way]:
        return {"Parquet": Way(FileSink)}

    @override
    @contextmanager
    def empty(self) -> Generator[str, None, None]:
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            yield directory

    @override
    def load_bare(self, address: str, rows: Rows) -> Loaded:
        with Clock() as clock, (Path(address) / "bare.parquet").open("wb") as file:
            with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
                writer.write_table(pa.Table.from_batches(rows.batches, SCHEMA))
            file.flush()
            os.fsync(file.fileno())
        return Loaded(rows.count, clock.seconds, clock.cpu_s)

    @override
    def verify(self, address: str, rows: Rows, effect: Effect) -> None:
        paths = sorted(path for path in Path(address).glob("*.parquet"))
        found = pa.concat_tables([pq.read_table(path) for path in paths]).sort_by("id")
        if not found.equals(pa.Table.from_batches(rows.batches, SCHEMA)):
            raise BenchmarkError(f"the files of {len(paths)} transactions have other rows")
