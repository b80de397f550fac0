"""A proxy that breaks the network exactly at the n-th exchange, before or after the request.

It can also hold the request and deliver it later.

An *exchange* is all data that a client sends until the server answers. Counting exchanges gives
exact faults for any request-reply protocol, without parsing it. A test loses the reply of the first
exchange, then of the second, and so on until the operation needs fewer exchanges.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from enum import Enum

from onceflow.integration.faults.network import LoopbackProxy

_CHUNK_BYTES = 65536
_HELD_S_MAX = 120.0


class Lose(Enum):
    """The part of an exchange that the network loses before it resets the connection."""

    REQUEST = "request"
    """The server does not get the request."""
    REPLY = "reply"
    """The server gets the whole request, in any number of pieces, and its reply is lost."""


@dataclass(frozen=True)
class Hold:
    """A request that the network holds and delivers later."""

    held: threading.Event = field(default_factory=threading.Event)
    """An event that is set when the request was intercepted."""
    released: threading.Event = field(default_factory=threading.Event)
    """An event that the test sets to deliver the request to the server."""


@dataclass
class _Armed:
    left: int
    fault: Lose | Hold


@dataclass(frozen=True)
class _Exchange:
    """The state of one connection between request and reply."""

    asking: threading.Event = field(default_factory=threading.Event)
    reply_lost: threading.Event = field(default_factory=threading.Event)


class ExchangeProxy(LoopbackProxy):
    """A proxy from `127.0.0.1:port` to a target that breaks a connection on request. Any thread."""

    def __init__(self, target: tuple[str, int]) -> None:
        """Listen on a free port."""
        super().__init__(target)
        self._armed: _Armed | None = None
        self._holds: list[Hold] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.breaks = 0
        """The number of connections broken so far."""
        self._spawn(self._accept)

    def lose(self, what: Lose, exchange: int) -> None:
        """Break the connection at the `exchange`-th exchange from now, of all connections."""
        with self._lock:
            self._armed = _Armed(exchange, what)

    def hold(self, exchange: int) -> Hold:
        """Hold the request of the `exchange`-th exchange from now until it is released."""
        hold = Hold()
        with self._lock:
            self._armed = _Armed(exchange, hold)
            self._holds.append(hold)
        return hold

    def heal(self) -> None:
        """Remove the armed fault."""
        with self._lock:
            self._armed = None

    def close(self) -> None:
        """End every connection. Return when all threads have ended. Idempotent."""
        self._stop_listening()
        with self._lock:
            sockets, threads = list(self._sockets), list(self._threads)
        for connection in sockets:
            _end(connection)
        for hold in self._holds:
            hold.released.set()
        for thread in threads:
            thread.join(60)

    def _spawn(self, run: object, *arguments: object) -> None:
        assert callable(run)
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while (client := self._accept_client()) is not None:
            server = self._dial()
            if server is None:
                _end(client)
                continue
            # A paused server answers after it is resumed. The test's timeout ends the wait, not the
            # proxy's.
            server.settimeout(None)
            # Otherwise small requests wait up to 40 ms for each other, at each of hundreds of
            # exchanges.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets += [client, server]
            state = _Exchange()
            self._spawn(self._requests, client, server, state)
            self._spawn(self._replies, client, server, state)

    def _requests(self, client: socket.socket, server: socket.socket, state: _Exchange) -> None:
        with contextlib.suppress(OSError):
            while chunk := client.recv(_CHUNK_BYTES):
                if not state.asking.is_set():
                    state.asking.set()
                    match self._count_exchange():
                        case Lose.REQUEST:
                            _end(client)
                            break
                        case Lose.REPLY:
                            # Forward the whole request: a server with half a request would wait and
                            # hold locks.
                            state.reply_lost.set()
                        case Hold() as hold:
                            hold.held.set()
                            hold.released.wait(_HELD_S_MAX)
                        case None:
                            pass
                server.sendall(chunk)
        _end(server)

    def _replies(self, client: socket.socket, server: socket.socket, state: _Exchange) -> None:
        with contextlib.suppress(OSError):
            while chunk := server.recv(_CHUNK_BYTES):
                if state.reply_lost.is_set():
                    break
                # Clear before forwarding the reply: the client may send a new request at once.
                state.asking.clear()
                client.sendall(chunk)
        _end(client)
        _end(server)

    def _count_exchange(self) -> Lose | Hold | None:
        """Count an exchange. Return the fault to inject, or None."""
        with self._lock:
            armed = self._armed
            if armed is None:
                return None
            armed.left -= 1
            if armed.left:
                return None
            self._armed = None
            if isinstance(armed.fault, Lose):
                self.breaks += 1
            return armed.fault


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
