"""The SQLSTATE of a refused login.

libpq reports only the text of a refusal, in the language of the server's `lc_messages`. Its trace
has the SQLSTATE, too.
"""

from __future__ import annotations

import os
import re
import select
import time

import psycopg
from psycopg import pq
from psycopg.pq import PollingStatus
from psycopg.pq.abc import PGconn

_STATE = re.compile(rb'\tErrorResponse\t.*? C "(\w{5})"')


def find_login_state(conninfo: str, timeout_s: float) -> str | None:
    """Log in again and return the SQLSTATE with which the server refuses the login.

    None if the server did not refuse it within `timeout_s`, or this libpq traces nothing: it does
    so on Linux, from version 14 on. The trace may have a password, so it is kept in memory.
    """
    if not hasattr(os, "memfd_create"):
        return None
    with os.fdopen(os.memfd_create("onceflow login"), "rb") as trace:
        connection = pq.PGconn.connect_start(conninfo.encode())
        try:
            connection.trace(trace.fileno())
            _await_end(connection, time.monotonic() + timeout_s)
        except psycopg.Error:
            return None
        finally:
            connection.untrace()
            connection.finish()
        trace.seek(0)
        states = _STATE.findall(trace.read())
    return states[-1].decode() if states else None


def _await_end(connection: PGconn, deadline_s: float) -> None:
    while (status := connection.connect_poll()) in (PollingStatus.READING, PollingStatus.WRITING):
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return
        # Not `select`, which takes no descriptor above 1,023.
        waiting = select.poll()
        is_reading = status == PollingStatus.READING
        waiting.register(connection.socket, select.POLLIN if is_reading else select.POLLOUT)
        waiting.poll(remaining_s * 1000)
