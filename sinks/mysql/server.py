"""What a MySQL or MariaDB server is, and what that means for a sink."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from enum import Enum

from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.sinks.mysql.catalog import grantee, literal, quoted
from onceflow.sinks.mysql.connection import own
from onceflow.sinks.mysql.two_phase import may_recover
from onceflow.sinks.sql.dialect import Server, TwoPhaseSupport
from onceflow.sinks.sql.session import Endpoint, Session

_logger = logging.getLogger("onceflow.sinks.mysql")
_VERSION = re.compile(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)")
# Rows of values in MySQL; XA that outlives its session in MariaDB.
_MYSQL_VERSION_MIN, _MARIADB_VERSION_MIN = (8, 0, 20), (10, 6, 0)
# xa_detach_on_prepare; Source: MySQL 8.0.29 release notes.
_DETACH_VERSION = (8, 0, 29)
_VARIABLES = (
    "read_only",
    "super_read_only",
    "xa_detach_on_prepare",
    "log_bin",
    "binlog_format",
    "wsrep_on",
    "innodb_flush_log_at_trx_commit",
    "sync_binlog",
    "innodb_doublewrite",
    "local_infile",
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the commit modes need to know about a server."""

    mariadb: bool
    version: tuple[int, int, int]
    read_only: bool
    detaches: bool
    """Whether a session may go on after XA PREPARE, and others commit what it prepared."""
    binlog_format: str
    """Empty when there is no binary log."""
    galera: bool
    flush_at_commit: str
    """innodb_flush_log_at_trx_commit."""
    sync_binlog: str
    doublewrite: str
    redo_log: bool
    local_infile: bool
    user: str
    """As GRANT takes it."""

    @property
    def shown(self) -> str:
        """Product and version."""
        return f"{'MariaDB' if self.mariadb else 'MySQL'} {'.'.join(map(str, self.version))}"


def server_facts(session: Session) -> ServerFacts:
    """Return the facts as of now."""
    mine = own(session)
    listed = ", ".join(map(literal, _VARIABLES))
    found = session.query(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({listed})")
    values = {str(name).lower(): str(value) for name, value in found}
    # Of MySQL alone, and no variable.
    redo_log = session.query("SHOW GLOBAL STATUS LIKE 'Innodb_redo_log_enabled'")
    match = _VERSION.match(mine.version_text)
    major, minor, patch = map(int, match.groups()) if match else (0, 0, 0)
    ((user,),) = session.query("SELECT CURRENT_USER()")
    return ServerFacts(
        mariadb=mine.is_mariadb,
        version=(major, minor, patch),
        read_only="ON" in (values.get("read_only"), values.get("super_read_only")),
        detaches=mine.is_mariadb or values.get("xa_detach_on_prepare") == "ON",
        binlog_format=values.get("binlog_format", "") if values.get("log_bin") == "ON" else "",
        galera=values.get("wsrep_on") == "ON",
        flush_at_commit=values.get("innodb_flush_log_at_trx_commit", ""),
        sync_binlog=values.get("sync_binlog", ""),
        doublewrite=values.get("innodb_doublewrite", ""),
        redo_log=not redo_log or redo_log[0][1] == "ON",
        local_infile=values.get("local_infile") == "ON",
        user=grantee(str(user)),
    )


# Which crash makes a server forget what it said is prepared or committed. The job deletes its copy
# of the rows once the server has said so, and does not ask again: a server that forgets then has
# lost them, and nobody notices.
# Source: MySQL 8.4 reference manual, 17.14 and 19.1.6.4; MariaDB's list of InnoDB system variables.
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


class MySQLServer(Server):
    """As it is now."""

    def __init__(self, session: Session) -> None:
        """Ask it."""
        self.facts = server_facts(session)
        self.user = self.facts.user

    @override
    def require(self, where: Endpoint, sink_id: str) -> None:
        facts = self.facts
        minimum = _MARIADB_VERSION_MIN if facts.mariadb else _MYSQL_VERSION_MIN
        if facts.version < minimum:
            raise ConfigError(
                f"{where} runs {facts.shown}; onceflow needs {'.'.join(map(str, minimum))} or newer"
            )
        if facts.read_only:
            raise ConfigError(
                f"{where} is read-only, as replicas are; name the primary in the url, or run: "
                "SET GLOBAL read_only = OFF"
            )
        for weakness in weaknesses(facts):
            if weakness.forgets_when is Crash.PROCESS:
                raise ConfigError(
                    f"sink {sink_id}: {where} has {weakness}. Run: {weakness.remedy} (on a managed "
                    "server it is set in the provider's parameter group; a server on which it "
                    "cannot be changed cannot be written to exactly once)"
                )
            _logger.warning(
                "sink %s: %s has %s. Run: %s", sink_id, where, weakness, weakness.remedy
            )
        if not facts.local_infile:
            _logger.info(
                "sink %s: %s has local_infile = OFF, so rows go by INSERT, which takes about twice "
                "as long as LOAD DATA. To allow it, run: SET GLOBAL local_infile = ON",
                sink_id,
                where,
            )

    @override
    def two_phase_support(self, session: Session) -> TwoPhaseSupport:
        return TwoPhaseSupport(
            f"{self.facts.shown} keeps prepared XA transactions without their session, and the "
            "user may list them",
            self._obstacle(session),
        )

    @override
    def bookkeeping_grants(self, schema: str) -> str:
        return (
            f"CREATE DATABASE IF NOT EXISTS {quoted(schema)}; GRANT CREATE, INDEX, SELECT, "
            f"INSERT, UPDATE, DELETE ON {quoted(schema)}.* TO {self.user}; or name a database "
            "where it may: MySQLSink(ledger_schema=…)"
        )

    def _obstacle(self, session: Session) -> str:
        """Return why the server cannot prepare for others to commit; empty when it can."""
        facts = self.facts
        obstacles: tuple[tuple[bool, str], ...] = (
            (
                not facts.mariadb and facts.version < _DETACH_VERSION,
                f"{facts.shown} lets only its preparing session commit. Upgrade to 8.0.29 or newer",
            ),
            (
                not facts.detaches,
                "xa_detach_on_prepare is OFF. Run: SET PERSIST xa_detach_on_prepare = ON",
            ),
            (facts.galera, "it is a Galera cluster (wsrep_on), which has no XA transactions"),
            (
                facts.binlog_format == "STATEMENT",
                (
                    "binlog_format is STATEMENT, and READ COMMITTED needs rows. Run: SET GLOBAL "
                    "binlog_format = 'ROW'"
                ),
            ),
            (
                own(session).is_pooled,
                "a proxy stands between here and the server's sessions; name the server itself",
            ),
            (
                not may_recover(session),
                (
                    "the user may not list prepared transactions. Run: GRANT XA_RECOVER_ADMIN ON "
                    f"*.* TO {facts.user}"
                ),
            ),
        )
        return next((text for there, text in obstacles if there), "")
