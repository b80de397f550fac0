"""Whether a MySQL or MariaDB can take rows exactly once, and in which way."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from onceflow.core.connector import Area, Finding, Questions, ServerAccess
from onceflow.core.errors import OnceflowError
from onceflow.sinks.mysql.catalog import XaNames, identifier, quoted
from onceflow.sinks.mysql.catalog import found as found_table
from onceflow.sinks.mysql.connection import MySQLSession
from onceflow.sinks.mysql.endpoint import MySQLEndpoint
from onceflow.sinks.mysql.server import Crash, ServerFacts, server_facts, weaknesses
from onceflow.sinks.mysql.sink import MySQLSink
from onceflow.sinks.mysql.two_phase import may_recover, recovered
from onceflow.sinks.sql.connector import (
    CLOCK_SKEW_MAX_S,
    CONNECTIONS_A_SUBTASK,
    NO_TABLE,
    DatabaseQuestion,
    Remedies,
    question_of,
    refused,
)
from onceflow.sinks.sql.session import SqlError
from onceflow.sinks.sql.settings import CommitMode
from onceflow.sinks.sql.tables import TableName

PASSWORD_VARIABLE = "MYSQL_PWD"  # noqa: S105 - its name
_ACCOUNT = re.compile(r"for user ('.*'@'.*') to database")
_VERSION_MIN = {False: (8, 0, 29), True: (10, 6, 0)}
"""MySQL's and MariaDB's first that keep a prepared transaction without its session."""
_SINGLE_ENGINE = "InnoDB"


def sink_of_tools(
    url: str, password: str | None, ledger_schema: str | None, timeout_s: float
) -> MySQLSink:
    """Return a sink that says how a tool reaches the server; the password may be in MYSQL_PWD.

    Raises:
        ConfigError: The URL cannot be read.
    """
    sink = MySQLSink(
        url,
        table=NO_TABLE,
        password=password,
        ledger_schema=ledger_schema,
        connect_timeout_s=timeout_s,
        statement_timeout_s=timeout_s,
        lock_timeout_s=timeout_s,
    )
    known = os.environ.get(PASSWORD_VARIABLE)
    return replace(sink, password=known) if known and not sink.endpoint.password else sink


def questions_of_mysql(access: ServerAccess, tables: Sequence[str], parallelism: int) -> Questions:
    """Return what a server is asked about itself; see `Diagnosis`."""
    return partial(_ask, question_of(access, tables, parallelism))


def _ask(question: DatabaseQuestion) -> Sequence[Finding]:
    sink = sink_of_tools(
        question.url, question.password, question.ledger_schema, question.timeout_s / 2
    )
    try:
        session = sink.endpoint.connect("onceflow doctor")
    except OnceflowError as error:
        remedies = _remedies(sink.endpoint, error)
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
            self._privileges, self._tables, self._clock, self._left_behind,
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
        if self._question.commit_mode is CommitMode.LEDGER:
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
        says = self._area.warning if self._question.commit_mode is None else self._area.problem
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

    def _tables(self, facts: ServerFacts) -> list[Finding]:
        return [self._table(given, facts) for given in self._question.tables]

    def _table(self, given: str, facts: ServerFacts) -> Finding:
        area, name = Area(f"table {given}"), TableName.parse(given)
        shown = identifier(TableName(name.schema or self._endpoint.database, name.name))
        table = found_table(self._session, name)
        if table is None:
            text = "it does not exist, or may not be seen"
            create = f"CREATE TABLE {shown} (…), or MySQLSink(…, create=True)"
            return area.problem(text, "the table", create)
        if table.unfit:
            alter = f"ALTER TABLE {shown} ENGINE = {_SINGLE_ENGINE}"
            return area.problem(table.unfit, "an engine with transactions", alter)
        if not all(one.insertable or one.generated for one in table.columns):
            grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {shown} TO {facts.user}"
            return area.problem(f"{facts.user} may not insert", "INSERT", grant)
        return area.ok(f"{facts.user} may insert")

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


def _remedies(where: MySQLEndpoint, error: OnceflowError) -> Remedies:
    """Return the statements, as an administrator runs them."""
    user, database = where.user.replace("'", "''"), quoted(where.database)
    # The account is in the text when the login was right; else it may be at any host.
    account = found[1] if (found := _ACCOUNT.search(str(error))) else f"'{user}'@'%'"
    password = (
        f"ALTER USER {account} IDENTIFIED BY '…', or CREATE USER if there is none; which there"
        f" is: SELECT user, host FROM mysql.user WHERE user = '{user}'"
    )
    privileges = "SELECT, INSERT, UPDATE, DELETE, CREATE, INDEX"
    return (
        ("(error 1044)", f"GRANT {privileges} ON {database}.* TO {account}"),
        ("(error 1049)", f"CREATE DATABASE {database}"),
        ("SSL is required", "ssl_mode=required in the url"),
        ("ertificate", "ssl_ca=, ssl_cert= and ssl_key= in the url"),
        ("", password),
    )
