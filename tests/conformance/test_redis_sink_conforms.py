"""The Redis recipe of docs/write-your-own-sink.md keeps every clause, and needs its floor."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.redis_program import redis_command
from tests.support.redis_sink import APPLY, CLAIM, FORGET, RedisSink

from onceflow.core.errors import SinkError
from onceflow.core.spi import Sink
from onceflow.integration.conformance import ClauseOutcome, SinkConformance, SinkTarget, run_clauses
from onceflow.integration.conformance.clauses import overtaking
from onceflow.integration.conformance.processes import Processes, eventually

_DOCUMENT = Path(__file__).parents[2] / "docs" / "write-your-own-sink.md"


class RedisServer:
    """A redis-server of the test's own, durable, which may be killed and frozen."""

    def __init__(self, command: tuple[str, ...], directory: Path) -> None:
        self._command = command
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.start()

    def start(self) -> None:
        """Start it on what it has on disk; return when it answers."""
        self.process = subprocess.Popen(
            [
                *(*self._command, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--dir", str(self._directory), "--appendonly", "yes"),
                *("--appendfsync", "always", "--logfile", str(self._directory / "log")),
            ]
        )
        assert eventually(self._answers, timeout_s=90)

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait(30)

    def _answers(self) -> bool:
        try:
            return RedisSink("127.0.0.1", self.port, "", "").ask("PING") == b"PONG"
        except SinkError:
            return False


class RedisTarget(SinkTarget):
    """A hash of its own on the server."""

    def __init__(self, server: RedisServer, apply_script: str = APPLY) -> None:
        self._server = server
        table = f"rows-{secrets.token_hex(4)}"
        self._sink = RedisSink("127.0.0.1", server.port, table, "id", apply_script)

    def sink(self) -> Sink:
        return self._sink

    def sink_at(self, host: str, port: int) -> Sink:
        return replace(self._sink, host=host, port=port)

    def address(self) -> tuple[str, int]:
        return self._sink.host, self._sink.port

    def rows(self) -> list[dict[str, object]]:
        found = self._sink.ask("HVALS", self._sink.table)
        assert isinstance(found, list)
        return [json.loads(row) for row in found if isinstance(row, bytes)]

    def kill(self) -> None:
        self._server.kill()

    def start(self) -> None:
        self._server.start()

    def pause(self) -> None:
        self._server.process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        self._server.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    command = redis_command()
    if command is None:
        pytest.skip("needs redis-server on PATH, or Debian's packages")
    server = RedisServer(command, tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


class TestRedisSink(SinkConformance):
    @pytest.fixture
    def sink_target(self, server: RedisServer) -> SinkTarget:
        return RedisTarget(server)


@pytest.mark.servers
def test_without_the_floor_a_late_request_is_applied_again(
    server: RedisServer, onceflow_processes: Processes
) -> None:
    lines = [line for line in APPLY.splitlines() if "KEYS[2]" not in line]
    without = "\n".join(lines)
    assert len(lines) == len(APPLY.splitlines()) - 1
    (late,) = [one for one in overtaking.CLAUSES if one.id == "overtaken-on-the-way"]
    results = run_clauses(lambda: RedisTarget(server, without), [late], onceflow_processes)
    assert [result.outcome for result in results] == [ClauseOutcome.FAILED]


def test_scripts_of_the_document_are_those_that_are_tested() -> None:
    text = _DOCUMENT.read_text(encoding="utf-8")
    for script in (APPLY, FORGET, CLAIM):
        assert f"```lua{script}```" in text
