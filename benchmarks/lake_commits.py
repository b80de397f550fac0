"""What a commit to a lake table costs: `python -m benchmarks.lake_commits`.

Commits of 100 data files, in turns with commits of as many files by the library itself; then the
memory of a process that commits one file at a time, thousands of times.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow as pa
import typer
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from pyiceberg.catalog import load_catalog
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.spread import Spread
from benchmarks.stage import BenchmarkError
from onceflow.core.protocol.committables import Committable, Committed
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import CommitterContext, GlobalCommitter, WriterContext
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import DeltaSink, IcebergSink
from onceflow.sinks.delta import data_files as delta_files
from onceflow.sinks.iceberg import staged_files as iceberg_files

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("part", pa.string())])
_SINK_ID = "bench.rows"
_KEEP_VERSIONS = 100


class LakeJob(ABC):
    """One job's sink with its table below `directory`; begins with an empty table."""

    name: ClassVar[str]

    def __init__(self, directory: Path, subtasks: int) -> None:
        """Create the table."""
        self.directory, self.subtasks = directory, subtasks
        directory.mkdir(parents=True)
        self.sink = self.make_sink()
        self.staging = FileStagingArea.in_directory(str(directory / "staging"), _SINK_ID)
        context = CommitterContext("bench", "rows", _SINK_ID, AttemptId(1), "bench", self.staging)
        self.sink.open(context, SCHEMA)
        self.committer = self.sink.committer(context)
        self._writers = [self._writer(subtask) for subtask in range(subtasks)]

    @abstractmethod
    def make_sink(self) -> IcebergSink | DeltaSink:
        """Return the sink of the table, partitioned by `part`."""

    @abstractmethod
    def decode(self, staged: pa.RecordBatch) -> Sequence[Any]:
        """Return what the library calls the data files that `staged` describes."""

    @abstractmethod
    def append_by_library(self, files: Sequence[Any]) -> None:
        """Load the table, and add `files` to it by the library's own means."""

    @abstractmethod
    def count_rows(self) -> int:
        """Return how many rows a reader sees."""

    @abstractmethod
    def trim(self) -> None:
        """Do what the sink's page tells users to do now and then: forget old versions, compact."""

    def prepare(self, checkpoint: int, files: int) -> list[Committable]:
        """Write `files` data files of a row each, and return what is to be committed."""
        each = files // self.subtasks
        rows = pa.RecordBatch.from_pydict(
            {"id": list(range(each)), "part": [f"p{number}" for number in range(each)]}, SCHEMA
        )
        committables: list[Committable] = []
        for writer in self._writers:
            writer.write(rows)
            committables += writer.pre_commit(CheckpointId(checkpoint))
        return committables

    def commit(self, checkpoint: int, committables: Sequence[Committable]) -> None:
        """Commit as a job's driver does.

        Raises:
            BenchmarkError: It did not simply succeed.
        """
        assert isinstance(self.committer, GlobalCommitter)
        outcome = self.committer.commit_checkpoint(CheckpointId(checkpoint), committables)
        if not isinstance(outcome, Committed):
            raise BenchmarkError(f"checkpoint {checkpoint} ended as {outcome}")

    def take_files(self, committables: Sequence[Committable]) -> list[Any]:
        """Return what was written, for the library."""
        return [file for one in committables for file in self._take(one)]

    def close(self) -> None:
        """Release writers and committer."""
        for writer in self._writers:
            writer.close()
        self.committer.close()

    def _take(self, committable: Committable) -> Iterator[Any]:
        for _, staged in self.staging.read(committable.transaction) or ():
            yield from self.decode(staged)
        self.staging.discard(committable.transaction)

    def _writer(self, subtask: int) -> Any:
        return self.sink.writer(
            WriterContext(
                "bench",
                "rows",
                _SINK_ID,
                subtask=subtask,
                parallelism=self.subtasks,
                attempt=AttemptId(1),
                first_checkpoint=CheckpointId(1),
                schema=SCHEMA,
                staging=self.staging,
            )
        )


