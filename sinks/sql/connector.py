"""What tools do with a SQL database: settle what it holds in doubt, and diagnose it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from typing_extensions import override

from onceflow.core.connector import Area, Finding, ServerAccess
from onceflow.core.errors import ConfigError, OnceflowError, SinkError
from onceflow.core.in_doubt import ResourceManager
from onceflow.core.spi import Committer, CommitterContext
from onceflow.sinks.sql.session import Session, SqlError, TableMissing
from onceflow.sinks.sql.settings import CommitMode
from onceflow.sinks.sql.sink import SqlSink

_T = TypeVar("_T")
NO_TABLE = "onceflow"
"""For a sink that only commits and rolls back by name, which needs no table."""
Remedies: TypeAlias = Sequence[tuple[str, str]]
CLOCK_SKEW_MAX_S = 5.0
CONNECTIONS_A_SUBTASK = 2
"""The writer's and the committer's."""


class SqlResourceManager(ResourceManager):
    """One database, for every sink id whose ledger is there. Connects when it is first asked."""

    def __init__(self, sink: SqlSink) -> None:
        """`sink` says how the database is reached; rows that are staged are not its to apply."""
        self._sink = sink
        self._settings = sink.settings
        self._session: Session | None = None

    @property
    @override
    def name(self) -> str:
        return str(self._settings.endpoint)

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return self._sink.committer(replace(context, staging=None))

    @override
    def claimed_by(self, sink_id: str) -> str | None:
        owner = self._of_our_tables(lambda s: self._settings.ledger.owner(s, sink_id))
        return owner.log_id if owner else None

    @override
    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _asked(self, ask: Callable[[Session], _T]) -> _T:
        """Return what `ask` returns.

        Raises:
            SinkError: The server does not answer, or refuses to.
        """
        try:
            if self._session is None or not self._session.is_open:
                self._session = self._settings.endpoint.connect("onceflow txn")
            return ask(self._session)
        except SqlError as error:
            raise SinkError(f"{self._settings.endpoint}: {error}") from error

    def _of_our_tables(self, ask: Callable[[Session], _T | None]) -> _T | None:
        """Return what `ask` returns; None where our tables are not."""

        def asked(session: Session) -> _T | None:
            try:
                return ask(session)
            except TableMissing:
                return None

        return self._asked(asked)


@dataclass(frozen=True, slots=True)
class DatabaseQuestion:
    """Which database is asked, and for what it must do."""

    url: str = field(repr=False)
    password: str | None = field(repr=False)
    tables: tuple[str, ...]
    ledger_schema: str | None
    commit_mode: CommitMode | None
    """None: whichever is possible."""
    parallelism: int
    timeout_s: float


def question_of(access: ServerAccess, tables: Sequence[str], parallelism: int) -> DatabaseQuestion:
    """Return what a diagnosis is to look at; of the options it takes the sink's two.

    Raises:
        ConfigError: There is no such commit mode.
    """
    given = access.options.get("commit_mode", "auto")
    modes: dict[str, CommitMode | None] = {"auto": None, **{one.value: one for one in CommitMode}}
    if given not in modes:
        raise ConfigError(f"commit_mode={given!r} must be one of {', '.join(modes)}")
    return DatabaseQuestion(
        access.url,
        access.password,
        tuple(tables),
        access.options.get("ledger_schema"),
        modes[given],
        parallelism,
        access.timeout_s,
    )


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
