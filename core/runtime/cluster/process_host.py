"""Processes in milliseconds: a program that has imported everything, and does nothing but fork.

The host is asked over a socket: a request with the descriptors of a link and of a log, and the
pickled call. It forks; the child runs the call and answers over the link, whose end is the child's
end. The host stays single-threaded, so that forking is safe, and ends with the process that started
it. It is in a process group of its own: ^C in a terminal does not reach it, nor what it has forked.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
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

from typing_extensions import Buffer, override

Link: TypeAlias = "Connection[Any, Any]"
"""A two-way pipe of pickled values; the other end sees its end when the process is gone."""

START_TIMEOUT_S = 60.0
"""A host begins a process within this time, also while it imports everything on a busy machine."""

_PRELOADED = (
    "onceflow.core.runtime.slot.slot",
    # pyarrow imports it as soon as it is given a list, and it is half of what a slot ever imports.
    "pandas",
    "pyarrow.pandas_compat",
    "onceflow.core.state.snapshots.expired_rows",
    "onceflow.core.state.heap.store",
    "onceflow.core.state.rocksdb.store",
)
"""What slots need in any case: imported once, before they are forked. Left out where it is not."""

_FORK, _STATUS = 0, 1
_REQUEST = struct.Struct("!BQ")
"""What is asked, and the size of the call or the process id."""
_ANSWER = struct.Struct("!i")
_OUTPUT_IS_GONE = frozenset({errno.EPIPE, errno.EIO})
"""A pipe without a reader, and a terminal that was closed."""
_STATUSES_MAX = 1000
"""How many ends of processes are remembered: nobody may ever ask for some of them."""


class ProcessKilled(Exception):
    """Raised when a process is gone without a last word."""


@dataclass(frozen=True, slots=True)
class Began:
    """The first word of every process."""

    pid: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The last word: what its function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The last word: its function raised."""

    kind: str
    text: str
    trace: str


@dataclass(frozen=True, slots=True)
class _Call:
    """What a child is to run, and where."""

    imports: Sequence[str]
    path: Sequence[str]
    directory: str
    environment: dict[str, str]
    call: bytes