class IcebergJob(LakeJob):
    """With a SQLite catalog."""

    name = "Iceberg"

    def make_sink(self) -> IcebergSink:
        return IcebergSink("bench.rows", catalog=self._catalog, create=True, partition_by=("part",))

    def decode(self, staged: pa.RecordBatch) -> Sequence[Any]:
        return [file for one in iceberg_files.decode_files([staged]) for file in one.files]

    def append_by_library(self, files: Sequence[Any]) -> None:
        table = self._library.load_table("bench.rows")
        with (
            table.transaction() as transaction,
            transaction.update_snapshot().fast_append() as append,
        ):
            for file in files:
                append.append_data_file(file)

    def count_rows(self) -> int:
        rows: int = self._library.load_table("bench.rows").scan().count()
        return rows

    def trim(self) -> None:
        table = self._library.load_table("bench.rows")
        old = [one.snapshot_id for one in table.snapshots()[:-_KEEP_VERSIONS]]
        table.maintenance.expire_snapshots().by_ids(old).commit()

    @property
    def _catalog(self) -> dict[str, str]:
        return {
            "uri": f"sqlite:///{self.directory}/catalog.db",
            "warehouse": f"file://{self.directory}",
        }

    @property
    def _library(self) -> Any:
        if not hasattr(self, "_opened"):
            self._opened = load_catalog("default", **self._catalog)
        return self._opened


class DeltaJob(LakeJob):
    """In a directory."""

    name = "Delta"

    def make_sink(self) -> DeltaSink:
        return DeltaSink(self._url, create=True, partition_by=("part",))

    def decode(self, staged: pa.RecordBatch) -> Sequence[Any]:
        return delta_files.decode_files(staged, _SINK_ID).files

    def append_by_library(self, files: Sequence[Any]) -> None:
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size_bytes, file.partition, now_ms, True, file.statistics)
            for file in files
        ]
        table = DeltaTable(self._url)
        table.create_write_transaction(actions, "append", table.schema(), partition_by=["part"])

    def count_rows(self) -> int:
        rows: int = DeltaTable(self._url).count()
        return rows

    def trim(self) -> None:
        table = DeltaTable(self._url)
        table.optimize.compact()
        table.create_checkpoint()
        table.cleanup_metadata()

    @property
    def _url(self) -> str:
        return str(self.directory / "table")


_JOBS: tuple[type[LakeJob], ...] = (IcebergJob, DeltaJob)


@dataclass(frozen=True, slots=True)
class CommitTimes:
    """Milliseconds of commits, ours and the library's in turns."""

    name: str
    subtasks: int
    ours_ms: Spread
    library_ms: Spread
    ratio: Spread


