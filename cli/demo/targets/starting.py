"""Starts the server of a target."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from typing_extensions import assert_never

from onceflow.cli.demo.settings import SinkKind
from onceflow.cli.demo.targets.mysql import MySQLRows, new_database
from onceflow.cli.demo.targets.postgres import PostgresRows
from onceflow.cli.demo.targets.table import TableTarget
from onceflow.cli.demo.targets.target import Target
from onceflow.cli.demo.targets.topic import TopicTarget
from onceflow.integration.servers import (
    EmbeddedKafka,
    EmbeddedMariaDB,
    EmbeddedMySQL,
    EmbeddedPostgres,
)

NAME = "ledger"
"""Of the table or topic."""


def started_target(
    kind: SinkKind,
    kafka: Future[EmbeddedKafka],
    partitions: int,
    *,
    directory: Path,
    at_end: Callable[[Callable[[], None]], object],
    say: Callable[[str], None],
) -> Target:
    """Return the target once its server answers; it is stopped by what is given to `at_end`.

    Args:
        kind: Which.
        kafka: The broker of the payments, which may be starting still.
        partitions: Of a topic.
        directory: Of the demo's own.
        at_end: Takes what is to be called at the end, also when the start fails.
        say: Told when a server's program is fetched.

    Raises:
        ServerError: The server's program is not there, or does not start.
    """
    match kind:
        case SinkKind.POSTGRES:
            postgres = EmbeddedPostgres()
            at_end(postgres.stop)
            return TableTarget(postgres.start(), postgres.url, NAME, PostgresRows)
        case SinkKind.MYSQL | SinkKind.MARIADB:
            server = EmbeddedMySQL if kind is SinkKind.MYSQL else EmbeddedMariaDB
            # A MariaDB that starts deletes other servers' work from a directory that it shares.
            temporary = directory / "tmp"
            temporary.mkdir()
            mysql = server({"tmpdir": str(temporary)}, progress=say)
            at_end(mysql.stop)
            return TableTarget(mysql.start(), new_database(mysql), NAME, MySQLRows)
        case SinkKind.KAFKA:
            return TopicTarget(kafka.result(), NAME, partitions)
        case _:
            assert_never(kind)
