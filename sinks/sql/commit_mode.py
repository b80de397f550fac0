"""Chooses how rows are kept between pre-commit and commit, and says why.

Both modes give the same guarantee; what differs is what they need. two_phase needs prepared
transactions that others may finish, and one server session from a checkpoint's first row to its
last; ledger needs checkpoint storage and writes every row twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from onceflow.core.errors import ConfigError
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.core.staging import required_staging
from onceflow.sinks.sql.dialect import TwoPhaseSupport
from onceflow.sinks.sql.errors import SqlError, TableMissing, refusal
from onceflow.sinks.sql.session import session_name
from onceflow.sinks.sql.settings import CommitMode, SqlSettings

STAGED = "commit_mode='ledger' keeps rows"


def chosen_mode(
    settings: SqlSettings,
    context: CommitterContext,
    look: Callable[[], TwoPhaseSupport],
    log: logging.Logger,
) -> CommitMode:
    """Return the mode of this attempt: the user's, or the one that server and path allow.

    `look` is asked unless the user chose ledger. `log` gets what was chosen and why.

    Raises:
        ConfigError: The mode is not possible here; has the statement that mends it.
    """
    if settings.commit_mode is CommitMode.LEDGER:
        required_staging(context.staging, context.sink_id, STAGED)
        return CommitMode.LEDGER
    found = look()
    if settings.commit_mode is CommitMode.TWO_PHASE or context.staging is None:
        if found.obstacle:
            raise ConfigError(
                f"{settings.endpoint} cannot do what commit_mode='two_phase' needs: "
                f"{found.obstacle}; or pass commit_mode='ledger'"
            )
        if found.drawback:
            log.warning(
                "sink %s: commit_mode is two_phase for %s, but %s",
                context.sink_id,
                settings.endpoint,
                found.drawback,
            )
        return CommitMode.TWO_PHASE
    against = found.obstacle or found.drawback
    mode = CommitMode.LEDGER if against else CommitMode.TWO_PHASE
    log.info(
        "sink %s: commit_mode auto chose %s: %s",
        context.sink_id,
        mode.value,
        against or found.merit,
    )
    return mode


def mode_of_writer(settings: SqlSettings, context: WriterContext) -> CommitMode:
    """Return the mode that `open` recorded for all subtasks, or the user's.

    Raises:
        ConfigError: The recorded mode is of another version of onceflow.
        SinkError: The server cannot be reached or asked now.
    """
    if settings.commit_mode is not None:
        return settings.commit_mode
    recorded = _recorded(settings, context)
    if recorded is None:
        # Never checked: its first pre-commit says so, and prepares nothing.
        return CommitMode.LEDGER if settings.two_phase is None else CommitMode.TWO_PHASE
    try:
        return CommitMode(recorded)
    except ValueError:
        raise ConfigError(
            f"sink {context.sink_id}: the recorded commit mode is {recorded!r}, which this version "
            "of onceflow does not have; run driver and executors with one version"
        ) from None


def _recorded(settings: SqlSettings, context: WriterContext) -> str | None:
    name = session_name(context.sink_id, context.attempt, "mode")
    with settings.endpoint.connect(name) as session:
        try:
            return settings.ledger.commit_mode(session, context.sink_id)
        except TableMissing:
            return None
        except SqlError as error:
            text = f"sink {context.sink_id}: {settings.endpoint}: the commit mode is not told"
            raise refusal(error, text) from error
