"""The endpoints of Postgres databases, and sessions on which every wait has a deadline.

Apart from `replication` and `login_states`, the only module that uses psycopg: it translates its
errors into those of `sql.session`. It does not rely on session state: settings are `SET LOCAL`, and
no statement is prepared by name. So a session may go through a pooler that gives each transaction
another server session.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import psycopg
import psycopg.postgres
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.generators import fetch_many
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import TupleRow
from psycopg.waiting import Wait
from typing_extensions import override

from onceflow.clients.postgres.binary_rows import RowBuffer
from onceflow.clients.postgres.login_states import find_login_state
from onceflow.clients.sql.session import (
    KEEPALIVE_COUNT,
    KEEPALIVE_IDLE_S,
    KEEPALIVE_INTERVAL_S,
    UNACKNOWLEDGED_S,
    AccessDenied,
    ConnectionLost,
    DatabaseAccess,
    DuplicateKey,
    LockTimeout,
    NameTaken,
    NameUnknown,
    ReadOnly,
    RepeatedPackets,
    RowRefused,
    Session,
    SqlError,
    StatementInvalid,
    StatementRefused,
    TableMissing,
    limit_silence,
)
from onceflow.core.errors import ConfigError, SettingsRefused, SinkError
from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX
from onceflow.core.secret_references import follow_references

_T = TypeVar("_T")

# Class 08: the connection broke. 57P: the server ends the session because it stops or crashed.
# Class 21: two rows of one statement have the same row of the table. Class 22: a value does not fit
# its type. Class 23: a constraint refuses the row. Class 44: a view does. P0001: a trigger does.
# 54000: a value is too long for an index or for a page. The classes of the last line are faults of
# a statement or a trigger.
_KINDS: tuple[tuple[str, type[SqlError]], ...] = (
    ("08", ConnectionLost),
    ("57P", ConnectionLost),
    ("23505", DuplicateKey),
    ("21", RowRefused),
    # A sequence that numbers the rows has reached its end.
    ("2200H", StatementInvalid),
    ("22", RowRefused),
    ("23", RowRefused),
    ("44", RowRefused),
    ("P0001", RowRefused),
    ("54000", RowRefused),
    # A table has too many columns.
    ("54011", StatementInvalid),
    # The table is published, and has no replica identity for changes.
    ("55000", StatementInvalid),
    ("25006", ReadOnly),
    ("55P03", LockTimeout),
    ("42501", AccessDenied),
    ("42P01", TableMissing),
    ("42704", NameUnknown),
    ("42710", NameTaken),
    *((start, StatementInvalid) for start in ("0A", "2F", "38", "39", "3F", "42", "P0")),
)
_CLASSES = re.compile(
    r"0[0-389ABFLPZ]|10|2[0-8BDF]|3[489BDF]|4[024]|5[34578]|72|F0|HV|P0|XX", re.ASCII
)
"""The classes of SQLSTATEs that servers use. Other classes come from a trigger's RAISE … ERRCODE.
Source: PostgreSQL 18, Appendix A, "PostgreSQL Error Codes"."""
# Timeouts are off, because the role's own would end a COPY that lasts as long as a checkpoint
# interval; the client has a deadline for each reply. Keepalives and the user timeout: if this
# machine vanishes, the server rolls back within a minute, even while it sends a reply, so a new
# attempt finds no lock of this session. synchronous_commit: after a commit no other copy of the
# rows exists, so it must not be only in the server's memory. array_nulls: without it, a null in an
# array would become the text NULL. row_security off: the server then raises an error for a table
# with row-level security. With it, an UPDATE or DELETE would silently skip rows that a policy
# hides. Transactions are not READ WRITE, which would override a default_transaction_read_only set
# to stop all writers.
_BEGIN = """
    BEGIN ISOLATION LEVEL READ COMMITTED;
    SET LOCAL lock_timeout = {lock_timeout_ms};
    SET LOCAL statement_timeout = 0;
    SET LOCAL idle_in_transaction_session_timeout = 0;
    SET LOCAL array_nulls = on;
    SET LOCAL row_security = off;
    SET LOCAL tcp_keepalives_idle = 20;
    SET LOCAL tcp_keepalives_interval = 10;
    SET LOCAL tcp_keepalives_count = 3;
    SET LOCAL tcp_user_timeout = 50000;
    SELECT pg_catalog.set_config(name, '0', true) FROM pg_catalog.pg_settings
    WHERE name = 'transaction_timeout' AND setting <> '0';
    SELECT pg_catalog.set_config('synchronous_commit', 'on', true)
    WHERE pg_catalog.current_setting('synchronous_commit') = 'off';
