"""Real servers for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.imports import lazy_names

# Lazy names: a module that needs one server does not import the clients of the others.
if TYPE_CHECKING:
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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.integration.servers.kafka": "EmbeddedKafka",
            "onceflow.integration.servers.kinds": (
                "DatabaseServer KafkaServer MySQLServer OwnDatabase OwnKafka PostgresServer "
                "ServerKind make_kafka make_mariadb make_mysql make_postgres"
            ),
            "onceflow.integration.servers.mysql": "EmbeddedMariaDB EmbeddedMySQL",
            "onceflow.integration.servers.postgres": "EmbeddedPostgres",
            "onceflow.integration.servers.server": "Server ServerError",
        },
    )

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
