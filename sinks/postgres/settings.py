"""What a sink's writers and committers need, resolved from what the user wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX
from onceflow.sinks import sql
from onceflow.sinks.postgres.connection import Endpoint
from onceflow.sinks.postgres.ledger import Ledger

# At most 63 bytes, which is what Postgres keeps of an application_name.
_WRITER_NAME = re.compile(rf"onceflow ([A-Za-z0-9_.-]{{1,{SINK_ID_LENGTH_MAX}}})/(\d+)/\d+ writer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings(sql.SinkSettings[Endpoint, Ledger]):
    """One target table and how to work with it."""


def writer_name(sink_id: str, attempt: int, subtask: int) -> str:
    """Return the application name of a writer's connection, by which its attempt is known."""
    return f"onceflow {sink_id}/{attempt}/{subtask} writer"


def attempt_of_writer(application_name: str, sink_id: str) -> int | None:
    """Return the attempt of the writer called so; None when it is no writer of `sink_id`."""
    match = _WRITER_NAME.fullmatch(application_name)
    return int(match[2]) if match is not None and match[1] == sink_id else None
