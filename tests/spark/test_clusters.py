"""The same guarantees where executors are processes of their own: local-cluster and standalone."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from pyarrow import flight
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.program import Program, python
from tests.support.standalone import standalone_cluster

from onceflow.core.errors import ConfigError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]

SOURCE = CountingSource(30_000, pause_s=0.002)


def start_ledger(directory: Path, master: str, *, tls: str = "auto") -> Program:
    return Program(
        directory / "driver.log",
        *python("-m", "tests.support.ledger_process", directory),
        *("--records", SOURCE.records, "--pause-s", SOURCE.pause_s),
        *("--ends-with", directory / "end", "--master", master, "--tls", tls),
    )


def await_status(
    directory: Path, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = 120.0
) -> dict[str, Any]:
    path = directory / "status.json"
    deadline = time.monotonic() + timeout_s
    while True:
        status = json.loads(path.read_text()) if path.exists() else {"state": "none"}
        if status["state"] != "none" and wanted(status):
            return status
        assert time.monotonic() < deadline, (status, (directory / "driver.log").read_text()[-3000:])
        time.sleep(0.02)


def running(checkpoints: int, restores: int = 0) -> Callable[[dict[str, Any]], bool]:
    return lambda status: (
        status["state"] == "running"
        and status["checkpoints"] >= checkpoints
        and status["restores"] >= restores
    )


def issuers_at(pid: int) -> list[str]:
    """Return the issuer of the certificate at each port on which `pid` listens; "" without TLS.

    Also sees that who only speaks gRPC, without TLS, is not answered there.
    """
    psutil: Any = importlib.import_module("psutil")  # it has no types
    listening = [
        connection.laddr.port
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    return [_issuer_at(port) for port in listening]


def _issuer_at(port: int) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            certificate = wrapped.getpeercert(binary_form=True)
    except OSError:
        return ""
    assert certificate is not None
    with pytest.raises(flight.FlightUnavailableError):
        list(flight.FlightClient(f"grpc://127.0.0.1:{port}").list_flights())
    return x509.load_der_x509_certificate(certificate).issuer.rfc4514_string()


def parent_of(pid: int) -> int:
    output = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, check=True)
    return int(output.stdout)


def finish(process: Program, directory: Path) -> None:
    (directory / "end").touch()
    process.wait(120)
    status = json.loads((directory / "status.json").read_text())
    assert status["state"] == "finished", status
    assert_exactly_once(DirectorySink(str(directory / "out")), SOURCE)


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[str]:
    with standalone_cluster(tmp_path) as cluster:
        yield cluster.url


@pytest.mark.slow  # the next one looks at the same on a standalone cluster
def test_with_tls_driver_and_slots_serve_nobody_without_a_certificate_of_the_attempt(
    tmp_path: Path,
) -> None:
    process = start_ledger(tmp_path, "local-cluster[2,1,1024]", tls="on")
    try:
        status = await_status(tmp_path, running(checkpoints=3))
        for pid, _ in status["slots"]:
            assert issuers_at(pid) == ["CN=onceflow attempt"]
        assert "CN=onceflow attempt" in issuers_at(process.pid)
        finish(process, tmp_path)
    finally:
        process.kill()


@pytest.mark.parametrize("driver_too", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_a_standalone_cluster_executors_and_the_driver_may_be_killed(
    tmp_path: Path, standalone: str, driver_too: bool
) -> None:
    process = start_ledger(tmp_path, standalone)
    try:
        status = await_status(tmp_path, running(checkpoints=3))
        # TLS is on by itself where slots may be on other machines.
        assert [issuers_at(pid) for pid, _ in status["slots"]] == [["CN=onceflow attempt"]] * 2
        assert "CN=onceflow attempt" in issuers_at(process.pid)
        os.kill(parent_of(status["slots"][1][1]), signal.SIGKILL)
        status = await_status(tmp_path, running(checkpoints=5, restores=1))
        if driver_too:
            process.kill()
            (tmp_path / "status.json").unlink()
            process = start_ledger(tmp_path, standalone)
            await_status(tmp_path, lambda s: s["attempt"] > status["attempt"])
        finish(process, tmp_path)
    finally:
        process.kill()


def test_more_slots_than_spark_has_are_refused_before_anything_runs(
    spark: SparkSession, tmp_path: Path
) -> None:
    pipeline, _ = ledger(spark, tmp_path, CountingSource(10), parallelism=9)
    with pytest.raises(ConfigError, match="parallelism=9"):
        pipeline.start()
