"""The same guarantees where the session is one of Spark Connect, and Spark itself elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.test_clusters import (
    await_status,
    finish,
    issuers_at,
    parent_of,
    running,
    start_ledger,
)
from tests.support.connect_server import connect_server

pytestmark = [pytest.mark.spark, pytest.mark.servers, pytest.mark.timeout(400)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, int]]:
    # The client must ask for the rest of an answer again and again, as it does in a query of days.
    with connect_server(
        tmp_path, "spark.connect.execute.reattachable.senderMaxStreamDuration=2s"
    ) as running_server:
        yield running_server


def test_over_spark_connect_slots_executors_and_the_client_may_be_killed(
    tmp_path: Path, server: tuple[str, int]
) -> None:
    process = start_ledger(tmp_path, server[0], tls="on")
    try:
        status = await_status(tmp_path, running(checkpoints=3))
        assert [issuers_at(pid) for pid, _ in status["slots"]] == [["CN=onceflow attempt"]] * 2
        os.kill(status["slots"][0][0], signal.SIGKILL)
        status = await_status(tmp_path, running(checkpoints=5, restores=1))
        os.kill(parent_of(status["slots"][1][1]), signal.SIGKILL)
        status = await_status(tmp_path, running(checkpoints=7, restores=2))
        process.kill()
        process.wait(60)
        (tmp_path / "status.json").unlink()
        process = start_ledger(tmp_path, server[0])
        await_status(tmp_path, lambda s: s["attempt"] > status["attempt"])
        finish(process, tmp_path)
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.slow  # the client asks a server that is away again and again, for minutes
def test_after_a_connect_server_was_killed_the_job_ends_by_name_and_a_new_session_goes_on(
    tmp_path: Path, server: tuple[str, int]
) -> None:
    url, pid = server
    process = start_ledger(tmp_path, url)
    try:
        await_status(tmp_path, running(checkpoints=3))
        os.kill(pid, signal.SIGKILL)
        port = url.rpartition(":")[2]
        with connect_server(tmp_path, f"spark.connect.grpc.binding.port={port}"):
            process.wait(120)
            # Raised by a wait, or in the status that was written last.
            told = (tmp_path / "driver.log").read_text() + (tmp_path / "status.json").read_text()
            assert "the connection to Spark Connect is lost" in told
            (tmp_path / "status.json").unlink()
            process = start_ledger(tmp_path, url)
            await_status(tmp_path, running(checkpoints=3))
            finish(process, tmp_path)
    finally:
        process.kill()
        process.wait(60)
