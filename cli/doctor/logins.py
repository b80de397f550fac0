"""What mends a login that a database has refused, by the words in which it refuses."""

from __future__ import annotations

import getpass
import re

from onceflow.cli.doctor.databases import Remedies
from onceflow.core.errors import OnceflowError
from onceflow.sinks.mysql.endpoint import MySQLEndpoint
from onceflow.sinks.mysql.names import quoted
from onceflow.sinks.postgres.catalog import quoted as identifier
from onceflow.sinks.postgres.connection import PostgresEndpoint

_ACCOUNT = re.compile(r"for user ('.*'@'.*') to database")


def remedies_of_postgres(where: PostgresEndpoint) -> Remedies:
    """Return the statements, as a superuser connected to another database runs them."""
    given = dict(where.parameters)
    user = given.get("user") or getpass.getuser()
    role, database = identifier(user), identifier(given.get("dbname") or user)
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


def remedies_of_mysql(where: MySQLEndpoint, error: OnceflowError) -> Remedies:
    """Return the statements, as an administrator runs them."""
    user, database = where.user.replace("'", "''"), quoted(where.database)
    # The account is in the text when the login was right; else it may be at any host.
    account = found[1] if (found := _ACCOUNT.search(str(error))) else f"'{user}'@'%'"
    password = (
        f"ALTER USER {account} IDENTIFIED BY '…', or CREATE USER if there is none; which there"
        f" is: SELECT user, host FROM mysql.user WHERE user = '{user}'"
    )
    privileges = "SELECT, INSERT, UPDATE, DELETE, CREATE, INDEX"
    return (
        ("(error 1044)", f"GRANT {privileges} ON {database}.* TO {account}"),
        ("(error 1049)", f"CREATE DATABASE {database}"),
        ("SSL is required", "ssl_mode=required in the url"),
        ("ertificate", "ssl_ca=, ssl_cert= and ssl_key= in the url"),
        ("", password),
    )
