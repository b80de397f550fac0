"""Runs a commit in a process of its own: one that is killed is repeated, and Spark never hears.

Spark repeats no commit. When the Python worker that commits is killed, the write fails, though all
of its rows may be there. So the worker forks, waits, and holds nothing that anybody would kill it
for.
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
"""How many processes may be killed in a row before the write gives up."""


def commit_in_process(commit: Callable[[], object]) -> None:
    """Call `commit` in a fork of this process, and once more where that one is killed.

    `commit` is idempotent, and opens what it needs. Where this process has several threads, locks
    of theirs might be held in a fork for ever: then it is called here.

    Raises:
        SinkError: The processes were killed, all of them; whether it is committed is not known.
        Exception: What `commit` raises.
    """
    if threading.active_count() > 1:
        commit()
        return
    for _ in range(COMMIT_TRIES_MAX):
        reading, writing = Pipe(duplex=False)
        process = os.fork()
        if process == 0:
            _end_with(commit, writing)
        # Closed here, or `recv` would not see that the child, the other writer, was killed.
        writing.close()
        with closing(reading):
            try:
                # Read before it has ended: a long error would fill the pipe.
                failure: BaseException | None = reading.recv()
            except (EOFError, OSError):  # killed before it sent, or in the middle
                _, status = os.waitpid(process, 0)
                _log.warning("a process that commits has ended by %s; trying again", status)
                continue
        os.waitpid(process, 0)
        if failure is not None:
            raise failure
        return
    raise SinkError(f"{COMMIT_TRIES_MAX} processes in a row were killed while they committed")


def _end_with(commit: Callable[[], object], writing: Connection) -> None:
    """Call `commit`, send how it ended, and end this process; Spark's cleaning up is its parent's.

    What cannot be pickled is sent as its text.
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
        # Not `sys.exit`: handlers that this process has from its parent must run there alone.
        os._exit(0)
