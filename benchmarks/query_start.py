"""Measures a Structured Streaming query from its start to its first rows, and its micro-batches.

    python -m benchmarks.query_start [--runs 3] [--json]

Kafka and Postgres run. A topic has three partitions, and records for one micro-batch. Three
programs read it into a table, each in a process of its own, once in each turn: see
`first_query.Kind`. Another connection looks every few milliseconds for the first row. After a
micro-batch is committed, the records of the next one are sent.

Afterwards the table is compared with the records: each exactly once for onceflow, at least once for
Spark's own. The archive of classes, which the first `onceflow.session` of a machine makes, is there
before. Seconds: median (least-greatest); ratios are of one turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import psycopg
import typer
from confluent_kafka import Producer
from rich.console import Console

from benchmarks.cpu import tree_cpu_s
from benchmarks.first_query import Kind, QuerySpec, QueryTimes
from benchmarks.machine import describe_machine
from benchmarks.spark_jars import spark_jars
from benchmarks.spread import Spread
from benchmarks.stage import BenchmarkError, Stage
from benchmarks.tables import figure_table
from onceflow.connectors.spark.class_archive import archive_classes
from onceflow.integration.faults.processes import kill_session
from onceflow.integration.workload import Payments

_PARTITIONS = 3
_NAMES = {
    Kind.SPARK: "Spark's own Kafka, foreachBatch + JDBC",
    Kind.BUILDER: "our formats, Spark's builder",
    Kind.SESSION: "our formats, onceflow.session",
}
_TIMEOUT_S = 180.0
_LOOK_S = 0.01
_COMMIT_LOOK_S = 0.002
_TABLE = "CREATE TABLE payments (id bigint, account text, amount bigint, ts bigint)"
_COUNTS = "SELECT count(*), count(DISTINCT id), min(id), max(id) FROM payments"
_DIGEST = """
    SELECT sum(id * amount)::text, sum(id * substr(account, 6)::bigint)::text,
        min(ts - id), max(ts - id)
    FROM (SELECT DISTINCT id, account, amount, ts FROM payments) AS distinct_rows
