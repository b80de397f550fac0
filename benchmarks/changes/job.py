"""The driver of one measured job: `python -m benchmarks.changes.job SPEC RESULT`.

The job reads a slot, or copies the table, into a sink that counts rows and drops them. It is
measured from the reader's first poll until the last row has reached the sink. Starting processes is
left out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa

from benchmarks.changes.workload import PUBLICATION
from benchmarks.cpu import tree_cpu_s
from benchmarks.discarding_sink import DiscardingSink
from onceflow import Checkpointing, LocalProcesses, NoRestart, Pipeline
from onceflow.core.spi import EndOfInput, OutputBatch, ReaderContext, Source, SourceReader, Split
from onceflow.sources import PostgresChanges

_TIMEOUT_S = 600.0
_LOOK_S = 0.02
_STATUS_S = 0.5
_NOTED_S = 0.1
"""The least time between two notes of the reader, so that they cost little."""


class ChangesSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the job."""

    url: str
    slot: str
    table: str
    rows: int
    """The number of rows after which the job is stopped."""
    copies: bool
    """True to copy the table, False to read the slot."""
    directory: str


class ChangesResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measured times of one run."""

    seconds: float
    cpu_s: float
    """CPU of driver and slot."""


@dataclass(frozen=True)
class CountedSource(Source):
    """`source`, whose reader writes to `progress` how many rows it has returned, and since when."""

    source: PostgresChanges
    progress: str
    rows: int
    """The number of rows after which the last note is written."""

    @property
    def schema(self) -> pa.Schema:
        return self.source.schema

    @property
    def bounded(self) -> bool:
        return False

    def bind(self, job: str, uid: str) -> CountedSource:
        return CountedSource(self.source.bind(job, uid), self.progress, self.rows)

    def splits(self) -> Sequence[Split]:
        return self.source.splits()

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        return self.source.discover(known)

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        reader = self.source.reader(splits, context)
        return _CountedReader(reader, Path(self.progress), self.rows)


class _CountedReader(SourceReader):
    def __init__(self, reader: SourceReader, progress: Path, rows_last: int) -> None:
        self._reader, self._progress = reader, progress
        self._rows_last = rows_last
        self._began_at: float | None = None
        self._noted_at = 0.0
        self._rows = 0

    def poll(
        self, timeout_s: float
    ) -> pa.RecordBatch | OutputBatch | tuple[OutputBatch, ...] | EndOfInput | None:
        if self._began_at is None:
            self._began_at = time.time()
            self._note()
        batch = self._reader.poll(timeout_s)
        if isinstance(batch, pa.RecordBatch):
            self._rows += batch.num_rows
            if self._rows >= self._rows_last or time.time() > self._noted_at + _NOTED_S:
                self._note()
        return batch

    def _note(self) -> None:
        fresh = self._progress.with_suffix(".new")
        self._noted_at = time.time()
        fresh.write_text(f"{self._began_at} {self._noted_at} {self._rows}")
        fresh.rename(self._progress)

    def snapshot(self) -> Sequence[Split]:
        return self._reader.snapshot()

    def commit(self, splits: Sequence[Split]) -> None:
        self._reader.commit(splits)

    def close(self) -> None:
        self._reader.close()


def main(spec_path: str, result_path: str) -> None:
    """Run the job of the spec until it has its rows, and write the result.

    Raises:
        TimeoutError: The rows did not come in time.
    """
    spec = msgspec.json.decode(Path(spec_path).read_bytes(), type=ChangesSpec)
    progress = Path(spec.directory, "progress")
    source = PostgresChanges(
        spec.url,
        table=spec.table,
        slot=spec.slot,
        publication=None if spec.copies else PUBLICATION,
        first_copy="all" if spec.copies else "none",
    )
    pipeline = Pipeline(
        LocalProcesses(),
        name="changes",
        parallelism=1,
        checkpointing=Checkpointing(storage=f"{spec.directory}/checkpoints", interval="1 s"),
        restart=NoRestart(),
    )
    counted = CountedSource(source, str(progress), spec.rows)
    pipeline.read(counted, uid="changes").write(DiscardingSink(spec.directory), uid="nowhere")
    job = pipeline.start()
    deadline = time.monotonic() + _TIMEOUT_S
    cpu_before: float | None = None
    ask_at = 0.0
    while True:
        if time.monotonic() > ask_at:
            ask_at = time.monotonic() + _STATUS_S
            if ask_at > deadline or job.status().state.ended:
                raise TimeoutError(f"the job has not read {spec.rows} rows: {job.status()}")
        if progress.exists():
            if cpu_before is None:
                cpu_before = tree_cpu_s(os.getpid())
            began_at, noted_at, rows = progress.read_text().split()
            if int(rows) >= spec.rows:
                break
        time.sleep(_LOOK_S)
    cpu_s = tree_cpu_s(os.getpid()) - cpu_before
    result = ChangesResult(seconds=float(noted_at) - float(began_at), cpu_s=cpu_s)
    Path(result_path).write_bytes(msgspec.json.encode(result))
    job.cancel()


if __name__ == "__main__":
    main(*sys.argv[1:])