def time_commits(
    kind: type[LakeJob], directory: Path, subtasks: int, files: int, turns: int
) -> CommitTimes:
    """Commit `files` data files to each of two tables, `turns` times after a first one."""
    ours = kind(directory / "ours", subtasks)
    library = kind(directory / "library", subtasks)
    ours_ms: list[float] = []
    library_ms: list[float] = []
    for turn in range(1, turns + 2):
        committables = ours.prepare(turn, files)
        taken = library.take_files(library.prepare(turn, files))
        both: list[tuple[list[float], Callable[[], None]]] = [
            (ours_ms, partial(ours.commit, turn, committables)),
            (library_ms, partial(library.append_by_library, taken)),
        ]
        # Whoever commits first finds the disk busy with what was prepared.
        for times_ms, commit in both if turn % 2 else reversed(both):
            began = time.perf_counter()
            commit()
            times_ms.append((time.perf_counter() - began) * 1e3)
    del ours_ms[0], library_ms[0]
    rows = (turns + 1) * files
    for job in (ours, library):
        if job.count_rows() != rows:
            raise BenchmarkError(f"{kind.name}: {job.count_rows()} rows in place of {rows}")
        job.close()
    ratios = [own / bare for own, bare in zip(ours_ms, library_ms, strict=True)]
    return CommitTimes(
        kind.name, subtasks, Spread.of(ours_ms), Spread.of(library_ms), Spread.of(ratios)
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process holds after `commits` commits, and what the last of them took."""

    name: str
    commits: int
    resident_mib: float
    commit_ms: float
    """Median since the row before."""


def watch_memory(kind: type[LakeJob], directory: Path, commits: int) -> Iterator[Memory]:
    """Commit one file at a time, and trim the table every `_KEEP_VERSIONS` commits.

    The writer is in the process, too: what it would leave is measured with it.
    """
    job = kind(directory / "memory", 1)
    times_ms: list[float] = []
    for number in range(1, commits + 1):
        committables = job.prepare(number, 1)
        began = time.perf_counter()
        job.commit(number, committables)
        times_ms.append((time.perf_counter() - began) * 1e3)
        if number % _KEEP_VERSIONS == 0:
            job.trim()
        if number % max(commits // 10, 1) == 0:
            gc.collect()
            yield Memory(kind.name, number, _resident_mib(), Spread.of(times_ms).median)
            times_ms.clear()
    if job.count_rows() != commits:
        raise BenchmarkError(f"{kind.name}: {job.count_rows()} rows in place of {commits}")
    job.close()


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def bench(
    files: Annotated[int, typer.Option(help="Data files a commit.", min=1)] = 100,
    turns: Annotated[int, typer.Option(help="Commits of them, after a first one.", min=1)] = 15,
    commits: Annotated[
        int, typer.Option(help="Commits while memory is watched; 0: none.", min=0)
    ] = 10_000,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure commits to Iceberg and Delta tables in a directory; needs no server."""
    console = Console(stderr=True, highlight=False)
    times: list[CommitTimes] = []
    memory: list[Memory] = []
    with tempfile.TemporaryDirectory(prefix="onceflow-bench-") as name:
        for kind in _JOBS:
            for subtasks in (4, files):
                console.print(f"{kind.name}: commits of {files} files of {subtasks} subtasks")
                place = Path(name) / f"{kind.name}-{subtasks}"
                times.append(time_commits(kind, place, subtasks, files, turns))
            if commits:
                console.print(f"{kind.name}: {commits:,} commits of one file")
                for one in watch_memory(kind, Path(name) / kind.name, commits):
                    console.print(str(one))
                    memory.append(one)
    if json_:
        print(json.dumps(_as_json(times, memory)))
        return
    out = Console(highlight=False)
    for table in (_times_table(files, times), _memory_table(memory)):
        out.print(table)


def _as_json(times: Sequence[CommitTimes], memory: Sequence[Memory]) -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "commits": [
            {
                "table": one.name,
                "subtasks": one.subtasks,
                "ours_ms": one.ours_ms.as_json(),
                "library_ms": one.library_ms.as_json(),
                "ratio": one.ratio.as_json(),
            }
            for one in times
        ],
        "memory": [asdict(one) for one in memory],
    }


def _times_table(files: int, times: Sequence[CommitTimes]) -> Table:
    table = Table(title=f"A commit of {files} data files, ms", title_justify="left")
    for column in ("table", "subtasks", "ours", "the library's own", "ours / the library's"):
        table.add_column(column)
    for one in times:
        spreads = one.ours_ms.shown(1), one.library_ms.shown(1), one.ratio.shown(2)
        table.add_row(one.name, str(one.subtasks), *spreads)
    return table


def _memory_table(memory: Sequence[Memory]) -> Table:
    title = f"Memory of the process; trimmed every {_KEEP_VERSIONS} commits"
    table = Table(title=title, title_justify="left")
    for column in ("table", "commits", "resident, MiB", "a commit, ms"):
        table.add_column(column)
    for one in memory:
        table.add_row(
            one.name, f"{one.commits:,}", f"{one.resident_mib:.0f}", f"{one.commit_ms:.1f}"
        )
    return table


if __name__ == "__main__":
    typer.run(bench)
