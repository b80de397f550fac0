"""Real servers for tests, demonstrations and benchmarks."""

from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.kinds import KafkaServer, PostgresServer, ServerKind
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.integration.servers.process import ServerError

__all__ = [
    "EmbeddedKafka",
    "EmbeddedPostgres",
    "KafkaServer",
    "PostgresServer",
    "ServerError",
    "ServerKind",
]