"""
# After this time a hanging server is no longer waited for; closing the connection rolls back too.
_CLOSE_TIMEOUT_S = 2.0
_GATHERED_S = 0.05
"""The time for which rows of a COPY are gathered. To return them costs as much as 50 rows."""
GATHERED_BYTES = 8 * 1024 * 1024
"""The size above which rows of a COPY are returned, so that large rows need little memory."""

# The loss of the server's machine is detected within half a minute.
_DEFAULTS: dict[str, str] = {
    "client_encoding": "utf8",
    "keepalives_idle": str(KEEPALIVE_IDLE_S),
    "keepalives_interval": str(KEEPALIVE_INTERVAL_S),
    "keepalives_count": str(KEEPALIVE_COUNT),
    "tcp_user_timeout": str(UNACKNOWLEDGED_S * 1000),
}
_APPLICATION_NAME_LENGTH_MAX = 63
_WRITER_NAME = re.compile(rf"onceflow ([A-Za-z0-9_.-]{{1,{SINK_ID_LENGTH_MAX}}})/(\d+)/\d+ writer")
_SCHEME = re.compile(r"(jdbc:)?[a-z0-9]+(\+[a-z0-9]+)?")
_UTF8_NAMES = frozenset({"utf8", "unicode"})
"""The names of UTF-8 as the server compares them: without upper case, hyphens and underscores."""
# Of a login, a database, a right, a parameter, its value, the time at which it may be set.
# Source: PostgreSQL 18, appendix A.
_WRONG_SETTING_STATES = re.compile(r"28|3D000|42501|42704|42601|22023|55P02")
# libpq reports no SQLSTATE for a failure at start-up, so the text decides first; a failure that is
# not listed may heal by itself.
_WRONG_SETTING = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|not permitted to log in"
    r"|unrecognized configuration parameter|cannot be (changed|set)|permission denied to set"
    r"|invalid command-line argument"
    r"|(database|role) \".*\" does not exist|permission denied for database|\[Errno -2\]"
    # A pooler that forwards neither this parameter nor connections for replication.
    r"|unsupported startup parameter"
    r"|could not translate host name|does not support SSL|certificate"
    # A parameter that libpq refuses before it connects, or a file of a key.
    r"|invalid (\"?\w+\"? )?value|invalid port number|weak sslmode|private key file"
    r"|channel binding|authentication method requirement"
    # The other side or OpenSSL refuses the handshake; the connection was not only lost.
    r"|SSL error: (?!unexpected eof)"
)
_SAID_BY_SERVER = re.compile(r":  \S")
"""The end of a severity, in each language. Other errors of libpq have no two spaces."""
_HEALS = re.compile(r"the database system is|too many (clients|connections)|connection slots")
"""The words of refusals that end by themselves."""


class ReplyTimeout(psycopg.OperationalError):
    """Raised if the server did not answer in time; the connection is already closed."""


class _BoundedConnection(psycopg.Connection[TupleRow]):
    """A connection that is closed if the server is silent for too long."""

    reply_timeout_s: float = 120.0
    unacknowledged_s: float | None = None
    """The limit of unacknowledged time that this module sets, or None if the user has set one."""

    @contextmanager
    def transfer(self) -> Generator[None]:
        """Allow the server to read nothing for up to `reply_timeout_s` while the block runs."""
        usual_s = self.unacknowledged_s
        if usual_s is None:
            yield
            return
        limit_silence(self.fileno(), max(usual_s, self.reply_timeout_s))
        try:
            yield
        finally:
            if not self.closed:
                limit_silence(self.fileno(), usual_s)

    def wait(self, gen: Generator[Any, Any, _T], *args: Any, **kwargs: Any) -> _T:
        """Return the result of `gen`, or close the connection.

        Raises:
            ReplyTimeout: The server neither answered nor took data for `reply_timeout_s`, or the
                network has lost all packets for `unacknowledged_s`.
        """
        bounded = until_silent(
            gen, self.reply_timeout_s, partial(self._find_loss, RepeatedPackets())
        )
        try:
            return super().wait(bounded, *args, **kwargs)
        except ReplyTimeout:
            self.close()
            raise

    def _find_loss(self, repeated: RepeatedPackets) -> str:
        """Return a text if the network loses all packets; empty if it does not."""
        repeated_s = repeated.measure(self.fileno(), time.monotonic())
        limit_s = self.unacknowledged_s
        if limit_s is None or repeated_s < limit_s:
            return ""
        return f"the server has acknowledged nothing for {repeated_s:.0f} s"


def _find_nothing() -> str:
    return ""


def until_silent(
    gen: Generator[Any, Any, _T],
    timeout_s: float,
    find_loss: Callable[[], str] = _find_nothing,
) -> Generator[Any, Any, _T]:
    """Return the result of `gen`.

    Raise ReplyTimeout after `timeout_s` or if `find_loss` returns a text.

    psycopg resumes it ten times a second, with 0 while nothing happens.
    """
    deadline = time.monotonic() + timeout_s
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() > deadline:
                raise ReplyTimeout(f"the server did not answer within {timeout_s:g} s")
            if not ready and (loss := find_loss()):
                raise ReplyTimeout(loss)
            state = gen.send(ready)
    except StopIteration as stop:
        return cast("_T", stop.value)


def receive_copied(
    connection: PGconn, rows_max: int
) -> Generator[Any, Any, tuple[RowBuffer, bool]]:
    """Return messages of a COPY, and True if they are the last.

    Returns after `rows_max` rows, or earlier if the rows are large. Also returns `_GATHERED_S`
    after the first row arrived. The inner loop runs once for each row, so it creates few objects.
    """
    rows = RowBuffer()
    data, add_size, read = rows.data, rows.sizes.append, connection.get_copy_data
    return_at = time.monotonic() + _GATHERED_S
    while True:
        for _ in range(rows_max - len(rows)):
            size, message = read(1)
            if size <= 0:
                break
            data += message
            add_size(size)
        else:
            return rows, False
        if size < 0:
            (result, *_) = yield from fetch_many(connection)
            if result.status != ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(result)
            return rows, True
        if len(rows) and (len(data) > GATHERED_BYTES or time.monotonic() > return_at):
            return rows, False
        while not (yield Wait.R):
            if len(rows):
                return rows, False
        connection.consume_input()


def type_number(name: str) -> int:
    """Return the number (OID) of a type in the wire format."""
    return psycopg.postgres.types[name].oid


def writer_name(sink_id: str, attempt: int, subtask: int) -> str:
    """Return the application name of a writer's session, which identifies its attempt."""
    return f"onceflow {sink_id}/{attempt}/{subtask} writer"


