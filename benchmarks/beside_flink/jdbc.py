"""Tables that Flink writes to, with the columns that our sinks would create; their JDBC URLs."""

from __future__ import annotations

from urllib.parse import unquote, urlencode, urlsplit

import psycopg
import pyarrow as pa
from psycopg import sql

from onceflow.clients.sql.tables import TableName
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.sinks.mysql.dialect import MYSQL
from onceflow.sinks.postgres.dialect import POSTGRES
from onceflow.sinks.sql.ddl import creation


def to_jdbc_url(url: str, driver: str) -> str:
    """Return the address of a database for `driver`: postgresql, mysql or mariadb.

    The user stands among its options, to which others can be appended.
    """
    parts = urlsplit(url)
    user = {"user": parts.username, "password": parts.password}
    options = urlencode({name: unquote(value) for name, value in user.items() if value})
    address = parts.netloc.rpartition("@")[2]
    return f"jdbc:{driver}://{address}{parts.path}?{options}"


def create_table(url: str, table: str, schema: pa.Schema) -> None:
    """Create the table that our sink would create for rows of `schema`."""
    name = TableName.parse(table)
    if _is_postgres(url):
        with psycopg.connect(url) as connection:
            connection.execute(creation(POSTGRES, name, schema, ()).encode())
    else:
        with MySQLAdmin.session(url) as session:
            session.rows(creation(MYSQL, name, schema, ()))


def roll_back_prepared(url: str) -> None:
    """Roll back what is prepared in a database of Postgres, or on a whole server of MySQL's."""
    if not _is_postgres(url):
        with MySQLAdmin.session(url) as session:
            session.roll_back(session.in_doubt())
        return
    with psycopg.connect(url, autocommit=True) as connection:
        prepared = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchall()
        for (gid,) in prepared:
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


def _is_postgres(url: str) -> bool:
    return urlsplit(url).scheme.startswith("postgres")
