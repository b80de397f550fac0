"""How long a database connection lives whose packets the other side no longer acknowledges.

Without a limit the system repeats a lost packet at ever longer intervals. So a connection through a
network that lost packets for a minute stays silent for almost another minute, and fails after a
quarter of an hour at the earliest.

The limit also holds while the other side acknowledges everything and reads nothing. A server does
so in the middle of a COPY or a LOAD DATA that waits for a lock. A transfer of rows therefore has a
limit of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket

UNACKNOWLEDGED_S = 30
"""As long as the keepalive probes of an idle connection take: 10 s of silence and 4 probes."""
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT = 4
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
"""Linux has it."""
_KEEPALIVE_IDLE: int = getattr(socket, "TCP_KEEPIDLE", 0) or getattr(socket, "TCP_KEEPALIVE", 0)


def limit_silence(descriptor: int, unacknowledged_s: float) -> None:
    """Fail the connection of `descriptor` after packets were unacknowledged for so long.

    Does nothing for a connection that is not TCP, and where the system has no such limit.
    """
    if _USER_TIMEOUT is None:
        return
    # The duplicate is closed again; the option stays with the connection.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, round(unacknowledged_s * 1000))


def probe_while_idle(descriptor: int) -> None:
    """Let the system probe an idle connection, and fail it when no probe is answered."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S),
            (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
            (socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
        ):
            duplicate.setsockopt(socket.IPPROTO_TCP, option, value)
