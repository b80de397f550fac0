"""The rows of a table in MySQL or MariaDB."""

from __future__ import annotations

import contextlib
import time

import pymysql
from typing_extensions import override

from onceflow.cli.demo.observers import ANSWER_TIMEOUT_S, Observer
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.mysql_admin import MySQLAdmin

_DATABASE = "demo"
_NO_SUCH_TABLE = 1146


def new_database(server: EmbeddedMySQL | EmbeddedMariaDB) -> str:
    """Return the address of a database that is made for the table."""
    with MySQLAdmin.session(server.url) as admin:
        admin.create_database(_DATABASE)
    return server.database_url(_DATABASE)


class MySQLRows(Observer):
    """How many rows a table has; 0 before there is one."""

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
