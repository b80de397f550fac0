"""The slot and the publication of a source on the server: created once, and checked before use.

The server keeps all WAL from the slot's position on. It silently starts at the slot's own position
if a reader asks for an older one. So a reader whose position is before the slot's must be refused
here. Otherwise rows would be lost silently.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from onceflow.clients.postgres.catalog import identifier, literal, quote
from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession
from onceflow.clients.postgres.replication import format_lsn, parse_lsn
from onceflow.clients.sql.session import ReadOnly, SqlError, StatementRefused
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import ConfigError, OffsetOutOfRange, SinkError, SourceUnavailable
from onceflow.sources.postgres.position import COPY_ANEW, SlotPosition, drop_statement
from onceflow.sources.postgres.refusals import to_session_error
from onceflow.sources.postgres.table import SourceTable

SERVER_VERSION_MIN = 140000
"""PostgreSQL 14, the first whose pgoutput sends values in binary format."""
_STANDBY_VERSION_MIN = 160000
"""PostgreSQL 16, the first whose standbys have logical slots."""
_PLUGIN = "pgoutput"
_NAME_MAX = 63
_RETRY_S = 0.2
_SESSION_NAME = "onceflow slot"
_OTHER_NAME = ". Give slot= another name"
"""The advice where no job is read on from the slot."""
_DROP_OLD_SLOT = (
    "If the job's slot already exists and the table is not new in tables=, the slot lacks earlier"
    f" changes: drop the slot, {COPY_ANEW}"
)
_LIMITS = {
    "wal_removed": "raise max_slot_wal_keep_size, ",
    "idle_timeout": "raise idle_replication_slot_timeout, ",
}
"""The advice that prevents the same invalidation of the next slot, by the server's reason."""
logger = logging.getLogger("onceflow.sources.postgres")

