"""The settings of a sink's writers and committers, resolved from the user's options.

They include the commit mode, which says where rows are kept between pre-commit and commit. Both
modes give the same guarantee and differ in what they need. `two_phase` needs prepared transactions
that other sessions may finish, and one server session from a checkpoint's first row to its last.
`ledger` needs checkpoint storage and writes every row twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from onceflow.clients.sql.session import SqlEndpoint, SqlError, TableMissing, refusal, session_name
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import ConfigError, StagingMissing
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.core.spi.staging import require_staging
from onceflow.sinks.sql.dialect import Dialect, TwoPhase, TwoPhaseSupport
from onceflow.sinks.sql.ledger import Ledger
from onceflow.sinks.sql.write_mode import ChangeRules


class CommitMode(Enum):
    """The place of rows between pre-commit and commit; see the option `commit_mode`."""

    TWO_PHASE = "two_phase"
    """Rows wait in the server, as a prepared transaction."""
    LEDGER = "ledger"
    """Rows wait in checkpoint storage; one ordinary transaction applies them and the ledger row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlSettings:
    """A target table and the settings for working with it."""

    dialect: Dialect
    endpoint: SqlEndpoint
    table: TableName
    """The table of rows that do not name their table."""
    ledger_schema: str
    """The schema of onceflow's own tables."""
    lock_timeout_s: float
    """The time for which the server may wait for another transaction's lock."""
    flush_rows: int
    """The number of rows of one commit with at-least-once delivery; at most one batch more."""
    rules: ChangeRules = field(default_factory=ChangeRules)
    create: bool = False
    evolve: bool = False
    null_overflow: bool = False
    """True if a value that does not fit its column becomes null instead of a bad row."""
    commit_mode: CommitMode | None = None
    """The user's choice; if None, `open` chooses."""

    @property
    def ledger(self) -> Ledger:
        """Onceflow's own tables."""
        return Ledger(self.dialect, self.ledger_schema)

    @property
    def two_phase(self) -> TwoPhase | None:
        """The two-phase operations under this ledger, or None if the server has none."""
        return self.dialect.two_phase(self.ledger_schema)


STAGED = "commit_mode='ledger' keeps rows"


def choose_mode(
    settings: SqlSettings,
    context: CommitterContext,
    look: Callable[[], TwoPhaseSupport],
    log: logging.Logger,
) -> CommitMode:
    """Return the commit mode of this attempt: the user's, or the best that the server allows.

    `look` is called unless the user chose ledger. `log` receives the choice and its reason.

    Raises:
        ConfigError: The mode is not possible here. The text contains the statement that would make
            it possible.
        StagingMissing: The server cannot prepare transactions, and there is no storage for staged
            rows.
    """
    if settings.commit_mode is CommitMode.LEDGER:
        require_staging(context.staging, context.sink_id, STAGED)
        return CommitMode.LEDGER
    support = look()
    if context.staging is None and support.obstacles:
        unused = settings.commit_mode is CommitMode.TWO_PHASE
        raise StagingMissing(
            f"{settings.endpoint} cannot prepare transactions, and no storage was given in which"
            " rows could wait until they are decided"
            + (", nor would commit_mode='two_phase' use it: leave that out, too" if unused else "")
            # Last, for it ends with a statement to run.
            + f". {support.obstacles[0]}"
        )
    if settings.commit_mode is CommitMode.TWO_PHASE or context.staging is None:
        if support.obstacles:
            raise ConfigError(
                f"{settings.endpoint} cannot do what commit_mode='two_phase' needs: "
                f"{support.obstacles[0]}; or pass commit_mode='ledger'"
            )
        for drawback in support.drawbacks:
            log.warning(
                "sink %s: commit_mode is two_phase for %s, but %s",
                context.sink_id,
                settings.endpoint,
                drawback,
            )
        return CommitMode.TWO_PHASE
    against = next(iter((*support.obstacles, *support.drawbacks)), None)
    mode = CommitMode.LEDGER if against else CommitMode.TWO_PHASE
    log.info(
        "sink %s: commit_mode auto chose %s: %s",
        context.sink_id,
        mode.value,
        against or support.merit,
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
    recorded = _read_commit_mode(settings, context)
    if recorded is None:
        # `open` recorded no mode. The writer's first pre-commit fails with that reason and prepares
        # nothing.
        return CommitMode.LEDGER if settings.two_phase is None else CommitMode.TWO_PHASE
    try:
        return CommitMode(recorded)
    except ValueError:
        raise ConfigError(
            f"sink {context.sink_id}: the recorded commit mode is {recorded!r}, which this version "
            "of onceflow does not have; run driver and executors with one version"
        ) from None


def _read_commit_mode(settings: SqlSettings, context: WriterContext) -> str | None:
    name = session_name(context.sink_id, context.attempt, "mode")
    with settings.endpoint.connect(name) as session:
        try:
            return settings.ledger.commit_mode(session, context.sink_id)
        except TableMissing:
            return None
        except SqlError as error:
            text = f"sink {context.sink_id}: {settings.endpoint}: the commit mode cannot be read"
            raise refusal(error, text) from error
