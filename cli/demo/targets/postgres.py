"""The rows of a table in Postgres."""

from __future__ import annotations

import contextlib
import time

import psycopg
from psycopg import sql
from typing_extensions import override

from onceflow.cli.demo.observers import ANSWER_TIMEOUT_S, Observer


class PostgresRows(Observer):
    """How many rows a table has; 0 before there is one."""

    def __init__(self, url: str, table: str) -> None:
        super().__init__("rows")
        self._url = url
        self._query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))

    @override
    def _ask_until_ended(self) -> None:
        with (
            contextlib.suppress(psycopg.Error),
            psycopg.connect(
                self._url, autocommit=True, connect_timeout=ANSWER_TIMEOUT_S
            ) as connection,
        ):
            started_at = time.monotonic()
            while self._answered(self._count(connection), started_at):
                started_at = time.monotonic()

    def _count(self, connection: psycopg.Connection) -> int:
        try:
            row = connection.execute(self._query).fetchone()
        except psycopg.errors.UndefinedTable:
            return 0
        return 0 if row is None else int(row[0])
