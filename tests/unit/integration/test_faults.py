"""Faults do what they say, and no more."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceflow.integration import faults

_FAMILY = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'],"
    " start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process and its child, which leads a session of its own."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _FAMILY], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent, child
        for pid in (child, parent.pid):
            faults.kill_process(pid)


def test_tree_reaches_a_child_with_its_own_session(
    family: tuple[subprocess.Popen[str], int],
) -> None:
    parent, child = family
    assert faults.process_tree(parent.pid) == (parent.pid, child)
    assert faults.kill_tree(parent.pid) == (parent.pid, child)
    assert not faults.is_alive(child)
    assert parent.wait(60) == -signal.SIGKILL
    assert faults.process_tree(parent.pid) == ()


def test_kill_process_leaves_its_children_and_tells_whether_it_was_there(
    family: tuple[subprocess.Popen[str], int],
) -> None:
    parent, child = family
    assert faults.kill_process(parent.pid)
    parent.wait(60)
    assert faults.is_alive(child)
    assert not faults.kill_process(parent.pid)


def test_pause_freezes_the_whole_tree_and_unpause_lets_it_go_on(
    family: tuple[subprocess.Popen[str], int],
) -> None:
    parent, child = family
    faults.pause_tree(parent.pid)
    assert faults.is_paused(parent.pid)
    assert faults.is_paused(child)
    faults.unpause_tree(parent.pid)
    assert not faults.is_paused(parent.pid)
    assert not faults.is_paused(child)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are seen in /proc")
def test_pause_returns_when_not_a_thread_runs_any_more() -> None:
    """Threads that are busy, as a server's are, stop one by one."""
    program = (
        "import hashlib, threading\n"
        "def work():\n"
        "    while True: hashlib.sha256(bytes(1 << 20))\n"
        "for _ in range(8): threading.Thread(target=work, daemon=True).start()\n"
        "print('at work', flush=True)\n"
        "work()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True
    ) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline()
        tasks = Path(f"/proc/{busy.pid}/task")
        try:
            for _ in range(10):
                faults.pause_tree(busy.pid)
                stats = [(task / "stat").read_text() for task in tasks.iterdir()]
                assert {stat.rpartition(") ")[2][0] for stat in stats} == {"T"}
                assert len(stats) == 9
                faults.unpause_tree(busy.pid)
        finally:
            faults.kill_process(busy.pid)


def test_family_knows_its_parent_and_its_children(
    family: tuple[subprocess.Popen[str], int],
) -> None:
    parent, child = family
    assert faults.parent_of(child) == parent.pid
    assert faults.children_of(parent.pid) == (child,)
    faults.kill_process(child)
    assert faults.children_of(parent.pid) == ()


def test_session_is_found_and_killed_after_its_leader_has_died() -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        orphan = int(leader.stdout.readline())
        faults.kill_process(leader.pid)
    assert faults.session_members(leader.pid) == (orphan,)
    assert faults.kill_session(leader.pid) == (orphan,)
    assert not faults.is_alive(orphan)
    assert faults.session_members(leader.pid) == ()


def test_own_process_is_alive() -> None:
    assert faults.is_alive(os.getpid())


class _EchoServer:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._echo, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1024):
                    connection.sendall(data)
            except ConnectionError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def proxy() -> Iterator[faults.TcpProxy]:
    server = _EchoServer()
    with faults.TcpProxy("127.0.0.1", server.port) as proxy:
        yield proxy
    server.close()


def _connect(proxy: faults.TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)


def _echo(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return client.recv(1024)


def _assert_resets(proxy: faults.TcpProxy) -> None:
    # The reset may come while connect() is still looking, or at the first byte.
    with pytest.raises(ConnectionResetError):
        _first_byte(proxy)


def _first_byte(proxy: faults.TcpProxy) -> bytes:
    with _connect(proxy) as client:
        return client.recv(1)


def test_proxy_hands_on_bytes_both_ways_and_counts_them(proxy: faults.TcpProxy) -> None:
    with _connect(proxy) as client:
        assert _echo(client, b"hello") == b"hello"
        assert proxy.connection_count == 1
        assert proxy.forwarded_bytes == 10


def test_cut_resets_what_is_open_and_takes_new_connections(proxy: faults.TcpProxy) -> None:
    with _connect(proxy) as client:
        assert _echo(client, b"x") == b"x"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with _connect(proxy) as client:
        assert _echo(client, b"y") == b"y"


def test_refuse_resets_new_connections_until_healed(proxy: faults.TcpProxy) -> None:
    proxy.refuse()
    _assert_resets(proxy)
    proxy.heal()
    with _connect(proxy) as client:
        assert _echo(client, b"y") == b"y"


def test_pause_holds_bytes_and_loses_none(proxy: faults.TcpProxy) -> None:
    with _connect(proxy) as client:
        assert _echo(client, b"a") == b"a"
        proxy.pause()
        client.sendall(b"held")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1024)
        client.settimeout(60)
        proxy.heal()
        assert client.recv(1024) == b"held"


def test_delay_holds_every_chunk_for_its_time(proxy: faults.TcpProxy) -> None:
    with _connect(proxy) as client:
        proxy.delay(0.1)
        started = time.monotonic()
        assert _echo(client, b"slow") == b"slow"
        assert time.monotonic() - started >= 0.2


def test_half_closed_connection_still_answers(proxy: faults.TcpProxy) -> None:
    with _connect(proxy) as client:
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1024) == b"last words"
        assert client.recv(1024) == b"", "the end comes through as an end and not as a reset"


def test_cut_reaches_a_connection_whose_peer_does_not_read(proxy: faults.TcpProxy) -> None:
    with _connect(proxy) as client:
        client.settimeout(0.2)
        # The echo server blocks once nobody takes its answers, and the proxy behind it.
        with pytest.raises(TimeoutError):
            client.sendall(bytes(64 << 20))
        proxy.cut()
        assert proxy.connection_count == 0
        with pytest.raises(ConnectionError):
            client.sendall(bytes(1 << 20))


def test_close_ends_a_paused_proxy(proxy: faults.TcpProxy) -> None:
    with _connect(proxy) as client:
        assert _echo(client, b"a") == b"a"
        proxy.pause()
        client.sendall(b"never")
        proxy.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_proxy_before_a_dead_target_resets(proxy: faults.TcpProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        dead_port = placeholder.getsockname()[1]
    with faults.TcpProxy("127.0.0.1", dead_port) as to_nowhere:
        _assert_resets(to_nowhere)
