"""Runs the same work in both engines, in turns, and measures it by the files that the jobs leave.

A turn is one run of ours and one of Flink's, of which each is first in every second turn. A run is
measured over as many seconds in both. They begin two seconds after its prologue has been read; in
a fresh JVM once it has used 20 seconds of processor time besides: code that is not compiled yet is
not what is compared, however busy the machine.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.beside_flink.engines import Engine, build_flink, flink, ours
from benchmarks.beside_flink.rows import Progress, rows_out
from benchmarks.beside_flink.works import PARALLELISM, Work
from benchmarks.discarding_sink import DiscardingSink
from benchmarks.job_spec import Backend
from benchmarks.stage import BenchmarkError

_LOOK_INTERVAL_S = 0.2
_TIMEOUT_S = 300.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Seconds:
    """The durations of a measured run, in seconds."""

    warm_s: float = 2.0
    fresh_jvm_cpu_s: float = 20.0
    """What a fresh JVM has used, besides, before it is measured: most of it to compile."""
    measured_s: float = 2.5
    paced_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One completed checkpoint; `sync_ms` is the slowest subtask's."""

    triggered_at_s: float
    duration_ms: float
    sync_ms: float
    bytes_written: float


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of one run of one engine."""

    rows_per_second: float
    cpu_us_per_row: float
    """Of all its processes."""
    checkpoints: tuple[Checkpoint, ...]
    """Those triggered in the measured seconds."""

    @property
    def shown(self) -> str:
        """Its figures for a person."""
        rate = f"{self.rows_per_second:,.0f} rows/s, {self.cpu_us_per_row:.2f} CPU us a row"
        durations = ", ".join(f"{checkpoint.duration_ms:.0f}" for checkpoint in self.checkpoints)
        return f"{rate}, checkpoints of {durations} ms" if durations else rate


@dataclass(frozen=True, slots=True)
class Turns:
    """One subject on one backend: runs of both, those of one turn at the same index."""

    work: Work
    backend: Backend
    ours: tuple[Run, ...]
    flink: tuple[Run, ...]


def compare(
    works: Sequence[Work], backends: Sequence[Backend], runs: int, seconds: Seconds, say: Say
) -> Iterator[Turns]:
    """Run every work in both engines `runs` times, in turns; yield each work once it is measured.

    Raises:
        BenchmarkError: Java or Maven is missing; or, after all others, works of which a job failed,
            or let too few or too many rows come out.
    """
    say("building the Flink jobs")
    build_flink()
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="onceflow-bench-") as name:
        scratch = Path(name)
        with ours(scratch) as spark:
            for backend, work in product(backends, works):
                try:
                    with flink(scratch) as java:
                        turns = _turns((spark, java), work, backend, runs, seconds, scratch, say)
                except BenchmarkError as error:
                    failed.append(str(error))
                    say(failed[-1])
                else:
                    yield turns
    if failed:
        raise BenchmarkError("\n".join(failed))


def _turns(
    engines: tuple[Engine, Engine],
    work: Work,
    backend: Backend,
    runs: int,
    seconds: Seconds,
    scratch: Path,
    say: Say,
) -> Turns:
    done: dict[str, list[Run]] = {engine.name: [] for engine in engines}

    def run_once(engine: Engine, turn: str, warm_cpu_s: float = 0.0) -> Run:
        directory = Path(tempfile.mkdtemp(dir=scratch))
        name = work.flinks_name if engine is engines[1] and work.flinks_name else work.name
        engine.begin(name, backend, directory)
        run = _run(engine, work, backend, directory, seconds, warm_cpu_s)
        shutil.rmtree(directory, ignore_errors=True)
        say(f"{turn}: {work.title}, {backend}, {engine.name}: {run.shown}")
        return run

    if work.is_whole:
        # What writes the first checkpoint is not compiled before it.
        run_once(engines[1], "warm-up")
    for turn in range(runs):
        for engine in engines[:: -1 if turn % 2 else 1]:
            is_fresh = engine is engines[1] and turn == 0 and not work.is_paced
            warm_cpu_s = seconds.fresh_jvm_cpu_s if is_fresh else 0.0
            done[engine.name].append(run_once(engine, f"run {turn + 1} of {runs}", warm_cpu_s))
    first, second = (tuple(done[engine.name]) for engine in engines)
    return Turns(work, backend, first, second)


def _run(
    engine: Engine,
    work: Work,
    backend: Backend,
    directory: Path,
    seconds: Seconds,
    warm_cpu_s: float,
) -> Run:
    """Return what a run that has begun measured, once what came out of it is right.

    Raises:
        BenchmarkError: The job failed, or too few or too many rows came out.
    """
    subtasks = PARALLELISM * (2 if work.name == "join" else 1)
    measured_s = seconds.paced_s if work.is_paced else seconds.measured_s
    began_cpu_s = engine.cpu_s()
    deadline = time.monotonic() + _TIMEOUT_S
    # When measuring began and ended, with the processor time that was used by then.
    marks = list[tuple[float, float]]()
    while len(marks) < 2 or not (progress := Progress(directory)).is_known_of(
        subtasks, marks[1][0]
    ):
        time.sleep(_LOOK_INTERVAL_S)
        now_s = time.time()
        if not marks:
            began_s = Progress(directory).passed_s(work.prologue_rows)
            is_due = (
                began_s is not None
                and now_s >= began_s + seconds.warm_s
                and engine.cpu_s() >= began_cpu_s + warm_cpu_s
            )
        else:
            is_due = len(marks) == 1 and now_s >= marks[0][0] + measured_s
        if is_due:
            marks.append((now_s, engine.cpu_s()))
            if work.is_whole and len(marks) == 1:
                engine.take_checkpoint()
        if time.monotonic() > deadline:
            engine.stop()
            raise BenchmarkError(
                f"{engine.name}: {work.title}, {backend}: not measured in {_TIMEOUT_S} s; the"
                f" sources have read {Progress(directory).rows()} rows"
            )
    (from_s, from_cpu_s), (to_s, to_cpu_s) = marks
    rows = max(progress.rows_at(to_s) - progress.rows_at(from_s), 1)
    engine.stop()
    _check(engine.name, work, Progress(directory).rows(), DiscardingSink(str(directory)).rows())
    checkpoints = (
        Checkpoint(*map(float, line.split()))
        for line in (directory / "checkpoint-times").read_text().splitlines()
    )
    in_time = tuple(
        checkpoint for checkpoint in checkpoints if from_s <= checkpoint.triggered_at_s < to_s
    )
    if work.is_paced and not in_time:
        raise BenchmarkError(f"{engine.name}: {backend}: no checkpoint in {measured_s} s")
    return Run(rows / (to_s - from_s), (to_cpu_s - from_cpu_s) / rows * 1e6, in_time)


def _check(engine: str, work: Work, read: Sequence[int], written: int) -> None:
    least, most = rows_out(work.name, read)
    if not least <= written <= most:
        raise BenchmarkError(
            f"{engine}: {work.title}: {written} rows came out of {list(read)}, which is not between"
            f" {least:.0f} and {most:.0f}"
        )
