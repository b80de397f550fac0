"""A TCP proxy on loopback that stands for the network between two processes.

Each direction of a connection has its own thread, which is enough for the few connections of a
test. A thread blocks for at most 20 ms before it checks whether to cut its connection. It closes
its sockets itself, because a socket that is closed while another thread blocks on it sends no
reset.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType

from typing_extensions import Self

_CHUNK_BYTES = 65536
_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 10.0
_LOOK_MS = 20
# l_onoff=1, l_linger=0: close() sends RST and drops unsent data, like a host that died.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class LoopbackProxy(ABC):
    """A proxy that listens on a free loopback `port` and connects to `target`. Any thread."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    @abstractmethod
    def close(self) -> None:
        """End every connection. Return when all threads have ended. Idempotent."""

    def __enter__(self) -> Self:
        """Return the proxy, which is already listening."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the proxy."""
        self.close()

    def _stop_listening(self) -> None:
        # shutdown() wakes a thread in accept() on Linux; close() does so on other systems.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept_client(self) -> socket.socket | None:
        """Return the next client, or None when the proxy has stopped listening."""
        try:
            return self._listener.accept()[0]
        except OSError:
            return None

    def _dial(self) -> socket.socket | None:
        """Return a connection to the target, or None if it cannot be reached."""
        try:
            server = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S)
        except OSError:
            return None
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server


class TcpProxy(LoopbackProxy):
    """A proxy from `127.0.0.1:port` to a target that can inject faults. Any thread.

    Faults apply to all current and future connections until `heal()`.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        """Listen on a free port. Forwarding starts with the first connection."""
        super().__init__((target_host, target_port))
        self._connections: list[_Connection] = []
        self._faults = _Faults()
        self._refusing = False
        self._acceptor = threading.Thread(
            target=self._accept, name=f"onceflow-proxy-{self.port}", daemon=True
        )
        self._acceptor.start()

    @property
    def connection_count(self) -> int:
        """The number of open connections through the proxy."""
        with self._lock:
            return sum(not connection.closed for connection in self._connections)

    @property
    def forwarded_bytes(self) -> int:
        """The number of bytes forwarded so far, in both directions together."""
        return self._faults.forwarded_bytes

    def cut(self) -> None:
        """Reset every connection, and return when done. New connections are forwarded."""
        with self._lock:
            victims, self._connections = self._connections, []
        for victim in victims:
            victim.cut()
        for victim in victims:
            victim.join()

    def refuse(self) -> None:
        """Reset all connections, and all new ones until `heal()`."""
        with self._lock:
            self._refusing = True
        self.cut()

    def pause(self) -> None:
        """Hold all bytes. Connections stay open, and no byte arrives or is lost."""
        self._faults.flowing.clear()

    def delay(self, delay_s: float) -> None:
        """Delay every chunk by `delay_s` before it is forwarded."""
        self._faults.delay_s = delay_s

    def heal(self) -> None:
        """Forward without delay again. Held bytes are sent in order."""
        with self._lock:
            self._refusing = False
        self._faults.delay_s = 0.0
        self._faults.flowing.set()

    def close(self) -> None:
        """Reset all connections, and return when all threads have ended. Idempotent."""
        self._stop_listening()
        self._acceptor.join(_JOIN_TIMEOUT_S)
        self.cut()

    def _accept(self) -> None:
        while (client := self._accept_client()) is not None:
            server = self._dial()
            with self._lock:
                if server is not None and not self._refusing:
                    self._connections = [
                        connection for connection in self._connections if not connection.closed
                    ]
                    self._connections.append(_Connection(client, server, self._faults))
                    continue
            for unwanted in (client, server):
                if unwanted is not None:
                    _reset(unwanted)


class _Faults:
    """The faults that apply to all connections of a proxy."""

    def __init__(self) -> None:
        self.flowing = threading.Event()
        self.flowing.set()
        self.delay_s = 0.0
        self.forwarded_bytes = 0
        self._lock = threading.Lock()

    def count(self, size_bytes: int) -> None:
        with self._lock:
            self.forwarded_bytes += size_bytes


class _Connection:
    """Two sockets and two threads that copy between them. The last thread to end closes both."""

    def __init__(self, client: socket.socket, server: socket.socket, faults: _Faults) -> None:
        self._sockets = (client, server)
        self._faults = faults
        self._cut = threading.Event()
        self._lock = threading.Lock()
        self._directions = 2
        for end in self._sockets:
            end.setblocking(False)
        self._threads = [
            threading.Thread(target=self._copy, args=pair, name="onceflow-proxy-copy", daemon=True)
            for pair in ((client, server), (server, client))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        with self._lock:
            return self._directions == 0

    def cut(self) -> None:
        self._cut.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)

    def _copy(self, reader: socket.socket, writer: socket.socket) -> None:
        try:
            while (chunk := self._receive(reader)) and self._hold():
                # Count first, so that a client that has received bytes finds them counted.
                self._faults.count(len(chunk))
                self._send(writer, chunk)
            if not self._cut.is_set():
                # Close only this direction. The other direction may continue.
                writer.shutdown(socket.SHUT_WR)
        except OSError:
            self._cut.set()
        with self._lock:
            self._directions -= 1
            if self._directions:
                return
        for end in self._sockets:
            if self._cut.is_set():
                _reset(end)
            else:
                end.close()

    def _receive(self, reader: socket.socket) -> bytes:
        return reader.recv(_CHUNK_BYTES) if self._await(reader, select.POLLIN) else b""

    def _send(self, writer: socket.socket, chunk: bytes) -> None:
        unsent = memoryview(chunk)
        while unsent and self._await(writer, select.POLLOUT):
            unsent = unsent[writer.send(unsent) :]

    def _await(self, end: socket.socket, event: int) -> bool:
        """Wait until `end` is ready. Return False if the connection is to be cut."""
        poll = select.poll()
        poll.register(end, event)
        while not self._cut.is_set():
            if poll.poll(_LOOK_MS):
                return True
        return False

    def _hold(self) -> bool:
        while not self._faults.flowing.wait(_LOOK_MS / 1000):
            if self._cut.is_set():
                return False
        deadline = time.monotonic() + self._faults.delay_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            if self._cut.wait(remaining_s):
                return False
        return True


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    end.close()
