"""The kit's network loses exactly what it is told to, and leaves no server waiting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from onceflow.integration.conformance.exchange_proxy import ExchangeProxy, Lose


class _Server:
    """Answers each line with OK; keeps the lines, and whether its client has gone."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.gone = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def serve(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            received = connection.makefile("rb")
            for line in received:
                self.lines.append(line)
                connection.sendall(b"OK\n")
            received.close()
        self.gone.set()


@contextmanager
def _network() -> Generator[tuple[_Server, ExchangeProxy, socket.socket], None, None]:
    server = _Server()
    thread = threading.Thread(target=server.serve)
    thread.start()
    address: tuple[str, int] = server.listener.getsockname()
    with (
        ExchangeProxy(address) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client,
    ):
        yield server, proxy, client
    thread.join(60)
    server.listener.close()


def _answer(client: socket.socket) -> bytes:
    """Return what comes back; empty when the connection is broken instead."""
    try:
        return client.recv(100)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(("lose", "received"), [(Lose.REQUEST, []), (Lose.REPLY, [b"two\n"])])
def test_what_is_lost_is_the_exchange_that_was_named(lose: Lose, received: list[bytes]) -> None:
    with _network() as (server, proxy, client):
        proxy.lose(lose, 2)
        client.sendall(b"one\n")
        assert _answer(client) == b"OK\n"
        client.sendall(b"two\n")
        assert _answer(client) == b""
        assert server.gone.wait(60)
        assert server.lines == [b"one\n", *received]
        assert proxy.breaks == 1


def test_reply_is_lost_only_after_the_server_has_all_of_a_request_in_pieces() -> None:
    with _network() as (server, proxy, client):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proxy.lose(Lose.REPLY, 1)
        client.sendall(b"half a ")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(60)
        client.sendall(b"request\n")
        assert _answer(client) == b""
        assert server.gone.wait(60)
        assert server.lines == [b"half a request\n"]


def test_request_that_is_held_back_arrives_when_it_is_released() -> None:
    with _network() as (server, proxy, client):
        hold = proxy.hold(2)
        client.sendall(b"one\n")
        assert _answer(client) == b"OK\n"
        client.sendall(b"two\n")
        assert hold.held.wait(60)
        assert server.lines == [b"one\n"]
        hold.released.set()
        assert _answer(client) == b"OK\n"
        assert server.lines == [b"one\n", b"two\n"]
        assert proxy.breaks == 0


def test_request_that_is_held_back_arrives_although_its_client_is_gone() -> None:
    with _network() as (server, proxy, client):
        hold = proxy.hold(1)
        client.sendall(b"late\n")
        assert hold.held.wait(60)
        client.close()
        hold.released.set()
        assert server.gone.wait(60)
        assert server.lines == [b"late\n"]
