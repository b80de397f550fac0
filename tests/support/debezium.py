"""Debezium itself: its connector for Postgres in a standalone worker of Kafka Connect."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from onceflow.integration.servers.kafka_jars import KAFKA_VERSION, jars_of, java_command
from onceflow.integration.servers.process import LOOPBACK, free_port

_VERSION = "3.3.1.Final"
_JARS = (
    ("io.debezium", "debezium-connector-postgres", _VERSION),
    ("org.apache.kafka", "connect-runtime", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)
_START_S = 180.0
_CONNECTOR = "orders"


@contextmanager
def debezium(
    directory: Path, url: str, servers: str, *, table: str, prefix: str, schemas: bool
) -> Generator[None, None, None]:
    """Have the changes of `table` in the database `url` written to the topic `prefix.table`.

    Runs when this yields; what was in the table before comes first. Fetched once (40 MB).

    Args:
        directory: Of its settings, position and log.
        url: A Postgres with `wal_level=logical`, and a user who may replicate.
        servers: Of Kafka.
        table: With its schema: `public.orders`.
        prefix: Of the topic, and the name of the replication slot.
        schemas: Whether each record has its schema beside it.
    """
    port, database = free_port(), urlsplit(url)
    home = jars_of(f"debezium-{_VERSION}", _JARS, f"Debezium {_VERSION} (40 MB, once)")
    described = str(schemas).lower()
    worker = {
        "bootstrap.servers": servers,
        "listeners": f"http://{LOOPBACK}:{port}",
        "offset.storage.file.filename": directory / "positions",
        "offset.flush.interval.ms": 1000,
        "key.converter": "org.apache.kafka.connect.json.JsonConverter",
        "key.converter.schemas.enable": described,
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter.schemas.enable": described,
    }
    connector = {
        "name": _CONNECTOR,
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": database.hostname,
        "database.port": database.port,
        "database.user": database.username,
        "database.password": database.password or "",
        "database.dbname": database.path.lstrip("/"),
        "plugin.name": "pgoutput",
        "publication.autocreate.mode": "filtered",
        "slot.name": prefix,
        "topic.prefix": prefix,
        "table.include.list": table,
        "topic.creation.default.partitions": 2,
        "topic.creation.default.replication.factor": 1,
    }
    for name, settings in (("worker", worker), ("connector", connector)):
        lines = [f"{key}={value}\n" for key, value in settings.items()]
        (directory / f"{name}.properties").write_text("".join(lines))
    log = directory / "debezium.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(java_command(), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                *("-cp", f"{home}/*", "org.apache.kafka.connect.cli.ConnectStandalone"),
                *("worker.properties", "connector.properties"),
            ],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _await(f"http://{LOOPBACK}:{port}/connectors/{_CONNECTOR}/status", process, log)
            yield
        finally:
            process.kill()
            process.wait(30)


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the connector's task runs."""
    until = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if response.read().count(b"RUNNING") >= 2:  # the connector and its task
                    return
        except OSError:
            pass
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < until, log.read_text(errors="replace")[-4000:]
        time.sleep(0.1)
