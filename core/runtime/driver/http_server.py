"""A small HTTP/1.1 server on one thread that no client can fill, block or keep from ending.

One connection carries one request. h11 parses; asyncio reads and writes, so a slow client costs a
task, not a thread. The application answers each request on a new daemon thread.

Limits, each enforced before the application sees the request:
    head <= HEAD_BYTES_MAX, body <= BODY_BYTES_MAX (announced or chunked)
    time from accept until the request is complete <= REQUEST_TIMEOUT_S, including TLS's handshake
    open connections <= CONNECTIONS_MAX, of which clients of other machines that have not shown the
        token hold at most STRANGERS_MAX: one more closes another connection without the token.
        Answered connections are closed first. Then the server closes connections of the larger
        group: those whose request is incomplete, or those being answered. It always closes the
        oldest connection of a group.

A client that has shown the token is never disconnected for a client that has not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Protocol

import h11

from onceflow.core.settings.pipeline_settings import is_loopback

HEAD_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 64 * 1024
CONNECTIONS_MAX = 256
STRANGERS_MAX = 192
"""Less than CONNECTIONS_MAX: the remaining connections are for clients of this machine, such as the
owner's.
"""
CALLS_MAX = 16
"""The number of requests that are answered at a time; others wait, within CALL_TIMEOUT_S."""
STRANGERS_CALLS_MAX = 4
"""The number of requests without the token that are answered at a time, on separate threads."""
REQUEST_TIMEOUT_S = 5.0
"""Longer than a loaded machine takes to send a request, shorter than a client waits."""
CALL_TIMEOUT_S = 60.0
"""Looking up state reads files of checkpoint storage, which may be in a bucket."""
RESPONSE_TIMEOUT_S = 10.0
LINGER_S = 1.0
"""The time for which data that a client still sends is read and dropped. Closing earlier resets the
connection, and the client may lose the answer.
"""
CLOSE_TIMEOUT_S = 2.0
_READ_BYTES = 16 * 1024

_log = logging.getLogger("onceflow.runtime.endpoint")


@dataclass(frozen=True, slots=True)
class Request:
    """A request as received; header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """A response. `sent` is called once the whole response is on its way to the client."""

    status: HTTPStatus
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    sent: Callable[[], None] = lambda: None


class Application(Protocol):
    """Answers requests."""

    def refuse(self, head: Request) -> Response | None:
        """Return the response if the head alone is reason to refuse the request; None: no refusal.

        Runs on the server's thread, before the body is read; must not wait.
        """
        ...

    def has_token(self, head: Request) -> bool:
        """Return True if the request shows the token.

        Runs on the server's thread; must not wait.
        """
        ...

    def answer(self, request: Request) -> Response:
        """Return the response to a request; runs on a separate thread."""
        ...

    def explain(self, status: HTTPStatus, reason: str) -> Response:
        """Return the response to input that is not a request, is too large, or arrives too late."""
        ...


class _Unreadable(Exception):
    """The received bytes are not a request, or the request is too large."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Stage(Enum):
    """The state of one connection."""

    UNREAD = "its request is not complete yet"
    ASKED = "its request has no token, and is being answered"
    TRUSTED = "its request has the token, and is being answered"
    ANSWERED = "it has its answer"


@dataclass(slots=True)
class _Guest:
    """The state of one open connection."""

    is_local: bool
    """True if the client is on this machine."""
    stage: _Stage = _Stage.UNREAD


class _Client:
    """A connection that is read and written as h11 events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)

    async def next_event(self) -> h11.Event:
        """Return the next part of the request.

        Raises:
            _Unreadable: The received bytes are not HTTP, or the head is too long.
        """
        while True:
            try:
                event = self._parser.next_event()
            except h11.RemoteProtocolError as error:
                raise _Unreadable(HTTPStatus(error.error_status_hint), str(error)) from error
            if isinstance(event, h11.Event):
                return event
            if self._parser.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                self._writer.write(self._parser.send(go_on) or b"")
            self._parser.receive_data(await self._reader.read(_READ_BYTES))

    async def send(self, response: Response) -> None:
        """Send the answer to the one request of this connection."""
        length = str(len(response.body))
        headers = {**response.headers, "Content-Length": length, "Connection": "close"}
        head = h11.Response(
            status_code=response.status.value,
            reason=response.status.phrase,
            headers=list(headers.items()),
        )
        for event in (head, h11.Data(data=response.body), h11.EndOfMessage()):
            self._writer.write(self._parser.send(event) or b"")
        await self._writer.drain()

    async def linger(self) -> None:
        """Close the sending side, then read and drop the client's data until it closes."""
        # TLS has no half-closed connections.
        if self._writer.can_write_eof():
            self._writer.write_eof()
        while await self._reader.read(_READ_BYTES):
            pass


