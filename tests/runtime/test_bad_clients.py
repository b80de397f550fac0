"""Addresses that cannot be had, and clients that never end: the job is unharmed by either."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.job_process import JobProcess
from tests.support.ledger import SETTINGS
from typer.testing import CliRunner

from onceflow import Checkpointing, Endpoint, JobState, LocalProcesses, Metrics, Pipeline
from onceflow.cli.main import app
from onceflow.core.runtime.driver.http_server import CONNECTIONS_MAX
from onceflow.integration.servers.process import free_port

NOT_OURS = "192.0.2.1"
"""Reserved for documents (RFC 5737): no machine has it."""
CLIENTS = 1_000
RECORDS = 2_000


def build(
    directory: Path, source: CountingSource, endpoint: Endpoint, metrics: Metrics
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="asked",
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        settings=SETTINGS,
        endpoint=endpoint,
        metrics=metrics,
    )
    pipeline.read(source, uid="records").write(sink, uid="out")
    return pipeline, sink


def test_a_job_runs_though_neither_of_its_addresses_can_be_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bind = f"{NOT_OURS}:9249"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        pipeline, sink = build(
            tmp_path, CountingSource(RECORDS), Endpoint(port=port), Metrics(prometheus_bind=bind)
        )
        assert pipeline.run(90).state is JobState.FINISHED
    assert len(sink.rows()) == RECORDS
    refused = next(line for line in caplog.messages if "cannot reach job" in line)
    assert f"endpoint.port={port}" in refused
    assert "in use" in refused
    unseen = next(line for line in caplog.messages if "metrics.prometheus.bind" in line)
    assert bind in unseen
    assert "Cannot assign requested address" in unseen


@contextmanager
def slow_clients(url: str, count: int = CLIENTS) -> Generator[None, None, None]:
    command = [sys.executable, "-m", "tests.support.slow_clients", url, str(count)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as clients:
        try:
            assert clients.stdout is not None
            assert clients.stdout.readline(), "the clients have not connected"
            yield
        finally:
            clients.kill()


def ask(url: str, token: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v1/status")
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        status: dict[str, Any] = json.load(answer)
        return status


@pytest.mark.servers
def test_1000_slow_clients_at_each_address_harm_no_job_and_keep_nobody_from_being_answered(
    tmp_path: Path,
) -> None:
    bind, end = f"127.0.0.1:{free_port()}", tmp_path / "end"
    source = CountingSource(RECORDS, pause_s=0.01, ends_with=str(end))
    pipeline, sink = build(tmp_path, source, Endpoint(), Metrics(prometheus_bind=bind))
    job = pipeline.start()
    deadline = time.monotonic() + 90
    while not job.status().checkpoints_completed:
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.05)
    files = tmp_path / "checkpoints" / "asked"
    url = json.loads((files / "driver.json").read_text())["url"]
    token = (files / "driver.token").read_text()
    with slow_clients(url), slow_clients(f"http://{bind}"):
        before = job.status().checkpoints_completed
        for _ in range(10):
            assert ask(url, token)["state"] == "running"
            with urllib.request.urlopen(f"http://{bind}/healthz", timeout=60) as answer:
                assert answer.status == 200
        while job.status().checkpoints_completed < before + 3:
            assert time.monotonic() < deadline + 90, job.status()
            time.sleep(0.05)
        end.touch()
        status = job.wait(90)
    assert (status.state, status.restores) == (JobState.FINISHED, 0)
    assert sorted(row["id"] for row in sink.rows()) == list(range(RECORDS))


@pytest.mark.servers
def test_status_and_stop_answer_in_time_while_lingering_clients_hold_every_connection(
    tmp_path: Path,
) -> None:
    """The clients have no token, and come back as soon as their connections are closed."""
    timeout_s = 30
    end = ("--ends-with", str(tmp_path / "end"))
    module = "tests.support.ledger_process"
    with JobProcess(tmp_path, module, "--records", "2000", "--pause-s", "0.01", *end) as job:
        job.await_checkpoints(1)
        files = tmp_path / "checkpoints" / "ledger"
        url = json.loads((files / "driver.json").read_text())["url"]
        storage = ["--storage", str(files.parent), "--timeout", str(timeout_s)]
        with slow_clients(url, CONNECTIONS_MAX):
            for command in (*["status"] * 5, "stop"):
                began = time.monotonic()
                result = CliRunner().invoke(app, [command, "ledger", *storage])
                assert result.exit_code == 0, result.output
                assert time.monotonic() - began < timeout_s
            assert job.wait() == 0
    rows = DirectorySink(str(tmp_path / "out")).rows()
    assert len({row["id"] for row in rows}) == len(rows)
