"""The remedies for a login that a Postgres server refuses."""

from __future__ import annotations

import getpass
from collections.abc import Sequence

from onceflow.clients.postgres.catalog import quote
from onceflow.clients.postgres.connection import PostgresEndpoint


def list_login_remedies(endpoint: PostgresEndpoint) -> Sequence[tuple[str, str]]:
    """Return pairs of words in the server's message and the remedy. The last pair has no words.

    Remedies are statements for a superuser who is connected to another database, or settings.
    """
    given = dict(endpoint.parameters)
    user = given.get("user") or getpass.getuser()
    role, database = quote(user), quote(given.get("dbname") or user)
    from_here = (
        f"a line in pg_hba.conf: host {database} {role} <this machine's address>/32 scram-sha-256;"
        " then SELECT pg_reload_conf()"
    )
    return (
        ("permission denied for database", f"GRANT CONNECT ON DATABASE {database} TO {role}"),
        (f'role "{user}" does not exist', f"CREATE ROLE {role} LOGIN PASSWORD '…'"),
        ('" does not exist', f"CREATE DATABASE {database} OWNER {role}"),
        ("not permitted to log in", f"ALTER ROLE {role} LOGIN"),
        ("no pg_hba.conf entry", from_here),
        ("does not support SSL", "sslmode=prefer in the url; or ALTER SYSTEM SET ssl = on"),
        ("certificate", "sslrootcert=, sslcert= and sslkey= in the url"),
        ("translate host name", "its host"),
        ("", f"ALTER ROLE {role} PASSWORD '…'"),
    )
