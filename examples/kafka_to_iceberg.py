"""Payments from Kafka, a balance for each account, every row in an Iceberg table, through kills.

    python examples/kafka_to_iceberg.py DIRECTORY

It starts a Kafka of its own, and produces payments for as long as the job is at work. The job's
driver is this program again (`run`), with slots on processes of this machine; a Spark session in
place of `LocalProcesses()` has them on a cluster. A slot gets SIGKILL, then the driver. The job is
stopped with a savepoint, and goes on from it with three subtasks in place of two. At the end SQL
compares topic and table. Exits with 1 when they differ.

It needs `pip install '/path/to/onceflow[iceberg,testing]' duckdb`, and Java 17 for Kafka.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import duckdb
import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchTableError

from onceflow import Checkpointing, FixedDelay, LocalProcesses, Pipeline, count, sum_
from onceflow.sinks import IcebergSink
from onceflow.sources import KafkaSource
from onceflow.testing import make_kafka

JOB, TABLE = "lake", "shop.payments"
PARTITIONS = 4
ACCOUNTS = 10
MORE = 2_000
"""Rows that readers of the table see more before what comes next."""
PAYMENT = "id BIGINT NOT NULL, account STRING NOT NULL, amount BIGINT NOT NULL"
COMPARISON = """
    WITH rows AS (SELECT id, account, amount FROM lake),
      chain AS (
        SELECT balance, n, sum(amount) OVER earlier AS total, count(*) OVER earlier AS number
        FROM lake WINDOW earlier AS (PARTITION BY account ORDER BY n, id)
      )
    SELECT (SELECT count(*) FROM topic) AS payments,
      (SELECT count(*) FROM (TABLE topic EXCEPT ALL TABLE rows)) AS missing,
      (SELECT count(*) FROM (TABLE rows EXCEPT ALL TABLE topic)) AS surplus,
      (SELECT count(*) FROM chain WHERE balance <> total OR n <> number) AS wrong_balances
