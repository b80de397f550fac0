"""Sessions with the database that can await a reply later and send files from memory.

PyMySQL sends a file of this machine when the server asks for one. Here only the server gets that
permission (CLIENT.LOCAL_FILES), not PyMySQL, which refuses every such request. LOAD DATA LOCAL
receives the data that was passed to `send`, and no server can ask for anything else.

This is the only module that uses PyMySQL: it translates its errors into those of `sql.session`. It
uses private names of PyMySQL, so pyproject.toml bounds the version: Connection._create_ssl_ctx,
_current_timeout, _execute_command, _next_seq_id, _read_packet, _read_timeout, _rfile, _sock,
_write_timeout; Cursor._result.
"""

from __future__ import annotations

import select
import ssl
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pymysql.connections import Connection
from pymysql.constants import CLIENT, COMMAND, CR, FIELD_TYPE, FLAG
from pymysql.cursors import Cursor
from pymysql.err import InternalError, MySQLError, OperationalError, raise_mysql_exception
from pymysql.protocol import OKPacketWrapper
from typing_extensions import override

from onceflow.clients.mysql.catalog import LOG_ROWS, literal
from onceflow.clients.sql.session import (
    UNACKNOWLEDGED_S,
    AccessDenied,
    BinaryLogRefuses,
    ConnectionLost,
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
    probe_while_idle,
)
from onceflow.core.errors import ConfigError

if TYPE_CHECKING:
    _Connection = Connection[Cursor]
else:
    _Connection = Connection

# No value is silently cut, rounded to another day or defaulted, and 0 does not mean "next number".
SQL_MODE = (
    "STRICT_ALL_TABLES",
    "NO_ZERO_DATE",
    "NO_ZERO_IN_DATE",
    "ERROR_FOR_DIVISION_BY_ZERO",
    "NO_ENGINE_SUBSTITUTION",
    "NO_AUTO_VALUE_ON_ZERO",
)
# A source may be idle for a long time while a transaction is open. The next attempt ends sessions
# that a vanished machine left behind.
_IDLE_S_MAX = 86_400
# The server's own limits would end a transaction that waits for the next row or barrier.
_MARIADB_TIMEOUTS: Mapping[str, str] = MappingProxyType(
    {
        "max_statement_time": "0",
        "idle_transaction_timeout": "0",
        "idle_write_transaction_timeout": "0",
        "idle_readonly_transaction_timeout": "0",
    }
)
_COMMAND_BYTES = 1
"""The size of the command byte before a statement in its packet."""
_ROWS_MAX = 2**64 - 1
"""The value of sql_select_limit that sets no limit."""
_ROW_NUMBERS_MAX = 1_000_000
"""A limit above the number of rows of any statement, which is at most 10,000."""
# After this time a hanging server is no longer waited for; closing the connection rolls back too.
_CLOSE_TIMEOUT_S = 2.0
XA_FATAL = "1401"
"""The error of XA RECOVER in MySQL for users who may not list prepared transactions."""

_PACKET_TOO_LARGE = 1153
"""ER_NET_PACKET_TOO_LARGE."""

