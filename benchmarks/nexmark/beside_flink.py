"""The queries of Nexmark in onceflow and in Flink SQL, from the same topic of Kafka, in turns.

Each query is first checked in both engines: with events that have a time of their own each, and
against DuckDB. Then the JVM runs it without being measured. A turn is one run of each engine, of
which each is first in every second turn. Both are measured from when all tasks run to their end.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.table import Table

from benchmarks.beside_flink.engines import Engine, build_flink, flink
from benchmarks.nexmark.events import fill_topic
from benchmarks.nexmark.expected import Judge
from benchmarks.nexmark.flink_queries import make_script
from benchmarks.nexmark.job import PARTITIONS, JobSpec
from benchmarks.nexmark.processes import run_job
from benchmarks.spread import Spread
from benchmarks.stage import BenchmarkError
from benchmarks.tables import figure_table
from onceflow.integration.servers import EmbeddedKafka

FLINK_VERSION = "1.20.3"
UNCHECKED = {"q12": "its windows are those of the clock, and the last ones never end"}
"""The queries whose result in Flink is not compared, and the reason."""
CHECKED_EVENTS_MAX = 100_000
CHECKED_INTERVAL_US = 1_000
"""Each event of a checked run has a time of its own, so that the last of several is defined."""
_START_TIMEOUT_S = 120.0
_RUN_TIMEOUT_S = 900.0

Say = Callable[[str], None]


class Run(NamedTuple):
    """The measurements of one run of one engine."""

    cpu_s_per_million: float
    events_per_second: float


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of one query."""

    query: str
    difference: str
    """The difference of our result from the right one; empty if it is right."""
    flink_difference: str | None
    """The same of Flink's result; None if it is not compared."""
    ours: tuple[Run, ...]
    flink: tuple[Run, ...]

    @property
    def is_right(self) -> bool:
        """True if no result is wrong."""
        return not self.difference and not self.flink_difference

    @property
    def ratio(self) -> Spread:
        """Our processor time by Flink's, of each turn."""
        turns = zip(self.ours, self.flink, strict=True)
        return Spread.of(ours.cpu_s_per_million / flink.cpu_s_per_million for ours, flink in turns)

    def as_json(self) -> dict[str, object]:
        """Return it for `--json`."""
        return {
            "query": self.query,
            "difference": self.difference,
            "flink_difference": self.flink_difference,
            "ours": _summarize(self.ours),
            "flink": _summarize(self.flink),
            "ratio": self.ratio.as_json(),
        }

    def as_line(self) -> str:
        """Return the result for a person."""
        flink = {None: "unchecked", "": "right"}.get(self.flink_difference, self.flink_difference)
        ours, flinks = (cpu_of(runs).shown(2) for runs in (self.ours, self.flink))
        return (
            f"{self.query}: ours {self.difference or 'right'}, Flink's {flink};"
            f" CPU s a million events: {ours}, Flink {flinks}; ratio {self.ratio.shown(2)}"
        )


def cpu_of(runs: Sequence[Run]) -> Spread:
    """Return the processor time of a million events."""
    return Spread.of(run.cpu_s_per_million for run in runs)


def _summarize(runs: Sequence[Run]) -> dict[str, object]:
    return {
        "cpu_s_per_million": cpu_of(runs).as_json(),
        "events_per_second": Spread.of(run.events_per_second for run in runs).as_json(),
    }