"""


@dataclass(frozen=True, slots=True)
class QueryFigures:
    """The figures of one query."""

    seconds: Mapping[str, float]
    """The seconds since the process was started, by what has happened."""
    first_rows_s: float
    cpu_s: float
    """The processor time of the process, its JVM and its workers until the first rows."""
    batch_s: float
    """The median duration of the micro-batches after the warm-up."""
    batch_parts_ms: Mapping[str, float]


class Topic:
    """A topic of payments that grows by one micro-batch at a time."""

    def __init__(self, servers: str, name: str, records: Sequence[bytes], batch_rows: int) -> None:
        self._name = name
        self._records = records
        self._batch_rows = batch_rows
        self._sent = 0
        self._producer = Producer(
            {"bootstrap.servers": servers, "acks": "all", "linger.ms": 1, "log_level": 2}
        )

    def grow(self) -> None:
        """Send the records of one micro-batch, and wait until the broker has them."""
        first, self._sent = self._sent, self._sent + self._batch_rows
        for number, record in enumerate(self._records[first : self._sent], first):
            self._producer.produce(self._name, record, partition=number % _PARTITIONS)
        if left := self._producer.flush(_TIMEOUT_S):
            raise BenchmarkError(f"{left} records were not acknowledged")


class QueryBench:
    """The servers, and the queries that run on them, one at a time."""

    def __init__(self, stage: Stage, jars: str, batch_rows: int, warm_up: int) -> None:
        self._stage = stage
        self._jars = jars
        self._batch_rows = batch_rows
        self._warm_up = warm_up
        self._records = [record for chunk in stage.payments.chunks() for record in chunk.json()]
        self._runs = 0

    def measure(self, kind: Kind) -> QueryFigures:
        """Run a query of `kind`, and return its figures once its rows are compared.

        Raises:
            BenchmarkError: The query failed, or the table is wrong.
        """
        self._runs += 1
        stage, name = self._stage, f"query-{self._runs}"
        servers = stage.kafka.bootstrap_servers
        stage.kafka.create_topic(name, _PARTITIONS)
        topic = Topic(servers, name, self._records, self._batch_rows)
        topic.grow()
        with stage.database() as url, psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_TABLE)
            spec = QuerySpec(
                kind=kind,
                servers=servers,
                topic=name,
                url=url,
                checkpoint=str(stage.directory / name),
                batch_rows=self._batch_rows,
                began_s=time.time(),
                jars=self._jars,
                result=str(stage.directory / f"{name}.json"),
            )
            with _QueryProcess(spec, stage.directory / f"{name}.log") as process:
                process.await_that(lambda: _has_rows(connection), _LOOK_S)
                first_rows_s, cpu_s = time.time() - spec.began_s, tree_cpu_s(process.pid)
                for batch in range(len(self._records) // self._batch_rows):
                    commit = Path(spec.checkpoint, "commits", str(batch))
                    if batch:
                        topic.grow()
                    process.await_that(commit.exists, _COMMIT_LOOK_S)
                times = process.end()
            _require_rows(connection, stage.payments, exactly_once=kind is not Kind.SPARK)
        return self._to_figures(times, first_rows_s, cpu_s)

    def _to_figures(self, times: QueryTimes, first_rows_s: float, cpu_s: float) -> QueryFigures:
        steady = [parts for batch, parts in times.batches.items() if batch > self._warm_up]
        batch_count = len(self._records) // self._batch_rows
        if len(times.batches) != batch_count:
            raise BenchmarkError(f"{len(times.batches)} batches instead of {batch_count}")
        parts_ms = {
            part: statistics.median(parts.get(part, 0) for parts in steady) for part in steady[0]
        }
        return QueryFigures(
            {
                "imports done": times.imported_s,
                "session started": times.session_s,
                "query started": times.started_s,
                "first rows visible": first_rows_s,
                "first batch, as Spark reports it": times.batches[0]["triggerExecution"] / 1e3,
            },
            first_rows_s,
            cpu_s,
            parts_ms["triggerExecution"] / 1e3,
            parts_ms,
        )


class _QueryProcess:
    """A process that runs `benchmarks.first_query`. A context manager that leaves no process."""

    def __init__(self, spec: QuerySpec, log: Path) -> None:
        self._result = Path(spec.result)
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.first_query", msgspec.json.encode(spec)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> _QueryProcess:
        return self

    def __exit__(self, *_: object) -> None:
        kill_session(self.pid)
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_that(self, holds: Callable[[], bool], look_s: float) -> None:
        """Return as soon as `holds`.

        Raises:
            BenchmarkError: The process has ended, or `_TIMEOUT_S` is over.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while not holds():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"the query did not go on:\n{self._tail()}")
            time.sleep(look_s)

    def end(self) -> QueryTimes:
        """Stop the query, and return its times."""
        self._process.communicate(timeout=_TIMEOUT_S)
        if self._process.returncode:
            raise BenchmarkError(f"the query failed:\n{self._tail()}")
        return msgspec.json.decode(self._result.read_bytes(), type=QueryTimes)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def _has_rows(connection: psycopg.Connection) -> bool:
    return connection.execute("SELECT 1 FROM payments LIMIT 1").fetchone() is not None


def _require_rows(
    connection: psycopg.Connection, payments: Payments, *, exactly_once: bool
) -> None:
    """Require that the table has each payment, and no other row.

    Raises:
        BenchmarkError: A payment is missing, or is there too often, or has other values.
    """
    counts = connection.execute(_COUNTS).fetchone()
    assert counts is not None
    records = payments.records
    rows_expected = records if exactly_once else counts[0]
    if counts != (rows_expected, records, 0, records - 1):
        raise BenchmarkError(f"rows, ids, least and greatest id are {counts}, not {records} each")
    chunks = list(payments.chunks())
    sums = [
        sum(int((chunk.ids * values).sum()) for chunk, values in zip(chunks, column, strict=True))
        for column in ([c.amounts for c in chunks], [c.accounts for c in chunks])
    ]
    digest = connection.execute(_DIGEST).fetchone()
    assert digest is not None
    if [int(digest[0]), int(digest[1])] != sums or digest[2] != digest[3]:
        raise BenchmarkError(f"the table has other values than the records: {digest} and {sums}")


