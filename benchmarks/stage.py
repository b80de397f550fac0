"""The stage of all scenarios: the servers, a topic of payments, and a process for each run."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import psycopg
from psycopg import sql
from tests.support.program import Program, python
from tests.support.servers.database_packages import offer_packages
from tests.support.servers.s3 import EmbeddedS3
from typing_extensions import LiteralString

from benchmarks.discarding_sink import DiscardingSink
from benchmarks.job_spec import Database, JobResult, JobSpec
from onceflow.core.errors import OnceflowError
from onceflow.integration.faults.processes import children_of, kill_process
from onceflow.integration.judge import verify
from onceflow.integration.servers import (
    EmbeddedKafka,
    EmbeddedMariaDB,
    EmbeddedMySQL,
    EmbeddedPostgres,
)
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.integration.workload import Payments, produce

ROOT = Path(__file__).resolve().parent.parent
_DRIVER_TIMEOUT_S = 1000.0


class BenchmarkError(OnceflowError):
    """Raised when a run came to no figure: the driver failed, or what it left is wrong."""

    domain = "external"
    retry = "never"


class Stage:
    """Owns the servers, the topic and all files; a context manager. One run at a time."""

    def __init__(self, payments: Payments) -> None:
        self.payments = payments
        self._stack = ExitStack()
        self.directory = Path()
        self._runs = 0
        self._mysql: dict[str, EmbeddedMySQL | EmbeddedMariaDB] = {}
        self._s3: EmbeddedS3 | None = None

    def __enter__(self) -> Stage:
        self.directory = Path(tempfile.mkdtemp(prefix="onceflow-bench-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        try:
            self.postgres = self._stack.enter_context(EmbeddedPostgres())
            self.kafka = self._stack.enter_context(EmbeddedKafka())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def server_pids(self) -> dict[str, int]:
        """The root process of each server that runs."""
        pids = {"postgres": self.postgres.pid, "kafka": self.kafka.pid}
        pids |= {kind: server.pid for kind, server in self._mysql.items()}
        return {name: pid for name, pid in pids.items() if pid is not None}

    def fill(self, topic: str = "payments") -> str:
        """Return `topic` with every payment in it."""
        self.kafka.create_topic(topic, self.payments.partitions)
        produce(self.payments, self.kafka.bootstrap_servers, topic)
        return topic

    @contextmanager
    def database(self, kind: Database = "postgres") -> Generator[str, None, None]:
        """Yield the URL of a database for the block, new and empty.

        MySQL and MariaDB run from the first one that is asked of them.
        """
        self._runs += 1
        name = f"bench_{self._runs}"
        if kind == "postgres":
            self._administer("CREATE DATABASE {}", name)
            try:
                yield self.postgres.database_url(name)
            finally:
                self._administer("DROP DATABASE {} WITH (FORCE)", name)
                # What one run has left to write would be written during the next.
                self._administer("CHECKPOINT")
            return
        server = self._running(kind)
        with MySQLAdmin.session(server.url) as admin:
            admin.create_database(name)
        try:
            yield server.database_url(name)
        finally:
            with MySQLAdmin.session(server.url) as admin:
                admin.end_sessions_of(name)
                # One run at a time: whatever is prepared is this one's.
                admin.roll_back(admin.in_doubt())
                admin.drop_database(name)

    def _running(self, kind: Literal["mysql", "mariadb"]) -> EmbeddedMySQL | EmbeddedMariaDB:
        if kind not in self._mysql:
            server: EmbeddedMySQL | EmbeddedMariaDB
            # A MariaDB that starts deletes other servers' work from a directory that it shares.
            temporary = self.directory / f"{kind}-tmp"
            temporary.mkdir()
            options = {"tmpdir": str(temporary)}
            offer_packages()
            server = EmbeddedMySQL(options) if kind == "mysql" else EmbeddedMariaDB(options)
            self._stack.callback(server.stop)
            self._mysql[kind] = server.start()
        return self._mysql[kind]

    def _bucket(self, name: str) -> tuple[str, dict[str, str]]:
        """Return a bucket's URL and the environment that leads there; runs the server from then."""
        if self._s3 is None:
            self._s3 = self._stack.enter_context(EmbeddedS3())
        return f"s3://{self._s3.create_bucket(name)}", self._s3.environment

    def run(self, spec: JobSpec) -> JobResult:
        """Run a job in a process of its own and return its figures, once what it wrote is right.

        Raises:
            BenchmarkError: The job failed, or a row is missing, doubled or wrong.
        """
        with self.prepared(spec) as ready, DriverProcess(ready) as driver:
            return driver.result()

    @contextmanager
    def prepared(self, spec: JobSpec) -> Generator[Ready, None, None]:
        """Yield `spec` with a database and files of its own; after the block its rows are proven.

        Raises:
            BenchmarkError: A row is missing, doubled or wrong.
        """
        kind: Database = "postgres" if spec.sink == "discard" else spec.sink
        with self.database(kind) as url:
            directory = Path(tempfile.mkdtemp(dir=self.directory))
            storage_url, environment = f"{directory}/checkpoints", dict[str, str]()
            if spec.storage == "bucket":
                storage_url, environment = self._bucket(f"run-{self._runs}")
            spec = msgspec.structs.replace(
                spec,
                bootstrap_servers=self.kafka.bootstrap_servers,
                database_url=url,
                directory=str(directory),
                storage_url=storage_url,
                server_pids=self.server_pids,
            )
            try:
                yield Ready(spec, directory, environment)
                self._verify(spec)
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def _verify(self, spec: JobSpec) -> None:
        if spec.sink == "discard":
            rows = DiscardingSink(spec.directory).rows()
            if rows != spec.records:
                raise BenchmarkError(f"{rows} rows reached the sink instead of {spec.records}")
        elif spec.source == "kafka":
            verdict = verify(spec.database_url, spec.table, self.payments)
            if not verdict.ok:
                raise BenchmarkError(f"the table is wrong after {spec}: {verdict}")

    def _administer(self, statement: LiteralString, *names: str) -> None:
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*(sql.Identifier(name) for name in names)))


