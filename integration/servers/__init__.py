"""Real servers for tests, demonstrations and benchmarks."""

from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.kinds import (
    DatabaseServer,
    KafkaServer,
    MySQLServer,
    PostgresServer,
    ServerKind,
)
from onceflow.integration.servers.mysql import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.integration.servers.process import ServerError

__all__ = [
    "DatabaseServer",
    "EmbeddedKafka",
    "EmbeddedMariaDB",
    "EmbeddedMySQL",
    "EmbeddedPostgres",
    "KafkaServer",
    "MySQLServer",
    "PostgresServer",
    "ServerError",
    "ServerKind",
]
