"""A table in MySQL or MariaDB."""

from __future__ import annotations

import contextlib
import time

import pymysql
from typing_extensions import override

from onceflow.cli.demo.observers import ANSWER_TIMEOUT_S, Observer
from onceflow.cli.demo.targets.target import Target
from onceflow.integration.oracle import Verdict, verify
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.mysql_admin import MySQLAdmin
from onceflow.integration.workload import Payments

_DATABASE = "demo"
_NO_SUCH_TABLE = 1146


class MySQLTarget(Target):
    """A table of a database that is made for it; the sink creates the table."""

    def __init__(self, server: EmbeddedMySQL | EmbeddedMariaDB, table: str) -> None:
        self._server = server
        self._table = table
        with MySQLAdmin.session(server.url) as admin:
            admin.create_database(_DATABASE)

    @property
    @override
    def server(self) -> EmbeddedMySQL | EmbeddedMariaDB:
        return self._server

    @property
    @override
    def address(self) -> str:
        return self._server.database_url(_DATABASE)

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
        self._query = f"SELECT COUNT(*) FROM `{table}`"  # noqa: S608 - a name of ours

    @override
    def _ask_until_ended(self) -> None:
        with (
            contextlib.suppress(pymysql.err.MySQLError),
            # Counting a large table takes longer than connecting.
            MySQLAdmin.session(self._url, timeout_s=10 * ANSWER_TIMEOUT_S) as session,
        ):
            started_at = time.monotonic()
            while self._answered(self._count(session), started_at):
                started_at = time.monotonic()

    def _count(self, session: MySQLAdmin) -> int:
        try:
            return int(session.rows(self._query)[0][0])
        except pymysql.err.ProgrammingError as error:
            if error.args[0] != _NO_SUCH_TABLE:
                raise
            return 0
