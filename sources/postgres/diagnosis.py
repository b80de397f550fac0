"""The checks of `onceflow doctor` for the server of a source of Postgres changes.

The start of a job makes the same checks, and ends at the first problem. The doctor reports all
problems. It also warns of conditions that may stop a job later: few free slots or WAL senders,
limits on WAL, large values that updates do not send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from onceflow.clients.postgres.catalog import identifier
from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession
from onceflow.clients.postgres.login_remedies import list_login_remedies
from onceflow.clients.sql.session import SqlError
from onceflow.core.errors import ConfigError, OnceflowError, SourceUnavailable
from onceflow.core.spi.connector import Area, Finding, Questions
from onceflow.sources.postgres import slot as slots
from onceflow.sources.postgres.access import (
    MissingPrivilege,
    check_replication,
    find_missing_privileges,
)
from onceflow.sources.postgres.slot_progress import read_slot
from onceflow.sources.postgres.source import PostgresChanges
from onceflow.sources.postgres.table import SourceTable

_NAME = "onceflow doctor"
_SERVER = Area("change data")
_ROOM = """
    SELECT current_setting('max_replication_slots')::int,
           (SELECT count(*) FROM pg_catalog.pg_replication_slots),
           current_setting('max_wal_senders')::int,
           (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE backend_type = 'walsender'),
           (SELECT setting::bigint FROM pg_catalog.pg_settings
            WHERE name = 'max_slot_wal_keep_size'),
           (SELECT setting::bigint FROM pg_catalog.pg_settings
            WHERE name = 'wal_sender_timeout')
