"""Tests the plugin's fixtures on each kind of server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from onceflow.integration.pytest_plugin import DatabaseFactory, KafkaFactory, TopicFactory
from onceflow.integration.servers import KafkaServer, ServerKind
from onceflow.integration.servers.kinds import find_kind
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.integration.servers.process import ServerProcess

if TYPE_CHECKING:
    from onceflow.integration.servers import DatabaseServer

_seen_topics: set[str] = set()


def test_switch_gives_servers_of_the_kind_that_it_names(
    onceflow_postgres: DatabaseServer,
    onceflow_mysql: DatabaseServer,
    onceflow_mariadb: DatabaseServer,
    onceflow_kafka: KafkaServer,
) -> None:
    servers = (onceflow_postgres, onceflow_mysql, onceflow_mariadb, onceflow_kafka)
    if find_kind() is ServerKind.EMBEDDED:
        assert all(isinstance(server, ServerProcess) for server in servers)
        return
    from onceflow.integration.servers.container import ContainerServer

    assert [server.image for server in servers if isinstance(server, ContainerServer)] == [
        "postgres:18",
        "mysql:9",
        "mariadb:11",
        "apache/kafka:4.2.1",
    ]


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_test_has_databases_of_its_own(
    turn: str, postgres_database: str, mysql_database: str, mariadb_database: str
) -> None:
    """The same names twice: the second test would find what the first one left."""
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (i int)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'left in doubt'")
    for url in (mysql_database, mariadb_database):
        with MySQLAdmin.session(url) as admin:
            admin.rows("CREATE TABLE t (i int PRIMARY KEY)")
            assert admin.in_doubt() == set(), turn
            admin.rows("XA START 'left in doubt'")
            admin.rows("INSERT INTO t VALUES (1)")
            admin.rows("XA END 'left in doubt'")
            admin.rows("XA PREPARE 'left in doubt'")


@pytest.mark.parametrize("turn", ["first", "second"])
def test_each_test_has_topics_of_its_own(turn: str, kafka_topic: TopicFactory) -> None:
    topics = {kafka_topic(), kafka_topic(3)}
    assert len(topics) == 2, turn
    assert not topics & _seen_topics
    _seen_topics.update(topics)


def test_factories_give_servers_that_a_test_may_kill_while_others_live(
    postgres_server: DatabaseFactory, postgres_database: str
) -> None:
    server = postgres_server({"max_connections": "17"})
    with psycopg.connect(server.url) as connection:
        assert connection.execute("SHOW max_connections").fetchone() == ("17",)
    server.kill()
    with psycopg.connect(postgres_database) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_two_brokers_do_not_know_each_other(
    kafka_server: KafkaFactory, onceflow_kafka: KafkaServer
) -> None:
    own = kafka_server()
    own.create_topic("same-name")
    # Refused if it were the same broker: a topic that exists is.
    onceflow_kafka.create_topic("same-name")
