"""A small HTTP/1.1 server on one thread, which no client can fill, block or keep from ending.

One connection carries one request. h11 parses; asyncio reads and writes, so a slow client costs a
task, not a thread. What a request asks for runs on a daemon thread of its own.

Bounds, each held before the application has seen anything of the request:
    head <= HEAD_BYTES_MAX, body <= BODY_BYTES_MAX (announced or chunked)
    time from accept until the request is whole <= REQUEST_TIMEOUT_S, TLS's handshake included
    open connections <= CONNECTIONS_MAX, of which clients of other machines that have not shown the
        token hold at most STRANGERS_MAX: one more closes another connection without the token.
        Those that have their answer go first, then whatever there is more of: connections whose
        request is not yet whole, or requests that are being answered; always the oldest

A client that has shown the token is never turned away for one that has not.
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
"""Less than CONNECTIONS_MAX: the rest is for clients of this machine, such as the owner's."""
CALLS_MAX = 16
"""How many requests are answered at a time; others wait, within CALL_TIMEOUT_S."""
STRANGERS_CALLS_MAX = 4
"""The same for requests without the token, which have threads of their own."""
REQUEST_TIMEOUT_S = 5.0
"""Longer than a loaded machine takes to send a request, shorter than a client waits."""
CALL_TIMEOUT_S = 60.0
"""Looking up state reads files of checkpoint storage, which may be in a bucket."""
RESPONSE_TIMEOUT_S = 10.0
LINGER_S = 1.0
"""How long what a client still sends is read and dropped: a close before resets the connection, and
the client may lose the answer."""
CLOSE_TIMEOUT_S = 2.0
_READ_BYTES = 16 * 1024

_log = logging.getLogger("onceflow.runtime.endpoint")


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came; names of headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; `sent` is called once all of it is on its way to the client."""

    status: HTTPStatus
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    sent: Callable[[], None] = lambda: None


class Application(Protocol):
    """Answers requests."""

    def refuse(self, head: Request) -> Response | None:
        """Return the answer to a request that is refused by its head alone.

        Runs on the server's thread, before the body is read; must not wait.
        """
        ...

    def has_token(self, head: Request) -> bool:
        """Return whether a request shows the token. Runs as `refuse` does."""
        ...

    def answer(self, request: Request) -> Response:
        """Return the answer to a request; runs on a thread of its own."""
        ...

    def explain(self, status: HTTPStatus, reason: str) -> Response:
        """Return the answer to what is no request, too large or too late."""
        ...


class _Unreadable(Exception):
    """What has been sent is no request, or a larger one than is taken."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Stage(Enum):
    """The state of one connection."""

    UNREAD = "its request is not yet whole"
    ASKED = "its request has no token, and is being answered"
    TRUSTED = "its request has the token, and is being answered"
    ANSWERED = "it has its answer"


@dataclass(slots=True)
class _Guest:
    """One connection among all that are open."""

    is_local: bool
    """Whether the client is on this machine."""
    stage: _Stage = _Stage.UNREAD


class _Client:
    """One connection, read and written by h11's events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)

    async def next_event(self) -> h11.Event:
        """Return the next part of the request.

        Raises:
            _Unreadable: What comes is no HTTP, or its head is too long.
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
        """Say that no more comes; read and drop what the client still sends, to its end."""
        # TLS has no half-closed connections.
        if self._writer.can_write_eof():
            self._writer.write_eof()
        while await self._reader.read(_READ_BYTES):
            pass


