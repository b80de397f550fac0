"""A table in Postgres."""

from __future__ import annotations

import contextlib
import time

import psycopg
from psycopg import sql
from typing_extensions import override

from onceflow.cli.demo.observers import ANSWER_TIMEOUT_S, Observer
from onceflow.cli.demo.targets.target import Target
from onceflow.integration.oracle import Verdict, verify
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.integration.workload import Payments


class PostgresTarget(Target):
    """A table of the server's own database; the sink creates it."""

    def __init__(self, server: EmbeddedPostgres, table: str) -> None:
        self._server = server
        self._table = table

    @property
    @override
    def server(self) -> EmbeddedPostgres:
        return self._server

    @property
    @override
    def address(self) -> str:
        return self._server.url

    @property
    @override
    def place(self) -> str:
        return self._table

    @override
    def visible_rows(self) -> Observer:
        return _Rows(self.address, self._table)

    @override
    def judge(self, payments: Payments) -> Verdict:
        return verify(self.address, self._table, payments)


class _Rows(Observer):
    """0 before there is a table."""

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
