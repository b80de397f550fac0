"""The execution of a commit in a separate process, repeated if that process is killed.

Spark repeats no commit. If the Python worker that commits is killed, the write fails, although all
of its rows may be written. So the worker forks and waits. It holds no resources for which it could
be killed.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import closing
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from onceflow.core.errors import OnceflowError, SinkError

_log = logging.getLogger("onceflow.spark")
COMMIT_TRIES_MAX = 3
"""The number of processes that may be killed in a row before the write fails."""


def commit_in_process(commit: Callable[[], object]) -> None:
    """Call `commit` in a fork of this process, and again if the fork is killed.

    `commit` must be idempotent, and must open its own connections. If this process has several
    threads, a fork could contain their locks in a locked state for ever. In this case `commit` runs
    in this process.

    Raises:
        SinkError: All processes were killed. It is not known whether the batch is committed.
        Exception: The error that `commit` raises.
    """
    if threading.active_count() > 1:
        commit()
        return
    for _ in range(COMMIT_TRIES_MAX):
        reading, writing = Pipe(duplex=False)
        process = os.fork()
        if process == 0:
            _end_with(commit, writing)
        # Close it here. Otherwise `recv` would not notice that the child, the other writer, was
        # killed.
        writing.close()
        with closing(reading):
            try:
                # Read before the child has ended: a long error would fill the pipe.
                failure: BaseException | None = reading.recv()
            except (EOFError, OSError):  # killed before it sent, or in the middle
                _, status = os.waitpid(process, 0)
                _log.warning("a committing process was ended by %s; trying again", status)
                continue
        os.waitpid(process, 0)
        if failure is not None:
            raise failure
        return
    raise SinkError(
        f"{COMMIT_TRIES_MAX} commit processes in a row were killed on the driver's machine. Look"
        " for the reason in the system's log, for example a lack of memory"
    )


def _end_with(commit: Callable[[], object], writing: Connection) -> None:
    """Call `commit`, send its result, and end this process without Spark's cleanup.

    The parent runs Spark's cleanup. An error that cannot be pickled is sent as its text.
    """
    try:
        failure: BaseException | None = None
        try:
            commit()
        except BaseException as error:
            failure = error
        try:
            data = pickle.dumps(failure)
        except Exception:
            data = pickle.dumps(OnceflowError(f"{type(failure).__name__}: {failure}"))
        writing.send_bytes(data)
    finally:
        # `sys.exit` would run handlers inherited from the parent, which only the parent may run.
        os._exit(0)
