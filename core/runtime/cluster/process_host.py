"""A host that starts processes within milliseconds: it has imported everything and only forks.

A request arrives over a socket: it has the descriptors of a link and of a log, and the pickled
call. The host forks; the child runs the call and answers over the link, which closes when the child
ends. The host stays single-threaded, so that forking is safe, and ends with the process that
started it. It is in its own process group, so ^C in a terminal reaches neither the host nor its
children.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeAlias

from onceflow.core.unread_output import UnreadOutput

Link: TypeAlias = "Connection[Any, Any]"
"""A two-way pipe of pickled values. The other end sees its end when the process is gone."""

START_TIMEOUT_S = 120.0
"""The default time in which a host must begin a process, even while it imports everything on a busy
machine."""

_PRELOADED = (
    "onceflow.core.runtime.slot.slot",
    # pyarrow imports pandas as soon as it receives a list; it is half of a slot's imports.
    "pandas",
    "pyarrow.pandas_compat",
    # The first pandas check of pyarrow and the first look-up of a host name import these two.
    "pyarrow.vendored.version",
    "encodings.idna",
    "onceflow.core.state.stores.store_parts",
    "onceflow.core.state.heap.store",
    "onceflow.core.state.rocksdb.store",
)
"""The modules that slots always need, imported once before they are forked. Missing ones are
skipped."""

_FORK, _STATUS = 0, 1
_REQUEST = struct.Struct("!BQ")
"""The header of a request: its kind, and the size of the call or the process id."""
_ANSWER = struct.Struct("!i")
_STATUSES_MAX = 1000
"""The number of remembered exit statuses: some of them may never be asked for."""


class ProcessKilled(Exception):
    """An exception for a process that is gone without a last message."""


@dataclass(frozen=True, slots=True)
class Began:
    """The first message of every process."""

    pid: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The last message of a process whose function has returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The last message of a process whose function has raised."""

    kind: str
    text: str
    trace: str


@dataclass(frozen=True, slots=True)
class _Call:
    """The function that a child must run, with its modules, path, directory and environment."""

    imports: Sequence[str]
    path: Sequence[str]
    directory: str
    environment: dict[str, str]
    call: bytes


class ProcessHost:
    """A host that starts processes. Any thread."""

    def __init__(self) -> None:
        """Create the object; `begin` or `start` starts the host's program."""
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._program: subprocess.Popen[bytes] | None = None

    @classmethod
    def fork(cls) -> ProcessHost:
        """Return a host that is a fork of this process, which must have a single thread.

        The host's processes inherit everything that this process has imported and opened.
        """
        host = cls()
        mine, theirs = socket.socketpair()
        # Each process closes the other's end: otherwise the host would not see the end of this one.
        if os.fork() == 0:
            mine.close()
            _serve(theirs)
        theirs.close()
        host._control = mine
        return host

    def begin(self) -> None:
        """Start the host's program if it does not run. Returns before its imports are done."""
        with self._lock:
            self._connection()

    def start(
        self,
        function: Callable[..., object],
        *arguments: object,
        imports: Sequence[str] = (),
        log: int = 2,
        timeout_s: float = START_TIMEOUT_S,
    ) -> tuple[int, Link]:
        """Return process id and link of a process that runs `function(link, *arguments)`.

        The process gets the current environment, directory and path of this process, and writes its
        output to the descriptor `log`. The host imports the modules `imports` before it forks.

        Raises:
            ProcessKilled: The process, or the host, ended before the process began, or it did not
                begin within `timeout_s`.
        """
        path = [entry for entry in sys.path if entry]
        # Pickle the call separately: the child unpickles it after its path and directory are set.
        call = pickle.dumps((function, arguments))
        payload = pickle.dumps(_Call(imports, path, str(Path.cwd()), dict(os.environ), call))
        mine, theirs = Pipe()
        with theirs, self._lock:
            try:
                control = self._connection()
                request = _REQUEST.pack(_FORK, len(payload))
                # The header is sent with the descriptors in one message; the call, of any size,
                # follows as bytes.
                socket.send_fds(control, [request], [theirs.fileno(), log])
                control.sendall(payload)
            except OSError as error:
                self._forget()
                raise ProcessKilled(f"the host of processes is gone: {error}") from error
        try:
            # Outside the lock: other threads may start processes while this one begins.
            if mine.poll(timeout_s):
                return mine.recv().pid, mine
        except (EOFError, ConnectionResetError) as error:
            mine.close()
            raise ProcessKilled("the process ended before it started") from error
        mine.close()
        raise ProcessKilled(f"the process did not start within {timeout_s:.0f} s")

    def how_ended(self, pid: int) -> str:
        """Return the cause of the end of process `pid`, as text. Its link must have ended."""
        try:
            with self._lock:
                control = self._connection()
                control.sendall(_REQUEST.pack(_STATUS, pid))
                (status,) = _ANSWER.unpack(_receive(control, _ANSWER.size))
        except OSError:
            return "ended, and the host of processes with it"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    def close(self) -> None:
        """End the host. Its processes are not affected. Idempotent."""
        with self._lock:
            self._forget()

    def close_at_exit(self) -> None:
        """Kill the host when this process ends, and wait for it, so that no resource stays open.

        A fork of this process does not kill the host. The host's processes are not affected.
        """
        atexit.register(self._kill, os.getpid())

    def _kill(self, owner: int) -> None:
        if os.getpid() != owner:
            return
        if self._program is not None:
            # The program may still be importing, and would see the closed socket only after that.
            self._program.kill()
        self.close()

    def _forget(self) -> None:
        control, self._control = self._control, None
        program, self._program = self._program, None
        if control is not None:
            control.close()
        if program is not None:
            try:
                program.wait(10)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

    def _connection(self) -> socket.socket:
        if self._control is None:
            mine, theirs = socket.socketpair()
            with theirs:
                program = f"from {__name__} import serve; serve({theirs.fileno()})"
                # The program must find our modules before it receives a path.
                paths = os.pathsep.join(dict.fromkeys(entry for entry in sys.path if entry))
                self._program = subprocess.Popen(
                    [sys.executable, "-c", program],
                    env={**os.environ, "PYTHONPATH": paths},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._control = mine
        return self._control


def import_for_slots() -> None:
    """Import the modules that slots always need, so that forks of this process have them."""
    for module in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def serve(descriptor: int) -> NoReturn:
    """Run as a host until the other end of the socket `descriptor` is closed. The main program."""
    import_for_slots()
    _serve(socket.socket(fileno=descriptor))


def _serve(control: socket.socket) -> NoReturn:
    os.setpgrp()
    statuses: dict[int, int] = {}

    def reap(number: int, frame: object) -> None:
        del number, frame
        # Signals of several children may be merged: wait for all that have ended.
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])
                if len(statuses) > _STATUSES_MAX:
                    statuses.pop(next(iter(statuses)))

    signal.signal(signal.SIGCHLD, reap)
    with contextlib.suppress(OSError):
        while True:
            head, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, 2)
            if len(head) < _REQUEST.size:
                break
            asked, value = _REQUEST.unpack(head)
            if asked == _FORK:
                _fork(control, _receive(control, value), descriptors)
            else:
                # The link of a process ends before the process does, so its status may still
                # arrive.
                deadline = time.monotonic() + 5.0
                while value not in statuses and time.monotonic() < deadline:
                    time.sleep(0.005)
                control.sendall(_ANSWER.pack(statuses.pop(value, 0)))
    os._exit(0)