# A value does not fit its column, or a constraint or a trigger's SIGNAL refuses the row.
_ROW_REFUSED = frozenset(
    {1048, 1118, 1169, 1216, 1217, 1261, 1262, 1263, 1264, 1265, 1292, 1300, 1301}
    | {1364, 1365, 1366, 1367, 1369, 1406, 1411, 1416, 1441, 1451, 1452, 1526, 1557, 1586, 1690}
    | {1644, 1748, 1761, 1762, 3819, 4025, 4078}
    # The statement of a row of this length is longer than max_allowed_packet.
    | {_PACKET_TOO_LARGE}
    # Text that is not JSON, in MySQL and in MariaDB.
    | set(range(3140, 3158))
    | set(range(4035, 4045))
)
# A column is gone, may not be assigned or is of another kind; the server requires a primary key
# that the table lacks; a trigger does what it must not. Second line, for CREATE and ALTER: names
# and keys that are too long, duplicate names, too many columns. Third line: AUTO_INCREMENT has
# reached the end of its type, in MariaDB and in MySQL; GTIDs forbid what a trigger does.
_INVALID = frozenset(
    {1054, 1064, 1093, 1109, 1136, 1173, 1235, 1305, 1336, 1356, 1422, 1442, 1906, 3098, 3105, 3750}
    | {1059, 1060, 1070, 1071, 1074, 1102, 1103, 1117, 1166}
    | {167, 1467, 1785, 1786, 1787}
)
# Client errors: could not connect, gone, lost. Server errors: it stops, or ends the session.
_LOST = frozenset({0, 2002, 2003, 2006, 2013, 2014, 2055, 1053, 1077, 1152, 1184, 1927, 3169, 4031})
_KINDS: Mapping[int, type[SqlError]] = MappingProxyType(
    {
        **dict.fromkeys(_ROW_REFUSED, RowRefused),
        **dict.fromkeys(_INVALID, StatementInvalid),
        **dict.fromkeys(_LOST, ConnectionLost),
        # For a database, a login, a table, a column, the server, a routine.
        **dict.fromkeys((1044, 1045, 1142, 1143, 1227, 1370), AccessDenied),
        1062: DuplicateKey,
        1146: TableMissing,
        1205: LockTimeout,
        # Because of a server option, the transaction's own mode, or its engine.
        **dict.fromkeys((1290, 1792, 1836), ReadOnly),
        **dict.fromkeys((1665, 1666), BinaryLogRefuses),  # it takes statements alone
        **dict.fromkeys((1094, 1397), NameUnknown),  # a session, a transaction
        **dict.fromkeys((1061, 1440), NameTaken),  # an index, a transaction
    }
)
_LOOK_S = 1.0
"""The interval at which a transfer of rows looks for lost packets."""
_PIECE_BYTES = 1 << 20
"""The size of the packets in which a file's content is sent."""
# The first byte of a row's packet: the text's length, that length's size, or a mark of no row.
_NULL, _EOF_PACKET, _ERROR_PACKET = 0xFB, 0xFE, 0xFF
_LENGTHS = {0xFC: 3, 0xFD: 4, 0xFE: 9}
_TOO_LONG = 1301
"""ER_WARN_ALLOWED_PACKET_OVERFLOWED."""
_EOF_LENGTH_END = 9
"""A longer packet that begins with 0xFE is a row, not the end of the rows."""
_PACKET_LENGTH_MAX = 0xFFFFFF
_OUT_OF_SYNC = 2014
"""The client error "Commands out of sync"."""
_NO_CHARSET = 63
"""The number of the character set called binary."""
_TYPES: dict[int, str] = {
    FIELD_TYPE.TINY: "tinyint",
    FIELD_TYPE.SHORT: "smallint",
    FIELD_TYPE.INT24: "mediumint",
    FIELD_TYPE.LONG: "int",
    FIELD_TYPE.LONGLONG: "bigint",
    FIELD_TYPE.YEAR: "year",
    FIELD_TYPE.FLOAT: "float",
    FIELD_TYPE.DOUBLE: "double",
    FIELD_TYPE.DECIMAL: "decimal",
    FIELD_TYPE.NEWDECIMAL: "decimal",
    FIELD_TYPE.DATE: "date",
    FIELD_TYPE.DATETIME: "datetime",
    FIELD_TYPE.TIMESTAMP: "timestamp",
    FIELD_TYPE.TIME: "time",
    FIELD_TYPE.BIT: "bit",
    FIELD_TYPE.JSON: "json",
    FIELD_TYPE.GEOMETRY: "geometry",
}
"""The types that the protocol numbers; all others are text or bytes."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's reply to a statement that returns no rows."""

    rows: int
    """The number of changed rows."""
    warnings: int


class PyMySQLConnection(_Connection):
    """A connection that loads the machine's certificates only if the login verifies a certificate.

    Loading them would take longer than all other steps of a login.
    """

    def _create_ssl_ctx(self, settings: ssl.SSLContext | Mapping[str, Any]) -> ssl.SSLContext:
        if settings:
            made: ssl.SSLContext = cast("Any", super())._create_ssl_ctx(settings)
            return made
        return make_unverified_tls()


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """A column of a statement's result, as the protocol describes it."""

    name: str
    type: str
    """The type in the words of DATA_TYPE; `varchar` for all texts, `varbinary` for all bytes."""
    length: int
    """The length; for a number in characters, including sign and point."""
    scale: int
    is_unsigned: bool


