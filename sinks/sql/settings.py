"""What a sink's writers and committers need, resolved from what the user wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from onceflow.sinks.sql.table_name import TableName
from onceflow.sinks.sql.write_mode import ChangeRules

EndpointT_co = TypeVar("EndpointT_co", covariant=True)
LedgerT_co = TypeVar("LedgerT_co", covariant=True)


class CommitMode(Enum):
    """How rows are kept between pre-commit and commit; see `commit_mode`."""

    TWO_PHASE = "two_phase"
    """In the server, as a prepared transaction."""
    LEDGER = "ledger"
    """In checkpoint storage, applied in one ordinary transaction with their ledger row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings(Generic[EndpointT_co, LedgerT_co]):
    """One target table and how to work with it."""

    endpoint: EndpointT_co
    table: TableName
    """The table of rows that name none."""
    ledger: LedgerT_co
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
