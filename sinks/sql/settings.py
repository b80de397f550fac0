"""What a sink's writers and committers need, resolved from what the user wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from onceflow.sinks.sql.dialect import Dialect, TwoPhase
from onceflow.sinks.sql.ledger import Ledger
from onceflow.sinks.sql.session import Endpoint
from onceflow.sinks.sql.tables import TableName
from onceflow.sinks.sql.write_mode import ChangeRules


class CommitMode(Enum):
    """How rows are kept between pre-commit and commit; see `commit_mode`."""

    TWO_PHASE = "two_phase"
    """In the server, as a prepared transaction."""
    LEDGER = "ledger"
    """In checkpoint storage, applied in one ordinary transaction with their ledger row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlSettings:
    """One target table and how to work with it."""

    dialect: Dialect
    endpoint: Endpoint
    table: TableName
    """The table of rows that do not name their table."""
    ledger_schema: str
    """Where onceflow's own tables are."""
    lock_timeout_s: float
    """How long the server may wait for another transaction's lock."""
    flush_rows: int
    """At least once: how many rows are committed together, at most a batch more."""
    rules: ChangeRules = field(default_factory=ChangeRules)
    create: bool = False
    evolve: bool = False
    null_overflow: bool = False
    """Whether a value that does not fit becomes null, and is not a bad row."""
    commit_mode: CommitMode | None = None
    """What the user chose; None lets `open` choose."""

    @property
    def ledger(self) -> Ledger:
        """Onceflow's own tables."""
        return Ledger(self.dialect, self.ledger_schema)

    @property
    def two_phase(self) -> TwoPhase | None:
        """How transactions are prepared under this ledger; None where they cannot be."""
        return self.dialect.two_phase(self.ledger_schema)
