"""A stream of the changes of one logical replication slot.

The server sends two kinds of messages and takes one:

    w    changes: the LSN of the data, the server's end of WAL, its time, and a message of pgoutput
    k    keepalive: the LSN up to which the server has sent everything, and if it wants a reply
    r    status, sent to the server: the LSN up to which the reader needs nothing any more

The slot moves only to the LSN that the caller has passed to `acknowledge`. Every status repeats
that LSN, also the reply to a keepalive. A thread sends a status at an interval, so the server keeps
the connection while the caller reads nothing. The caller slows the server down by not reading.

libpq admits one thread at a time. A lock protects each call; no thread waits for the socket while
it holds the lock.

Source: PostgreSQL 18, "Streaming Replication Protocol".
"""

from __future__ import annotations

import select
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import psycopg
from psycopg import pq
from typing_extensions import Self

from onceflow.clients.postgres.catalog import literal, quote
from onceflow.clients.postgres.connection import PostgresEndpoint
from onceflow.core.errors import BadRecord, SourceUnavailable

_CHANGES_KIND = b"w"[0]
_CHANGES = struct.Struct("!cQQQ")
_KEEPALIVE = struct.Struct("!cQQ?")
_STATUS = struct.Struct("!cQQQQ?")
_EPOCH_S = 946_684_800
"""2000-01-01 UTC, from which Postgres counts its times, in seconds since 1970."""
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Changes:
    """A message of the plugin."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Keepalive:
    """A sign of life. The server has sent every transaction that ended before `end_lsn`."""

    end_lsn: int
    sent_us: int
    """The server's time in microseconds since 2000-01-01 UTC."""