def _fork(control: socket.socket, payload: bytes, descriptors: Sequence[int]) -> None:
    call: _Call = pickle.loads(payload)  # noqa: S301 - of the process that started this one
    # For all later children. If an import fails here, the child repeats it and reports that.
    sys.path[:] = call.path
    for module in call.imports:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    # Import the modules of the call in the host, once for all children.
    with contextlib.suppress(Exception):
        pickle.loads(call.call)  # noqa: S301
    gc.freeze()  # a collection in a child would copy every page that it shares with the others
    if os.fork() == 0:
        control.close()
        _run(call, *descriptors)
    for descriptor in descriptors:
        # The child has its own copies. If these stayed open, the link would not end with the child.
        os.close(descriptor)


def _run(call: _Call, link_descriptor: int, log: int) -> NoReturn:
    """Run the call and end this process in any case."""
    # The host's handler would take the exit statuses of the child's own children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link: Link = Connection(link_descriptor)
    with contextlib.suppress(OSError):
        link.send(Began(os.getpid()))
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            sys.stdout, sys.stderr = _open_output(1), _open_output(2)
            os.environ.clear()
            os.environ.update(call.environment)
            os.chdir(call.directory)
            function, arguments = pickle.loads(call.call)  # noqa: S301
            link.send(Returned(function(link, *arguments)))
        except BaseException as error:
            link.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
    # Skip destructors: they must not roll back open transactions.
    os._exit(0)


def _open_output(descriptor: int) -> TextIO:
    """Return a text stream to `descriptor` that flushes each line, and drops unread data.

    A service's output ends when the journal is restarted, or with its terminal. An error there
    would fail each function that prints, in every attempt, until another driver with another output
    is started.
    """
    inherited = sys.__stderr__ if descriptor == 2 else sys.__stdout__  # None if it was closed
    return io.TextIOWrapper(
        io.BufferedWriter(UnreadOutput(descriptor, "wb", closefd=False)),
        encoding=inherited.encoding if inherited is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def _receive(control: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        chunk = control.recv(min(size_bytes - len(data), 1 << 20))
        if not chunk:
            raise ConnectionResetError("the other process has closed the connection")
        data += chunk
    return bytes(data)
