"""A whole job around a source: the real engine reads it and writes the rows into files.

The source is wrapped, so that its rows take several checkpoints, and a crash point is armed in one
of them. Files become visible when their checkpoint is decided.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from onceflow.core.errors import SlotLost
from onceflow.core.runtime.cluster.process_host import Link
from onceflow.core.spi import (
    EndOfInput,
    Outage,
    OutputBatch,
    PolledRows,
    ReaderContext,
    Source,
    SourceProgress,
    SourceReader,
    Split,
    SplitOffsets,
)
from onceflow.integration.conformance.processes import TIMEOUT_S
from onceflow.integration.conformance.source_harness import SOURCE_UID, count_rows
from onceflow.integration.conformance.whole_job import KillPlan, arm_in_job, make_pipeline
from onceflow.sinks import FileSink

_UNLIMITED = 1 << 62
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class SourceWork:
    """The parameters that all attempts of a job share."""

    source: Source
    storage: str
    """The root of checkpoint storage."""
    target: str
    """The directory of the files."""
    rows_expected: int
    """The number of rows after which a job with a source without an end is stopped."""
    rows_a_checkpoint: int
    """The number of rows after which a reader waits for the next checkpoint, in a killed attempt.

    A reader may return the rest of a batch more.
    """


def run_source_attempt(link: Link, work: SourceWork, plan: KillPlan) -> bool:
    """Run the driver of one attempt. Return True if all rows are committed, False if a slot died.

    Runs in a new process without open resources.
    """
    pipeline = make_pipeline(work.storage, plan.parallelism)
    source = PacedSource(work.source, work.rows_a_checkpoint, plan)
    if source.outputs:
        for output, stream in pipeline.read_outputs(source, uid=SOURCE_UID).items():
            number = list(source.outputs).index(output)
            stream.write(FileSink(f"{work.target}/{number}"), uid=f"files-{number}")
    else:
        pipeline.read(source, uid=SOURCE_UID).write(FileSink(work.target), uid="files")
    job = pipeline.start()
    link.send("started")
    deadline = time.monotonic() + TIMEOUT_S / 2
    try:
        while True:
            try:
                job.wait(_LOOK_S)
                return True
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
            # A job with an end must end by itself, not only show its rows.
            is_endless = not work.source.bounded
            if is_endless and count_files_rows(work.source, work.target) >= work.rows_expected:
                job.stop(TIMEOUT_S / 2)
                return True
    except SlotLost:
        return False


def read_files(source: Source, target: str) -> list[PolledRows]:
    """Return the rows of `source` that are visible in the files of its job."""
    if not source.outputs:
        return list(_read_batches(target, source.schema))
    return [
        OutputBatch(output, rows)
        for number, (output, schema) in enumerate(source.outputs.items())
        for rows in _read_batches(f"{target}/{number}", schema)
    ]


def _read_batches(directory: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    if Path(directory).is_dir():
        files = ds.dataset(directory, format="parquet")
        if files.files:
            yield from files.to_table(schema.names).to_batches()


def count_files_rows(source: Source, target: str) -> int:
    """Return the number of rows of `source` that are visible in the files of its job."""
    return sum(map(count_rows, read_files(source, target)))


@dataclass(frozen=True)
class PacedSource(Source):
    """A source whose readers wait for a checkpoint after some rows, if a crash is planned."""

    source: Source
    rows_a_checkpoint: int
    plan: KillPlan

    @property
    def schema(self) -> pa.Schema:
        """The schema of the source."""
        return self.source.schema

    @property
    def outputs(self) -> Mapping[str, pa.Schema]:
        """The outputs of the source."""
        return self.source.outputs

    @property
    def bounded(self) -> bool:
        """True if the source has an end."""
        return self.source.bounded

    @property
    def discovery_interval_s(self) -> float | None:
        """The interval of the source."""
        return self.source.discovery_interval_s

    def validate(self) -> None:
        """Delegate to the source."""
        self.source.validate()

    def splits(self) -> Sequence[Split]:
        """Delegate to the source."""
        return self.source.splits()

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Delegate to the source."""
        return self.source.discover(known)

    def latest_offsets(self, splits: Sequence[Split]) -> Sequence[SplitOffsets]:
        """Delegate to the source."""
        return self.source.latest_offsets(splits)

    def measure(self, splits: Sequence[Split]) -> SourceProgress | None:
        """Delegate to the source."""
        return self.source.measure(splits)

    def on_finished(self, splits: Sequence[Split]) -> None:
        """Delegate to the source."""
        self.source.on_finished(splits)

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader that waits if a crash is planned."""
        # Only one subtask arms the crash point, so that its checkpoint number is well defined.
        arms = context.subtask == 0 and self.plan.crash is not None
        return _PacedReader(self, self.source.reader(splits, context), arms)


class _PacedReader(SourceReader):
    """A reader that returns some rows, and the next ones after a snapshot."""

    def __init__(self, paced: PacedSource, reader: SourceReader, arms: bool) -> None:
        self._paced = paced
        self._reader = reader
        self._arms = arms
        self._checkpoint = 1
        self._begin()

    def poll(self, timeout_s: float) -> PolledRows | EndOfInput | None:
        if self._left <= 0:
            time.sleep(timeout_s)
            return None
        result = self._reader.poll(timeout_s)
        if not (result is None or isinstance(result, EndOfInput)):
            self._left -= count_rows(result)
        return result

    def snapshot(self) -> Sequence[Split]:
        splits = self._reader.snapshot()
        self._checkpoint += 1
        self._begin()
        return splits

    def _begin(self) -> None:
        """Allow the rows of the next checkpoint, and arm the crash point in the chosen one."""
        plan = self._paced.plan
        self._left = _UNLIMITED if plan.crash is None else self._paced.rows_a_checkpoint
        if self._arms and plan.crash is not None and self._checkpoint == plan.crash_at:
            arm_in_job(plan.crash)

    def wake(self) -> None:
        self._reader.wake()

    def find_outage(self) -> Outage | None:
        return self._reader.find_outage()

    def rows_by_split(self) -> Sequence[tuple[str, int]] | None:
        return self._reader.rows_by_split()

    def list_ended_splits(self) -> Sequence[str]:
        return self._reader.list_ended_splits()

    def take_rejected(self) -> Sequence[Any]:
        self._reader.take_rejected()
        return ()

    def add_splits(self, splits: Sequence[Split]) -> None:
        self._reader.add_splits(splits)

    def commit(self, splits: Sequence[Split]) -> None:
        self._reader.commit(splits)

    def close(self) -> None:
        self._reader.close()