def attempt_of_writer(application_name: str, sink_id: str) -> int | None:
    """Return the attempt of the writer with this name, or None if it is no writer of `sink_id`."""
    match = _WRITER_NAME.fullmatch(application_name)
    return int(match[2]) if match is not None and match[1] == sink_id else None


@dataclass(frozen=True, slots=True)
class BinaryArray:
    """The value of one array parameter in wire format."""

    data: bytes


class _BinaryArrayDumper(Dumper):
    """A dumper that leaves the type open, because the statement casts each parameter."""

    format = Format.BINARY
    oid = 0

    @override
    def dump(self, obj: BinaryArray) -> Buffer | None:
        return obj.data


class PostgresSession(Session):
    """A session whose transactions set their own settings. Used by one thread."""

    def __init__(self, connection: _BoundedConnection, lock_timeout_s: float) -> None:
        """Send nothing yet; only this class translates errors of `connection`."""
        self._connection = connection
        self._begin = _BEGIN.format(lock_timeout_ms=round(lock_timeout_s * 1000)).encode()
        connection.adapters.register_dumper(BinaryArray, _BinaryArrayDumper)

    @property
    @override
    def is_open(self) -> bool:
        return not self._connection.closed

    @property
    def server_version(self) -> int:
        """The version as a number: 160004 is 16.4."""
        return self._connection.info.server_version

    @property
    def backend_pid(self) -> int:
        """The process id of the session that the other side sent at the login."""
        return self._connection.info.backend_pid

    @override
    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        with _translate_errors(self._connection):
            return self._connection.execute(statement.encode()).fetchall()

    @override
    def execute(self, statement: str) -> int:
        with _translate_errors(self._connection):
            return self._connection.execute(statement.encode()).rowcount

    def execute_arrays(self, statement: str, parameters: Sequence[BinaryArray]) -> int:
        """Carry out `statement` with `parameters`, to which it refers as $1 and so on.

        Return the number of rows that the server has found or changed.
        """
        with _translate_errors(self._connection), psycopg.RawCursor(self._connection) as cursor:
            return cursor.execute(statement.encode(), parameters).rowcount

    def query_arrays(
        self, statement: str, parameters: Sequence[BinaryArray]
    ) -> Sequence[tuple[Any, ...]]:
        """Return the rows that `statement` returns; it refers to `parameters` as $1 and so on."""
        with _translate_errors(self._connection), psycopg.RawCursor(self._connection) as cursor:
            return cursor.execute(statement.encode(), parameters).fetchall()

    def end_transaction(self, statement: str, answer: str) -> None:
        """Carry out `statement`; raise StatementRefused unless the server replies `answer`.

        In a failed transaction the server replies ROLLBACK, without an error.
        """
        with _translate_errors(self._connection):
            status = self._connection.execute(statement.encode()).statusmessage
        if status != answer:
            raise StatementRefused(
                f"{statement} was answered with {status}: the transaction had failed and is rolled"
                " back"
            )

    @override
    def begin(self) -> None:
        with _translate_errors(self._connection):
            self._connection.execute(self._begin)

    @override
    def commit(self) -> None:
        self.end_transaction("COMMIT", "COMMIT")

    @override
    def roll_back(self) -> None:
        connection = self._connection
        if connection.closed or connection.info.transaction_status == TransactionStatus.IDLE:
            return
        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:
            self.close()

    def copy_out(self, statement: str, rows_max: int = 10_000) -> Generator[RowBuffer]:
        """Yield the messages of the COPY … TO STDOUT of `statement`, up to `rows_max` at once.

        Yields fewer if no more arrive within a moment. Each message is one row, after the head of a
        binary COPY. A caller that does not read to the end cancels the COPY.
        """
        connection = self._connection
        with (
            _translate_errors(connection),
            connection.cursor() as cursor,
            cursor.copy(statement.encode()),
        ):
            is_ended = False
            while not is_ended:
                rows, is_ended = connection.wait(receive_copied(connection.pgconn, rows_max))
                if len(rows):
                    yield rows

    def copy_in(self, statement: str) -> CopyIn:
        """Begin the COPY … FROM STDIN of `statement`."""
        return CopyIn(self._connection, statement)

    @override
    def hasten(self) -> None:
        connection = self._connection
        connection.reply_timeout_s = min(connection.reply_timeout_s, _CLOSE_TIMEOUT_S)

    @override
    def close(self) -> None:
        with suppress(psycopg.Error):
            self._connection.close()


