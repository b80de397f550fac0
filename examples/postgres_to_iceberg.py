"""A Postgres table, copied to Iceberg and followed through kills, while a program changes it.

    python examples/postgres_to_iceberg.py DIRECTORY

It starts a Postgres of its own with a table of 100,000 orders, which a program inserts, updates,
moves to other keys and deletes for as long as the job runs. The job copies the table and follows
its changes. Its driver is this program again (`run`), with slots on processes of this machine. A
slot and the driver get SIGKILL during the first copy, and again while changes stream. At the end
the program compares a hash of the table with a hash of the copy. Exits with 1 if they differ.

It needs `pip install '/path/to/onceflow[cli,iceberg,postgres,testing]'`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import psycopg
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchTableError

from onceflow import Checkpointing, FixedDelay, LocalProcesses, Pipeline
from onceflow.sinks import IcebergSink
from onceflow.sources import PostgresChanges
from onceflow.testing import make_postgres

JOB, COPY = "orders", "shop.orders"
ROWS = 100_000
_TIMEOUT_S = 240.0
_CREATE = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, state text NOT NULL, cents numeric(12, 2),"
    " at timestamptz)"
)
_FILL = """
    INSERT INTO orders SELECT i, 'new', i %% 977 + 0.25, '2026-01-01 00:00Z'
    FROM generate_series(1, %s) i
"""
_CHANGES = (
    "INSERT INTO orders VALUES (%(id)s, 'new', 1.50, now()) ON CONFLICT DO NOTHING",
    "UPDATE orders SET state = state || '.', at = now() WHERE id = %(id)s",
    (
        "UPDATE orders SET id = %(other)s WHERE id = %(id)s"
        " AND NOT EXISTS (SELECT FROM orders WHERE id = %(other)s)"
    ),
    "DELETE FROM orders WHERE id = %(id)s",
)
_SLOT_LSN = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"


def catalog_of(directory: str) -> dict[str, str]:
    """Return the properties of the catalog: a SQLite file beside the data."""
    return {"uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/lake"}


def run(url: str, directory: str) -> None:
    """Run the job until it is stopped, or killed."""
    pipeline = Pipeline(
        LocalProcesses(),
        name=JOB,
        parallelism=2,
        checkpointing=Checkpointing(storage=f"{directory}/checkpoints", interval="500 ms"),
        restart=FixedDelay(attempts=20, delay_s=0.1),
    )
    orders = PostgresChanges(url, table="orders", chunk_rows=2_000)
    copy = IcebergSink(
        COPY,
        catalog=catalog_of(directory),
        create=True,
        write_mode="upsert",
        primary_key=("id",),
        operation_column="_op",
        partition_by=("bucket(8, id)",),
    )
    pipeline.read(orders, uid="orders").write(copy, uid="lake")
    pipeline.start().wait()


def fill(url: str) -> None:
    """Create the table with its first rows."""
    with psycopg.connect(url) as connection:
        connection.execute(_CREATE)
        connection.execute(_FILL, [ROWS])


def survive(url: str, directory: str) -> int:
    """Run the job through four kills until the copy equals the table; return the number of changes.

    The program that changes the table stops first, because equality needs a table that stands
    still.
    """
    start = [sys.executable, __file__, "run", url, directory]
    with Path(directory, "job.log").open("ab") as log, _open_catalog(directory) as catalog:
        job = subprocess.Popen(start, stdout=log, stderr=log)

        def wait_for(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + _TIMEOUT_S
            while not condition():
                if job.poll() is not None:
                    raise SystemExit(f"the job ended with {job.returncode}; job.log says why")
                if time.monotonic() > deadline:
                    raise SystemExit(f"no progress for {_TIMEOUT_S:.0f} s; job.log says why")
                time.sleep(0.1)

        def wait_for_version() -> None:
            """Wait until readers see another version of the copy."""
            version = _count_versions(catalog)
            wait_for(lambda: _count_versions(catalog) > version)

        def wait_for_stream() -> None:
            """Wait until the slot moves, because changes of the stream were decided."""
            lsn = _slot_lsn(url)
            wait_for(lambda: _slot_lsn(url) != lsn)

        with _changing(url) as count_changes:
            for phase in ("the first copy", "the stream"):
                if phase == "the first copy":
                    wait_for(lambda: _count_copied(catalog) > 0)
                else:
                    wait_for_stream()
                slot = json.loads(_ask(directory, "status", "--json"))["slots"][0]["pid"]
                _kill(slot, f"a slot, in {phase}", catalog)
                wait_for_version()
                _kill(job.pid, f"the driver, in {phase}", catalog)
                job.wait()
                job = subprocess.Popen(start, stdout=log, stderr=log)
            wait_for_stream()
            changes = count_changes()
        truth = read_table(url)
        wait_for(lambda: read_copy(catalog) == truth)
        _ask(directory, "stop")
        job.wait()
    return changes


def read_table(url: str) -> tuple[int, str]:
    """Return the number of the table's rows and a hash of all of them."""
    with psycopg.connect(url) as connection:
        rows = connection.execute("SELECT id, state, cents, at FROM orders ORDER BY id").fetchall()
    return _hash(rows)