_SLOT = """
    SELECT s.plugin::text, s.database::text, s.active, s.confirmed_flush_lsn::text,
           coalesce(s.wal_status = 'lost', false), s.two_phase, s.temporary,
           coalesce(to_jsonb(s) ->> 'invalidation_reason',
                    CASE to_jsonb(s) ->> 'conflicting' WHEN 'true' THEN 'conflict' END)
    FROM pg_catalog.pg_replication_slots AS s WHERE s.slot_name = {slot}
"""
_PUBLICATION = """
    SELECT p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate, p.oid || '.' || p.xmin
    FROM pg_catalog.pg_publication AS p WHERE p.pubname = {publication}
"""
# The fourth column changes whenever the server may have left out changes of the table: a table may
# be published by its name, with all tables, or by its schema or a table that it is a partition of.
_PUBLISHED = """
    SELECT c.oid::bigint, t.schemaname::text, t.tablename::text,
           CASE WHEN r.oid IS NOT NULL THEN ' ' || r.oid || '.' || r.xmin
                WHEN p.puballtables THEN ''
                ELSE (
                    SELECT string_agg(' ' || reason.version, '' ORDER BY reason.version)
                    FROM (SELECT c.oid UNION SELECT relid
                          FROM pg_catalog.pg_partition_ancestors(c.oid)) AS member(oid)
                    CROSS JOIN LATERAL ({reasons}) AS reason(version)
                ) END,
           coalesce(to_jsonb(r) ->> 'prqual', to_jsonb(r) ->> 'prattrs') IS NOT NULL
    FROM pg_catalog.pg_publication_tables AS t
    JOIN pg_catalog.pg_publication AS p ON p.pubname = t.pubname
    JOIN pg_catalog.pg_namespace AS n ON n.nspname = t.schemaname
    JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
    LEFT JOIN pg_catalog.pg_publication_rel AS r ON r.prpubid = p.oid AND r.prrelid = c.oid
    WHERE t.pubname = {publication}
    ORDER BY 2, 3
"""
_BY_NAME_OR_ROOT = """
    SELECT 'table ' || m.oid || '.' || m.xmin FROM pg_catalog.pg_publication_rel AS m
    WHERE m.prpubid = p.oid AND m.prrelid = member.oid
    UNION ALL
    SELECT 'partition ' || i.inhparent || '.' || i.xmin FROM pg_catalog.pg_inherits AS i
    JOIN pg_catalog.pg_class AS k ON k.oid = i.inhrelid
    WHERE i.inhrelid = member.oid AND k.relispartition
"""
# If a table is moved to another schema and back, its row in pg_depend has another xmin.
_BY_SCHEMA = """
    SELECT 'schema ' || m.oid || '.' || m.xmin || '.' || d.xmin
    FROM pg_catalog.pg_class AS k
    JOIN pg_catalog.pg_publication_namespace AS m ON m.pnnspid = k.relnamespace
    LEFT JOIN pg_catalog.pg_depend AS d ON d.objid = k.oid AND d.objsubid = 0
        AND d.classid = 'pg_catalog.pg_class'::regclass
        AND d.refclassid = 'pg_catalog.pg_namespace'::regclass
    WHERE k.oid = member.oid AND m.pnpubid = p.oid
"""
_SCHEMAS_FROM = 150000
"""PostgreSQL 15, the first that publishes schemas."""
# With the whole row as identity, Postgres 18 refuses updates and deletes if a publication does not
# send all generated columns. It never sends virtual ones.
_GENERATED = """
    SELECT c.oid::bigint, bool_or(a.attgenerated = 'v')
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid
    WHERE c.oid IN ({oids}) AND c.relreplident = 'f' AND a.attgenerated <> ''
        AND NOT a.attisdropped AND current_setting('server_version_num')::int >= 180000
    GROUP BY c.oid
"""
_SENDS_GENERATED = """
    SELECT to_jsonb(p) ->> 'pubgencols' = 's'
    FROM pg_catalog.pg_publication AS p WHERE p.pubname = {publication}
"""
_PRESENT_LSN = """
    SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
           ELSE pg_catalog.pg_current_wal_flush_lsn() END::text
"""
_SERVER = """
    SELECT (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),
           (SELECT timeline_id FROM pg_catalog.pg_control_checkpoint()),
           current_setting('wal_level'), pg_catalog.pg_is_in_recovery(),
           (SELECT rolreplication OR rolsuper FROM pg_catalog.pg_roles
            WHERE rolname = current_user),
           pg_catalog.quote_ident(current_user), current_setting('hot_standby_feedback') = 'on'
"""


class _OtherSlot(ConfigError):
    """A slot of another purpose has the name. The message ends with `_OTHER_NAME`."""


class _NotPublished(ConfigError):
    """A publication does not send every change."""

    def __init__(self, text: str, what: str = "its tables") -> None:
        """`what` names the tables whose changes are not sent."""
        super().__init__(text)
        self.what = what


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """The identity of a cluster."""

    system: str
    timeline: int
    is_standby: bool
    """True if the session leads to a standby of the cluster."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as the server describes it."""

    is_active: bool
    confirmed: int
    """The LSN from which the server still has every change."""


def name_slot(job: str, uid: str) -> str:
    """Return a name that slots and publications may have, different for each job and uid."""
    plain = f"onceflow_{job}_{uid}"
    name = re.sub(r"[^a-z0-9_]", "_", plain)
    if name == plain and len(name) <= _NAME_MAX:
        return name
    digest = hashlib.sha256(f"{job}\0{uid}".encode()).hexdigest()[:8]
    return f"{name[: _NAME_MAX - 9]}_{digest}"


@contextmanager
def connect(endpoint: PostgresEndpoint, name: str) -> Generator[PostgresSession]:
    """Yield a session; its errors become those of sources.

    Raises:
        BadRecord: The server cannot read a value of the table.
        ConfigError: The server refuses the user or a statement, or the user lacks a privilege.
        SourceUnavailable: The server does not answer, or refuses for now.
    """
    try:
        session = endpoint.connect(name)
    except SinkError as error:
        raise SourceUnavailable(str(error)) from None
    try:
        with session:
            yield session
    except SqlError as error:
        raise to_session_error(error, str(endpoint)) from error


