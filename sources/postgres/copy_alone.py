"""The copy of tables without a stream: its position, and the checks before it continues.

All rows are those of one moment: one exported snapshot for all tables and connections. The snapshot
ends with the attempt that took it. A later attempt may continue only in an equal snapshot, which
sees the same transactions: the database was not written in between. Otherwise it raises
OffsetOutOfRange.
"""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.clients.postgres.connection import PostgresSession
from onceflow.core.errors import ConfigError, OffsetOutOfRange, StateIncompatible
from onceflow.sources.postgres.access import find_missing_privileges
from onceflow.sources.postgres.first_copy import CopiedChunks
from onceflow.sources.postgres.position import (
    COPY_ANEW,
    SlotPosition,
    TablePosition,
    drop_statement,
)
from onceflow.sources.postgres.slot import identify_primary
from onceflow.sources.postgres.table import SourceTable


def begin_copy(session: PostgresSession, tables: Sequence[SourceTable]) -> SlotPosition:
    """Return the position before the copy of `tables`. Creates nothing on the server.

    Raises:
        ConfigError: The server is too old or a standby, or the user lacks a privilege.
    """
    cluster = identify_primary(session)
    for table in tables:
        names = [column.name for column in table.columns]
        for privilege in find_missing_privileges(
            session, table.name, table.oid, names, copies_rows=True, creates_publication=False
        ):
            raise ConfigError(str(privilege))
    return SlotPosition(
        slot="",
        system=cluster.system,
        timeline=cluster.timeline,
        lsn=0,
        tables=tuple(TablePosition(t.name, t.oid, CopiedChunks()) for t in tables),
    )


def require_same_kind(position: SlotPosition, *, follows: bool) -> None:
    """Raise StateIncompatible if only one of `position` and the source follows a slot."""
    if follows == bool(position.slot):
        return
    if follows:
        raise StateIncompatible(
            "the source of the checkpoint has first_copy='only', and now first_copy= is 'all' or"
            f" 'none': give it its old value. To follow the tables from now on, {COPY_ANEW}"
        )
    raise StateIncompatible(
        f"the source of the checkpoint follows slot {position.slot}, and now first_copy= is"
        " 'only': give it its old value. To copy the tables once more and follow them no longer,"
        f" drop the slot ({drop_statement(position.slot)}), empty the target, and start the job"
        " under another name"
    )


def check_copy(
    session: PostgresSession, position: SlotPosition, tables: Sequence[SourceTable]
) -> None:
    """Raise an error unless the copy of exactly `tables` can continue on this server.

    Raises:
        ConfigError: The server is a standby.
        OffsetOutOfRange: The server or the tables differ from those of `position`.
    """
    cluster = identify_primary(session)
    if (position.system, position.timeline) != (cluster.system, cluster.timeline):
        raise OffsetOutOfRange(
            f"the copy began in the cluster {position.system} on timeline {position.timeline}, and"
            f" the url leads to {cluster.system} on timeline {cluster.timeline}: correct url=. If a"
            f" standby was promoted or a backup restored: {position.copy_anew}"
        )
    stored = {table.oid: str(table.name) for table in position.tables}
    present = {table.oid: str(table.name) for table in tables}
    if stored.keys() != present.keys():
        raise OffsetOutOfRange(
            f"the copy began with the tables {_list_tables(stored)}, and the source now reads"
            f" {_list_tables(present)}: a table was dropped and created again, or other tables are"
            f" named. Name the same tables. If they were created again: {position.copy_anew}"
        )


def _list_tables(names: dict[int, str]) -> str:
    return ", ".join(f"{name} (oid {oid})" for oid, name in sorted(names.items()))


def require_same_snapshot(position: SlotPosition, snapshot: str) -> None:
    """Raise OffsetOutOfRange if a part was copied in another snapshot than `snapshot`."""
    for table in position.tables:
        for chunk in () if table.copied is None else table.copied.chunks:
            if chunk.snapshot != snapshot:
                raise OffsetOutOfRange(
                    f"the copy was interrupted: its rows are of the snapshot {chunk.snapshot}, and"
                    f" the server is at {snapshot} now. The remaining rows would be of another"
                    f" moment. {position.copy_anew}"
                )