def read_copy(catalog: Catalog) -> tuple[int, str]:
    """Return the same of the copy, as readers of Iceberg see it."""
    table = catalog.load_table(COPY).scan().to_arrow().sort_by("id")
    columns = [table[name].to_pylist() for name in ("id", "state", "cents", "at")]
    return _hash(zip(*columns, strict=True))


def _hash(rows: Iterable[tuple[object, ...]]) -> tuple[int, str]:
    digest, count = hashlib.sha256(), 0
    for id_, state, cents, at in rows:
        digest.update(f"{id_}|{state}|{cents}|{at:%s.%f}\n".encode())
        count += 1
    return count, digest.hexdigest()


@contextmanager
def _changing(url: str) -> Generator[Callable[[], int], None, None]:
    """Change the table in small transactions, also its keys, until the block ends."""
    enough, draw, count = Event(), random.Random(1), [0]  # noqa: S311 - a load

    def change() -> None:
        with psycopg.connect(url) as connection:
            while not enough.wait(0.005):
                for _ in range(draw.randrange(1, 8)):
                    id_, other = draw.randrange(2 * ROWS), draw.randrange(2 * ROWS)
                    statement = draw.choice(_CHANGES)
                    count[0] += connection.execute(statement, {"id": id_, "other": other}).rowcount
                connection.rollback() if draw.random() < 0.05 else connection.commit()

    thread = Thread(target=change)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        enough.set()
        thread.join()


def _slot_lsn(url: str) -> str:
    """Return the position of the slot, which moves when changes of the stream are decided."""
    with psycopg.connect(url) as connection:
        row = connection.execute(_SLOT_LSN).fetchone()
    return str(row[0]) if row else ""


def _kill(pid: int, who: str, catalog: Catalog) -> None:
    print(f"kill -9 {pid}  ({who}; readers see {_count_copied(catalog):,} rows)", flush=True)
    os.kill(pid, signal.SIGKILL)


def _count_copied(catalog: Catalog) -> int:
    try:
        snapshot = catalog.load_table(COPY).current_snapshot()
    except NoSuchTableError:
        return 0
    summary = snapshot.summary if snapshot else None
    return int(summary["total-records"] or 0) if summary else 0


def _count_versions(catalog: Catalog) -> int:
    return len(catalog.load_table(COPY).snapshots())


def _open_catalog(directory: str) -> closing[Catalog]:
    return closing(load_catalog("default", **catalog_of(directory)))


def _ask(directory: str, *arguments: str) -> str:
    """Run `onceflow` for the job; return what it prints."""
    program = [sys.executable, "-m", "onceflow.cli.main", *arguments, JOB]
    return subprocess.check_output([*program, "--storage", f"{directory}/checkpoints"], text=True)


def main(directory: str) -> int:
    """Start a Postgres, run the job, compare; return the exit status."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    began_at = time.monotonic()
    with make_postgres({"wal_level": "logical"}) as server, _open_catalog(directory) as catalog:
        fill(server.url)
        changes = survive(server.url, directory)
        table, copy = read_table(server.url), read_copy(catalog)
    for name, (rows, digest) in (("Postgres", table), ("Iceberg", copy)):
        print(f"{name:8}  {rows:7,} rows  sha256 {digest}")
    verdict = "The copy equals the table" if table == copy else "The copy differs from the table"
    print(f"{verdict}: {changes:,} changes, 4 kills, {time.monotonic() - began_at:.0f} s.")
    return int(table != copy)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1]))
