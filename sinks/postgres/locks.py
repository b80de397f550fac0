"""Who holds locks on a table: for the error of a writer that waited in vain."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.sinks.postgres import catalog
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import TableName

# Readers hold nothing that a writer waits for. Of a statement only its command is shown: the rest
# may hold values. A user without pg_read_all_stats sees no state and no command of others.
_SESSIONS = """
    SELECT a.pid, a.usename::text, a.application_name, a.state,
           substring(ltrim(a.query) FROM '^[A-Za-z]{{1,20}}'), max(l.mode),
           date_trunc('second', a.query_start)::text
    FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'relation' AND l.granted AND l.relation = to_regclass({table})
      AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
      AND l.mode <> 'AccessShareLock' AND a.pid <> pg_backend_pid()
      AND a.application_name <> {writer}
    GROUP BY a.pid, a.usename, a.application_name, a.state, a.query, a.query_start, a.xact_start
    ORDER BY max(l.mode) IN ('RowExclusiveLock', 'RowShareLock'), a.xact_start
    LIMIT {most}
"""
# A prepared transaction has no session: its locks are listed under -1/<its number>.
_PREPARED = """
    SELECT p.gid, p.owner::text, date_trunc('second', p.prepared)::text
    FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_prepared_xacts AS p
      ON l.virtualtransaction = '-1/' || p.transaction
    WHERE l.locktype = 'relation' AND l.relation = to_regclass({table})
      AND p.database = current_database() AND l.mode <> 'AccessShareLock'
    GROUP BY p.gid, p.owner, p.prepared
    ORDER BY p.prepared
    LIMIT {most}
"""


def lock_holders(session: Session, table: TableName, writer: str, most: int) -> Sequence[str]:
    """Describe who holds locks on `table` now, except for the session called `writer`."""
    named = {
        "table": catalog.literal(catalog.identifier(table)),
        "writer": catalog.literal(writer),
        "most": most,
    }
    sessions = [
        f"session {pid} of role {user!r} (application {application!r}, {state or 'state hidden'},"
        f" command {command or 'hidden'} since {since}), which has a {mode} on the table"
        for pid, user, application, state, command, mode, since in session.query(
            _SESSIONS.format(**named)
        )
    ]
    prepared = [
        f"prepared transaction {gid!r} of role {owner!r}, prepared at {since}"
        for gid, owner, since in session.query(_PREPARED.format(**named))
    ]
    return [*sessions, *prepared][:most]
