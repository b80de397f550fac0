"""The queries to MySQL and MariaDB for preflight and doctor, with judgements and remedies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from typing_extensions import override

from onceflow.clients.mysql.catalog import XaNames, find_table, grantee, identifier, literal, quote
from onceflow.clients.mysql.connection import own
from onceflow.clients.sql.session import Session, SqlEndpoint
from onceflow.clients.sql.tables import TableName
from onceflow.core.spi.connector import Area, Finding
from onceflow.sinks.mysql.two_phase import may_recover, xa_recover
from onceflow.sinks.sql.dialect import DATABASE, ServerDiagnosis, TwoPhaseSupport, connections
from onceflow.sinks.sql.ledger import LEDGER, SINKS

_DURABLE = "committed rows survive a crash of the server and of its machine"
_VERSION = re.compile(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)")
# MySQL: VALUES ROW(…). MariaDB: XA transactions that outlive their session.
_MYSQL_VERSION_MIN, _MARIADB_VERSION_MIN = (8, 0, 20), (10, 6, 0)
# xa_detach_on_prepare. Source: MySQL 8.0.29 release notes.
_DETACH_VERSION = (8, 0, 29)
_VARIABLES = (
    "read_only",
    "super_read_only",
    "transaction_read_only",
    "tx_read_only",
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
    """The facts about a server that the commit modes need."""

    mariadb: bool
    version: tuple[int, int, int]
    read_only: bool
    transactions_read_only: bool
    """True if transactions are read-only by default."""
    detaches: bool
    """True if a session may continue after XA PREPARE, and others may commit what it prepared."""
    binlog_format: str
    """The format of the binary log; empty if there is none."""
    galera: bool
    flush_at_commit: str
    """The value of innodb_flush_log_at_trx_commit."""
    sync_binlog: str
    doublewrite: str
    redo_log: bool
    local_infile: bool
    user: str
    """The user in the form that GRANT accepts."""

    @property
    def shown(self) -> str:
        """The product and its version."""
        return f"{'MariaDB' if self.mariadb else 'MySQL'} {'.'.join(map(str, self.version))}"


def server_facts(session: Session) -> ServerFacts:
    """Query the server and return its current facts."""
    mine = own(session)
    listed = ", ".join(map(literal, _VARIABLES))
    variables = session.query(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({listed})")
    values = {str(name).lower(): str(value) for name, value in variables}
    # Only MySQL has this status; it is not a variable.
    redo_log = session.query("SHOW GLOBAL STATUS LIKE 'Innodb_redo_log_enabled'")
    match = _VERSION.match(mine.version_text)
    major, minor, patch = map(int, match.groups()) if match else (0, 0, 0)
    ((user,),) = session.query("SELECT CURRENT_USER()")
    return ServerFacts(
        mariadb=mine.is_mariadb,
        version=(major, minor, patch),
        read_only="ON" in (values.get("read_only"), values.get("super_read_only")),
        transactions_read_only="ON"
        in (values.get("transaction_read_only"), values.get("tx_read_only")),
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


# The crash after which a server forgets transactions that it reported as prepared or committed. The
# job deletes its copy of the rows after that report and does not ask again. So a server that
# forgets them has lost rows without an error. Source: MySQL 8.4 reference manual, 17.14 and
# 19.1.6.4; MariaDB's list of InnoDB system variables.
class Crash(Enum):
    """A crash of a server that may happen at any moment."""

    PROCESS = "its process is killed"
    MACHINE = "its machine loses power or its kernel crashes"


@dataclass(frozen=True, slots=True)
class Weakness:
    """A setting under which the server forgets transactions."""

    setting: str
    """The setting, with its value."""
    forgets_when: Crash
    remedy: str
    """The statement or change that corrects the setting."""


def weaknesses(facts: ServerFacts) -> tuple[Weakness, ...]:
    """Return the settings of the server under which it forgets transactions."""
    scope = "GLOBAL" if facts.mariadb else "PERSIST"
    weaknesses: list[Weakness] = []
    if facts.flush_at_commit in {"0", "2"}:  # MariaDB's 3 also waits for the disk, as 1 does
        weaknesses.append(
            Weakness(
                f"innodb_flush_log_at_trx_commit = {facts.flush_at_commit}",
                Crash.PROCESS if facts.flush_at_commit == "0" else Crash.MACHINE,
                f"SET {scope} innodb_flush_log_at_trx_commit = 1",
            )
        )
    if not facts.redo_log:
        remedy = "ALTER INSTANCE ENABLE INNODB REDO_LOG"
        weaknesses.append(Weakness("Innodb_redo_log_enabled = OFF", Crash.PROCESS, remedy))
    if facts.binlog_format and facts.sync_binlog != "1":
        remedy = f"SET {scope} sync_binlog = 1"
        weaknesses.append(Weakness(f"sync_binlog = {facts.sync_binlog}", Crash.MACHINE, remedy))
    if facts.doublewrite in {"OFF", "0", "DETECT_ONLY"}:
        remedy = "write innodb_doublewrite = ON into its option file and restart it"
        weaknesses.append(
            Weakness(f"innodb_doublewrite = {facts.doublewrite}", Crash.MACHINE, remedy)
        )
    return tuple(weaknesses)


class MySQLDiagnosis(ServerDiagnosis):
    """A server's current settings and the user's rights."""

    def __init__(self, session: Session) -> None:
        """Query the server."""
        self.facts = server_facts(session)
        self.user = self.facts.user

    @override
    def fitness(self, where: SqlEndpoint) -> Sequence[Finding]:
        facts, findings = self.facts, list[Finding]()
        minimum = _MARIADB_VERSION_MIN if facts.mariadb else _MYSQL_VERSION_MIN
        if facts.version < minimum:
            needed = f"{'.'.join(map(str, minimum))} or newer"
            findings.append(DATABASE.problem(facts.shown, needed, "upgrade it"))
        if facts.read_only:
            findings.append(
                DATABASE.problem(
                    f"{facts.shown} is read-only, as replicas are",
                    "the primary: a replica takes no writes",
                    "name the primary in the url, or run: SET GLOBAL read_only = OFF",
                )
            )
        if facts.transactions_read_only:
            findings.append(
                DATABASE.problem(
                    "transactions are read-only",
                    "transactions that write",
                    # Before 11.1 MariaDB knows the variable only by this name.
                    f"SET GLOBAL {'tx' if facts.mariadb else 'transaction'}_read_only = OFF",
                )
            )
        if facts.binlog_format == "STATEMENT":
            findings.append(_warn_of_binary_log())
        findings = findings or [DATABASE.ok(f"{facts.shown}, {where}")]
        return [*findings, *_durability(facts), _loading(facts)]

    @override
    def two_phase_support(self, session: Session, parallelism: int) -> TwoPhaseSupport:
        return TwoPhaseSupport(
            f"{self.facts.shown} keeps transactions without their session: XA transactions can be "
            "prepared and listed",
            tuple(_obstacles(self.facts, session)),
        )

    @override
    def bookkeeping(self, session: Session, schema: str, tables: Sequence[str]) -> Finding:
        granted = {
            str(privilege)
            for scope in (
                "user_privileges WHERE TRUE",
                f"schema_privileges WHERE '{_text(schema)}' LIKE table_schema",
            )
            for (privilege,) in session.query(
                f"SELECT privilege_type FROM information_schema.{scope} "
                f"AND REPLACE(grantee, '''', '') = '{_text(self.user)}'"
            )
        }
        needed = {"SELECT", "INSERT", "UPDATE", "DELETE"}
        if None in (find_table(session, TableName(schema, name)) for name in (LEDGER, SINKS)):
            needed |= {"CREATE", "INDEX"}
        missing = sorted(needed - granted)
        if not missing:
            return DATABASE.ok(f"{self.user} may keep the ledger in database {schema}")
        text = f"{self.user} lacks {', '.join(missing)} on database {schema}"
        grant = f"GRANT {', '.join(sorted(needed))} ON {quote(schema)}.* TO {self.user}"
        if not granted:
            # Privileges by a role or on single tables are not listed here.
            return DATABASE.warning(f"{text}, as far as it is listed", "both", grant)
        return DATABASE.problem(text, "onceflow's own two tables", grant)

    @override
    def absent(self, session: Session, name: TableName, area: Area) -> Finding:
        ((database,),) = session.query("SELECT DATABASE()")
        shown = identifier(TableName(name.schema or str(database), name.name))
        create = f"CREATE TABLE {shown} (…), or MySQLSink(…, create=True)"
        return area.problem("it does not exist, or may not be seen", "the table", create)

    @override
    def room(self, session: Session, parallelism: int) -> Sequence[Finding]:
        ((_, total),) = session.query("SHOW GLOBAL VARIABLES LIKE 'max_connections'")
        ((_, used),) = session.query("SHOW GLOBAL STATUS LIKE 'Threads_connected'")
        raised = "SET GLOBAL max_connections = {total}"
        return [connections(int(total), int(total) - int(used), parallelism, raised)]

    @override
    def clock_s(self, session: Session) -> float:
        ((theirs,),) = session.query("SELECT UNIX_TIMESTAMP(SYSDATE(6))")
        return float(theirs)

    @override
    def list_left_over(self, session: Session, schema: str) -> Sequence[Finding]:
        if not may_recover(session):
            return ()
        rows, names = xa_recover(session), XaNames(schema)
        parsed = [
            names.parse(int(format_id), int(gtrid), data) for format_id, gtrid, _, data in rows
        ]
        ours = sorted(transaction for transaction in parsed if transaction is not None)
        findings: list[Finding] = []
        if ours:
            text = f"{len(ours)} of ours prepared, the first {ours[0]}"
            needed = "no old prepared transactions: they hold locks"
            remedy = "onceflow txn list --url … --storage … --job … tells their age"
            findings.append(DATABASE.warning(text, needed, remedy))
        if len(rows) > len(ours):
            text = f"{len(rows) - len(ours)} of others, or of other ledgers, are prepared"
            remedy = "XA RECOVER CONVERT XID; ask who owns it, then XA COMMIT or XA ROLLBACK"
            findings.append(DATABASE.warning(text, "that somebody settles them", remedy))
        return findings or [DATABASE.ok("nothing is left prepared")]


def _warn_of_binary_log() -> Finding:
    """Return a warning: a server that leaves the database out of its binary log takes the rows."""
    return DATABASE.warning(
        "binlog_format = STATEMENT",
        "ROW or MIXED: the sink writes in READ COMMITTED, and the server logs such changes as rows",
        "SET GLOBAL binlog_format = 'ROW'",
    )


def _durability(facts: ServerFacts) -> Sequence[Finding]:
    findings: list[Finding] = []
    for weakness in weaknesses(facts):
        says = DATABASE.problem if weakness.forgets_when is Crash.PROCESS else DATABASE.warning
        needed = (
            f"{_DURABLE}: with this setting they are lost when {weakness.forgets_when.value} (a"
            " managed server has it in its provider's parameter group)"
        )
        findings.append(says(weakness.setting, needed, weakness.remedy))
    return findings or [DATABASE.ok(_DURABLE)]


def _loading(facts: ServerFacts) -> Finding:
    if facts.local_infile:
        return DATABASE.ok("local_infile = ON")
    return DATABASE.warning(
        "local_infile = OFF, so rows go by INSERT, which takes about twice as long as LOAD DATA",
        "ON",
        "SET GLOBAL local_infile = ON",
    )


def _obstacles(facts: ServerFacts, session: Session) -> Iterator[Finding]:
    """Yield the reasons why the server cannot prepare transactions for other sessions to commit."""
    if not facts.mariadb and facts.version < _DETACH_VERSION:
        text = f"{facts.shown} lets only its preparing session commit"
        yield DATABASE.problem(text, "8.0.29 or newer", "upgrade it")
    if not facts.detaches:
        remedy = "SET PERSIST xa_detach_on_prepare = ON"
        yield DATABASE.problem("xa_detach_on_prepare = OFF", "ON", remedy)
    if facts.galera:
        text = "it is a Galera cluster (wsrep_on), which has no XA transactions"
        yield DATABASE.problem(text, "a single server", "MySQLSink(commit_mode='ledger')")
    if own(session).is_pooled:
        yield DATABASE.problem(
            "the connection goes through a proxy",
            "a direct connection for two-phase commit; ledger mode works through a proxy",
            "use the server's own port, or MySQLSink(commit_mode='ledger')",
        )
    if not may_recover(session):
        text = f"{facts.user} may not list prepared transactions"
        remedy = f"GRANT XA_RECOVER_ADMIN ON *.* TO {facts.user}"
        yield DATABASE.problem(text, "XA_RECOVER_ADMIN", remedy)


def _text(value: str) -> str:
    """Return `value` for use inside quotes, without the quotes in CURRENT_USER."""
    return value.replace("'", "").replace("\\", "\\\\")
