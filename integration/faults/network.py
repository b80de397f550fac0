"""A TCP proxy on loopback that stands for the network between two processes.

One thread a direction of a connection, which is enough for the few connections of a test; each
copies what it receives unless the proxy is told to hold, delay or cut.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType

from typing_extensions import Self

_CHUNK_BYTES = 65536
_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 5.0
# l_onoff=1, l_linger=0: close() sends RST and drops what is unsent, as a dead host's peer sees it.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TcpProxy:
    """Forwards `127.0.0.1:port` to a target, and can break that. Methods: any thread.

    Faults hold for every connection, present and future, until `heal()`.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        """Listen on a free port; forwarding begins with the first connection."""
        self._target = (target_host, target_port)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        self._closed = False
        self._delay_s = 0.0
        self._forwarded_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept, "accept")

    @property
    def connection_count(self) -> int:
        """Connections open through the proxy now."""
        with self._lock:
            return len(self._sockets) // 2

    @property
    def forwarded_bytes(self) -> int:
        """Bytes handed on so far, both directions together."""
        with self._lock:
            return self._forwarded_bytes

    def cut(self) -> None:
        """Reset every connection; new ones are still accepted and forwarded."""
        with self._lock:
            victims, self._sockets = self._sockets, set()
        for victim in victims:
            _reset(victim)

    def refuse(self) -> None:
        """Reset every connection and every one that is tried from now on, until `heal()`."""
        with self._lock:
            self._refusing = True
        self.cut()

    def pause(self) -> None:
        """Hold every byte: connections stay open, nothing is lost, nothing arrives."""
        self._flowing.clear()

    def delay(self, delay_s: float) -> None:
        """Hold every chunk for `delay_s` before it is handed on."""
        with self._lock:
            self._delay_s = delay_s

    def heal(self) -> None:
        """Forward at once again; bytes that were held go out in order."""
        with self._lock:
            self._refusing = False
            self._delay_s = 0.0
        self._flowing.set()

    def close(self) -> None:
        """Reset everything and return when no thread is left. Idempotent."""
        with self._lock:
            self._closed = True
        # A thread in accept() is woken by shutdown on Linux, by close elsewhere.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._flowing.set()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> Self:
        """Return the proxy, which listens already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _start(self, work: object, name: str, *arguments: socket.socket) -> None:
        if not callable(work):
            raise TypeError(name)
        thread = threading.Thread(
            target=work, args=arguments, name=f"onceflow-proxy-{self.port}-{name}", daemon=True
        )
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = self._dial()
            with self._lock:
                accepted = server is not None and not self._refusing and not self._closed
                if accepted and server is not None:
                    self._sockets |= {client, server}
            if not accepted or server is None:
                _reset(client)
                if server is not None:
                    _reset(server)
                continue
            self._start(self._copy, "up", client, server)
            self._start(self._copy, "down", server, client)

    def _dial(self) -> socket.socket | None:
        try:
            server = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S)
        except OSError:
            return None
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def _copy(self, reader: socket.socket, writer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := reader.recv(_CHUNK_BYTES):
                self._hold()
                writer.sendall(chunk)
                with self._lock:
                    self._forwarded_bytes += len(chunk)
            self._hold()
            # A half-closed connection stays half open: the other direction may go on.
            writer.shutdown(socket.SHUT_WR)
            return
        with self._lock:
            self._sockets -= {reader, writer}
        for broken in (reader, writer):
            _reset(broken)

    def _hold(self) -> None:
        self._flowing.wait()
        with self._lock:
            delay_s = self._delay_s
        if delay_s:
            time.sleep(delay_s)


def _reset(victim: socket.socket) -> None:
    with contextlib.suppress(OSError):
        victim.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    # shutdown wakes a thread that is blocked in recv on it; close alone does not.
    with contextlib.suppress(OSError):
        victim.shutdown(socket.SHUT_RDWR)
    victim.close()
