"""What a sink's writers and committers need, resolved from what the user wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX
from onceflow.sinks.mysql.connection import Endpoint
from onceflow.sinks.mysql.ledger import Ledger
from onceflow.sinks.mysql.names import XaNames
from onceflow.sinks.sql import ChangeRules, TableName


class CommitMode(Enum):
    """How rows are kept between pre-commit and commit; see `commit_mode`."""

    TWO_PHASE = "two_phase"
    """In the server, as a prepared XA transaction."""
    LEDGER = "ledger"
    """In checkpoint storage, applied in one ordinary transaction with their ledger row."""


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """One target table and how to work with it."""

    endpoint: Endpoint
    table: TableName
    """The table of rows that name none."""
    ledger: Ledger
    flush_rows: int
    rules: ChangeRules = field(default_factory=ChangeRules)
    create: bool = False
    evolve: bool = False
    null_overflow: bool = False
    """Whether a value that does not fit becomes null, and is not a bad row."""
    commit_mode: CommitMode | None = None
    """What the user chose; None lets `check` choose."""

    @property
    def names(self) -> XaNames:
        """How this sink's transactions are called in the server."""
        return XaNames(self.ledger.database)


def session_name(sink_id: str, attempt: int, role: str) -> str:
    """Return the program name under which the server's operator sees a session."""
    return f"onceflow {sink_id[:SINK_ID_LENGTH_MAX]}/{attempt} {role}"
