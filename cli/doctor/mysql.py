"""Whether a MySQL or MariaDB can take rows exactly once, and in which way."""

from __future__ import annotations

import time
from collections.abc import Sequence

from onceflow.cli.doctor.databases import (
    CLOCK_SKEW_MAX_S,
    CONNECTIONS_A_SUBTASK,
    DatabaseQuestion,
    refused,
)
from onceflow.cli.doctor.findings import Area, Finding
from onceflow.cli.doctor.logins import remedies_of_mysql
from onceflow.cli.txn.mysql import with_password_of_environment
from onceflow.core.errors import OnceflowError
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql.catalog import found as found_table
from onceflow.sinks.mysql.connection import MySQLSession
from onceflow.sinks.mysql.names import XaNames, identifier, quoted
from onceflow.sinks.mysql.server import Crash, ServerFacts, server_facts, weaknesses
from onceflow.sinks.mysql.two_phase import may_recover, recovered
from onceflow.sinks.sql.errors import SqlError
from onceflow.sinks.sql.tables import TableName

_VERSION_MIN = {False: (8, 0, 29), True: (10, 6, 0)}
"""MySQL's and MariaDB's first that keep a prepared transaction without its session."""
_SINGLE_ENGINE = "InnoDB"


def check_mysql(question: DatabaseQuestion) -> Sequence[Finding]:
    """Connect, and ask the server about itself; changes nothing in it."""
    sink = with_password_of_environment(
        MySQLSink(
            question.url,
            table=question.table or "onceflow",
            password=question.password,
            ledger_schema=question.ledger_schema,
            connect_timeout_s=question.timeout_s / 2,
            statement_timeout_s=question.timeout_s / 2,
        )
    )
    try:
        session = sink.endpoint.connect("onceflow doctor")
    except OnceflowError as error:
        remedies = remedies_of_mysql(sink.endpoint, error)
        return [refused(error, remedies, "bind_address, port")]
    with session:
        return _Examination(question, sink, session).findings()