class StreamRefused(Exception):
    """Raised if the server refuses a command of the stream; its text is the server's message."""

    def __init__(self, text: str, code: str) -> None:
        """Create the error from the server's text and its SQLSTATE."""
        super().__init__(text, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


def format_lsn(lsn: int) -> str:
    """Return `lsn` as Postgres writes it: two hexadecimal numbers."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def to_unix_ms(postgres_us: int) -> int:
    """Return a time of Postgres, in microseconds since 2000, in milliseconds since 1970."""
    return _EPOCH_S * 1000 + postgres_us // 1000


def to_unix_us(postgres_us: int) -> int:
    """Return a time of Postgres, in microseconds since 2000, in microseconds since 1970."""
    return _EPOCH_S * 1_000_000 + postgres_us


def parse_lsn(text: str) -> int:
    """Return the number of an LSN that Postgres has written.

    Raises:
        ValueError: The text has another form.
    """
    upper, lower = text.split("/")
    return int(upper, 16) << 32 | int(lower, 16)


class ReplicationStream:
    """A connection that reads one slot. `receive` is called by one thread, the others by any."""

    def __init__(
        self, connection: psycopg.Connection, where: str, status_interval_s: float
    ) -> None:
        """Create a stream on `connection`, which was opened for replication. Use `open` instead."""
        self._connection = connection
        self._pgconn = connection.pgconn
        self._pgconn.nonblocking = 1
        self._where = where
        self._lock = threading.Lock()
        self._acknowledged = 0
        self._interval_s = status_interval_s
        self._closed = threading.Event()
        self._heard_at = time.monotonic()
        self._reporter = threading.Thread(
            target=self._report_for_ever, name="replication status", daemon=True
        )

    @classmethod
    def open(
        cls, endpoint: PostgresEndpoint, name: str, *, status_interval_s: float = 10.0
    ) -> Self:
        """Return a stream that is connected and reads nothing yet; see `start`.

        Raises:
            SettingsRefused: The server refuses the user for good.
            SinkError: The server cannot be reached now.
        """
        return cls(endpoint.connect_for_replication(name), str(endpoint), status_interval_s)

    @property
    def silent_s(self) -> float:
        """The time since the server has sent anything."""
        return time.monotonic() - self._heard_at

    def start(
        self,
        slot: str,
        publication: str,
        lsn: int,
        *,
        timeout_s: float,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Read `slot` from `lsn` on. The server omits transactions that ended before `lsn`.

        Values come in binary format, except those of types without one. With `texts`, the settings
        of the session, all values come as texts. The stream is closed if this fails.

        Raises:
            StreamRefused: The server refuses it, for example because another reader is active.
            SourceUnavailable: The server did not answer within `timeout_s`.
        """
        # Commands of replication have no E'': a backslash in a text stands for itself.
        names = quote(publication).replace("'", "''")
        options = f"proto_version '1', publication_names '{names}'"
        command = (
            f"START_REPLICATION SLOT {quote(slot)} LOGICAL {format_lsn(lsn)}"
            f" ({options}, binary '{'true' if texts is None else 'false'}')"
        )
        deadline = time.monotonic() + timeout_s
        try:
            for name, value in (texts or {}).items():
                self._run(f"SET {name} = {literal(value)}", deadline)
            self._begin_copy(command, deadline)
        except BaseException:
            self.close()
            raise
        self._heard_at = time.monotonic()
        self._reporter.start()

    def receive(self, timeout_s: float) -> Changes | Keepalive | None:
        """Return the next message, or None if no message arrived within `timeout_s`.

        Raises:
            StreamRefused: The server has ended the stream with an error.
            SourceUnavailable: The connection broke.
            BadRecord: The server sent a message of an unknown kind.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._take()
            if message is not None:
                return message
            if self._closed.is_set():
                return None
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._is_readable(left_s):
                return None
            with self._lock:
                self._consume()

    def receive_available(self, count_max: int) -> Sequence[bytes | Keepalive]:
        """Return messages that have arrived, without waiting: the plugin's as their bytes.

        One call for many messages costs less than `receive` for each. Raises its errors.
        """
        arrived: list[bytes] = []
        with self._lock:
            while len(arrived) < count_max and (message := self._get_data()) is not None:
                arrived.append(message)
        return [
            message[_CHANGES.size :] if message[0] == _CHANGES_KIND else self._parse(message)
            for message in arrived
        ]

    def acknowledge(self, lsn: int) -> None:
        """Allow the server to remove WAL before `lsn`. An older LSN changes nothing.

        The caller must have a durable decision that contains every transaction before `lsn`:
        the server never sends these transactions again.
        """
        with self._lock:
            if lsn <= self._acknowledged or self._closed.is_set():
                return
            self._acknowledged = lsn
        self.send_status()

    def send_status(self) -> None:
        """Send the acknowledged LSN. A failure is left to `receive`, which meets it, too."""
        with self._lock:
            if self._closed.is_set() or not self._reporter.is_alive():
                return
            now_us = round((time.time() - _EPOCH_S) * 1_000_000)
            lsn = self._acknowledged
            try:
                self._pgconn.put_copy_data(_STATUS.pack(b"r", lsn, lsn, lsn, now_us, False))
                self._pgconn.flush()
            except psycopg.Error:
                return

    def close(self) -> None:
        """Close the connection. The slot stays, and keeps its position."""
        self._closed.set()
        with self._lock:
            self._connection.close()
        if self._reporter.is_alive() and self._reporter is not threading.current_thread():
            self._reporter.join(_CLOSE_S)

    def _begin_copy(self, command: str, deadline: float) -> None:
        self._send(command)
        result = self._await_result(deadline)
        if result is None or result.status != pq.ExecStatus.COPY_BOTH:
            raise self._refusal(result)

    def _run(self, statement: str, deadline: float) -> None:
        """Carry out a statement that returns nothing."""
        self._send(statement)
        result = self._await_result(deadline)
        if result is None or result.status != pq.ExecStatus.COMMAND_OK:
            raise self._refusal(result)
        while self._await_result(deadline) is not None:
            pass

    def _send(self, command: str) -> None:
        with self._lock:
            self._pgconn.send_query(command.encode())
            self._pgconn.flush()

    def _await_result(self, deadline: float) -> pq.abc.PGresult | None:
        """Return the next result of the command, or None after the last one."""
        while True:
            with self._lock:
                if not self._pgconn.is_busy():
                    return self._pgconn.get_result()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._is_readable(left_s):
                raise SourceUnavailable(f"{self._where} did not answer START_REPLICATION in time")
            with self._lock:
                self._consume()

    def _take(self) -> Changes | Keepalive | None:
        """Return a message that has arrived, or None."""
        with self._lock:
            message = self._get_data()
        if message is None:
            return None
        if message[0] == _CHANGES_KIND:
            return Changes(message[_CHANGES.size :])
        return self._parse(message)

    def _get_data(self) -> bytes | None:
        """Return the data of a message that has arrived, or None. The caller holds the lock."""
        if self._closed.is_set():
            return None
        try:
            size, data = self._pgconn.get_copy_data(1)
        except psycopg.Error as error:
            raise self._outage(error) from None
        if size < 0:
            raise self._refusal(self._pgconn.get_result())
        return bytes(data) if size else None

    def _parse(self, message: bytes) -> Keepalive:
        if message[:1] == b"k":
            _, end_lsn, sent_us, wants_reply = _KEEPALIVE.unpack(message)
            if wants_reply:
                self.send_status()
            return Keepalive(cast("int", end_lsn), cast("int", sent_us))
        raise BadRecord(
            f"{self._where} sent a message of the kind {message[:1]!r}, which this version of"
            " onceflow does not know. No row is lost: upgrade onceflow, and start the job again"
        )

    def _is_readable(self, timeout_s: float) -> bool:
        try:
            return bool(select.select([self._pgconn.socket], [], [], timeout_s)[0])
        except (OSError, ValueError, psycopg.Error):
            # The socket was closed by another thread, or is broken: the next call tells.
            return True

    def _consume(self) -> None:
        if self._closed.is_set():
            return
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            raise self._outage(error) from None
        self._heard_at = time.monotonic()

    def _outage(self, error: psycopg.Error) -> SourceUnavailable:
        return SourceUnavailable(
            f"lost the connection to {self._where}: {' '.join(str(error).split())}"
        )

    def _refusal(self, result: pq.abc.PGresult | None) -> StreamRefused | SourceUnavailable:
        if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
            return SourceUnavailable(f"{self._where} has ended the stream of changes")
        fields = pq.DiagnosticField
        text = result.error_field(fields.MESSAGE_PRIMARY) or result.error_message
        detail = result.error_field(fields.MESSAGE_DETAIL) or b""
        code = result.error_field(fields.SQLSTATE) or b""
        words = b" ".join((text + (b"; " + detail if detail else b"")).split())
        if not code or code.startswith((b"08", b"57P")):
            return SourceUnavailable(f"{self._where}: {words.decode(errors='replace')}")
        return StreamRefused(words.decode(errors="replace"), code.decode())

    def _report_for_ever(self) -> None:
        while not self._closed.wait(self._interval_s):
            self.send_status()
