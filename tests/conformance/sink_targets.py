"""Targets of our own sinks on servers: each asks its server itself what a reader sees."""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pyarrow as pa
from psycopg import sql
from tests.integration.kafka_sink_kit import await_markers, messages

from onceflow.core.protocol.committables import Committable
from onceflow.core.spi import Sink
from onceflow.integration.conformance import NotTestable, SinkTarget
from onceflow.integration.conformance.target import ROWS
from onceflow.integration.servers.kafka import delete_topics
from onceflow.integration.servers.kinds import OwnDatabase, OwnKafka
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.sinks import KafkaSink, MySQLSink, PostgresSink

USER = "kit"
PASSWORD = "correct-horse-battery-staple"
DATABASE = "conformance"
TABLE = "CREATE TABLE kept_rows (id bigint PRIMARY KEY, account varchar(50), amount integer)"

_MARKED_S = 10.0
_MARKED_AFTER_DEATH_S = 30.0
# A broker that is away is asked for so long, call by call; one that is there answers at once.
_AWAY_S = 8.0
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class DatabaseTarget(SinkTarget):
    """The table `kept_rows` of one database on a server that the test may kill."""

    def __init__(self, server: OwnDatabase, settings: Mapping[str, Any] = _NOTHING) -> None:
        self.server = server
        self.settings = settings

    @abstractmethod
    def sink_of(self, url: str) -> Sink:
        """Return the sink that writes to the database at `url`."""

    def url(self, host: str, port: int) -> str:
        """Return the URL that the sink's user is given, with a password."""
        parts = urlsplit(self.server.database_url(DATABASE))
        return urlunsplit(parts._replace(netloc=f"{USER}:{PASSWORD}@{host}:{port}"))

    def sink(self) -> Sink:
        return self.sink_of(self.url(*self.address()))

    def sink_at(self, host: str, port: int) -> Sink:
        return self.sink_of(self.url(host, port))

    def address(self) -> tuple[str, int]:
        return self.server.host, self.server.port

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return a key that is there twice, or, where only values are looked at, one too large."""
        if self.settings.get("commit_mode") == "two_phase" and "write_mode" not in self.settings:
            return self.batch([*ids, ids[0]])
        good = self.batch(ids)
        amounts = pa.array([2**40, *[0] * (len(ids) - 1)], pa.int64())
        return pa.RecordBatch.from_arrays([*good.columns[:2], amounts], schema=good.schema)

    def secrets(self) -> Sequence[str]:
        return [PASSWORD]

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def pause(self) -> None:
        self.server.pause()

    def unpause(self) -> None:
        self.server.unpause()


class PostgresTarget(DatabaseTarget):
    """A Postgres database; `create` makes it and its table, once."""

    def create(self) -> None:
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            role = sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}")
            connection.execute(role.format(sql.Identifier(USER), sql.Literal(PASSWORD)))
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        with psycopg.connect(self.server.database_url(DATABASE), autocommit=True) as connection:
            connection.execute(TABLE)

    def sink_of(self, url: str) -> Sink:
        return PostgresSink(url, table="kept_rows", primary_key=("id",), **self.settings)

    def rows(self) -> list[dict[str, object]]:
        with psycopg.connect(self.server.database_url(DATABASE)) as connection:
            cursor = connection.execute("SELECT id, account, amount FROM kept_rows")
            return [dict(zip(ROWS.names, row, strict=True)) for row in cursor]

    def lose(self, committable: Committable) -> None:
        name = sql.Literal(str(committable.transaction))
        with psycopg.connect(self.server.database_url(DATABASE), autocommit=True) as connection:
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(name))


class MySQLTarget(DatabaseTarget):
    """A database of MySQL or MariaDB; `create` makes it and its table, once."""

    def create(self) -> None:
        with MySQLAdmin.session(self.server.url) as admin:
            admin.create_database(DATABASE)
            admin.rows(f"CREATE USER {USER}@'%' IDENTIFIED BY '{PASSWORD}'")
            admin.rows(f"GRANT ALL ON *.* TO {USER}@'%'")
        with MySQLAdmin.session(self.server.database_url(DATABASE)) as admin:
            admin.rows(TABLE)

    def sink_of(self, url: str) -> Sink:
        return MySQLSink(url, table="kept_rows", primary_key=("id",), **self.settings)

    def rows(self) -> list[dict[str, object]]:
        with MySQLAdmin.session(self.server.database_url(DATABASE)) as admin:
            found = admin.rows("SELECT id, account, amount FROM kept_rows")
        return [dict(zip(ROWS.names, row, strict=True)) for row in found]

    def lose(self, committable: Committable) -> None:
        name = str(committable.transaction).encode().hex()
        with MySQLAdmin.session(self.server.url) as admin:
            admin.roll_back({xid for xid in admin.in_doubt() if name in xid.lower()})


class KafkaTarget(SinkTarget):
    """A topic of its own on a broker that the test may kill, read as read_committed consumers do.

    A broker tells its clients its own address, so a network in between would be left at once.
    """

    def __init__(self, broker: OwnKafka, settings: Mapping[str, Any] = _NOTHING) -> None:
        self._broker = broker
        self._settings = settings
        self._topic = broker.create_topic(f"rows-{secrets.token_hex(4)}", partitions=2)
        # Waited for in vain where a commit is begun, which the transaction must outlast.
        self._marked_s = _MARKED_S

    def sink(self) -> Sink:
        settings: dict[str, Any] = {"deadline_s": _AWAY_S, **self._settings}
        return KafkaSink(self._broker.bootstrap_servers, topic=self._topic, **settings)

    def rows(self) -> list[dict[str, object]]:
        # What is committed is seen when its partitions are marked, which a broker does afterwards.
        await_markers(self._broker.bootstrap_servers, self._topic, timeout_s=self._marked_s)
        found = messages(self._broker.bootstrap_servers, self._topic)
        return [json.loads(message.value() or b"") for message in found]

    def close(self) -> None:
        delete_topics(self._broker.bootstrap_servers, [self._topic])

    def secrets(self) -> Sequence[str]:
        raise NotTestable("the broker of the tests asks for no password")

    def kill(self) -> None:
        self._broker.kill()

    def start(self) -> None:
        self._broker.start()
        self._marked_s = _MARKED_AFTER_DEATH_S

    def pause(self) -> None:
        self._broker.pause()

    def unpause(self) -> None:
        self._broker.unpause()
        self._marked_s = _MARKED_AFTER_DEATH_S