class _Examination:
    def __init__(self, question: DatabaseQuestion, sink: MySQLSink, session: MySQLSession) -> None:
        self._question = question
        self._endpoint = sink.endpoint
        self._ledger = sink.settings.ledger_schema
        self._session = session
        self._area = Area("database")

    def findings(self) -> list[Finding]:
        """Return all findings; a question that the server refuses does not end the others."""
        try:
            facts = server_facts(self._session)
        except SqlError as error:
            return [self._area.problem(f"it tells nothing of itself: {error}", "", "")]
        found: list[Finding] = []
        for look in (
            self._server, self._durability, self._two_phase, self._loading, self._connections,
            self._privileges, self._table, self._clock, self._left_behind,
        ):  # fmt: skip
            try:
                found += look(facts)
            except SqlError as error:
                name = look.__name__.strip("_").replace("_", " ")
                found.append(self._area.problem(f"{name}: {error}", "", ""))
                if not self._session.is_open:
                    break
        return found

    def _server(self, facts: ServerFacts) -> list[Finding]:
        if facts.read_only:
            return [
                self._area.problem(
                    f"{facts.shown} is read-only",
                    "the primary: a replica takes no writes",
                    "name the primary, or: SET GLOBAL read_only = OFF",
                )
            ]
        return [self._area.ok(f"{facts.shown}, {self._endpoint}")]

    def _durability(self, facts: ServerFacts) -> list[Finding]:
        covered = "what is committed outlives the server's process and its machine"
        found: list[Finding] = []
        for one in weaknesses(facts):
            process = one.forgets_when is Crash.PROCESS
            says = self._area.problem if process else self._area.warning
            needed = f"{covered}: this forgets it when {one.forgets_when.value}"
            found.append(says(one.setting, needed, one.remedy))
        return found or [self._area.ok(covered)]

    def _two_phase(self, facts: ServerFacts) -> list[Finding]:
        if self._question.commit_mode == "ledger":
            return []
        minimum = ".".join(map(str, _VERSION_MIN[facts.mariadb]))
        obstacles = (
            (
                facts.version < _VERSION_MIN[facts.mariadb],
                f"{facts.shown} loses prepared transactions with their session",
                f"version {minimum} or newer",
                "upgrade",
            ),
            (
                not facts.detaches,
                "xa_detach_on_prepare = OFF",
                "ON",
                "SET PERSIST xa_detach_on_prepare = ON",
            ),
            (
                facts.galera,
                "it is a Galera cluster, which has no XA transactions",
                "a single server",
                "MySQLSink(commit_mode='ledger')",
            ),
            (
                facts.binlog_format == "STATEMENT",
                "binlog_format = STATEMENT",
                "ROW",
                "SET GLOBAL binlog_format = 'ROW'",
            ),
            (
                self._session.is_pooled,
                "a proxy is in between",
                "a direct connection for two-phase commit; ledger mode works through a proxy",
                "name the server's own port, or MySQLSink(commit_mode='ledger')",
            ),
            (
                not may_recover(self._session),
                f"{facts.user} may not list prepared transactions",
                "XA_RECOVER_ADMIN",
                f"GRANT XA_RECOVER_ADMIN ON *.* TO {facts.user}",
            ),
        )
        says = self._area.warning if self._question.commit_mode == "auto" else self._area.problem
        found = [says(text, needed, remedy) for is_so, text, needed, remedy in obstacles if is_so]
        return found or [self._area.ok("XA transactions can be prepared and listed")]

    def _loading(self, facts: ServerFacts) -> list[Finding]:
        if facts.local_infile:
            return [self._area.ok("local_infile = ON")]
        return [
            self._area.warning(
                "local_infile = OFF: rows go by INSERT, which takes about twice as long",
                "ON",
                "SET GLOBAL local_infile = ON",
            )
        ]

    def _connections(self, facts: ServerFacts) -> list[Finding]:
        del facts
        total = int(self._variable("max_connections"))
        ((_, used),) = self._session.query("SHOW GLOBAL STATUS LIKE 'Threads_connected'")
        free, needed = total - int(used), CONNECTIONS_A_SUBTASK * self._question.parallelism + 2
        if free < needed:
            return [
                self._area.warning(
                    f"{free} of {total} connections are free",
                    f"{needed}: {CONNECTIONS_A_SUBTASK} for each parallel subtask, 2 for the"
                    " driver",
                    f"SET GLOBAL max_connections = {total + needed}",
                )
            ]
        return [self._area.ok(f"{free} of {total} connections are free")]

    def _privileges(self, facts: ServerFacts) -> list[Finding]:
        database = self._ledger
        granted = {
            str(one)
            for scope in (
                "user_privileges WHERE TRUE",
                f"schema_privileges WHERE '{_text(database)}' LIKE table_schema",
            )
            for (one,) in self._session.query(
                f"SELECT privilege_type FROM information_schema.{scope} "
                f"AND REPLACE(grantee, '''', '') = '{_text(facts.user)}'"
            )
        }
        needed = {"SELECT", "INSERT", "UPDATE", "DELETE"}
        tables = [found_table(self._session, TableName(database, name)) for name in
                  ("onceflow_ledger", "onceflow_sinks")]  # fmt: skip
        if None in tables:
            needed |= {"CREATE", "INDEX"}
        missing = sorted(needed - granted)
        if missing:
            text = f"{facts.user} lacks {', '.join(missing)} on database {database}"
            grant = f"GRANT {', '.join(sorted(needed))} ON {quoted(database)}.* TO {facts.user}"
            if not granted:
                # By a role, or on single tables: the server does not list it here.
                return [self._area.warning(f"{text}, as far as it is listed", "both", grant)]
            return [self._area.problem(text, "onceflow's own two tables", grant)]
        return [self._area.ok(f"{facts.user} may keep the ledger in database {database}")]

    def _table(self, facts: ServerFacts) -> list[Finding]:
        given = self._question.table
        if given is None:
            return []
        area, name = Area(f"table {given}"), TableName.parse(given)
        shown = identifier(TableName(name.schema or self._endpoint.database, name.name))
        table = found_table(self._session, name)
        if table is None:
            text = "it does not exist, or may not be seen"
            create = f"CREATE TABLE {shown} (…), or MySQLSink(…, create=True)"
            return [area.problem(text, "the table", create)]
        if table.unfit:
            alter = f"ALTER TABLE {shown} ENGINE = {_SINGLE_ENGINE}"
            return [area.problem(table.unfit, "an engine with transactions", alter)]
        if not all(one.insertable or one.generated for one in table.columns):
            grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {shown} TO {facts.user}"
            return [area.problem(f"{facts.user} may not insert", "INSERT", grant)]
        return [area.ok(f"{facts.user} may insert")]

    def _clock(self, facts: ServerFacts) -> list[Finding]:
        del facts
        before = time.time()
        ((theirs,),) = self._session.query("SELECT UNIX_TIMESTAMP(SYSDATE(6))")
        after = time.time()
        skew_s = max(before - float(theirs), float(theirs) - after, 0.0)
        if skew_s <= CLOCK_SKEW_MAX_S:
            return [
                self._area.ok(f"its clock agrees with ours within {skew_s + after - before:.3f} s")
            ]
        return [
            self._area.warning(
                f"its clock is {skew_s:.0f} s off ours",
                f"clocks within {CLOCK_SKEW_MAX_S:g} s; ages are told wrong otherwise",
                "sudo timedatectl set-ntp true, on both machines",
            )
        ]

    def _left_behind(self, facts: ServerFacts) -> list[Finding]:
        del facts
        if not may_recover(self._session):
            return []
        rows, names = recovered(self._session), XaNames(self._ledger)
        parsed = [names.parsed(int(one), int(gtrid), data) for one, gtrid, _, data in rows]
        ours = sorted(one for one in parsed if one is not None)
        found: list[Finding] = []
        if ours:
            text = f"{len(ours)} of ours prepared, the first {ours[0]}"
            needed = "none that are old: they hold locks"
            remedy = "onceflow txn list --url … --storage … --job … tells their age"
            found.append(self._area.warning(text, needed, remedy))
        if len(rows) > len(ours):
            text = f"{len(rows) - len(ours)} of others, or of other ledgers, are prepared"
            remedy = "XA RECOVER CONVERT XID; ask who owns it, then XA COMMIT or XA ROLLBACK"
            found.append(self._area.warning(text, "that somebody settles them", remedy))
        return found or [self._area.ok("nothing is left prepared")]

    def _variable(self, name: str) -> str:
        found = self._session.query(f"SHOW GLOBAL VARIABLES LIKE '{name}'")
        return str(found[0][1]) if found else ""


def _text(value: str) -> str:
    """Return `value` for use inside quotes, without the quotes that CURRENT_USER's parts have."""
    return value.replace("'", "").replace("\\", "\\\\")