class HttpServer:
    """A listening socket and its thread."""

    def __init__(
        self, host: str, port: int, application: Application, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen at the address.

        Raises:
            OSError: The address is not this machine's, or is in use.
        """
        self._socket = _listen(host, port)
        self._application = application
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._accepting: asyncio.Task[None] | None = None
        self._open: dict[asyncio.Task[None], _Guest] = {}
        """The open connections, oldest first."""
        self._calls = asyncio.Semaphore(CALLS_MAX)
        self._strangers_calls = asyncio.Semaphore(STRANGERS_CALLS_MAX)
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._socket.getsockname()[1])

    def start(self, name: str) -> None:
        """Start answering, on a daemon thread called `name`."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket and all connections without waiting for clients. Idempotent."""
        if self._thread is None:
            self._socket.close()
            self._loop.close()
            return
        with contextlib.suppress(RuntimeError):  # The loop is closed already.
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _end(self) -> None:
        self._closing = True
        if self._accepting is not None:
            self._accepting.cancel()

    def _run(self) -> None:
        try:
            self._accepting = self._loop.create_task(self._accept())
            # `close` may have run before the task existed.
            if self._closing:
                self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
            self._loop.run_until_complete(self._drop(tuple(self._open)))
        except Exception:
            _log.debug("the endpoint's server has ended", exc_info=True)
        finally:
            self._socket.close()
            self._loop.close()

    async def _drop(self, connections: Sequence[asyncio.Task[None]]) -> None:
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections, timeout=CLOSE_TIMEOUT_S / 2)
        # Transports that were aborted close their sockets in the loop's next step.
        await asyncio.sleep(0)

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._socket)
            except OSError as error:
                # The process has no free file descriptor. Let clients wait: the job needs the next
                # free one.
                _log.debug("a connection cannot be accepted: %s", error)
                await asyncio.sleep(0.2)
                continue
            guest = _Guest(is_loopback(str(address[0]).removeprefix("::ffff:")))
            if not self._makes_room(guest):
                connection.close()
                continue
            task = self._loop.create_task(self._serve(connection, guest))
            self._open[task] = guest
            task.add_done_callback(partial(self._forget, connection))
            # `sock_accept` does not wait while connections are queued. Without this, a crowd that
            # connects again and again would push a request out before any of it is read.
            await asyncio.sleep(0)

    def _makes_room(self, newcomer: _Guest) -> bool:
        """Return True if `newcomer` can be accepted.

        Closes another connection if that is necessary.
        """
        others = [entry for entry in self._open.items() if entry[1].stage is not _Stage.TRUSTED]
        strangers = [entry for entry in others if not entry[1].is_local]
        if not newcomer.is_local and len(strangers) >= STRANGERS_MAX:
            others = strangers
        elif len(self._open) < CONNECTIONS_MAX:
            return True
        if not others:
            # All others have shown the token: refuse the newcomer instead of closing one of them.
            return False
        stages = Counter(guest.stage for _, guest in others)
        # Close one of the larger group, because a flood of connections makes its group the largest.
        crowd = max((_Stage.UNREAD, _Stage.ASKED), key=lambda stage: stages[stage])
        stage = _Stage.ANSWERED if stages[_Stage.ANSWERED] else crowd
        oldest = next(task for task, guest in others if guest.stage is stage)
        del self._open[oldest]
        oldest.cancel()
        return True

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        # Close here: a task that is cancelled before its first step runs none of its own code.
        connection.close()
        self._open.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a connection has ended: %s", error)

    async def _serve(self, connection: socket.socket, guest: _Guest) -> None:
        # Handshake, head and body share one deadline, so that a client that sends a byte now and
        # then gains nothing.
        deadline = self._loop.time() + REQUEST_TIMEOUT_S
        try:
            opening = self._open_streams(connection)
            reader, writer = await asyncio.wait_for(opening, REQUEST_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError) as error:
            _log.debug("a connection could not be set up: %s", error)
            return
        try:
            await self._exchange(_Client(reader, writer), guest, deadline - self._loop.time())
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            _log.debug("a client has closed its connection: %s", error)
        finally:
            # Abort: an orderly close would wait for the client.
            writer.transport.abort()

    async def _exchange(self, client: _Client, guest: _Guest, left_s: float) -> None:
        """Read one request within `left_s`, and send the response."""
        try:
            asked = await asyncio.wait_for(self._read(client), left_s)
        except asyncio.TimeoutError:
            late = f"the request was not complete within {REQUEST_TIMEOUT_S:.0f} s"
            asked = self._application.explain(HTTPStatus.REQUEST_TIMEOUT, late)
        except _Unreadable as error:
            asked = self._application.explain(error.status, str(error))
        guest.stage = _Stage.ASKED
        calls = self._strangers_calls
        if isinstance(asked, Request) and self._application.has_token(asked):
            # From here on no new connection closes this one.
            guest.stage, calls = _Stage.TRUSTED, self._calls
        response = asked if isinstance(asked, Response) else await self._answer(asked, calls)
        await asyncio.wait_for(client.send(response), RESPONSE_TIMEOUT_S)
        response.sent()
        guest.stage = _Stage.ANSWERED
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.linger(), LINGER_S)

    async def _open_streams(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader(limit=_READ_BYTES, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        handshake_s = REQUEST_TIMEOUT_S if self._tls is not None else None
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=handshake_s
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _read(self, client: _Client) -> Request | Response:
        """Return the request, or the response that refuses it by its head.

        Raises:
            _Unreadable: The bytes are not a request, or the request is too large.
            EOFError: The client has closed the connection.
        """
        head: Request | None = None
        body = bytearray()
        while True:
            event = await client.next_event()
            if isinstance(event, h11.Request):
                head = _to_request(event)
                # h11 limits only a head that arrives in several pieces.
                if _size_bytes(event) > HEAD_BYTES_MAX:
                    raise _Unreadable(
                        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                        f"the head has more than {HEAD_BYTES_MAX} bytes",
                    )
                if (refused := self._application.refuse(head)) is not None:
                    return refused
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > BODY_BYTES_MAX:
                    raise _Unreadable(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                        f"the body has more than {BODY_BYTES_MAX} bytes",
                    )
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return Request(head.method, head.target, head.headers, bytes(body))
            else:
                raise EOFError("the client has closed the connection")

    async def _answer(self, request: Request, calls: asyncio.Semaphore) -> Response:
        """Return the application's response.

        After a timeout, the application's thread may run on.
        """
        call: Future[Response] = Future()

        def work() -> None:
            try:
                response = self._application.answer(request)
            except Exception as error:
                _log.warning("%s %s", request.method, request.target, exc_info=True)
                response = self._application.explain(
                    HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}"
                )
            with contextlib.suppress(InvalidStateError):  # The call has timed out.
                call.set_result(response)

        try:
            return await asyncio.wait_for(_call(work, call, calls), CALL_TIMEOUT_S)
        except asyncio.TimeoutError:
            return self._application.explain(
                HTTPStatus.SERVICE_UNAVAILABLE, f"no answer within {CALL_TIMEOUT_S:.0f} s"
            )


async def _call(
    work: Callable[[], None], call: Future[Response], calls: asyncio.Semaphore
) -> Response:
    # The wait for a free thread counts towards the call's time.
    async with calls:
        threading.Thread(target=work, name="endpoint's call", daemon=True).start()
        return await asyncio.wrap_future(call)


def _size_bytes(head: h11.Request) -> int:
    """Return the approximate size in bytes of the head on the wire."""
    lines = sum(len(name) + len(value) + len(": \r\n") for name, value in head.headers)
    return len(head.method) + len(head.target) + lines


def _to_request(event: h11.Request) -> Request:
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
    return Request(event.method.decode("ascii"), event.target.decode("latin-1"), headers)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first usable address of `host`.

    Raises:
        OSError: No address of `host` is usable.
    """
    flags = socket.AI_PASSIVE
    *others, last = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    for family, _, _, _, address in others:
        with contextlib.suppress(OSError):
            return _listen_at(family, (str(address[0]), port))
    return _listen_at(last[0], (str(last[4][0]), port))


def _listen_at(family: int, address: tuple[str, int]) -> socket.socket:
    listening = socket.create_server(address, family=family, backlog=CONNECTIONS_MAX)
    listening.setblocking(False)
    return listening
