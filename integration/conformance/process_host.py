"""A program that has imported everything and does nothing but fork: a process in milliseconds.

Asked over a socket for a process (length, one descriptor, a pickled function with arguments),
it forks; the child runs the function and answers over that descriptor. It stays single-threaded, so
that forking is safe, and ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from onceflow.core import spi, storage
from onceflow.integration.conformance.link import Began, Link, Raised, Returned

LENGTH = struct.Struct("!Q")
_PRELOADED = (pa, spi, storage)


def serve(descriptor: int) -> None:
    """Serve until the other end of the socket is closed."""
    # Nobody asks how a child ended: its pipe tells.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as control:
        while True:
            head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, 1)
            if not head:
                return
            (size_bytes,) = LENGTH.unpack(head)
            payload = _received(control, size_bytes)
            # Imports what the function needs, once for all children to come.
            with suppress(Exception):
                pickle.loads(payload)  # noqa: S301 - of the parent process
            if os.fork() == 0:
                control.close()
                _run(descriptors[0], payload)
            os.close(descriptors[0])


def _received(control: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        chunk = control.recv(min(size_bytes - len(data), 1 << 20))
        if not chunk:
            raise SystemExit(1)
        data += chunk
    return bytes(data)


def _run(descriptor: int, payload: bytes) -> None:
    """Run the function and end this process, whatever happens."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link: Link = Connection(descriptor)
    with suppress(OSError):
        link.send(Began(os.getpid()))
        try:
            function: Callable[..., Any]
            function, arguments = pickle.loads(payload)  # noqa: S301 - the same
            link.send(Returned(function(link, *arguments)))
        except BaseException as error:
            link.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
    # Not an orderly end: what is open must not be rolled back by a destructor's courtesy.
    os._exit(0)