"""


def questions_of_changes(source: PostgresChanges, parallelism: int) -> Questions:
    """Return the questions about the server of `source`. A source has one reader."""
    del parallelism
    return partial(_examine, source)


def _examine(source: PostgresChanges) -> Sequence[Finding]:
    findings: list[Finding] = []
    endpoint = source.endpoint
    questions: Sequence[Callable[[PostgresSession], Sequence[Finding]]] = (
        partial(_judge_server, source),
        partial(_judge_room, source),
        lambda _: _judge_replication(endpoint),
        partial(_judge_slot, source),
        partial(_judge_tables, source),
    )
    if not source.follows:
        questions = (_judge_cluster, partial(_judge_copied_tables, source))
    try:
        with slots.connect(endpoint, _NAME) as session:
            for ask in questions:
                try:
                    findings += ask(session)
                except SqlError as error:
                    findings.append(_SERVER.problem(str(error), "", ""))
                    if not session.is_open:
                        break
                except OnceflowError as error:
                    findings.append(_SERVER.problem(str(error), "", ""))
    except ConfigError as error:
        needed = "user, password, database and encryption that let this machine in"
        remedies = list_login_remedies(endpoint)
        remedy = next(advice for words, advice in remedies if words in str(error))
        findings.append(_SERVER.problem(str(error), needed, f"correct the url, or: {remedy}"))
    except SourceUnavailable as error:
        remedy = "start it, or check the way to it: listen_addresses, port, firewall, proxy"
        findings.append(_SERVER.problem(str(error), "a server that answers", remedy))
    return findings


def _judge_cluster(session: PostgresSession) -> Sequence[Finding]:
    slots.identify_primary(session)
    version = session.server_version
    return [_SERVER.ok(f"PostgreSQL {version // 10000}.{version % 10000}; no slot is needed")]


def _judge_server(source: PostgresChanges, session: PostgresSession) -> Sequence[Finding]:
    source.check_server(session)
    version = session.server_version
    text = f"PostgreSQL {version // 10000}.{version % 10000}, wal_level = logical, REPLICATION"
    return [_SERVER.ok(text)]


def _judge_room(source: PostgresChanges, session: PostgresSession) -> Sequence[Finding]:
    ((slots_max, slots_used, senders_max, senders_used, wal_limit, timeout_ms),) = session.query(
        _ROOM
    )
    findings: list[Finding] = []
    is_new = source.has_slot_name and read_slot(session, source.slot_name) is None
    for setting, limit, used in (
        ("max_replication_slots", slots_max, slots_used),
        ("max_wal_senders", senders_max, senders_used),
    ):
        text = f"{setting} = {limit}, {used} in use"
        if used >= limit and (is_new or setting == "max_wal_senders"):
            advice = f"ALTER SYSTEM SET {setting} = {limit + 10}, then restart the server"
            if setting == "max_replication_slots":
                advice += "; or drop slots that are not used: onceflow slots list"
            findings.append(_SERVER.problem(text, "a free one", advice))
        else:
            findings.append(_SERVER.ok(text))
    if wal_limit is not None and wal_limit < 0:
        findings.append(
            _SERVER.warning(
                "max_slot_wal_keep_size = -1: a slot that does not move fills the server's disk",
                "a limit that the disk has room for, or an alert on onceflow_source_retained_bytes",
                "ALTER SYSTEM SET max_slot_wal_keep_size = '100GB'; SELECT pg_reload_conf()",
            )
        )
    if timeout_ms and source.status_interval * 1000 >= timeout_ms:
        findings.append(
            _SERVER.problem(
                f"wal_sender_timeout = {timeout_ms} ms, and status_interval ="
                f" {source.status_interval:g} s: the server ends the stream of a busy reader",
                "a status_interval that is shorter",
                f"status_interval={timeout_ms / 3000:g}",
            )
        )
    return findings


def _judge_replication(endpoint: PostgresEndpoint) -> Sequence[Finding]:
    check_replication(endpoint, _NAME)
    return [_SERVER.ok("the server takes connections for replication from here")]


def _judge_slot(source: PostgresChanges, session: PostgresSession) -> Sequence[Finding]:
    if not source.has_slot_name:
        return ()
    area = Area(f"slot {source.slot_name}")
    facts = read_slot(session, source.slot_name)
    if facts is None:
        return [area.ok("it does not exist yet: the first start creates it")]
    warnings = [area.warning(warning.text, "", "") for warning in facts.list_warnings()]
    state = "in use" if facts.is_active else "not in use"
    return warnings or [area.ok(f"it exists and is {state}")]


def _judge_tables(source: PostgresChanges, session: PostgresSession) -> Sequence[Finding]:
    tables = source.describe_tables(session)
    publication = source.publication_name if source.has_slot_name else None
    published = None if publication is None else slots.find_publication(session, publication)
    if publication is not None and source.publication is not None:
        slots.check_publication(session, publication, tables)
    slots.require_updates(session, publication, tables)
    findings: list[Finding] = []
    for table in tables:
        missing = find_missing_privileges(
            session,
            table.name,
            table.oid,
            [column.name for column in table.columns],
            copies_rows=source.copies_rows,
            creates_publication=table.name not in (published or ()),
        )
        findings += _judge_table(table, tuple(missing))
    return findings


def _judge_copied_tables(source: PostgresChanges, session: PostgresSession) -> Sequence[Finding]:
    """Judge the tables of a source that ends after their copy."""
    findings: list[Finding] = []
    for table in source.describe_tables(session):
        area = Area(f"table {table.name}")
        missing = find_missing_privileges(
            session,
            table.name,
            table.oid,
            [column.name for column in table.columns],
            copies_rows=True,
            creates_publication=False,
        )
        problems = [area.problem(right.lack, right.needed, right.remedy) for right in missing]
        findings += problems or [area.ok(f"{len(table.columns)} columns")]
    return findings


def _judge_table(table: SourceTable, missing: Sequence[MissingPrivilege]) -> Sequence[Finding]:
    area = Area(f"table {table.name}")
    findings = [area.problem(right.lack, right.needed, right.remedy) for right in missing]
    if table.unsent_columns:
        findings.append(
            area.warning(
                "an update that leaves a large value as it was ends the job, because Postgres does"
                f" not send the value of {', '.join(table.unsent_columns)}",
                "the whole old row in each change",
                f"ALTER TABLE {identifier(table.name)} REPLICA IDENTITY FULL",
            )
        )
    identity = {"d": "primary key", "f": "whole row", "i": "index"}[table.identity]
    text = f"{len(table.columns)} columns; a change names its row by {identity}"
    return findings or [area.ok(text)]
