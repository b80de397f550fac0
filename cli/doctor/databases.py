"""What every check of a database is asked, and how each says that it was not let in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from onceflow.cli.doctor.findings import Area, Finding
from onceflow.core.errors import ConfigError, OnceflowError

CommitMode = Literal["auto", "two_phase", "ledger"]
Remedies: TypeAlias = Sequence[tuple[str, str]]
CLOCK_SKEW_MAX_S = 5.0
CONNECTIONS_A_SUBTASK = 2
"""The writer's and the committer's."""


@dataclass(frozen=True, slots=True)
class DatabaseQuestion:
    """Which database is asked, and for what it must do."""

    url: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    table: str | None = None
    ledger_schema: str | None = None
    commit_mode: CommitMode = "auto"
    parallelism: int = 1
    timeout_s: float = 30.0


def refused(error: OnceflowError, remedies: Remedies, address: str) -> Finding:
    """Return the finding for a connection that was not made.

    `remedies` has what mends a refusal by the words that the server refuses with, the last for all
    others; `address` names where it listens.
    """
    area, text = Area("database"), str(error)
    if isinstance(error, ConfigError):
        needed = "user, password, database and encryption that let this machine in"
        remedy = next(remedy for words, remedy in remedies if words in text)
        return area.problem(text, needed, f"mend the url, or: {remedy}")
    remedy = f"start it, or mend what is in between: {address}, firewall, proxy"
    return area.problem(str(error), "a server that listens there and answers", remedy)
