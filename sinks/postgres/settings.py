"""What a sink's writers and committers need, resolved from what the user wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX
from onceflow.sinks.postgres.connection import Endpoint
from onceflow.sinks.postgres.ledger import Ledger
from onceflow.sinks.sql import ChangeRules, TableName

# At most 63 bytes, which is what Postgres keeps of an application_name.
_WRITER_NAME = re.compile(rf"onceflow ([A-Za-z0-9_.-]{{1,{SINK_ID_LENGTH_MAX}}})/(\d+)/\d+ writer")


class CommitMode(Enum):
    """How rows are kept between pre-commit and commit; see `commit_mode`."""

    TWO_PHASE = "two_phase"
    """In the server, as a prepared transaction."""
    LEDGER = "ledger"
    """In checkpoint storage, applied in one ordinary transaction with their ledger row."""


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """One target table and how to work with it."""

    endpoint: Endpoint
    table: TableName
    """The table of rows that name none."""
    ledger: Ledger
    lock_timeout_s: float
    flush_rows: int
    rules: ChangeRules = field(default_factory=ChangeRules)
    create: bool = False
    evolve: bool = False
    null_overflow: bool = False
    """Whether a value that does not fit becomes null, and is not a bad row."""
    commit_mode: CommitMode | None = None
    """What the user chose; None lets `check` choose."""


def writer_name(sink_id: str, attempt: int, subtask: int) -> str:
    """Return the application name of a writer's connection, by which its attempt is known."""
    return f"onceflow {sink_id}/{attempt}/{subtask} writer"


def attempt_of_writer(application_name: str, sink_id: str) -> int | None:
    """Return the attempt of the writer called so; None when it is no writer of `sink_id`."""
    match = _WRITER_NAME.fullmatch(application_name)
    return int(match[2]) if match is not None and match[1] == sink_id else None