class HttpServer:
    """One listening socket, and its thread."""

    def __init__(
        self, host: str, port: int, application: Application, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen.

        Raises:
            OSError: The address is not this machine's, or in use.
        """
        self._socket = _listen(host, port)
        self._application = application
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._accepting: asyncio.Task[None] | None = None
        self._open: dict[asyncio.Task[None], _Guest] = {}
        """All connections, the oldest first."""
        self._calls = asyncio.Semaphore(CALLS_MAX)
        self._strangers_calls = asyncio.Semaphore(STRANGERS_CALLS_MAX)
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._socket.getsockname()[1])

    def start(self, name: str) -> None:
        """Begin to answer, on a daemon thread called `name`."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket and all connections; waits for no client. A second call does nothing."""
        if self._thread is None:
            self._socket.close()
            self._loop.close()
            return
        with contextlib.suppress(RuntimeError):  # The loop is closed: that was done before.
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _end(self) -> None:
        self._closing = True
        if self._accepting is not None:
            self._accepting.cancel()

    def _run(self) -> None:
        try:
            self._accepting = self._loop.create_task(self._accept())
            # `close` may have come before there was a task to cancel.
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
                # The process has no file to spare: clients wait, and the job has the next one.
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
        """Return whether `newcomer` can be taken, closing another connection if that is needed."""
        others = [one for one in self._open.items() if one[1].stage is not _Stage.TRUSTED]
        strangers = [one for one in others if not one[1].is_local]
        if not newcomer.is_local and len(strangers) >= STRANGERS_MAX:
            others = strangers
        elif len(self._open) < CONNECTIONS_MAX:
            return True
        if not others:
            # All show the token: the newcomer is turned away rather than one of them.
            return False
        stages = Counter(guest.stage for _, guest in others)
        # More of them than of the others: what there is most of is what a crowd consists of.
        crowd = max((_Stage.UNREAD, _Stage.ASKED), key=lambda stage: stages[stage])
        stage = _Stage.ANSWERED if stages[_Stage.ANSWERED] else crowd
        oldest = next(task for task, guest in others if guest.stage is stage)
        del self._open[oldest]
        oldest.cancel()
        return True

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        # Here, too: a task that is cancelled before its first step runs nothing of its own.
        connection.close()
        self._open.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a connection has ended: %s", error)

    async def _serve(self, connection: socket.socket, guest: _Guest) -> None:
        # One deadline for handshake, head and body: a client that sends a byte now and then gains
        # nothing.
        deadline = self._loop.time() + REQUEST_TIMEOUT_S
        try:
            opening = self._open_streams(connection)
            reader, writer = await asyncio.wait_for(opening, REQUEST_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError) as error:
            _log.debug("a client has not come through: %s", error)
            return
        try:
            await self._exchange(_Client(reader, writer), guest, deadline - self._loop.time())
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            _log.debug("a client has gone: %s", error)
        finally:
            # Not closed in order, which would wait for the client's part of it.
            writer.transport.abort()

    async def _exchange(self, client: _Client, guest: _Guest, left_s: float) -> None:
        """Read one request within `left_s`, and answer it."""
        try:
            asked = await asyncio.wait_for(self._read(client), left_s)
        except asyncio.TimeoutError:
            late = f"the request was not whole within {REQUEST_TIMEOUT_S:.0f} s"
            asked = self._application.explain(HTTPStatus.REQUEST_TIMEOUT, late)
        except _Unreadable as error:
            asked = self._application.explain(error.status, str(error))
        guest.stage = _Stage.ASKED
        calls = self._strangers_calls
        if isinstance(asked, Request) and self._application.has_token(asked):
            # From here on no newcomer pushes it out.
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
        """Return the request, or the answer to one that is refused by its head.

        Raises:
            _Unreadable: It is no request, or too large.
            EOFError: The client has closed the connection.
        """
        head: Request | None = None
        body = bytearray()
        while True:
            event = await client.next_event()
            if isinstance(event, h11.Request):
                head = _to_request(event)
                # h11 bounds only a head that comes in pieces.
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
        """Return the application's answer; its thread may outlive a call that takes too long."""
        call: Future[Response] = Future()

        def work() -> None:
            try:
                response = self._application.answer(request)
            except Exception as error:
                _log.warning("%s %s", request.method, request.target, exc_info=True)
                response = self._application.explain(
                    HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}"
                )
            with contextlib.suppress(InvalidStateError):  # Nobody waits for it any more.
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
    """Return the size of a request's head in the order of its bytes on the wire."""
    lines = sum(len(name) + len(value) + len(": \r\n") for name, value in head.headers)
    return len(head.method) + len(head.target) + lines


def _to_request(event: h11.Request) -> Request:
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
    return Request(event.method.decode("ascii"), event.target.decode("latin-1"), headers)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the first address of `host` that can be had.

    Raises:
        OSError: None of them can.
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
