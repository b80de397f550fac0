"""Which crash makes a server forget what it said is prepared or committed.

The job deletes its copy of the rows once the server has said so, and does not ask again: a server
that forgets then has lost them, and nobody notices.
Source: MySQL 8.4 reference manual, 17.14 and 19.1.6.4; MariaDB's list of InnoDB system variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onceflow.sinks.mysql.catalog import ServerFacts


class Crash(Enum):
    """What may happen to a server at any moment."""

    PROCESS = "its process is killed"
    MACHINE = "its machine loses power or its kernel crashes"


@dataclass(frozen=True, slots=True)
class Weakness:
    """A setting under which the server forgets."""

    setting: str
    """With its value."""
    forgets_when: Crash
    remedy: str
    """What mends it."""

    def __str__(self) -> str:
        return (
            f"{self.setting}: when {self.forgets_when.value}, the server forgets what it said is"
            " prepared or committed"
        )


def weaknesses(facts: ServerFacts) -> tuple[Weakness, ...]:
    """Return what the server's settings leave uncovered."""
    scope = "GLOBAL" if facts.mariadb else "PERSIST"
    found: list[Weakness] = []
    if facts.flush_at_commit in {"0", "2"}:  # MariaDB's 3 waits for the disk, as 1 does
        found.append(
            Weakness(
                f"innodb_flush_log_at_trx_commit = {facts.flush_at_commit}",
                Crash.PROCESS if facts.flush_at_commit == "0" else Crash.MACHINE,
                f"SET {scope} innodb_flush_log_at_trx_commit = 1",
            )
        )
    if not facts.redo_log:
        remedy = "ALTER INSTANCE ENABLE INNODB REDO_LOG"
        found.append(Weakness("Innodb_redo_log_enabled = OFF", Crash.PROCESS, remedy))
    if facts.binlog_format and facts.sync_binlog != "1":
        remedy = f"SET {scope} sync_binlog = 1"
        found.append(Weakness(f"sync_binlog = {facts.sync_binlog}", Crash.MACHINE, remedy))
    if facts.doublewrite in {"OFF", "0", "DETECT_ONLY"}:
        remedy = "write innodb_doublewrite = ON into its option file and restart it"
        found.append(Weakness(f"innodb_doublewrite = {facts.doublewrite}", Crash.MACHINE, remedy))
    return tuple(found)
