"""Real servers for tests, demonstrations and benchmarks."""

from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.kinds import (
    DatabaseServer,
    KafkaServer,
    MySQLServer,
    OwnDatabase,
    OwnKafka,
    PostgresServer,
    ServerKind,
    make_kafka,
    make_mariadb,
    make_mysql,
    make_postgres,
)
from onceflow.integration.servers.mysql import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.integration.servers.server import Server, ServerError

__all__ = [
    "DatabaseServer",
    "EmbeddedKafka",
    "EmbeddedMariaDB",
    "EmbeddedMySQL",
    "EmbeddedPostgres",
    "KafkaServer",
    "MySQLServer",
    "OwnDatabase",
    "OwnKafka",
    "PostgresServer",
    "Server",
    "ServerError",
    "ServerKind",
    "make_kafka",
    "make_mariadb",
    "make_mysql",
    "make_postgres",
]
