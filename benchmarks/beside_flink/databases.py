"""The ledger in both engines, from the same topic into the same servers, in turns.

A turn is one run of ours and one of Flink's, of which each is first in every second turn. A run of
ours is measured as in all other scenarios, and takes a fresh driver. Flink's takes a warm JVM: for
each database and backend a fresh one first runs the job without being measured, until it has used
60 seconds of processor time. Flink's is measured from the first record that its source has in hand,
so without the wait for the broker, to the last commit.

Flink may take one checkpoint more between its last one and the end of its job, and leaves what it
has prepared for that. No row is in it, or it would be missed when the table is checked; so it is
rolled back before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks.beside_flink.engines import Engine, build_flink, flink
from benchmarks.beside_flink.jdbc import create_table, roll_back_prepared, to_jdbc_url
from benchmarks.cpu import groups_cpu_s
from benchmarks.job_spec import Backend, Database, JobSpec
from benchmarks.sinks.rows import SCHEMA
from benchmarks.stage import BenchmarkError, Stage
from benchmarks.throughput import Say
from onceflow.core.errors import OnceflowError

_WARM_JVM_CPU_S = 60.0
"""What a JVM has used before it is measured: most of it to compile."""
_TICK_S = 0.01
"""What /proc counts in: less may be none."""
_START_TIMEOUT_S = 120.0
_RUN_TIMEOUT_S = 900.0
_TITLES: dict[Database, str] = {"postgres": "Postgres", "mysql": "MySQL", "mariadb": "MariaDB"}
_DRIVERS: dict[Database, str] = {"postgres": "postgresql", "mysql": "mysql", "mariadb": "mariadb"}


@dataclass(frozen=True, slots=True)
class LedgerRun:
    """The measurements of one run of one engine."""

    rows_per_second: float
    cpu_s_per_million: Mapping[str, float]
    """CPU seconds a million records by group: engine, and every server.

    Ours has the engine's also by its parts: driver, jvm and slots.
    """

    @classmethod
    def of(cls, records: int, seconds: float, cpu_s: Mapping[str, float]) -> LedgerRun:
        """Return it, of what all records took."""
        known = {name: max(used, _TICK_S) / records * 1e6 for name, used in cpu_s.items()}
        return cls(records / seconds, known)


@dataclass(frozen=True, slots=True)
class LedgerWork:
    """The ledger into one database, with its state on one backend."""

    database: Database
    backend: Backend

    @property
    def title(self) -> str:
        """The title of the run."""
        return f"ledger into {_TITLES[self.database]}"


@dataclass(frozen=True, slots=True)
class LedgerTurns:
    """Runs of one work by both engines; those of one turn are at the same index."""

    work: LedgerWork
    ours: tuple[LedgerRun, ...]
    flink: tuple[LedgerRun, ...]


def compare_ledgers(
    stage: Stage, topic: str, backends: Sequence[Backend], runs: int, say: Say
) -> Iterator[LedgerTurns]:
    """Run the ledger in both engines `runs` times, in turns; yield each database once measured.

    Into Postgres with each backend, into the others with the first one.

    Raises:
        BenchmarkError: Java or Maven is missing; or, after all others, databases that have no
            server here, or of which a job failed, or left a table that is wrong.
    """
    say("building the Flink jobs")
    build_flink()
    works = [LedgerWork("postgres", backend) for backend in backends]
    works += [LedgerWork("mysql", backends[0]), LedgerWork("mariadb", backends[0])]
    failed: list[str] = []
    for work in works:
        try:
            with flink(stage.directory, "Ledger") as jvm:
                turns = _Runs(stage, topic, work, jvm, say).take_turns(runs)
        except OnceflowError as error:
            failed.append(str(error))
            say(failed[-1])
        else:
            yield turns
    if failed:
        raise BenchmarkError("\n".join(failed))


class _Runs:
    """Runs of one work, of ours and in one JVM."""

    def __init__(self, stage: Stage, topic: str, work: LedgerWork, jvm: Engine, say: Say) -> None:
        self._stage = stage
        self._work = work
        self._jvm = jvm
        self._say = say
        self._records = stage.payments.records
        self._spec = JobSpec(
            records=self._records, topic=topic, backend=work.backend, sink=work.database
        )

    def take_turns(self, runs: int) -> LedgerTurns:
        """Warm the JVM, and run the work as many times in either engine.

        Raises:
            BenchmarkError: A job failed, or a row is missing, doubled or wrong.
        """
        for turn in count(1):
            self._tell(f"warm-up {turn}", self._jvm.name, self._run_flinks())
            if self._jvm.cpu_s() >= _WARM_JVM_CPU_S:
                break
        ours: list[LedgerRun] = []
        flinks: list[LedgerRun] = []
        sides = (("onceflow", self._run_ours, ours), (self._jvm.name, self._run_flinks, flinks))
        for turn in range(runs):
            for name, run, done in sides[:: -1 if turn % 2 else 1]:
                done.append(run())
                self._tell(f"run {turn + 1} of {runs}", name, done[-1])
        return LedgerTurns(self._work, tuple(ours), tuple(flinks))

    def _tell(self, turn: str, engine: str, run: LedgerRun) -> None:
        cpu_s = run.cpu_s_per_million["engine"]
        figures = f"{run.rows_per_second:,.0f} rows/s, {cpu_s:.2f} CPU s/M"
        self._say(f"{turn}: {self._work.title}, {self._work.backend}, {engine}: {figures}")

    def _run_ours(self) -> LedgerRun:
        result = self._stage.run(self._spec)
        return LedgerRun.of(self._records, result.seconds, result.cpu_s)

    def _run_flinks(self) -> LedgerRun:
        with self._stage.prepared(self._spec) as ready:
            spec = ready.spec
            create_table(spec.database_url, spec.table, SCHEMA)
            address = to_jdbc_url(spec.database_url, _DRIVERS[self._work.database])
            words = (spec.backend, spec.bootstrap_servers, spec.topic, address, spec.table)
            self._jvm.begin(ready.directory, *words)
            self._jvm.expect("reading", _START_TIMEOUT_S)
            before = self._cpu_s(spec)
            self._jvm.expect("stopped", _RUN_TIMEOUT_S)
            cpu_s = {name: used - before[name] for name, used in self._cpu_s(spec).items()}
            seconds = float((ready.directory / "seconds").read_text())
            roll_back_prepared(spec.database_url)
        return LedgerRun.of(self._records, seconds, cpu_s)

    def _cpu_s(self, spec: JobSpec) -> dict[str, float]:
        return {"engine": self._jvm.cpu_s(), **groups_cpu_s(spec.server_pids)}
