"""A network that breaks at an exact place: at the n-th exchange, before or after the request.

Or that only keeps the request back, until it is told to deliver it.

An *exchange* is what a client sends until the server answers. Counting them makes a lost reply
exact for any protocol in which the client asks and the server answers, without knowing it: a test
loses the reply of the first exchange, then of the second, until the work is done in fewer.
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
    """What the network swallows of one exchange before it resets the connection."""

    REQUEST = "request"
    """The server never gets it."""
    REPLY = "reply"
    """The server gets all of it, in however many pieces, and answers into nothing."""


@dataclass(frozen=True)
class Hold:
    """One request that the network keeps back: nobody knows of it, and it arrives in the end."""

    held: threading.Event = field(default_factory=threading.Event)
    """Set when the request has been met."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set it to let the request go on to the server."""


@dataclass
class _Armed:
    left: int
    fault: Lose | Hold


@dataclass(frozen=True)
class _Exchange:
    """Where one connection is in asking and answering."""

    asking: threading.Event = field(default_factory=threading.Event)
    reply_lost: threading.Event = field(default_factory=threading.Event)


class ExchangeProxy(LoopbackProxy):
    """Forwards `127.0.0.1:port` to a target; breaks one connection where it is told. Any thread."""

    def __init__(self, target: tuple[str, int]) -> None:
        """Listen on a free port."""
        super().__init__(target)
        self._armed: _Armed | None = None
        self._holds: list[Hold] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.breaks = 0
        """How many connections were broken so far."""
        self._spawn(self._accept)

    def lose(self, what: Lose, exchange: int) -> None:
        """Break the connection at the `exchange`-th exchange from now, counted from 1, over all."""
        with self._lock:
            self._armed = _Armed(exchange, what)

    def hold(self, exchange: int) -> Hold:
        """Keep back the request of the `exchange`-th exchange from now, until it is released."""
        hold = Hold()
        with self._lock:
            self._armed = _Armed(exchange, hold)
            self._holds.append(hold)
        return hold

    def heal(self) -> None:
        """Break nothing more."""
        with self._lock:
            self._armed = None

    def close(self) -> None:
        """End every connection; return when no thread is left. Idempotent."""
        self._stop_listening()
        with self._lock:
            sockets, threads = list(self._sockets), list(self._threads)
        for one in sockets:
            _end(one)
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
            # A paused server answers when it goes on: the test's deadline ends the wait, not the
            # proxy's.
            server.settimeout(None)
            # Else small requests wait up to 40 ms for each other, at each of hundreds of exchanges.
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
                            # A server with half a request would wait for the rest, locks in hand.
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
                # Before the reply is passed on: the client may ask again as soon as it has it.
                state.asking.clear()
                client.sendall(chunk)
        _end(client)
        _end(server)

    def _count_exchange(self) -> Lose | Hold | None:
        """Count one exchange; return what is to happen to it."""
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


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
