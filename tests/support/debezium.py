"""Debezium itself: its connector for Postgres in a standalone worker of Kafka Connect."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.program import Program

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
    command = (
        *(java_command(), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        *("-cp", f"{home}/*", "org.apache.kafka.connect.cli.ConnectStandalone"),
        *("worker.properties", "connector.properties"),
    )
    status = f"http://{LOOPBACK}:{port}/connectors/{_CONNECTOR}/status"
    with Program(log, *command, cwd=directory) as program:
        # The connector and its task.
        program.wait_until(lambda: program.read_page(status).count(b"RUNNING") >= 2, _START_S)
        yield