class WireConnection:
    """A connection on which every wait has a timeout. Raises `SqlError`. Used by one thread."""

    def __init__(self, arguments: dict[str, Any], *, timeout_s: float, reply_timeout_s: float):
        """Connect and log in, `timeout_s` per step; later replies may take `reply_timeout_s`."""
        self._awaits_reply = False
        self._transfers = False
        """True if the statement whose reply is awaited was sent with a file of rows."""
        self._reply_timeout_s = timeout_s
        with _translate_errors(timeout_s):
            self._connection = PyMySQLConnection(
                **arguments,
                charset="utf8mb4",
                autocommit=True,
                client_flag=CLIENT.LOCAL_FILES,
                connect_timeout=cast("int", timeout_s),
                read_timeout=timeout_s,
                write_timeout=timeout_s,
            )
        self.wait_at_most(reply_timeout_s)
        probe_while_idle(self._descriptor)
        limit_silence(self._descriptor, UNACKNOWLEDGED_S)

    @property
    def _descriptor(self) -> int:
        return int(cast("Any", self._connection)._sock.fileno())

    @property
    def reply_timeout_s(self) -> float:
        """The time for which the server may be silent."""
        return self._reply_timeout_s

    def wait_at_most(self, reply_timeout_s: float) -> None:
        """Set the time for which the server may be silent before the connection is closed."""
        self._reply_timeout_s = reply_timeout_s
        private = cast("Any", self._connection)
        private._read_timeout = reply_timeout_s
        private._write_timeout = reply_timeout_s

    @property
    def open(self) -> bool:
        """True if there is a connection; False after it broke."""
        return bool(self._connection.open)

    @property
    def session_id(self) -> int:
        """The number of the session, as the other side sent it at the login."""
        return int(cast("Any", self._connection).server_thread_id[0])

    @property
    def encrypted(self) -> bool:
        """True if TLS is used."""
        return bool(cast("Any", self._connection)._secure)

    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Return the rows of `statement`; none if it returns only a count."""
        self._require_settled()
        with self._bound(), self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cast("Sequence[tuple[Any, ...]]", cursor.fetchall() or ())

    def describe(self, statement: str) -> list[ResultColumn]:
        """Return the columns of the result of `statement`."""
        self._require_settled()
        with self._bound(), self._connection.cursor() as cursor:
            cursor.execute(statement)
            fields = cast("Any", cursor)._result.fields
        return [
            ResultColumn(
                str(field.name),
                _TYPES.get(int(field.type_code))
                or ("varbinary" if field.charsetnr == _NO_CHARSET else "varchar"),
                int(field.length),
                int(field.scale),
                is_unsigned=bool(field.flags & FLAG.UNSIGNED),
            )
            for field in fields
        ]

    def execute(self, statement: str | bytes) -> Reply:
        """Carry out `statement`, which returns no rows, and return the reply."""
        self.send(statement)
        return self.receive()

    def send(self, statement: str | bytes, file: Sequence[memoryview] | None = None) -> None:
        """Send `statement` and the `file` that it loads, if any; `receive` reads the reply.

        Raises:
            SqlError: The connection broke, or the server does not ask for the file.
        """
        self._require_settled()
        private = cast("Any", self._connection)
        with self._bound():
            private._execute_command(COMMAND.COM_QUERY, statement)
            if file is not None:
                packet = private._read_packet()
                if not packet.is_load_local_packet():
                    raise InternalError(_OUT_OF_SYNC, "the server did not ask for the rows")
                # A LOAD DATA that waits for a lock reads no rows in the meantime.
                limit_silence(self._descriptor, max(UNACKNOWLEDGED_S, self._reply_timeout_s))
                for chunk in file:
                    for start in range(0, len(chunk), _PIECE_BYTES):
                        self._write_packet(chunk[start : start + _PIECE_BYTES])
                self._write_packet(b"")
        self._transfers = file is not None
        self._awaits_reply = True

    def receive(self) -> Reply:
        """Return the reply to the last `send`."""
        self._awaits_reply = False
        with self._bound():
            if self._transfers:
                self._await_reply_to_rows()
            packet = cast("Any", self._connection)._read_packet()
        if self._transfers:
            self._transfers = False
            limit_silence(self._descriptor, UNACKNOWLEDGED_S)
        if not packet.is_ok_packet():
            self.close()
            raise to_sql_error(_OUT_OF_SYNC, "the server answered neither success nor error")
        reply = cast("Any", OKPacketWrapper)(packet)
        return Reply(int(reply.affected_rows), int(reply.warning_count))

    def _write_packet(self, payload: bytes | memoryview) -> None:
        """Send one packet of a file, and detect lost packets, which PyMySQL would not notice.

        Raises:
            OperationalError: The server accepts no data, or the network loses all packets.
        """
        private = cast("Any", self._connection)
        head = len(payload).to_bytes(3, "little") + bytes([private._next_seq_id])
        left = memoryview(head + bytes(payload))
        private._next_seq_id = (private._next_seq_id + 1) % 256
        watch = _TransferWatch(self._descriptor, self._reply_timeout_s)
        self._set_timeout(_LOOK_S)
        while left:
            try:
                left = left[private._sock.send(left) :]
            except TimeoutError:
                watch.check()
            except OSError as error:
                self.close()
                raise OperationalError(CR.CR_SERVER_GONE_ERROR, f"rows: {error!r}") from error

    def _await_reply_to_rows(self) -> None:
        """Wait for the first byte of the reply.

        Raises:
            OperationalError: No reply came in time, or the network loses all packets.
        """
        private = cast("Any", self._connection)
        watch = _TransferWatch(self._descriptor, self._reply_timeout_s)
        readable = select.poll()
        readable.register(self._descriptor, select.POLLIN)
        self._set_timeout(0.0)
        is_there = bool(_peek(private._rfile))
        while not is_there:
            is_there = bool(readable.poll(_LOOK_S * 1000)) and _peek(private._rfile) is not None
            if not is_there:
                watch.check()

    def _set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of the socket. PyMySQL replaces it at its next read or write."""
        private = cast("Any", self._connection)
        private._sock.settimeout(timeout_s)
        # PyMySQL sets its timeout only if it differs from the last timeout that it has set.
        private._current_timeout = timeout_s

    def single_texts(self, statement: str, chunk_bytes: int) -> Iterator[bytes]:
        """Yield the rows of `statement`, which has one column without nulls, as lines of text.

        Yields about `chunk_bytes` at a time, as rows arrive. Unread rows are lost with the
        connection. PyMySQL would decode each value; this decodes only the length of each row.
        """
        self._require_settled()
        private = cast("Any", self._connection)
        with self._bound():
            private._execute_command(COMMAND.COM_QUERY, statement)
            head = private._read_packet()
            # The number of columns, the description of each column, and their end.
            for _ in range(head.read_length_encoded_integer() + 1):
                private._read_packet()
            yield from self._lines(private, chunk_bytes)

    def _lines(self, private: Any, chunk_bytes: int) -> Iterator[bytes]:
        lines: list[bytes] = []
        size = 0
        for payload in self._row_packets(private):
            first = payload[0]
            if first < _NULL:
                lines.append(payload[1:])
            elif first == _NULL:
                raise InternalError(
                    _TOO_LONG,
                    "a row is longer than max_allowed_packet, the longest text that the server"
                    " sends; raise it on the server, or read fewer columns",
                )
            else:
                lines.append(payload[_LENGTHS[first] :])
            size += len(payload)
            if size > chunk_bytes:
                lines.append(b"")
                yield b"\n".join(lines)
                lines, size = [], 0
        if lines:
            lines.append(b"")
            yield b"\n".join(lines)

    def _row_packets(self, private: Any) -> Iterator[bytes]:
        """Yield the packets of rows, up to the packet that ends them."""
        while True:
            payload, number = self._packet(private)
            length = len(payload)
            while length == _PACKET_LENGTH_MAX:
                more, number = self._packet(private)
                payload, length = payload + more, len(more)
            if payload[0] == _ERROR_PACKET:
                raise_mysql_exception(payload)
            if payload[0] == _EOF_PACKET and len(payload) < _EOF_LENGTH_END:
                private._next_seq_id = (number + 1) % 256
                return
            yield payload

    def _packet(self, private: Any) -> tuple[bytes, int]:
        try:
            header = private._rfile.read(4)
            length = int.from_bytes(header[:3], "little")
            payload = private._rfile.read(length)
        except OSError as error:
            self.close()
            raise OperationalError(CR.CR_SERVER_LOST, f"timed out: {error}") from error
        if len(header) < 4 or len(payload) < length:
            self.close()
            raise OperationalError(CR.CR_SERVER_LOST, "the connection broke while rows were read")
        return payload, header[3]

    def close(self) -> None:
        """Disconnect without COM_QUIT, which would wait for a hanging server. May be repeated.

        The server rolls back an open transaction.
        """
        cast("Any", self._connection)._force_close()

    @contextmanager
    def _bound(self) -> Generator[None, None, None]:
        """Raise PyMySQL's errors as `SqlError`; close the connection if it was lost."""
        try:
            with _translate_errors(self._reply_timeout_s):
                yield
        except SqlError as error:
            if not self.open and not isinstance(error, ConnectionLost):
                raise ConnectionLost(str(error), error.code) from error
            if isinstance(error, ConnectionLost):
                self.close()
            raise

    def _require_settled(self) -> None:
        if self._awaits_reply:
            self.close()
            raise to_sql_error(_OUT_OF_SYNC, "the reply to the last statement is not read")


