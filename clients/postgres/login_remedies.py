"""The remedies for a login that a Postgres server refuses."""

from __future__ import annotations

import getpass
from collections.abc import Sequence

from onceflow.clients.postgres.catalog import quote
from onceflow.clients.postgres.connection import PostgresEndpoint

_AUTHORITY = "the server's ssl_ca_file, which must have the authority of sslcert="
_OF_PARAMETERS = (
    ("does not support SSL", "sslmode=prefer in the url; or ALTER SYSTEM SET ssl = on"),
    ("private key file", "sslkey= and sslpassword= in the url, and chmod 600 for the key's file"),
    ("root certificate file", "sslrootcert= in the url, a file on each machine of the job"),
    ("does not match host name", "the server's certificate, which must name the host of the url"),
    ("unknown ca", _AUTHORITY),
    ("decrypt error", _AUTHORITY),
    ("signature failure", "sslrootcert= in the url, with the authority of the server"),
    ("certificate", "sslrootcert=, sslcert= and sslkey= in the url"),
    ("SSL error", "the server's settings of ssl"),
    ("sslmode", "sslmode=verify-full in the url"),
    ("channel binding", "channel_binding=prefer in the url"),
    ("authentication method requirement", "a line in pg_hba.conf with a method of require_auth="),
    (" value", "leave the parameter out"),
    ("port number", "its port"),
)
"""The remedies for parameters of the url, above all of its encryption. The first match counts."""


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
        *_OF_PARAMETERS,
        ('" does not exist', f"CREATE DATABASE {database} OWNER {role}"),
        ("not permitted to log in", f"ALTER ROLE {role} LOGIN"),
        ("no pg_hba.conf entry", from_here),
        ("translate host name", "its host"),
        *_list_remedies_of_states(role, database, from_here),
        ("", f"ALTER ROLE {role} PASSWORD '…'"),
    )


def _list_remedies_of_states(role: str, database: str, from_here: str) -> Sequence[tuple[str, str]]:
    """Return the remedies for refusals in other languages than English."""
    by_state = {
        "3D000": f"CREATE DATABASE {database} OWNER {role}",
        "42501": f"GRANT CONNECT ON DATABASE {database} TO {role}",
        "28000": f"CREATE ROLE {role} LOGIN, ALTER ROLE {role} LOGIN, or {from_here}",
        "42704": "leave the parameter out",
        "22023": "leave the parameter out",
    }
    return [(f"(SQLSTATE {state})", remedy) for state, remedy in by_state.items()]
