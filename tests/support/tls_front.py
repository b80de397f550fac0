"""A front that ends TLS as a Postgres server does. The servers of the tests have none."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Generator

_SSL_REQUEST = struct.pack("!ii", 8, 80877103)
_GSS_REQUEST = struct.pack("!ii", 8, 80877104)


@contextlib.contextmanager
def front_of(backend: tuple[str, int], context: ssl.SSLContext) -> Generator[int, None, None]:
    """Accept TLS by `context`, and pass the rest on to `backend`. Yields the front's port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, backend, context), daemon=True).start()
        yield listener.getsockname()[1]
        # Closing the listener alone does not wake the thread that accepts.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, backend: tuple[str, int], context: ssl.SSLContext) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(client, backend, context), daemon=True).start()


def _serve(client: socket.socket, backend: tuple[str, int], context: ssl.SSLContext) -> None:
    with client, contextlib.suppress(OSError):
        while client.recv(8, socket.MSG_PEEK) == _GSS_REQUEST:
            client.recv(8)
            client.sendall(b"N")
        if client.recv(8, socket.MSG_PEEK) != _SSL_REQUEST:
            return
        client.recv(8)
        client.sendall(b"S")
        with (
            context.wrap_socket(client, server_side=True) as encrypted,
            socket.create_connection(backend) as server,
        ):
            answers = threading.Thread(target=_pass_on, args=(server, encrypted), daemon=True)
            answers.start()
            _pass_on(encrypted, server)
            server.shutdown(socket.SHUT_RDWR)
            answers.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