"""


def catalog_of(directory: str) -> dict[str, str]:
    """Return the properties of the catalog: a SQLite file beside the data."""
    return {"uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/lake"}


def run(
    servers: str, topic: str, directory: str, parallelism: str, savepoint: str | None = None
) -> None:
    """Run the job until it is stopped, or killed."""
    pipeline = Pipeline(
        LocalProcesses(),
        name=JOB,
        parallelism=int(parallelism),
        checkpointing=Checkpointing(storage=f"{directory}/checkpoints", interval="500 ms"),
        restart=FixedDelay(attempts=10, delay_s=0.0),
    )
    source = KafkaSource(servers, topic=topic, schema=PAYMENT, starting_offsets="earliest")
    payments = pipeline.read(source, uid="payments")
    balances = payments.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    sink = IcebergSink(TABLE, catalog=catalog_of(directory), create=True, partition_by=("account",))
    balances.write(sink, uid="lake")
    pipeline.start(from_savepoint=savepoint).wait()


def survive(servers: str, topic: str, directory: str) -> None:
    """Run the job through two kills and a savepoint, until the table has all of the topic."""
    start = [sys.executable, __file__, "run", servers, topic, directory]
    with Path(directory, "job.log").open("ab") as log, _open_catalog(directory) as catalog:
        with _producing(servers, topic):
            job = subprocess.Popen([*start, "2"], stdout=log, stderr=log)
            _await_rows(catalog, job, MORE)
            slot = json.loads(_ask(directory, "status", "--json"))["slots"][0]
            print(f"kill -9 {slot['pid']}  (a slot, after {_rows_of(catalog)} rows)")
            os.kill(slot["pid"], signal.SIGKILL)
            _await_rows(catalog, job, _rows_of(catalog) + MORE)
            print(f"kill -9 {job.pid}  (the driver, after {_rows_of(catalog)} rows)")
            job.kill()
            job.wait()
            job = subprocess.Popen([*start, "2"], stdout=log, stderr=log)
            _await_rows(catalog, job, _rows_of(catalog) + MORE)
            savepoint = _ask(directory, "stop", "--savepoint").strip()
            print(f"stopped with {savepoint} after {_rows_of(catalog)} rows")
            job.wait()
            job = subprocess.Popen([*start, "3", savepoint], stdout=log, stderr=log)
            _await_rows(catalog, job, _rows_of(catalog) + MORE)
        _await_rows(catalog, job, read_topic(servers, topic).num_rows)
        _ask(directory, "stop")
        job.wait()


def compare(servers: str, topic: str, directory: str) -> dict[str, int]:
    """Return how many payments there are, and how many rows are missing, too many, or wrong."""
    with closing(duckdb.connect()) as database, _open_catalog(directory) as catalog:
        database.register("topic", read_topic(servers, topic))
        catalog.load_table(TABLE).scan().to_duckdb("lake", connection=database)
        found: dict[str, int] = database.sql(COMPARISON).to_arrow_table().to_pylist()[0]
    return found


def read_topic(servers: str, topic: str) -> pa.Table:
    """Return all payments of the topic."""
    settings = {"bootstrap.servers": servers, "group.id": "audit"}
    payments: list[dict[str, Any]] = []
    with closing(Consumer(settings)) as consumer:
        for number in range(PARTITIONS):
            partition = TopicPartition(topic, number, 0)
            _, end = consumer.get_watermark_offsets(partition, timeout=30)
            consumer.assign([partition])
            values: list[bytes | None] = []
            while len(values) < end:
                values += [one.value() for one in consumer.consume(end - len(values), 1.0)]
            payments += [json.loads(value or b"") for value in values]
    return pa.Table.from_pylist(payments)


@contextmanager
def _producing(servers: str, topic: str) -> Generator[None, None, None]:
    """Produce payments, at most 1,000 a second, until the block ends."""
    producer, enough = Producer({"bootstrap.servers": servers}), Event()

    def produce() -> None:
        ids = itertools.count()
        while not enough.wait(0.02):
            for number in itertools.islice(ids, 20):
                payment = {"id": number, "account": f"a{number % ACCOUNTS}", "amount": number % 97}
                producer.produce(topic, json.dumps(payment), partition=number // 7 % PARTITIONS)
            producer.poll(0)

    thread = Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
        producer.flush()


def _await_rows(catalog: Catalog, job: subprocess.Popen[bytes], rows: int) -> None:
    deadline = time.monotonic() + 300
    while (found := _rows_of(catalog)) < rows:
        if job.poll() is not None:
            raise SystemExit(f"the job ended with status {job.returncode}; job.log says why")
        if time.monotonic() > deadline:
            raise SystemExit(f"the table has {found} of {rows} rows after 300 s; job.log says why")
        time.sleep(0.2)


def _rows_of(catalog: Catalog) -> int:
    """Return how many rows readers of the table see."""
    try:
        snapshot = catalog.load_table(TABLE).current_snapshot()
    except NoSuchTableError:
        return 0
    summary = snapshot.summary if snapshot else None
    return int(summary["total-records"] or 0) if summary else 0


def _open_catalog(directory: str) -> closing[Catalog]:
    return closing(load_catalog("default", **catalog_of(directory)))


def _ask(directory: str, *arguments: str) -> str:
    """Run `onceflow` for the job; return what it prints."""
    program = [sys.executable, "-m", "onceflow.cli.main", *arguments, JOB]
    return subprocess.check_output([*program, "--storage", f"{directory}/checkpoints"], text=True)


def main(directory: str) -> int:
    """Start a Kafka, run the job, compare; return the exit status."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    with make_kafka() as kafka:
        topic = kafka.create_topic("payments", PARTITIONS)
        survive(kafka.bootstrap_servers, topic, directory)
        found = compare(kafka.bootstrap_servers, topic, directory)
    print(found)
    return int(any(count for name, count in found.items() if name != "payments"))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1]))