@dataclass(frozen=True, slots=True)
class Ready:
    """The things that a driver is started with."""

    spec: JobSpec
    directory: Path
    environment: Mapping[str, str]


class DriverProcess:
    """A driver that runs a job in a process, and a session of Spark, of its own.

    A context manager: after the block none of its processes is left.
    """

    def __init__(self, ready: Ready) -> None:
        """Start it."""
        self._spec = ready.spec
        self._result = ready.directory / "result.json"
        spec_path = ready.directory / "spec.json"
        spec_path.write_bytes(msgspec.json.encode(ready.spec))
        self.began_at_s = time.time()
        self._program = Program(
            ready.directory / "driver.log",
            *python("-m", "benchmarks.job", spec_path, self._result),
            environment={**ready.environment, "PYSPARK_PYTHON": sys.executable},
        )

    def __enter__(self) -> DriverProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.kill_tree()

    def result(self) -> JobResult:
        """Return what the job measured, once it has ended.

        Raises:
            BenchmarkError: It failed; quotes the end of what it said.
        """
        if self._program.wait(_DRIVER_TIMEOUT_S) != 0:
            raise self._failed()
        return msgspec.json.decode(self._result.read_bytes(), type=JobResult)

    def check_alive(self) -> None:
        """Return when the process runs.

        Raises:
            BenchmarkError: It has ended; quotes the end of what it said.
        """
        if self._program.poll() is not None:
            raise self._failed()

    def kill(self) -> None:
        """SIGKILL the driver and its JVM, as a dying machine would; slots are left on their own."""
        for victim in (self._program.pid, *children_of(self._program.pid)):
            kill_process(victim)
        self._program.wait()

    def _failed(self) -> BenchmarkError:
        status, tail = self._program.poll(), self._program.tail()
        return BenchmarkError(f"the driver of {self._spec} ended with {status}:\n{tail}")