def identify_cluster(session: PostgresSession) -> ClusterIdentity:
    """Return the identity of the cluster.

    Raises:
        ConfigError: The server is too old.
    """
    version = session.server_version
    if version < SERVER_VERSION_MIN:
        raise ConfigError(f"PostgreSQL {version // 10000} is too old; needed: 14 or newer: upgrade")
    ((system, timeline, _, is_standby, _, _, _),) = session.query(_SERVER)
    return ClusterIdentity(str(system), int(timeline), bool(is_standby))


def identify_primary(session: PostgresSession) -> ClusterIdentity:
    """Return the identity of the cluster, whose rows can be copied.

    Snapshots of a standby do not list the running transactions.

    Raises:
        ConfigError: The server is too old or a standby.
    """
    cluster = identify_cluster(session)
    if cluster.is_standby:
        raise ConfigError(
            "the server is a standby, and rows cannot be copied from a standby: its snapshots do"
            " not list the running transactions. Name the primary in url=, or give"
            " first_copy='none'"
        )
    return cluster


def check_server(session: PostgresSession) -> ClusterIdentity:
    """Return the identity of the cluster.

    Raises:
        ConfigError: The server cannot send changes, or not to this user.
    """
    cluster = identify_cluster(session)
    ((_, _, wal_level, _, may_replicate, role, has_feedback),) = session.query(_SERVER)
    if cluster.is_standby and session.server_version < _STANDBY_VERSION_MIN:
        raise ConfigError(
            f"the server is a standby of PostgreSQL {session.server_version // 10000}, and changes"
            " can be read from a standby since PostgreSQL 16: name the primary in url="
        )
    if cluster.is_standby and not has_feedback:
        raise ConfigError(
            "the server is a standby with hot_standby_feedback = off; needed: on, or the primary"
            " removes rows of catalogs that the slot needs. Run ALTER SYSTEM SET"
            " hot_standby_feedback = on; SELECT pg_reload_conf()"
        )
    if wal_level != "logical":
        raise ConfigError(
            f"wal_level = {wal_level}; needed: logical. Run ALTER SYSTEM SET wal_level = 'logical',"
            " then restart the server"
        )
    if not may_replicate:
        raise ConfigError(f"role {role} may not read changes. Run: ALTER ROLE {role} REPLICATION")
    return cluster


def find_publication(session: PostgresSession, name: str) -> Sequence[TableName] | None:
    """Return the tables of publication `name`, or None if there is no such publication."""
    if not session.query(_PUBLICATION.format(publication=literal(name))):
        return None
    rows = _list_published(session, name)
    return [TableName(str(schema), str(table)) for _, schema, table, _, _ in rows]


def _list_published(session: PostgresSession, name: str) -> Sequence[tuple[Any, ...]]:
    reasons = [_BY_NAME_OR_ROOT]
    if session.server_version >= _SCHEMAS_FROM:
        reasons.append(_BY_SCHEMA)
    return session.query(
        _PUBLISHED.format(publication=literal(name), reasons="UNION ALL".join(reasons))
    )


def check_publication(
    session: PostgresSession, name: str, tables: Sequence[SourceTable]
) -> Mapping[int, str] | None:
    """Return the version of publication `name` for each of `tables`, by OID.

    The version differs after each change of the publication that concerns the table. The result
    is None if there is no such publication.

    Raises:
        ConfigError: The publication exists and does not send every change of `tables`.
    """
    rows = session.query(_PUBLICATION.format(publication=literal(name)))
    if not rows:
        return None
    ((has_all_kinds, version),) = rows
    published = _list_published(session, name)
    members = {int(oid): (str(member), bool(limited)) for oid, _, _, member, limited in published}
    alter = f"ALTER PUBLICATION {quote(name)}"
    for table in tables:
        if table.oid not in members:
            raise _NotPublished(
                f"publication {name} does not have table {table.name}. Run: {alter} ADD TABLE"
                f" {identifier(table.name)}. A partitioned table also needs: {alter} SET"
                f" (publish_via_partition_root = true). {_DROP_OLD_SLOT}",
                f"table {table.name}",
            )
        if members[table.oid][1]:
            raise _NotPublished(
                f"publication {name} limits the rows or columns of table {table.name}, and the"
                f" first copy would have the others. Use another publication, or drop the limit."
                f" {_DROP_OLD_SLOT}",
                f"table {table.name}",
            )
    if not has_all_kinds:
        kinds = "insert, update, delete, truncate"
        raise _NotPublished(
            f"publication {name} does not send every kind of change. Run: {alter} SET (publish ="
            f" '{kinds}'). {_DROP_OLD_SLOT}",
            f"table {tables[0].name}" if len(tables) == 1 else "its tables",
        )
    return {table.oid: f"{version}{members[table.oid][0]}" for table in tables}