def own(session: Session) -> PostgresSession:
    """Return `session` as a `PostgresSession`, which a `PostgresEndpoint` created."""
    assert isinstance(session, PostgresSession), session
    return session


class CopyIn:
    """A single COPY into a table, from its beginning to its end."""

    def __init__(self, connection: _BoundedConnection, statement: str) -> None:
        self._connection = connection
        self._open = ExitStack()
        with _translate_errors(connection):
            # A COPY that waits for a lock reads no rows in the meantime.
            self._open.enter_context(connection.transfer())
            copying = connection.cursor().copy(statement.encode())
            self._copy = self._open.enter_context(copying)

    def write(self, data: bytes) -> None:
        """Send `data`. libpq reports an error only at the end."""
        with _translate_errors(self._connection):
            self._copy.write(data)

    def end(self) -> None:
        """End the rows and wait until the server has accepted all of them.

        Raises:
            SqlError: The server refused them; the transaction has failed.
        """
        with _translate_errors(self._connection):
            self._open.close()

    def give_up(self) -> None:
        """Tell the server that no more rows follow; the transaction then fails."""
        given_up = _GivenUp("the writer was closed")
        with suppress(psycopg.Error):
            self._open.__exit__(_GivenUp, given_up, None)


class _GivenUp(Exception):
    """Raised inside a COPY, so that psycopg ends the COPY with a failure."""


