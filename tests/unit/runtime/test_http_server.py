"""No client can fill the driver's HTTP server, keep it from answering others, or from ending."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus

import pytest

from onceflow.core.runtime.driver import http_server
from onceflow.core.runtime.driver.http_server import (
    BODY_BYTES_MAX,
    CONNECTIONS_MAX,
    HEAD_BYTES_MAX,
    LINGER_S,
    STRANGERS_MAX,
    HttpServer,
    Request,
    Response,
)
from onceflow.core.settings.pipeline_settings import is_loopback


@dataclass
class Echo:
    """Answers with the body; refuses who shows no token."""

    asked: list[Request] = field(default_factory=list[Request])
    holds: threading.Event | None = None

    def refuse(self, head: Request) -> Response | None:
        if self.has_token(head) or head.target == "/healthz":
            return None
        return self.explain(HTTPStatus.UNAUTHORIZED, "no token")

    def has_token(self, head: Request) -> bool:
        return "authorization" in head.headers

    def answer(self, request: Request) -> Response:
        self.asked.append(request)
        if request.target == "/held" and self.holds is not None:
            self.holds.wait(60)
        if request.target == "/broken":
            raise LookupError("as asked for")
        return Response(HTTPStatus.OK, request.body)

    def explain(self, status: HTTPStatus, reason: str) -> Response:
        return Response(status, reason.encode())


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1", 0, echo)
    server.start("server of a test")
    yield server
    server.close()


def _open(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def _ask(
    server: HttpServer, body: bytes | None = None, *, target: str = "/", token: bool = True
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        headers = {"Authorization": "Bearer it"} if token else {}
        connection.request("GET" if body is None else "POST", target, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _send_raw(server: HttpServer, *parts: bytes) -> bytes:
    """Return all that the server answers to `parts`."""
    with _open(server) as connection:
        with contextlib.suppress(OSError):  # It may have heard enough.
            for part in parts:
                connection.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                answer += data
        return answer


def test_clients_that_never_end_their_request_keep_nobody_from_being_answered(
    server: HttpServer,
) -> None:
    slow = [_open(server) for _ in range(CONNECTIONS_MAX + 50)]
    try:
        for connection in slow:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert _ask(server, b"told") == (200, b"told")
    finally:
        for connection in slow:
            connection.close()


def test_closing_waits_for_no_client(server: HttpServer, echo: Echo) -> None:
    echo.holds = threading.Event()
    slow = [_open(server) for _ in range(40)]
    asking = threading.Thread(target=lambda: _ask_in_vain(server), daemon=True)
    asking.start()
    deadline = time.monotonic() + 30
    while not echo.asked and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.port
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < http_server.CLOSE_TIMEOUT_S + 60
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=30)
    echo.holds.set()
    asking.join(30)
    for connection in slow:
        connection.close()


def _ask_in_vain(server: HttpServer) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        _ask(server, target="/held")


def test_a_head_without_an_end_is_refused_at_its_bound(server: HttpServer) -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (HEAD_BYTES_MAX + 1)
    assert _send_raw(server, head).startswith(b"HTTP/1.1 431 ")


def test_a_head_that_comes_at_once_is_refused_at_its_bound(server: HttpServer, echo: Echo) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (HEAD_BYTES_MAX - 200)
    assert _send_raw(server, head + b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert _send_raw(server, head + b"a" * 250 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    assert len(echo.asked) == 1


class _Siege:
    """Connections that send `request`, read nothing, and are replaced again and again."""

    def __init__(self, server: HttpServer, request: bytes) -> None:
        self._address = ("127.0.0.1", server.port)
        self._request = request
        self._ended = threading.Event()
        self._besieged = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._besieged.wait(30)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30)

    def _run(self) -> None:
        connections: deque[socket.socket] = deque()
        while not self._ended.is_set():
            with contextlib.suppress(OSError):
                connection = socket.create_connection(self._address, timeout=5)
                connections.append(connection)
                connection.sendall(self._request)
            if len(connections) > 2 * CONNECTIONS_MAX:
                connections.popleft().close()
                self._besieged.set()
            # Twice as fast as lingering connections end by themselves. Much faster ones would fill
            # the system's own queue, and not the server.
            time.sleep(LINGER_S / CONNECTIONS_MAX / 2)
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    "request_of_stranger",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["refused", "probes"],
)
def test_clients_without_a_token_that_linger_shut_out_neither_the_owner_nor_probes(
    server: HttpServer, request_of_stranger: bytes
) -> None:
    with _Siege(server, request_of_stranger):
        for number in range(10):
            assert _ask(server, str(number).encode()) == (200, str(number).encode())
            probe = _send_raw(server, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert probe.startswith(b"HTTP/1.1 200 ")


def _say_no(_: str) -> bool:
    return False


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the server closes it without a word."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_clients_of_other_machines_leave_a_share_of_the_connections_to_this_one(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 60.0)
    monkeypatch.setattr(http_server, "is_loopback", _say_no)
    strangers = [_open(server) for _ in range(CONNECTIONS_MAX)]
    try:
        for connection in strangers[: CONNECTIONS_MAX - STRANGERS_MAX]:
            assert _is_closed(connection)
        # All of them are accepted now, and the others are open.
        monkeypatch.setattr(http_server, "is_loopback", is_loopback)
        own = [_open(server) for _ in range(CONNECTIONS_MAX - STRANGERS_MAX - 1)]
        assert _ask(server, b"mine") == (200, b"mine")
        for connection in strangers[CONNECTIONS_MAX - STRANGERS_MAX :]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
        for connection in own:
            connection.close()
    finally:
        for connection in strangers:
            connection.close()


def test_a_request_that_is_not_whole_in_time_is_refused(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.2)
    assert _send_raw(server, b"GET / HTTP/1.1\r\nHost: x\r\n").startswith(b"HTTP/1.1 408 ")


_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer it\r\n"


def test_a_chunked_body_is_read(server: HttpServer, echo: Echo) -> None:
    chunks = b"Transfer-Encoding: chunked\r\n\r\n4\r\nfour\r\n6\r\n more!\r\n0\r\n\r\n"
    answer = _send_raw(server, _HEAD + chunks)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"four more!")
    assert [request.body for request in echo.asked] == [b"four more!"]


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"Content-Length: -5\r\n\r\n", b"400"),
        (b"Content-Length: five\r\n\r\nfive!", b"400"),
        (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (
            b"Content-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1) + b" " * (BODY_BYTES_MAX + 1),
            b"413",
        ),
        (
            b"Transfer-Encoding: chunked\r\n\r\n"
            + b"%x\r\n" % (BODY_BYTES_MAX + 1)
            + b" " * (BODY_BYTES_MAX + 1),
            b"413",
        ),
    ],
)
def test_bodies_that_are_none_or_too_large_are_refused(
    server: HttpServer, echo: Echo, rest: bytes, status: bytes
) -> None:
    assert _send_raw(server, _HEAD + rest).startswith(b"HTTP/1.1 " + status)
    assert echo.asked == []


def test_what_is_no_http_is_refused(server: HttpServer) -> None:
    assert _send_raw(server, b"\x16\x03\x01\x02\x00\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_without_a_token_the_body_is_not_waited_for(server: HttpServer, echo: Echo) -> None:
    answer = _send_raw(server, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert _ask(server, b"x" * 60_000, token=False)[0] == 401
    assert echo.asked == []


def test_an_error_of_the_application_is_an_answer(server: HttpServer) -> None:
    assert _ask(server, target="/broken") == (500, b"LookupError: as asked for")


def test_many_clients_at_once_are_all_answered(server: HttpServer) -> None:
    answers: list[tuple[int, bytes]] = []

    def ask(number: int) -> None:
        answers.append(_ask(server, b"%d" % number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == sorted((200, b"%d" % number) for number in range(64))