def require_updates(
    session: PostgresSession, publication: str | None, tables: Sequence[SourceTable]
) -> None:
    """Raise ConfigError if Postgres would refuse updates of `tables` because they are published."""
    generated = _find_generated(session, tables)
    if not generated:
        return
    known = publication and session.query(_SENDS_GENERATED.format(publication=literal(publication)))
    for table in tables:
        if table.oid not in generated or not (generated[table.oid] or (known and not known[0][0])):
            continue
        name = identifier(table.name)
        advice = f"Run: ALTER TABLE {name} REPLICA IDENTITY DEFAULT, or USING INDEX"
        if not generated[table.oid] and publication:
            advice += (
                f"; or, before the first start, ALTER PUBLICATION {quote(publication)} SET"
                " (publish_generated_columns = stored)"
            )
        raise ConfigError(
            f"table {table.name} has REPLICA IDENTITY FULL and a generated column that is not"
            " published, so Postgres would refuse every UPDATE and DELETE of the published table."
            f" {advice}"
        )


def _find_generated(session: PostgresSession, tables: Sequence[SourceTable]) -> Mapping[int, bool]:
    """Return the tables whose generated columns must be published, by OID.

    The value is True if one of these columns is virtual, which cannot be published.
    """
    oids = ", ".join(str(table.oid) for table in tables) or "NULL"
    return dict(session.query(_GENERATED.format(oids=oids)))


def create_publication(
    session: PostgresSession, name: str, tables: Sequence[SourceTable]
) -> Mapping[int, str]:
    """Create publication `name` of `tables`, and return its version for each, by OID.

    Raises:
        ConfigError: The user's transactions are read-only.
    """
    options = "publish_via_partition_root = true"
    if _find_generated(session, tables):
        options += ", publish_generated_columns = stored"
    try:
        session.execute(
            f"CREATE PUBLICATION {quote(name)} FOR TABLE {_list_names(tables)} WITH ({options})"
        )
    except ReadOnly as error:
        raise ConfigError(
            f"publication {name} cannot be created: {error}. Create it yourself, for a standby on"
            " its primary; or run ALTER ROLE … SET default_transaction_read_only = off for the user"
            " of the job"
        ) from error
    return require_versions(session, name, tables)


def add_to_publication(
    session: PostgresSession, name: str, tables: Sequence[SourceTable]
) -> Mapping[int, str]:
    """Add `tables` to publication `name`, and return its version for each table, by OID."""
    present = frozenset(find_publication(session, name) or ())
    if missing := [table for table in tables if table.name not in present]:
        session.execute(f"ALTER PUBLICATION {quote(name)} ADD TABLE {_list_names(missing)}")
    return require_versions(session, name, tables)


def require_versions(
    session: PostgresSession, name: str, tables: Sequence[SourceTable]
) -> Mapping[int, str]:
    """Return the version of publication `name` for each of `tables`, by OID.

    Raises:
        ConfigError: The publication does not send every change of `tables`.
        SourceUnavailable: There is no such publication.
    """
    versions = check_publication(session, name, tables)
    if versions is None:
        raise SourceUnavailable(f"publication {name} was dropped by another session")
    return versions