@contextmanager
def _translate_errors(connection: _BoundedConnection) -> Generator[None, None, None]:
    """Raise psycopg's errors as `SqlError`.

    Close the connection if the error says that it is lost.
    """
    try:
        yield
    except psycopg.Error as error:
        state = error.sqlstate or ""
        kind = _kind_of(state)
        if connection.closed:
            kind = ConnectionLost
        elif kind is ConnectionLost:
            with suppress(psycopg.Error):
                connection.close()
        raise kind(_describe(error), state) from error


def _kind_of(state: str) -> type[SqlError]:
    if state and not _CLASSES.match(state):
        return RowRefused
    return next((kind for start, kind in _KINDS if state.startswith(start)), StatementRefused)


def _describe(error: psycopg.Error) -> str:
    """Return the server's message on one line: text, constraint, detail, hint, place, SQLSTATE."""
    diagnostics = error.diag
    if diagnostics.message_primary is None:
        return " ".join(str(error).split())
    parts = [diagnostics.message_primary]
    if diagnostics.constraint_name:
        parts.append(f"constraint {diagnostics.constraint_name}")
    elif diagnostics.column_name:
        parts.append(f"column {diagnostics.column_name}")
    parts += [part for part in (diagnostics.message_detail, diagnostics.message_hint) if part]
    if diagnostics.context:
        # The innermost context is first; the last line is that of the COPY and names row and
        # column.
        parts += diagnostics.context.splitlines()[-2:]
    # The detail of a deadlock has a line for each process.
    return f"{' '.join('; '.join(parts).split())} (SQLSTATE {error.sqlstate})"


@dataclass(frozen=True, slots=True, repr=False)
class PostgresEndpoint:
    """The address of a database and the settings of its connections.

    Pickles contain the user's settings; texts never show secrets.
    """

    parameters: tuple[tuple[str, str], ...]
    connect_timeout_s: float
    reply_timeout_s: float
    lock_timeout_s: float

    def __repr__(self) -> str:
        return f"PostgresEndpoint({self})"

    def __str__(self) -> str:
        given = dict(self.parameters)
        host = given.get("host") or given.get("hostaddr") or "the default host"
        return (
            f"database {given.get('dbname') or given.get('user') or 'of the user'!r} at "
            f"{host}:{given.get('port') or 5432} as user {given.get('user') or 'of the system'!r}"
        )

    def connect(self, name: str) -> PostgresSession:
        """Return a new session in autocommit mode, shown to its operator as `name`.

        Raises:
            SettingsRefused: Password, database, role, host or encryption is refused.
            SinkError: The connection is refused now: the server is not running, starting, full or
                too slow.
        """
        parameters = cast("dict[str, Any]", self._connection_parameters(name))
        try:
            connection = _BoundedConnection.connect(
                **parameters, autocommit=True, prepare_threshold=None
            )
        except psycopg.Error as error:
            raise self._to_refusal(error, parameters) from None
        connection.reply_timeout_s = self.reply_timeout_s
        if "tcp_user_timeout" not in dict(self.parameters):
            connection.unacknowledged_s = UNACKNOWLEDGED_S
        return PostgresSession(connection, self.lock_timeout_s)

    def connect_for_replication(self, name: str) -> psycopg.Connection[TupleRow]:
        """Return a new connection that takes the commands of the replication protocol.

        Raises:
            SettingsRefused: Password, database, role, host or encryption is refused.
            SinkError: The connection is refused now.
        """
        given = {**self._connection_parameters(name), "replication": "database"}
        parameters = cast("dict[str, Any]", given)
        try:
            return psycopg.Connection.connect(autocommit=True, prepare_threshold=None, **parameters)
        except psycopg.Error as error:
            raise self._to_refusal(error, parameters) from None

    def conninfo(self, name: str) -> str:
        """Return the connection string for another client of libpq.

        It contains secrets: do not store it.
        """
        return make_conninfo(**self._connection_parameters(name))

    def _connection_parameters(self, name: str) -> dict[str, str]:
        parameters = {**_DEFAULTS, **self._follow_references()}
        parameters["application_name"] = name[:_APPLICATION_NAME_LENGTH_MAX]
        # libpq takes whole seconds, and treats 1 as 2.
        parameters["connect_timeout"] = str(max(2, round(self.connect_timeout_s)))
        return parameters

    def _to_refusal(
        self, error: psycopg.Error, parameters: Mapping[str, Any]
    ) -> SettingsRefused | SinkError:
        reason = self.without_secrets(str(error).strip())
        state = error.sqlstate
        is_wrong = not state and _WRONG_SETTING.search(reason) is not None
        if not (state or is_wrong or _HEALS.search(reason)) and _SAID_BY_SERVER.search(reason):
            # The text may be in another language than English.
            state = find_login_state(make_conninfo(**parameters), self.connect_timeout_s)
            reason += f" (SQLSTATE {state})" if state else ""
        is_wrong = is_wrong or bool(state and _WRONG_SETTING_STATES.match(state))
        kind = SettingsRefused if is_wrong else SinkError
        return kind(f"cannot connect to {self}: {reason}")

    def without_secrets(self, text: str) -> str:
        """Return `text` with the passwords replaced by asterisks."""
        for key, value in self._follow_references().items():
            if key in ("password", "sslpassword") and value:
                text = text.replace(value, "***")
        return text

    def _follow_references(self) -> dict[str, str]:
        """Return the parameters with references to secrets resolved for this process."""
        return {
            key: follow_references(value, setting=f"{key} of {self}")
            for key, value in self.parameters
        }


