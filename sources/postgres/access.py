"""The checks whether a user may read changes: a connection for replication, and privileges.

They run before anything is created on the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onceflow.clients.postgres.catalog import identifier, literal, quote
from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import ConfigError, SinkError, SourceUnavailable

_TOO_MANY_SENDERS = "max_wal_senders"
_POOLER = "unsupported startup parameter"
_PRIVILEGES = """
    SELECT pg_catalog.has_table_privilege(c.oid, 'SELECT')
               OR NOT EXISTS (SELECT FROM pg_catalog.pg_attribute AS a
                              WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                                AND a.attname IN ({columns})
                                AND NOT pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT')),
           pg_catalog.pg_has_role(c.relowner, 'USAGE'),
           pg_catalog.pg_get_userbyid(c.relowner)::text,
           pg_catalog.quote_ident(current_user), pg_catalog.quote_ident(current_database()),
           pg_catalog.has_database_privilege(current_database(), 'CREATE')
    FROM pg_catalog.pg_class AS c WHERE c.oid = {oid}
"""


@dataclass(frozen=True, slots=True)
class MissingPrivilege:
    """A privilege that the user lacks, and the statement that grants it."""

    lack: str
    needed: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.lack}; needed: {self.needed}. Run: {self.remedy}"


def check_replication(endpoint: PostgresEndpoint, name: str) -> None:
    """Raise an error unless the server takes a connection for replication. Closes it again.

    Raises:
        ConfigError: The user is refused, a pooler is in between, or no WAL sender is free.
        SourceUnavailable: The server does not answer.
    """
    try:
        endpoint.connect_for_replication(name).close()
    except SinkError as error:
        if _TOO_MANY_SENDERS in str(error):
            raise ConfigError(
                f"no WAL sender is free: {error}. End readers that are not needed (SELECT * FROM"
                " pg_stat_replication), or raise max_wal_senders and restart the server"
            ) from None
        raise SourceUnavailable(str(error)) from None
    except ConfigError as error:
        if _POOLER in str(error):
            raise ConfigError(
                f"{error}. The url leads to a pooler, such as PgBouncer, that refuses connections"
                " for replication: give the address of the database itself"
            ) from None
        raise


def find_missing_privileges(
    session: PostgresSession,
    table: TableName,
    oid: int,
    columns: Sequence[str],
    *,
    copies_rows: bool,
    creates_publication: bool,
) -> Iterator[MissingPrivilege]:
    """Yield the privileges on one table that the session's user lacks.

    With `copies_rows` those for a copy of `columns`, with `creates_publication` those for a
    publication.
    """
    names = ", ".join(map(literal, columns)) or "NULL"
    rows = session.query(_PRIVILEGES.format(oid=oid, columns=names))
    if not rows:
        return
    ((may_read, is_owner, owner, role, database, may_create),) = rows
    if copies_rows and not may_read:
        yield MissingPrivilege(
            f"role {role} may not read table {table}",
            "SELECT for the first copy",
            f"GRANT SELECT ON {identifier(table)} TO {role}",
        )
    if creates_publication and not is_owner:
        yield MissingPrivilege(
            f"role {role} does not own table {table}, so it cannot create a publication of it",
            f"the owner {owner}, or a publication that exists (publication=)",
            f"CREATE PUBLICATION {quote('my_publication')} FOR TABLE {identifier(table)} as"
            f" {owner}, or GRANT {quote(str(owner))} TO {role}",
        )
    elif creates_publication and not may_create:
        yield MissingPrivilege(
            f"role {role} may not create a publication in database {database}",
            "CREATE on the database, or a publication that exists (publication=)",
            f"GRANT CREATE ON DATABASE {database} TO {role}",
        )
