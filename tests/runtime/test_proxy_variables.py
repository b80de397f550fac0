"""The proxy variables of the environment do not apply to a job's own connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.test_job_commands import asked
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger

from onceflow import JobState, LocalProcesses, NoRestart
from onceflow.integration.conformance.processes import eventually

PROXY_VARIABLES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


def _set_proxy(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in PROXY_VARIABLES:
        for variable in (name, name.upper()):
            monkeypatch.setenv(variable, url)
    for exemption in ("no_proxy", "no_grpc_proxy"):
        for variable in (exemption, exemption.upper()):
            monkeypatch.delenv(variable, raising=False)


class _RecordingProxy:
    """An HTTP proxy that forwards what CONNECT asks for, and keeps all bytes of its clients."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError, IndexError):
            head = client.recv(65536)
            self.received.append(head)
            host, _, port = head.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as server:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                replies = threading.Thread(target=_copy, args=(server, client), daemon=True)
                replies.start()
                while data := client.recv(65536):
                    self.received.append(data)
                    server.sendall(data)
                server.shutdown(socket.SHUT_WR)
                replies.join()


def _copy(reader: socket.socket, writer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := reader.recv(65536):
            writer.sendall(data)


@pytest.fixture
def recording_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[_RecordingProxy]:
    proxy = _RecordingProxy()
    _set_proxy(monkeypatch, proxy.url)
    yield proxy
    proxy.close()


def test_a_job_runs_where_the_proxy_of_the_environment_is_dead(
    cluster: LocalProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Port 1 of loopback refuses connections: only root could listen there.
    _set_proxy(monkeypatch, "http://127.0.0.1:1")
    source = CountingSource(400)
    pipeline, sink = ledger(cluster, tmp_path, source, restart=NoRestart())
    assert pipeline.run(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_no_byte_of_a_job_or_of_its_commands_passes_the_proxy_of_the_environment(
    cluster: LocalProcesses, tmp_path: Path, recording_proxy: _RecordingProxy
) -> None:
    source = CountingSource(400, pause_s=0.002, ends_with=str(tmp_path / "read all"))
    pipeline, sink = ledger(cluster, tmp_path, source, restart=NoRestart())
    job = pipeline.start()
    assert eventually(lambda: job.status().checkpoints_completed > 1, 60)
    assert asked(tmp_path, "status")["state"] == "running"
    assert asked(tmp_path, "list")["jobs"][0]["state"] == "running"
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)
    assert recording_proxy.received == []
