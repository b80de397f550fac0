"""Lost packets are told from a server that reads nothing."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Generator
from typing import Any

import pytest

from onceflow.clients.postgres.connection import ReplyTimeout, until_silent
from onceflow.clients.sql import session
from onceflow.clients.sql.session import RepeatedPackets

_PROBES = 3
"""The position of tcpi_probes in struct tcp_info: how many probes in a row got no data through.

Source: include/uapi/linux/tcp.h of Linux."""


def _await_probe(client: socket.socket) -> None:
    """Wait until the system has probed the full window of the other side."""
    deadline = time.monotonic() + 60
    while not client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _PROBES + 1)[_PROBES]:
        assert time.monotonic() < deadline, "the window was never probed"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which packets it repeats")
def test_a_server_that_reads_nothing_loses_no_packets() -> None:
    repeated = RepeatedPackets()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                client.send(b"x" * 65536)
        _await_probe(client)
        assert repeated.measure(client.fileno(), 0.0) == 0.0
        assert repeated.measure(client.fileno(), 60.0) == 0.0


@pytest.mark.parametrize(
    ("repeats", "seconds"),
    [
        ([0, 0, 0], 0.0),
        ([0, 1, 2], 10.0),
        ([1, 5, 7], 20.0),
        ([3, 1, 2], 10.0),
        ([3, 0, 4], 0.0),
    ],
)
def test_repeats_count_from_the_first_one_since_the_last_progress(
    repeats: list[int], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(repeats)

    def count_repeats(descriptor: int) -> int:
        del descriptor
        return next(counts)

    monkeypatch.setattr(session, "_count_repeats", count_repeats)
    repeated = RepeatedPackets()
    measured = [repeated.measure(0, at_s) for at_s in (100.0, 110.0, 120.0)]
    assert measured[-1] == seconds


def test_a_wait_ends_when_packets_are_lost_and_not_while_answers_come() -> None:
    def talk() -> Generator[int, int, None]:
        while True:
            yield 1

    waiting: Generator[Any, Any, None] = until_silent(
        talk(), 60, lambda: "the server has acknowledged nothing for 30 s"
    )
    next(waiting)
    waiting.send(1)
    with pytest.raises(ReplyTimeout, match="acknowledged nothing for 30 s"):
        waiting.send(0)