class _TransferWatch:
    """The limits of one wait while rows are sent, or while their reply is awaited."""

    def __init__(self, descriptor: int, timeout_s: float) -> None:
        self._descriptor = descriptor
        self._deadline_s = time.monotonic() + timeout_s
        self._repeated = RepeatedPackets()

    def check(self) -> None:
        """Raise OperationalError if the wait must end.

        Raises:
            OperationalError: The timeout has passed, or the network loses all packets.
        """
        now_s = time.monotonic()
        repeated_s = self._repeated.measure(self._descriptor, now_s)
        if repeated_s >= UNACKNOWLEDGED_S:
            raise OperationalError(
                CR.CR_SERVER_LOST, f"the server has acknowledged nothing for {repeated_s:.0f} s"
            )
        if now_s > self._deadline_s:
            raise OperationalError(CR.CR_SERVER_LOST, "timed out")


def _peek(reader: BufferedReader) -> bytes | None:
    """Return the available bytes of `reader`, of a non-blocking socket; None if TLS needs more.

    Raises:
        OperationalError: The connection is broken.
    """
    try:
        return reader.peek(1)
    except ssl.SSLWantReadError:
        return None
    except OSError as error:
        raise OperationalError(CR.CR_SERVER_LOST, f"reply to rows: {error!r}") from error


