"""The questions of `onceflow doctor` to a SQL database: those of a job's start, and its capacity.

The dialect's `Server` contains the questions and judges the answers; this module orders them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from onceflow.clients.sql.session import AccessDenied, Session, SqlError
from onceflow.clients.sql.tables import Table, TableName
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.spi.connector import Area, Finding, Level, Questions, ServerAccess
from onceflow.sinks.sql.dialect import DATABASE, ServerDiagnosis
from onceflow.sinks.sql.ledger import LEDGER, SINKS
from onceflow.sinks.sql.settings import CommitMode, SqlSettings
from onceflow.sinks.sql.sink import SqlSink

CLOCK_SKEW_MAX_S = 5.0
Remedies: TypeAlias = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class SqlDiagnosis:
    """The checks that `onceflow doctor` makes of servers of one dialect; see `Diagnosis`."""

    sink: Callable[[ServerAccess, float], SqlSink]
    """Returns a sink that reaches the server, with the given timeout in seconds."""
    remedies: Callable[[SqlSink, OnceflowError], Remedies]
    """Returns pairs of words in a refused login and their remedy. The last pair matches all
    others."""
    address: str
    """The names of the settings that hold the server's address."""

    def __call__(
        self, access: ServerAccess, names: Sequence[str], parallelism: int, /
    ) -> Questions:
        """Return the checks to run. The checks connect to the server, not this method."""
        given = access.options.get("commit_mode", "auto")
        modes: dict[str, CommitMode | None] = {"auto": None, **{m.value: m for m in CommitMode}}
        if given not in modes:
            raise ConfigError(f"commit_mode={given!r} must be one of {', '.join(modes)}")
        sink = self.sink(access, access.timeout_s / 2)
        return partial(self._examine, sink, modes[given], tuple(names), parallelism)

    def examine(self, sink: SqlSink, parallelism: int) -> Questions:
        """Return the questions to the server of `sink`.

        Its table is not asked for: `validate` checks it.
        """
        return partial(self._examine, sink, sink.settings.commit_mode, (), parallelism)

    def _examine(
        self, sink: SqlSink, mode: CommitMode | None, tables: Sequence[str], parallelism: int
    ) -> Sequence[Finding]:
        settings = sink.settings
        try:
            session = settings.endpoint.connect("onceflow doctor")
        except OnceflowError as error:
            return [self._not_connected(sink, error)]
        with session:
            try:
                server = settings.dialect.look_at_server(session)
            except SqlError as error:
                problem = f"its version and settings cannot be read: {error}"
                return [DATABASE.problem(problem, "", "")]
            return _Examination(settings, server, session).findings(mode, tables, parallelism)

    def _not_connected(self, sink: SqlSink, error: OnceflowError) -> Finding:
        text = str(error)
        if isinstance(error, ConfigError):
            needed = "user, password, database and encryption that let this machine in"
            remedy = next(advice for words, advice in self.remedies(sink, error) if words in text)
            return DATABASE.problem(text, needed, f"correct the url, or: {remedy}")
        remedy = f"start it, or check the way to it: {self.address}, firewall, proxy"
        return DATABASE.problem(text, "a server that listens there and answers", remedy)


class _Examination:
    def __init__(self, settings: SqlSettings, server: ServerDiagnosis, session: Session) -> None:
        self._settings = settings
        self._server = server
        self._session = session

    def findings(
        self, mode: CommitMode | None, tables: Sequence[str], parallelism: int
    ) -> list[Finding]:
        """Return all findings; a question that the server refuses does not stop the others."""
        session, server, schema = self._session, self._server, self._settings.ledger_schema
        questions: Sequence[tuple[str, Callable[[], Sequence[Finding]]]] = (
            ("server", lambda: server.fitness(self._settings.endpoint)),
            ("commit mode", lambda: self._two_phase(mode, parallelism)),
            ("room", lambda: server.room(session, parallelism)),
            ("bookkeeping", lambda: [server.bookkeeping(session, schema, (LEDGER, SINKS))]),
            ("tables", lambda: [self._table(name) for name in tables]),
            ("clock", self._clock),
            ("prepared transactions", lambda: server.list_left_over(session, schema)),
        )
        findings: list[Finding] = []
        for name, ask in questions:
            try:
                findings += ask()
            except SqlError as error:
                findings.append(DATABASE.problem(f"{name}: {error}", "", ""))
                if not session.is_open:
                    break
        return findings

    def _two_phase(self, mode: CommitMode | None, parallelism: int) -> Sequence[Finding]:
        """Return the obstacles and drawbacks of two_phase, at the level that applies to `mode`."""
        if self._settings.two_phase is None:
            return ()
        support = self._server.two_phase_support(self._session, parallelism)
        against = (*support.obstacles, *support.drawbacks)
        match mode:
            case CommitMode.TWO_PHASE:
                findings = against
            case None:
                findings = tuple(replace(finding, level=Level.WARNING) for finding in against)
            case CommitMode.LEDGER:
                return [replace(finding, level=Level.OK, remedy="") for finding in against]
        return findings or [DATABASE.ok(support.merit)]

    def _table(self, given: str) -> Finding:
        area, name = Area(f"table {given}"), TableName.parse(given)
        try:
            table = self._settings.dialect.find_table(self._session, name)
        except AccessDenied:  # the user may not read the table's schema
            table = None
        if table is None:
            return self._server.absent(self._session, name, area)
        if table.unfit is not None:
            return replace(table.unfit, area=area.name)
        who = f"{self._settings.dialect.user} {self._server.user}"
        if not any(column.insertable for column in table.columns):
            shown = self._settings.dialect.identifier(table.name)
            grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {shown} TO {self._server.user}"
            return area.problem(f"{who} may not insert", "INSERT", grant)
        return area.ok(f"{who} may {', '.join(self._list_privileges(table))}")

    def _list_privileges(self, table: Table) -> list[str]:
        may = ["insert"]
        may += ["select"] if all(column.readable for column in table.columns) else []
        may += ["update"] if all(column.updatable for column in table.columns) else []
        try:
            self._settings.dialect.require_delete(self._session, table)
        except ConfigError:
            return may
        return [*may, "delete"] if table.deletable else may

    def _clock(self) -> Sequence[Finding]:
        before = time.time()
        theirs = self._server.clock_s(self._session)
        after = time.time()
        if theirs is None:
            return ()
        skew_s = max(before - theirs, theirs - after, 0.0)
        if skew_s <= CLOCK_SKEW_MAX_S:
            within_s = skew_s + after - before
            return [DATABASE.ok(f"its clock agrees with ours within {within_s:.3f} s")]
        return [
            DATABASE.warning(
                f"its clock differs from ours by {skew_s:.0f} s",
                f"clocks within {CLOCK_SKEW_MAX_S:g} s of each other; otherwise ages are wrong",
                "sudo timedatectl set-ntp true, on both machines",
            )
        ]