def drop_from_publication(
    session: PostgresSession, name: str, in_use: Collection[TableName]
) -> None:
    """Remove the tables that are not `in_use` from publication `name`."""
    if unused := [t for t in find_publication(session, name) or () if t not in in_use]:
        names = ", ".join(map(identifier, unused))
        session.execute(f"ALTER PUBLICATION {quote(name)} DROP TABLE {names}")


def _list_names(tables: Sequence[SourceTable]) -> str:
    return ", ".join(identifier(table.name) for table in tables)


def drop_publication(session: PostgresSession, name: str) -> None:
    """Drop publication `name`, if it exists."""
    session.execute(f"DROP PUBLICATION IF EXISTS {quote(name)}")


def create_slot(session: PostgresSession, name: str) -> int:
    """Create slot `name`, and return the LSN from which it has every change.

    Waits until every transaction that writes now has ended. On a standby, waits until the primary
    writes its list of running transactions to the WAL.

    Raises:
        ConfigError: The server has no free slot.
    """
    if identify_cluster(session).is_standby:
        logger.info(
            "slot %s is created when the primary lists its running transactions, in 15 s if the"
            " primary writes. Else run on the primary: SELECT pg_log_standby_snapshot()",
            name,
        )
    try:
        ((lsn,),) = session.query(
            "SELECT lsn::text FROM pg_catalog.pg_create_logical_replication_slot("
            f"{literal(name)}, '{_PLUGIN}')"
        )
    except StatementRefused as error:
        if error.code.startswith("53"):
            raise ConfigError(
                f"slot {name} cannot be created: {error}. Drop slots that are not used (SELECT"
                " pg_drop_replication_slot('…')), or raise max_replication_slots and restart the"
                " server"
            ) from error
        raise
    return parse_lsn(lsn)


def find_slot(session: PostgresSession, name: str) -> SlotState | None:
    """Return slot `name`, or None if there is none.

    Raises:
        ConfigError: A slot of this name has another purpose.
        OffsetOutOfRange: The server has deleted WAL that the slot needs.
        SourceUnavailable: The slot is being created.
    """
    rows = session.query(_SLOT.format(slot=literal(name)))
    if not rows:
        return None
    ((plugin, database, is_active, confirmed, is_lost, two_phase, temporary, reason),) = rows
    ((own_database,),) = session.query("SELECT current_database()::text")
    if plugin != _PLUGIN or database != own_database or two_phase or temporary:
        raise _OtherSlot(
            f"slot {name} exists and is not one that this source reads: plugin {plugin}, database"
            f" {database}, two_phase {two_phase}, temporary {temporary}{_OTHER_NAME}"
        )
    if confirmed is None and is_active:
        raise SourceUnavailable(
            f"slot {name} is being created by another session, which waits until every transaction"
            " that writes now has ended. To see them: SELECT * FROM pg_stat_activity WHERE"
            " backend_xid IS NOT NULL, and SELECT * FROM pg_prepared_xacts"
        )
    if is_lost or reason is not None or confirmed is None:
        reason = reason or "wal_removed"
        raise OffsetOutOfRange(
            f"slot {name} was invalidated ({reason}): the server has deleted changes that were not"
            f" read. Drop it ({drop_statement(name)}), {_LIMITS.get(reason, '')}{COPY_ANEW}"
        )
    return SlotState(bool(is_active), parse_lsn(confirmed))


def read_present_lsn(endpoint: PostgresEndpoint) -> int:
    """Return the LSN before which every durable transaction of the server has ended.

    Raises the errors of `connect`.
    """
    with connect(endpoint, _SESSION_NAME) as session:
        ((present,),) = session.query(_PRESENT_LSN)
    return parse_lsn(present)


def wait_until_free(endpoint: PostgresEndpoint, name: str, timeout_s: float) -> None:
    """Wait until no reader uses slot `name`, and no session creates it, at most `timeout_s`.

    The server takes a moment to see that a killed reader is gone. A session whose program was
    killed still creates its slot to the end. Raises the errors of `connect` and of `find_slot`.
    """
    deadline = time.monotonic() + timeout_s
    with connect(endpoint, _SESSION_NAME) as session:
        while not _is_free(session, name) and time.monotonic() <= deadline:
            time.sleep(_RETRY_S)


