"""What fixtures ask of a Postgres: databases, and transactions that are in doubt."""

from __future__ import annotations

import contextlib

import psycopg
from psycopg import sql


def create_database(url: str, name: str) -> None:
    """Create the empty database `name` on the server of `url`."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))


def drop_database(url: str, name: str) -> None:
    """Drop the database `name` with its sessions; refused while anything in it is prepared."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def roll_back_prepared(url: str) -> None:
    """End every other session of the database of `url` and roll back what is prepared in it."""
    with psycopg.connect(url, autocommit=True) as connection:
        # Sessions that the test forgot may hold locks for which the rollback would wait.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        listed = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchall()
        for (gid,) in listed:
            # Somebody else may decide it at the same moment.
            with contextlib.suppress(psycopg.errors.UndefinedObject):
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


__all__ = ["create_database", "drop_database", "roll_back_prepared"]