def _as_json(turns: Sequence[Mapping[Kind, QueryFigures]]) -> dict[str, object]:
    def spreads(value: Callable[[QueryFigures], float]) -> dict[str, object]:
        return {
            kind.value: Spread.of(value(turn[kind]) for turn in turns).as_json() for kind in Kind
        }

    return {
        "seconds": {step: spreads(_seconds_of(step)) for step in turns[0][Kind.SPARK].seconds},
        "cpu_s_until_first_rows": spreads(lambda figures: figures.cpu_s),
        "batch_s": spreads(lambda figures: figures.batch_s),
        "batch_parts_ms": {
            kind.value: [turn[kind].batch_parts_ms for turn in turns] for kind in Kind
        },
        "ratios": {
            name: {kind.value: spread.as_json() for kind, spread in of_kinds.items()}
            for name, of_kinds in _ratios(turns).items()
        },
    }


def _seconds_of(step: str) -> Callable[[QueryFigures], float]:
    return lambda figures: figures.seconds[step]


def _ratios(
    turns: Sequence[Mapping[Kind, QueryFigures]],
) -> dict[str, dict[Kind, Spread]]:
    """Return the ratios of our time to Spark's own, each of one turn: below 1, ours is less."""
    values: dict[str, Callable[[QueryFigures], float]] = {
        "first rows": lambda figures: figures.first_rows_s,
        "micro-batch": lambda figures: figures.batch_s,
    }
    return {
        name: {
            kind: Spread.of(value(turn[kind]) / value(turn[Kind.SPARK]) for turn in turns)
            for kind in (Kind.BUILDER, Kind.SESSION)
        }
        for name, value in values.items()
    }


def _print_tables(turns: Sequence[Mapping[Kind, QueryFigures]], rows: int) -> None:
    table = figure_table("Seconds from the start of the process", "", *_NAMES.values())
    for step in turns[0][Kind.SPARK].seconds:
        spreads = (Spread.of(turn[kind].seconds[step] for turn in turns) for kind in Kind)
        table.add_row(step, *(spread.shown(1) for spread in spreads))
    cpu = (Spread.of(turn[kind].cpu_s for turn in turns) for kind in Kind)
    table.add_row("CPU until then", *(spread.shown(1) for spread in cpu))
    batch = (Spread.of(turn[kind].batch_s for turn in turns) for kind in Kind)
    table.add_row(f"a micro-batch of {rows:,} rows", *(spread.shown(3) for spread in batch))
    for name, spreads_by_kind in _ratios(turns).items():
        ratios = (spread.shown(2) for spread in spreads_by_kind.values())
        table.add_row(f"{name}, ours / Spark's own", "", *ratios)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    Console(highlight=False).print(table, f"load average {load}")


def query_start(
    runs: Annotated[int, typer.Option(help="Turns; medians are shown.", min=1)] = 3,
    batches: Annotated[int, typer.Option(help="Micro-batches to measure.", min=1, max=60)] = 20,
    warm_up: Annotated[int, typer.Option(help="Micro-batches before.", min=0, max=30)] = 10,
    batch_rows: Annotated[int, typer.Option(help="Rows of a micro-batch.", min=1)] = 5_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the three programs in turns."""
    console = Console(stderr=True, highlight=False)
    archive_classes()
    jars = ",".join(map(str, spark_jars(progress=console.print)))
    turns: list[Mapping[Kind, QueryFigures]] = []
    machine = describe_machine()
    with Stage(Payments(batch_rows * (1 + warm_up + batches), partitions=_PARTITIONS)) as stage:
        bench = QueryBench(stage, jars, batch_rows, warm_up)
        for run in range(runs):
            turn: dict[Kind, QueryFigures] = {}
            for kind in Kind if run % 2 == 0 else reversed(Kind):
                turn[kind] = bench.measure(kind)
                console.print(f"turn {run + 1} of {runs}: {kind.value}: {turn[kind]}", markup=False)
            turns.append(turn)
    if as_json:
        figures = _as_json(turns)
        load = {"load_average_end": [round(value, 2) for value in os.getloadavg()]}
        sys.stdout.write(json.dumps({"machine": machine, **load, **figures}) + "\n")
    else:
        _print_tables(turns, batch_rows)


if __name__ == "__main__":
    typer.run(query_start)
