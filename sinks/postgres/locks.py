"""The holders of locks: for the error of a writer that waited in vain, and while it waits."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.clients.postgres import catalog
from onceflow.clients.postgres.connection import attempt_of_writer
from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import TableName

# Readers hold no lock that blocks a writer. Of a statement only its command is shown, because the
# rest may contain values. Without pg_read_all_stats a user sees no state and no command of others.
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
# A prepared transaction has no process. Its locks have the virtual transaction of the session that
# prepared it, or -1/<its number> after a restart of the server. The transaction's lock on its own
# number shows which of the two it is.
_PREPARED = """
    SELECT p.gid, p.owner::text, date_trunc('second', p.prepared)::text
    FROM pg_catalog.pg_prepared_xacts AS p
    JOIN pg_catalog.pg_locks AS own ON own.locktype = 'transactionid' AND own.pid IS NULL
     AND own.transactionid = p.transaction
    JOIN pg_catalog.pg_locks AS l
      ON l.virtualtransaction = own.virtualtransaction AND l.pid IS NULL
    WHERE l.locktype = 'relation' AND l.relation = to_regclass({table})
      AND p.database = current_database() AND l.mode <> 'AccessShareLock'
    GROUP BY p.gid, p.owner, p.prepared
    ORDER BY p.prepared
    LIMIT {most}
"""

_WAITING_WRITERS = """
    SELECT pid, application_name FROM pg_catalog.pg_stat_activity
    WHERE datname = current_database() AND usename = current_user AND wait_event_type = 'Lock'
      AND application_name LIKE 'onceflow %'
"""
# pg_blocking_pids reports a prepared transaction as process id 0, so it is found by the awaited
# lock.
_BLOCKING_SESSIONS = """
    SELECT a.pid, a.usename::text, a.application_name, a.state,
           substring(ltrim(a.query) FROM '^[A-Za-z]{{1,20}}'),
           date_trunc('second', a.query_start)::text
    FROM pg_catalog.pg_stat_activity AS a
    WHERE a.pid <> ALL (ARRAY[{waiting}]) AND a.pid IN (
        SELECT unnest(pg_catalog.pg_blocking_pids(waiting)) FROM unnest(ARRAY[{waiting}]) AS waiting
    )
    ORDER BY a.xact_start LIMIT {most}
"""
_BLOCKING_PREPARED = """
    SELECT p.gid, p.owner::text, date_trunc('second', p.prepared)::text
    FROM pg_catalog.pg_prepared_xacts AS p
    JOIN pg_catalog.pg_locks AS own ON own.locktype = 'transactionid' AND own.pid IS NULL
     AND own.transactionid = p.transaction
    JOIN pg_catalog.pg_locks AS held
      ON held.virtualtransaction = own.virtualtransaction AND held.pid IS NULL
    JOIN pg_catalog.pg_locks AS wanted
      ON wanted.pid = ANY (ARRAY[{waiting}]) AND NOT wanted.granted AND held.granted
     AND wanted.locktype = held.locktype AND wanted.database IS NOT DISTINCT FROM held.database
     AND wanted.relation IS NOT DISTINCT FROM held.relation
     AND wanted.transactionid IS NOT DISTINCT FROM held.transactionid
     AND wanted.classid IS NOT DISTINCT FROM held.classid
     AND wanted.objid IS NOT DISTINCT FROM held.objid
     AND wanted.objsubid IS NOT DISTINCT FROM held.objsubid
    GROUP BY p.gid, p.owner, p.prepared ORDER BY p.prepared LIMIT {most}
"""


def lock_holders(session: Session, table: TableName, writer: str, most: int) -> Sequence[str]:
    """Describe the holders of locks on `table` now, except for the session called `writer`."""
    named = {
        "table": catalog.literal(catalog.identifier(table)),
        "writer": catalog.literal(writer),
        "most": most,
    }
    sessions = [
        f"{_describe_session(pid, user, application, state, command, since)}, which has a {mode} on"
        " the table"
        for pid, user, application, state, command, mode, since in session.query(
            _SESSIONS.format(**named)
        )
    ]
    prepared = [_describe_prepared(*row) for row in session.query(_PREPARED.format(**named))]
    return [*sessions, *prepared][:most]


def list_blockers(session: Session, sink_id: str, attempt: int, most: int) -> Sequence[str]:
    """Describe the sessions that block the writers of `attempt` now, without those writers."""
    waiting = ", ".join(
        str(int(pid))
        for pid, name in session.query(_WAITING_WRITERS)
        if attempt_of_writer(str(name), sink_id) == attempt
    )
    if not waiting:
        return ()
    named = {"waiting": waiting, "most": most}
    sessions = [
        _describe_session(*row) for row in session.query(_BLOCKING_SESSIONS.format(**named))
    ]
    prepared = [
        _describe_prepared(*row) for row in session.query(_BLOCKING_PREPARED.format(**named))
    ]
    return [*sessions, *prepared][:most]


def _describe_session(
    pid: int, user: str, application: str, state: str, command: str, since: str
) -> str:
    return (
        f"session {pid} of role {user!r} (application {application!r}, {state or 'state hidden'},"
        f" command {command or 'hidden'} since {since})"
    )


def _describe_prepared(gid: str, owner: str, since: str) -> str:
    return f"prepared transaction {gid!r} of role {owner!r}, prepared at {since}"