class MySQLSession(Session):
    """A session that is closed if the server is silent for too long. Used by one thread.

    It is strict, in UTC, in utf8mb4 and READ COMMITTED. With READ COMMITTED a prepared transaction
    holds no locks between its rows.
    """

    def __init__(self, wire: WireConnection, *, lock_timeout_s: float) -> None:
        """Set the session's variables, and check that they took effect.

        Raises:
            ConfigError: A proxy between this client and the server discards the settings.
        """
        self._wire = wire
        lock_timeout = max(1, round(lock_timeout_s))
        self.version_text = str(wire.query("SELECT VERSION()")[0][0])
        self.is_mariadb = "mariadb" in self.version_text.lower()
        settings = {
            "sql_mode": literal(",".join(SQL_MODE)),
            "time_zone": "'+00:00'",
            "foreign_key_checks": "1",
            "unique_checks": "1",
            "sql_safe_updates": "0",
            # Server defaults that would break the session: statements that begin a transaction
            # unseen by the driver, results cut short, large queries refused, a COMMIT that begins
            # another transaction or disconnects, rounding without a warning, and a special meaning
            # of IS NULL.
            "autocommit": "1",
            "sql_select_limit": str(_ROWS_MAX),
            "sql_big_selects": "1",
            "completion_type": "'NO_CHAIN'",
            "sql_notes": "1",
            "sql_auto_is_null": "0",
            "innodb_lock_wait_timeout": str(lock_timeout),
            "lock_wait_timeout": str(lock_timeout),
            "wait_timeout": str(_IDLE_S_MAX),
            # Statements that receive columns number their rows by a recursive query.
            **(
                _MARIADB_TIMEOUTS
                if self.is_mariadb
                else {
                    "cte_max_recursion_depth": str(_ROW_NUMBERS_MAX),
                    "max_execution_time": "0",
                }
            ),
        }
        given = ", ".join(f"SESSION {name} = {value}" for name, value in settings.items())
        wire.execute(f"SET {given}")
        wire.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        ((modes, zone, charset, self.session_id, packet_bytes),) = wire.query(
            "SELECT @@SESSION.sql_mode, @@SESSION.time_zone, @@SESSION.character_set_client, "
            "CONNECTION_ID(), @@SESSION.max_allowed_packet"
        )
        self.statement_bytes_max = int(packet_bytes) - _COMMAND_BYTES
        """The longest statement that the server accepts; it disconnects at a longer one."""
        if set(str(modes).split(",")) != set(SQL_MODE) or (zone, charset) != ("+00:00", "utf8mb4"):
            wire.close()
            raise ConfigError(
                f"the session does not keep its settings: sql_mode is {modes}, time_zone {zone}, "
                f"character set {charset}. Connect to the server itself, or through a proxy that "
                "keeps a session's settings"
            )

    @property
    @override
    def is_open(self) -> bool:
        return self._wire.open

    @property
    def reply_timeout_s(self) -> float:
        """The time for which the server may be silent."""
        return self._wire.reply_timeout_s

    @property
    def is_pooled(self) -> bool:
        """True if a pooler between this client and the server shares server sessions.

        A pooler tells its clients session numbers of its own.
        """
        return self._wire.session_id != int(self.session_id)

    @cached_property
    def loads(self) -> bool:
        """True if the server allows LOAD DATA LOCAL; queried once."""
        variables = self.query("SHOW GLOBAL VARIABLES LIKE 'local_infile'")
        return [value for _, value in variables] == ["ON"]

    @override
    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        return self._wire.query(statement)

    @override
    def execute(self, statement: str) -> int:
        return self._wire.execute(statement).rows

    def send(self, statement: str | bytes, file: Sequence[memoryview] | None = None) -> None:
        """Send `statement` and the file that it loads; `receive` reads the reply.

        Raises:
            RowRefused: The statement is longer than the server's max_allowed_packet.
        """
        if len(statement) > self.statement_bytes_max:
            packet_bytes = self.statement_bytes_max + _COMMAND_BYTES
            raise to_sql_error(
                _PACKET_TOO_LARGE,
                f"a row needs a statement of {len(statement)} bytes, but the server allows"
                f" max_allowed_packet = {packet_bytes}. Raise it on the server, or filter such"
                " rows",
            )
        self._wire.send(statement, file)

    def receive(self) -> Reply:
        """Return the reply to the last `send`."""
        return self._wire.receive()

    def describe(self, statement: str) -> list[ResultColumn]:
        """Return the columns of the result of `statement`."""
        return self._wire.describe(statement)

    def single_texts(self, statement: str, chunk_bytes: int) -> Iterator[bytes]:
        """Yield the rows of `statement`, of one column without nulls, as lines of text."""
        return self._wire.single_texts(statement, chunk_bytes)

    @override
    def begin(self) -> None:
        # READ WRITE would override a transaction_read_only that is set to stop all writers.
        self.execute("START TRANSACTION")

    @override
    def commit(self) -> None:
        self.execute("COMMIT")

    @override
    def roll_back(self) -> None:
        if not self.is_open:
            return
        try:
            self.execute("ROLLBACK")
        except SqlError:
            self.close()

    @override
    def hasten(self) -> None:
        self._wire.wait_at_most(min(self._wire.reply_timeout_s, _CLOSE_TIMEOUT_S))

    @override
    def close(self) -> None:
        self._wire.close()


