"""Kafka Connect: Debezium's JDBC sink connector, which inserts or upserts."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.scoreboard.contestant import Contestant, Deployment, NotRun, Place, Role, Say, Way
from onceflow.integration.servers.kafka_jars import KAFKA_VERSION, Progress, jars_of, java_command
from onceflow.integration.servers.server import ServerError, free_port

_DEBEZIUM = "3.5.0.Final"
_JARS = (
    ("org.apache.kafka", "connect-runtime", KAFKA_VERSION),
    ("org.apache.kafka", "connect-json", KAFKA_VERSION),
    ("io.debezium", "debezium-connector-jdbc", _DEBEZIUM),
    ("org.postgresql", "postgresql", "42.7.7"),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)
_LOOK_S = 1.0
_HTTP_TIMEOUT_S = 5.0


class Connect(Contestant):
    """A worker of Kafka Connect, whose failed tasks a supervisor restarts by the REST API."""

    engine = f"Kafka Connect {KAFKA_VERSION}"
    record_format = "json with a schema"
    no_totals = "Kafka Connect copies records and has no state of its own."
    links = (
        "https://debezium.io/documentation/reference/stable/connectors/jdbc.html",
        "https://kafka.apache.org/documentation/#connect",
    )

    def __init__(self, way: Way) -> None:
        self.way = way
        self.name = f"connect-{way}"
        self.sink = f"Debezium JDBC sink {_DEBEZIUM}, insert.mode " + (
            "upsert" if way == "upsert" else "insert"
        )
        self.claim = (
            "at least once, effectively once by key" if way == "upsert" else "at least once"
        )
        self.settings = (
            "a distributed worker, tasks.max 2, offset.flush.interval.ms 1000",
            "consumer session.timeout.ms 6000, so that a killed member leaves its group sooner",
            "records carry their schema, as JsonConverter needs it",
            "the worker is started again, and failed tasks are restarted by the REST API",
            "primary.key.mode record_value, primary.key.fields id"
            if way == "upsert"
            else "primary.key.mode none",
        )

    def install(self, say: Say) -> None:
        """Fetch the jars of Connect and of the connector."""
        try:
            _find_jars(say)
        except ServerError as error:
            raise NotRun(str(error)) from error

    def deploy(self, place: Place) -> Deployment:
        """Return a worker, in which the connector is created once."""
        jars = _find_jars(lambda _: None)
        connector = {
            "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
            "tasks.max": "2",
            "topics": place.topic,
            "connection.url": place.jdbc_url,
            "connection.username": "postgres",
            "connection.password": "postgres",
            "insert.mode": "upsert" if self.way == "upsert" else "insert",
            "primary.key.mode": "record_value" if self.way == "upsert" else "none",
            "schema.evolution": "none",
            "collection.name.format": "payments",
        }
        if self.way == "upsert":
            connector["primary.key.fields"] = "id"
        return _Worker(place, jars, connector)


class _Worker(Deployment):
    def __init__(self, place: Place, jars: Path, connector: Mapping[str, str]) -> None:
        self._place = place
        self._jars = jars
        self._connector = connector
        self._rest_port = 0
        self._look_at = 0.0
        role = Role("worker", self._make_command)
        super().__init__([role], place.directory, coordinator="worker", worker="worker")

    def supervise(self) -> None:
        """Start the worker again, create the connector, and restart failed tasks."""
        super().supervise()
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        with suppress(OSError, ValueError):
            if not self._call("GET", "/connectors"):
                self._call("PUT", "/connectors/payments/config", self._connector)
                return
            status = self._call("GET", "/connectors/payments/status")
            if isinstance(status, dict) and "FAILED" in json.dumps(status):
                self._call("POST", "/connectors/payments/restart?includeTasks=true&onlyFailed=true")

    def _call(self, method: str, path: str, body: Mapping[str, str] | None = None) -> object:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._rest_port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            raise ValueError(error.read()) from error
        return json.loads(text) if text else None

    def _make_command(self) -> Sequence[object]:
        # A frozen worker keeps its port.
        self._rest_port = free_port()
        settings = {
            "bootstrap.servers": self._place.bootstrap_servers,
            "group.id": "scoreboard-connect",
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            "value.converter.schemas.enable": "true",
            "offset.flush.interval.ms": 1000,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 2000,
            "scheduled.rebalance.max.delay.ms": 0,
            "consumer.session.timeout.ms": 6000,
            "consumer.heartbeat.interval.ms": 2000,
            "consumer.auto.offset.reset": "earliest",
            "listeners": f"http://127.0.0.1:{self._rest_port}",
            "rest.advertised.host.name": "127.0.0.1",
            "plugin.discovery": "only_scan",
        }
        for kind in ("offset", "config", "status"):
            settings[f"{kind}.storage.topic"] = f"scoreboard-connect-{kind}"
            settings[f"{kind}.storage.replication.factor"] = 1
        path = self._place.directory / f"worker-{self._rest_port}.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        options = ("-Xmx768m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        return (java_command(), *options, "-cp", f"{self._jars}{os.sep}*", main, path)


def _find_jars(progress: Progress) -> Path:
    return jars_of(
        f"kafka-connect-{KAFKA_VERSION}-debezium-jdbc-{_DEBEZIUM}",
        _JARS,
        "Kafka Connect and Debezium's JDBC sink",
        progress=progress,
    )
