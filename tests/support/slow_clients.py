"""Clients that begin a request and never end it: `python -m tests.support.slow_clients URL COUNT`.

Each connects, sends the head of a request byte by byte, and connects again when it is refused. A
line on stdout says that all have connected once.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from urllib.parse import urlsplit

_HEAD = b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


class _SlowClient:
    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._connection: socket.socket | None = None

    def drip(self) -> None:
        """Send one byte more; connect first where there is no connection, or none any more."""
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self._address, timeout=30)
                self._connection.sendall(_HEAD)
            self._connection.sendall(b"x")
        except OSError:
            if self._connection is not None:
                self._connection.close()
            self._connection = None


def main(url: str, count: int) -> None:
    """Run until the process is killed."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    clients = [_SlowClient((parts.hostname, parts.port)) for _ in range(count)]
    told = False
    while True:
        for client in clients:
            client.drip()
        if not told:
            told = True
            sys.stdout.write("all have connected\n")
            sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1], int(sys.argv[2]))