def make_unverified_tls() -> ssl.SSLContext:
    """Return a TLS context that encrypts and accepts any certificate of the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def own(session: Session) -> MySQLSession:
    """Return `session` as a `MySQLSession`, which a `MySQLEndpoint` created."""
    assert isinstance(session, MySQLSession), session
    return session


def to_sql_error(number: int, text: str) -> SqlError:
    """Return the `SqlError` for the server's error `number`."""
    is_1117 = number == 1005 and "Too many columns" in text  # as MariaDB says it
    kind = StatementInvalid if is_1117 else _KINDS.get(number, StatementRefused)
    advice = LOG_ROWS if kind is BinaryLogRefuses else ""
    return kind(f"{' '.join(text.split())} (error {number}){advice}", str(number))


@contextmanager
def _translate_errors(reply_timeout_s: float) -> Generator[None, None, None]:
    """Raise PyMySQL's errors as `SqlError`; for a timeout the text says how long it was."""
    try:
        yield
    except MySQLError as error:
        number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        text = " ".join(str(part) for part in error.args[1:]) or type(error).__name__
        if _has_timed_out(error):
            text = f"the server did not answer within {reply_timeout_s:g} s"
        raise to_sql_error(number, text) from error


def _has_timed_out(error: MySQLError) -> bool:
    """Return True if `error` means that a timeout has passed."""
    lost = (CR.CR_SERVER_LOST, CR.CR_SERVER_GONE_ERROR, CR.CR_CONN_HOST_ERROR)
    return (
        isinstance(error, OperationalError)
        and error.args[0] in lost
        and "timed out" in str(error.args[1])
    )
