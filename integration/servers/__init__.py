"""Real servers for tests, demonstrations and benchmarks."""

from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.kinds import (
    DatabaseServer,
    KafkaServer,
    MySQLServer,
    OwnDatabase,
    OwnKafka,
    OwnS3,
    PostgresServer,
    S3Server,
    ServerKind,
    make_kafka,
    make_mariadb,
    make_mysql,
    make_postgres,
    make_s3,
)
from onceflow.integration.servers.mysql import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.integration.servers.s3 import EmbeddedS3
from onceflow.integration.servers.server import Server, ServerError

__all__ = [
    "DatabaseServer",
    "EmbeddedKafka",
    "EmbeddedMariaDB",
    "EmbeddedMySQL",
    "EmbeddedPostgres",
    "EmbeddedS3",
    "KafkaServer",
    "MySQLServer",
    "OwnDatabase",
    "OwnKafka",
    "OwnS3",
    "PostgresServer",
    "S3Server",
    "Server",
    "ServerError",
    "ServerKind",
    "make_kafka",
    "make_mariadb",
    "make_mysql",
    "make_postgres",
    "make_s3",
]
