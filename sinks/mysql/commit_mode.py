"""Chooses how rows are kept between pre-commit and commit, and says why.

Both modes give the same guarantee; what differs is what they need. two_phase needs XA transactions
that outlive their session and the privilege to list them, and one server session from a
checkpoint's first row to its last; ledger needs checkpoint storage and writes every row twice.
"""

from __future__ import annotations

import logging

from pymysql.err import MySQLError

from onceflow.core.errors import ConfigError
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.sinks.mysql.catalog import ServerFacts, may_recover
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.failures import NO_SUCH_TABLE, code
from onceflow.sinks.mysql.settings import CommitMode, SinkSettings, session_name

_logger = logging.getLogger("onceflow.sinks.mysql")
# xa_detach_on_prepare; Source: MySQL 8.0.29 release notes.
_DETACH_VERSION = (8, 0, 29)


def chosen_mode(
    settings: SinkSettings, context: CommitterContext, session: Session, facts: ServerFacts
) -> CommitMode:
    """Return the mode of this attempt: the user's, or the one that server and path allow.

    Raises:
        ConfigError: The mode is not possible here; has the statement that mends it.
    """
    if settings.commit_mode is CommitMode.LEDGER:
        return _ledger(context)
    obstacle = _obstacle(session, facts)
    if settings.commit_mode is CommitMode.TWO_PHASE or context.staging is None:
        if obstacle:
            raise ConfigError(
                f"{settings.endpoint} cannot do what commit_mode='two_phase' needs: {obstacle}; or "
                "pass commit_mode='ledger'"
            )
        return CommitMode.TWO_PHASE
    if obstacle:
        return _logged(context, CommitMode.LEDGER, obstacle)
    return _logged(
        context,
        CommitMode.TWO_PHASE,
        f"{facts.shown} keeps prepared XA transactions without their session, and the user may "
        "list them",
    )


def mode_of_writer(settings: SinkSettings, context: WriterContext) -> CommitMode:
    """Return the mode that `check` recorded for all subtasks, or the user's.

    Raises:
        ConfigError: The recorded mode is of another version of onceflow.
        SinkError: The server cannot be reached now.
    """
    if settings.commit_mode is not None:
        return settings.commit_mode
    name = session_name(context.sink_id, context.attempt, "mode")
    with settings.endpoint.connect(name) as session:
        try:
            recorded = settings.ledger.commit_mode(session, context.sink_id)
        except MySQLError as error:
            if code(error) != NO_SUCH_TABLE:
                raise
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


def _obstacle(session: Session, facts: ServerFacts) -> str:
    """Return why the server cannot prepare for others to commit; empty when it can."""
    obstacles: tuple[tuple[bool, str], ...] = (
        (
            not facts.mariadb and facts.version < _DETACH_VERSION,
            (
                f"{facts.shown} lets only the session that prepared commit. Upgrade "
                "to MySQL 8.0.29 or newer"
            ),
        ),
        (
            not facts.detaches,
            "xa_detach_on_prepare is OFF. Run: SET PERSIST xa_detach_on_prepare = ON",
        ),
        (facts.galera, "it is a Galera cluster (wsrep_on), which has no XA transactions"),
        (
            facts.binlog_format == "STATEMENT",
            (
                "binlog_format is STATEMENT, and READ COMMITTED needs rows. Run: "
                "SET GLOBAL binlog_format = 'ROW'"
            ),
        ),
        (
            session.is_pooled,
            "a proxy stands between here and the server's sessions; name the server itself",
        ),
        (
            not may_recover(session),
            (
                "the user may not list prepared transactions. Run: "
                f"GRANT XA_RECOVER_ADMIN ON *.* TO {facts.user}"
            ),
        ),
    )
    return next((text for there, text in obstacles if there), "")


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