class ProcessHost:
    """Starts processes. Any thread."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._program: subprocess.Popen[bytes] | None = None

    @classmethod
    def fork(cls) -> ProcessHost:
        """Return a host that is a fork of this process, which must have a single thread.

        What this process has imported and opened, the host's processes have too.
        """
        host = cls()
        mine, theirs = socket.socketpair()
        # Each process closes the other's end: else the host would never see that this one is gone.
        if os.fork() == 0:
            mine.close()
            _serve(theirs)
        theirs.close()
        host._control = mine
        return host

    def begin(self) -> None:
        """Start the host's program unless it runs; returns before it has imported everything."""
        with self._lock:
            self._connection()

    def start(
        self,
        function: Callable[..., object],
        *arguments: object,
        imports: Sequence[str] = (),
        log: int = 2,
    ) -> tuple[int, Link]:
        """Return process id and link of a process that runs `function(link, *arguments)`.

        It has this process's environment, directory and path as of now, and writes its output to
        the descriptor `log`. The host imports the modules `imports` before it forks.

        Raises:
            ProcessKilled: It, or the host, ended before it began.
        """
        path = [one for one in sys.path if one]
        # Pickled on its own: the child unpickles it only where its path and directory are set.
        call = pickle.dumps((function, arguments))
        payload = pickle.dumps(_Call(imports, path, str(Path.cwd()), dict(os.environ), call))
        mine, theirs = Pipe()
        with theirs, self._lock:
            try:
                control = self._connection()
                request = _REQUEST.pack(_FORK, len(payload))
                # The head goes with the descriptors in one message; the call, of any size, follows
                # as bytes.
                socket.send_fds(control, [request], [theirs.fileno(), log])
                control.sendall(payload)
            except OSError as error:
                self._forget()
                raise ProcessKilled(f"the host of processes is gone: {error}") from error
        try:
            # Outside the lock: other threads may ask for processes while this one begins.
            if mine.poll(START_TIMEOUT_S):
                return mine.recv().pid, mine
        except (EOFError, ConnectionResetError) as error:
            raise ProcessKilled("the process ended before it began") from error
        raise ProcessKilled(f"the process did not begin within {START_TIMEOUT_S:.0f} s")

    def how_ended(self, pid: int) -> str:
        """Return how the process `pid`, whose link has ended, ended; for an error's text."""
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
        """End the host. What it has started sees nothing of it. Idempotent."""
        with self._lock:
            self._forget()

    def close_at_exit(self) -> None:
        """Kill the host when this process ends, and wait for it: nothing is left unclosed then.

        A fork of this process leaves it alone. What the host has started sees nothing of it.
        """
        atexit.register(self._kill, os.getpid())

    def _kill(self, owner: int) -> None:
        if os.getpid() != owner:
            return
        if self._program is not None:
            # It may be importing everything, and would see the closed socket only after that.
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
                # The program must find our modules before it can be told any path.
                paths = os.pathsep.join(dict.fromkeys(one for one in sys.path if one))
                self._program = subprocess.Popen(
                    [sys.executable, "-c", program],
                    env={**os.environ, "PYTHONPATH": paths},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._control = mine
        return self._control


def import_for_slots() -> None:
    """Import what slots need in any case, so that forks of this process have it."""
    for module in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def serve(descriptor: int) -> NoReturn:
    """Be a host until the other end of the socket `descriptor` is closed. The main program."""
    import_for_slots()
    _serve(socket.socket(fileno=descriptor))


def _serve(control: socket.socket) -> NoReturn:
    os.setpgrp()
    statuses: dict[int, int] = {}

    def reap(number: int, frame: object) -> None:
        del number, frame
        # Signals of several children may arrive as one: all that have ended are waited for.
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
                # The link of a process ends before the process does: its status may be yet to come.
                deadline = time.monotonic() + 5.0
                while value not in statuses and time.monotonic() < deadline:
                    time.sleep(0.005)
                control.sendall(_ANSWER.pack(statuses.pop(value, 0)))
    os._exit(0)


def _fork(control: socket.socket, payload: bytes, descriptors: Sequence[int]) -> None:
    call: _Call = pickle.loads(payload)  # noqa: S301 - of the process that started this one
    # For all children to come; what fails here is told by the child, which tries it again.
    sys.path[:] = call.path
    for module in call.imports:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    # Only to import in the host, once for all children, what the call needs.
    with contextlib.suppress(Exception):
        pickle.loads(call.call)  # noqa: S301
    gc.freeze()  # a collection in a child would copy every page that it shares with the others
    if os.fork() == 0:
        control.close()
        _run(call, *descriptors)
    for descriptor in descriptors:
        # The child has its own copies. Left open here, the link would not end with the child.
        os.close(descriptor)


def _run(call: _Call, link_descriptor: int, log: int) -> NoReturn:
    """Run the call and end this process, whatever happens."""
    # The host's handler would take the statuses of the child's own children.
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
    # Not an orderly end: what is open must not be rolled back by a destructor's courtesy.
    os._exit(0)


class _Output(io.FileIO):
    """Standard output or error; drops what is written once nothing takes it any more.

    A service's output ends when the journal is restarted, or with its terminal. An error there
    would fail each function that prints, in every attempt, and only another driver would have
    another output.
    """

    @override
    def write(self, data: Buffer, /) -> int:
        """Write `data`, or drop it."""
        try:
            # None only from a descriptor that does not block.
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _OUTPUT_IS_GONE:
                raise
            return memoryview(data).nbytes


def _open_output(descriptor: int) -> TextIO:
    """Return a text stream to `descriptor`, which passes each line on as it ends."""
    inherited = sys.__stderr__ if descriptor == 2 else sys.__stdout__  # None if it was closed
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, "wb", closefd=False)),
        encoding=inherited.encoding if inherited is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def _receive(control: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        chunk = control.recv(min(size_bytes - len(data), 1 << 20))
        if not chunk:
            raise ConnectionResetError("the other end is gone")
        data += chunk
    return bytes(data)
