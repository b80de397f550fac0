"""The limits on how long a database connection lives without acknowledgements of its packets.

Without a limit the system repeats a lost packet at ever longer intervals. So a connection through a
network that lost packets for a minute stays silent for almost another minute, and fails after a
quarter of an hour at the earliest.

The system's limit also applies while the other side acknowledges all packets and reads no data. A
server does so in the middle of a COPY or a LOAD DATA that waits for a lock. A transfer of rows
therefore has a longer limit in the system. A writer that waits for the reply asks
`RepeatedPackets`, which tells lost packets from a server that reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

UNACKNOWLEDGED_S = 30
"""The time that the keepalive probes of an idle connection take: 10 s of silence and 4 probes."""
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT = 4
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
"""The socket option that limits unacknowledged data, or None if the system is not Linux."""
_KEEPALIVE_IDLE: int = getattr(socket, "TCP_KEEPIDLE", 0) or getattr(socket, "TCP_KEEPALIVE", 0)

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_REPEATS = 2
"""The position of tcpi_retransmits in struct tcp_info: how often the packet has been repeated.

Source: include/uapi/linux/tcp.h of Linux."""


def limit_silence(descriptor: int, unacknowledged_s: float) -> None:
    """Fail the connection of `descriptor` after packets were unacknowledged for so long.

    Does nothing for a connection that is not TCP, and where the system has no such limit.
    """
    if _USER_TIMEOUT is None:
        return
    # The duplicate is closed again; the option stays with the connection.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, round(unacknowledged_s * 1000))


class RepeatedPackets:
    """Measures for how long the system repeats lost packets, during one wait for a reply.

    Packets that probe a full window do not count, so a server that reads nothing is no loss.
    """

    def __init__(self) -> None:
        """Begin a wait in which no packet was repeated yet."""
        self._repeats = 0
        self._since_s = 0.0

    def measure(self, descriptor: int, now_s: float) -> float:
        """Return the seconds for which every call has found the same packet repeated.

        Returns 0 for a connection that is not TCP, and where the system does not tell.
        """
        repeats = _count_repeats(descriptor)
        # The count only falls when the other side has acknowledged something new.
        if repeats == 0 or repeats < self._repeats or self._repeats == 0:
            self._since_s = now_s
        self._repeats = repeats
        return now_s - self._since_s


def _count_repeats(descriptor: int) -> int:
    if _TCP_INFO is None:
        return 0
    try:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            return duplicate.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _REPEATS + 1)[_REPEATS]
    except OSError:
        return 0


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
