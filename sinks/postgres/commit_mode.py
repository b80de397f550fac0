"""Chooses how rows are kept between pre-commit and commit, and says why.

Both modes give the same guarantee; what differs is what they need. two_phase needs prepared
transactions and one server session from a checkpoint's first row to its last; ledger needs
checkpoint storage and writes every row twice.
"""

from __future__ import annotations

import logging

import psycopg
from psycopg.rows import TupleRow

from onceflow.core.errors import ConfigError
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.sinks.postgres.catalog import ServerFacts
from onceflow.sinks.postgres.settings import CommitMode, SinkSettings

_logger = logging.getLogger("onceflow.sinks.postgres")


def is_pooled(connection: psycopg.Connection[TupleRow]) -> bool:
    """Return whether something between here and the server hands out its sessions.

    A pooler tells its clients a process id of its own making, by which they cancel queries; the
    server tells its real one. PgBouncer, pgcat, Odyssey and the proxies of managed databases do so.
    One that passes the id on keeps one session a client, and needs no care.

    Source: PgBouncer 1.15 to 1.25, BackendKeyData of a client login.
    """
    row = connection.execute("SELECT pg_catalog.pg_backend_pid()").fetchone()
    return row is not None and int(row[0]) != connection.info.backend_pid


def chosen_mode(
    settings: SinkSettings,
    context: CommitterContext,
    connection: psycopg.Connection[TupleRow],
    facts: ServerFacts,
) -> CommitMode:
    """Return the mode of this attempt: the user's, or the one that server and path allow.

    Raises:
        ConfigError: The mode is not possible here; has the statement that mends it.
    """
    if settings.commit_mode is CommitMode.LEDGER:
        return _ledger(context)
    prepares = facts.max_prepared_transactions > 0
    pooled = is_pooled(connection)
    if settings.commit_mode is CommitMode.TWO_PHASE or context.staging is None:
        if not prepares:
            raise ConfigError(_cannot_prepare(settings))
        if pooled:
            _logger.warning(
                "sink %s: %s is reached through a pooler, of which commit_mode two_phase holds one "
                "server session a subtask from a checkpoint's first row to its last",
                context.sink_id,
                settings.endpoint,
            )
        return CommitMode.TWO_PHASE
    if not prepares:
        return _logged(context, CommitMode.LEDGER, "the server has max_prepared_transactions = 0")
    if pooled:
        return _logged(
            context, CommitMode.LEDGER, "a pooler stands between here and the server's sessions"
        )
    return _logged(
        context,
        CommitMode.TWO_PHASE,
        f"the server has max_prepared_transactions = {facts.max_prepared_transactions}, and its "
        "sessions are reached directly",
    )


def mode_of_writer(settings: SinkSettings, context: WriterContext) -> CommitMode:
    """Return the mode that `check` recorded for all subtasks, or the user's.

    Raises:
        ConfigError: The recorded mode is of another version of onceflow.
        SinkError: The server cannot be reached now.
    """
    if settings.commit_mode is not None:
        return settings.commit_mode
    name = f"onceflow {context.sink_id}/{context.attempt} mode"
    with settings.endpoint.connect(name) as connection:
        try:
            recorded = settings.ledger.commit_mode(connection, context.sink_id)
        except psycopg.errors.UndefinedTable:
            recorded = None
    if recorded is None:
        # Never checked: its first pre-commit says so, and prepares nothing.
        return CommitMode.TWO_PHASE
    try:
        return CommitMode(recorded)
    except ValueError:
        raise ConfigError(
            f"sink {context.sink_id}: the recorded commit mode is {recorded!r}, which this version "
            "of onceflow does not have; run driver and executors with one version"
        ) from None


def _ledger(context: CommitterContext) -> CommitMode:
    if context.staging is None:
        raise ConfigError(
            f"sink {context.sink_id}: commit_mode='ledger' keeps rows in checkpoint storage, and "
            "there is none here"
        )
    return CommitMode.LEDGER


def _logged(context: CommitterContext, mode: CommitMode, why: str) -> CommitMode:
    _logger.info("sink %s: commit_mode auto chose %s: %s", context.sink_id, mode.value, why)
    return mode


def _cannot_prepare(settings: SinkSettings) -> str:
    return (
        f"{settings.endpoint} has max_prepared_transactions = 0, so it refuses the two-phase "
        "commit that commit_mode='two_phase' needs. Run: ALTER SYSTEM SET "
        "max_prepared_transactions = 64; then restart the server (two for each parallel subtask of "
        "every sink are enough); or pass commit_mode='ledger'"
    )