class Turns:
    """Runs of both engines. `checked` is a topic with the events of `judge`."""

    def __init__(
        self, spec: JobSpec, checked: JobSpec, judge: Judge, jvm: Engine, warm_up_cpu_s: float
    ) -> None:
        self._spec = spec
        self._checked = checked
        self._judge = judge
        self._jvm = jvm
        self._warm_up_cpu_s = warm_up_cpu_s

    def compare(self, query: str, runs: int, say: Say) -> Compared:
        """Check a query in both engines, warm the JVM, and take `runs` turns.

        Raises:
            BenchmarkError: A job failed.
        """
        with _directory() as directory:
            run_job(_of(self._checked, query, directory))
            difference = self._judge.find_difference(query, Path(directory, query))
        flink_difference = self._check_flink(query)
        used_before_s = self._jvm.cpu_s()
        while True:
            run = self._run_flink(query)
            say(f"{query}: warm-up, {run.cpu_s_per_million:.2f} CPU s a million events")
            if self._jvm.cpu_s() - used_before_s >= self._warm_up_cpu_s:
                break
        ours: list[Run] = []
        flink: list[Run] = []
        sides = ((self._run_ours, ours), (self._run_flink, flink))
        for turn in range(runs):
            for measure, measured in sides[:: -1 if turn % 2 else 1]:
                measured.append(measure(query))
        return Compared(
            query=query,
            difference=difference,
            flink_difference=flink_difference,
            ours=tuple(ours),
            flink=tuple(flink),
        )

    def _check_flink(self, query: str) -> str | None:
        with _directory() as directory:
            self._run_job(query, self._checked, directory, "changes")
            if query in UNCHECKED:
                return None
            return self._judge.find_difference_of_changes(query, Path(directory))

    def _run_ours(self, query: str) -> Run:
        with _directory() as directory:
            spec = msgspec.structs.replace(_of(self._spec, query, directory), sink="discard")
            result = run_job(spec)
        if result.events != self._spec.events:
            raise BenchmarkError(f"{query}: {result.events} events were read")
        return Run(result.cpu_s / result.events * 1e6, result.events / result.seconds)

    def _run_flink(self, query: str) -> Run:
        with _directory() as directory:
            sink = "log" if query in PARTITIONS else "blackhole"
            return self._run_job(query, self._spec, directory, sink)

    def _run_job(self, query: str, spec: JobSpec, directory: str, sink: str) -> Run:
        assert spec.topic is not None
        Path(directory, "job.sql").write_text(make_script(query, spec.topic))
        self._jvm.begin(directory, spec.backend, spec.parallelism, sink)
        self._jvm.expect("running", _START_TIMEOUT_S)
        began_s, began_cpu_s = time.monotonic(), self._jvm.cpu_s()
        self._jvm.expect("stopped", _RUN_TIMEOUT_S)
        cpu_s = self._jvm.cpu_s() - began_cpu_s
        return Run(cpu_s / spec.events * 1e6, spec.events / (time.monotonic() - began_s))


def compare_queries(
    names: Sequence[str], spec: JobSpec, runs: int, warm_up_cpu_s: float, say: Say
) -> Iterator[Compared]:
    """Fill the topics, start a JVM, and yield each query once it is measured.

    Raises:
        BenchmarkError: Java or Maven is missing; or, after all other queries, those that failed.
    """
    say("building the Flink jobs")
    build_flink()
    checked = msgspec.structs.replace(
        spec, events=min(spec.events, CHECKED_EVENTS_MAX), event_interval_us=CHECKED_INTERVAL_US
    )
    with _directory() as scratch, EmbeddedKafka() as kafka:
        say(f"writing {spec.events:,} and {checked.events:,} events to Kafka")
        measured, checked = (
            msgspec.structs.replace(job, topic=fill_topic(kafka, name, job.source))
            for name, job in (("measured", spec), ("checked", checked))
        )
        judge = Judge(replace(checked.source, splits_count=1))
        with flink(Path(scratch), "Nexmark") as jvm:
            turns = Turns(measured, checked, judge, jvm, warm_up_cpu_s)
            failed: list[str] = []
            for name in names:
                try:
                    compared = turns.compare(name, runs, say)
                except BenchmarkError as error:
                    failed.append(f"{name}: {error}")
                    say(failed[-1])
                else:
                    yield compared
    if failed:
        raise BenchmarkError("\n".join(failed))


def make_table(results: Sequence[Compared], title: str) -> Table:
    """Return a row for each query."""
    table = figure_table(
        f"Nexmark beside Flink SQL, {title}; less is better",
        *("query", "results", "CPU s a million events", "Flink's", "ours / Flink"),
    )
    for result in results:
        table.add_row(
            result.query,
            "right" if result.is_right else "wrong",
            cpu_of(result.ours).shown(2),
            cpu_of(result.flink).shown(2),
            result.ratio.shown(2),
        )
    return table


def _of(spec: JobSpec, query: str, directory: str) -> JobSpec:
    return msgspec.structs.replace(spec, queries=(query,), directory=directory)


@contextmanager
def _directory() -> Generator[str, None, None]:
    directory = tempfile.mkdtemp(prefix="onceflow-nexmark-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