def endpoint_of(access: DatabaseAccess, *, lock_timeout_s: float) -> PostgresEndpoint:
    """Return the endpoint that `url` describes; `user` and `password` override the url's.

    Takes libpq's URLs (`postgresql://h1,h2/db?sslmode=require`), SQLAlchemy's
    (`postgresql+psycopg://…`) and JDBC's (`jdbc:postgresql://…?user=…`).

    Raises:
        ConfigError: The URL has another form. The error text does not repeat it, because it may
            contain a password.
    """
    url = access.url
    scheme, separator, _ = url.partition("://")
    driverless = scheme.removeprefix("jdbc:").partition("+")[0]
    if not separator or driverless not in ("postgresql", "postgres"):
        raise ConfigError(
            "url must begin with postgresql://, postgresql+psycopg:// or jdbc:postgresql://"
            # Show only a text that is certainly a scheme: other parts of an unreadable url may be a
            # password.
            + (f", not {scheme}://" if separator and _SCHEME.fullmatch(scheme) else "")
        )
    parameters = _from_sqlalchemy(url) if "+" in scheme else _from_libpq(url)
    # A host that begins with an @ is a socket without a file.
    if "@" in parameters.get("host", "")[1:]:
        raise ConfigError(
            "url has an @ in its password, or in its user's name; percent-encode it there (%40), or"
            " pass password=…"
        )
    _drop_encoding(parameters)
    if access.user is not None:
        parameters["user"] = access.user
    if access.password is not None:
        parameters["password"] = access.password
    return PostgresEndpoint(
        tuple(sorted(parameters.items())),
        access.connect_timeout_s,
        access.statement_timeout_s,
        lock_timeout_s,
    )


def _drop_encoding(parameters: dict[str, str]) -> None:
    """Remove the client's encoding, which is always UTF-8.

    Raises:
        ConfigError: The parameters name another encoding, with which the server would decode all
            texts.
    """
    encoding = parameters.pop("client_encoding", "utf8")
    if re.sub("[^a-z0-9]", "", encoding.lower()) not in _UTF8_NAMES:
        raise ConfigError(
            f"url has client_encoding={encoding}: texts are sent and read in UTF-8 only, and the"
            " server converts them to the encoding of its database; leave it out"
        )


def _from_libpq(url: str) -> dict[str, str]:
    try:
        parsed = conninfo_to_dict(url.removeprefix("jdbc:"))
    except psycopg.ProgrammingError as error:
        # The text after the first quote or colon is a part of the URL.
        reason = re.split(r"[:\"]", str(error), maxsplit=1)[0].strip()
        raise ConfigError(
            f"url cannot be read as postgresql://user@host:port/database: {reason}; "
            "percent-encode special characters of the password, or pass password=…"
        ) from None
    return {key: str(value) for key, value in parsed.items() if value is not None}


def _from_sqlalchemy(url: str) -> dict[str, str]:
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        dialect = cast("Any", PGDialect_psycopg)()
        _, parsed = dialect.create_connect_args(make_url(url))
    except (ArgumentError, ValueError):
        raise ConfigError(
            "url cannot be read as postgresql+psycopg://user@host:port/database; "
            "percent-encode special characters of the password, or pass password=…"
        ) from None
    return {str(key): str(value) for key, value in cast("dict[str, Any]", parsed).items()}