def _is_free(session: PostgresSession, name: str) -> bool:
    try:
        state = find_slot(session, name)
    except SourceUnavailable:  # the slot is being created
        return False
    return state is None or not state.is_active


def check_position(
    session: PostgresSession,
    position: SlotPosition,
    publication: str,
    tables: Sequence[SourceTable],
) -> None:
    """Raise an error unless the server still sends every change of `tables` from `position` on.

    Raises:
        ConfigError: The server cannot send changes, or not to this user.
        OffsetOutOfRange: The slot is gone, invalidated or past the position, the server is another
            one, or the publication lacks changes.
    """
    cluster = check_server(session)
    if position.system != cluster.system:
        raise OffsetOutOfRange(
            f"the checkpoint has a position in the cluster {position.system}, and the url leads to"
            f" the cluster {cluster.system}: correct url=. To read the other cluster, {COPY_ANEW}"
        )
    if position.timeline != cluster.timeline:
        raise OffsetOutOfRange(
            f"the server was on timeline {position.timeline} and is on {cluster.timeline}: a"
            " standby was promoted or a backup restored, and changes that were read may not exist"
            f" any more. {position.copy_anew}"
        )
    ((present,),) = session.query(_PRESENT_LSN)
    if parse_lsn(present) < position.furthest.lsn:
        raise OffsetOutOfRange(
            f"the server's WAL ends at {present}, before the checkpoint's position"
            f" {format_lsn(position.furthest.lsn)}: a backup was restored, and changes that were"
            f" read do not exist any more. {position.copy_anew}"
        )
    slot = _find_own_slot(session, position)
    if slot.confirmed > position.lsn:
        raise OffsetOutOfRange(
            f"slot {position.slot} is at {format_lsn(slot.confirmed)}, past the checkpoint's"
            f" position {format_lsn(position.lsn)}: the server has forgotten the changes between."
            " Another reader used the slot, or the job starts from an older checkpoint. If there"
            f" is a later checkpoint, start the job from that one. If not: {position.copy_anew}"
        )
    _check_still_published(session, position, publication, tables)


def _find_own_slot(session: PostgresSession, position: SlotPosition) -> SlotState:
    """Return the slot of `position`.

    Raises:
        OffsetOutOfRange: The slot is gone or invalidated, or another one has its name.
        SourceUnavailable: The slot is being created.
    """
    try:
        slot = find_slot(session, position.slot)
    except _OtherSlot as error:
        difference = str(error).removesuffix(_OTHER_NAME)
        raise OffsetOutOfRange(
            f"{difference}. The checkpoint's slot had this name. If url= leads to another"
            f" database than before, correct it. If not, give slot= another name, {COPY_ANEW}"
        ) from None
    if slot is None:
        raise OffsetOutOfRange(
            f"slot {position.slot} does not exist any more, and with it the changes after"
            f" {format_lsn(position.lsn)}. To copy the table again, {COPY_ANEW}"
        )
    return slot


def _check_still_published(
    session: PostgresSession,
    position: SlotPosition,
    publication: str,
    tables: Sequence[SourceTable],
) -> None:
    """Raise OffsetOutOfRange unless the publication sends every change of `tables`.

    The server silently leaves out what the publication did not have when it was changed. So a
    publication that is repaired now does not bring these changes back.
    """
    reason = f"publication {publication} does not exist any more"
    known = {table.oid: table.published for table in position.tables}
    try:
        versions = check_publication(session, publication, tables)
    except _NotPublished as error:
        reason = f"publication {publication} no longer sends every change of {error.what}"
    else:
        altered = [t for t in tables if versions is not None and versions[t.oid] != known[t.oid]]
        if versions is not None and not altered:
            return
        if altered:
            reason = f"publication {publication} was altered, or dropped and created again"
    raise OffsetOutOfRange(
        f"{reason}: since then the server leaves out changes. {position.copy_anew}"
    )
