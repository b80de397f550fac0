"""Apicurio Registry, a real schema registry that speaks Confluent's protocol, as a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.kafka_jars import java_command
from onceflow.integration.servers.process import LOOPBACK, exclusive, free_port

_VERSION = "3.0.9"
_FETCH_S = 600.0
_START_S = 150.0


@contextmanager
def apicurio(directory: Path) -> Generator[str, None, None]:
    """Yield the address of a registry that keeps everything in memory; its log is in `directory`.

    Fetched once (109 MB), by Maven; without it the test is skipped.
    """
    home, port = _program(), free_port()
    address = f"http://{LOOPBACK}:{port}/apis/ccompat/v7"
    settings = {
        "QUARKUS_HTTP_HOST": LOOPBACK,
        "QUARKUS_HTTP_PORT": str(port),
        "APICURIO_STORAGE_KIND": "sql",
        "APICURIO_STORAGE_SQL_KIND": "h2",
    }
    jar = next(home.glob("*-runner.jar"))
    flags = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    log = directory / "apicurio.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [java_command(), *flags, "-jar", str(jar)],
            cwd=directory,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _await(f"{address}/subjects", process, log)
            yield address
        finally:
            process.kill()
            process.wait(30)


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < until, log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)


def _program() -> Path:
    target = cache_directory() / f"apicurio-{_VERSION}"
    if target.is_dir():
        return target
    if shutil.which("mvn") is None:
        pytest.skip("the registry is fetched by Maven, and there is no mvn on PATH")
    with exclusive(target.with_name(f"{target.name}.lock"), _FETCH_S):
        if not target.is_dir():
            with publish(target) as fresh:
                _fetch(fresh)
    return target


def _fetch(into: Path) -> None:
    artifact = f"io.apicurio:apicurio-registry-app:{_VERSION}:tar.gz:all"
    subprocess.run(
        [
            *("mvn", "--batch-mode", "--quiet", "--no-transfer-progress", "dependency:copy"),
            *(f"-Dartifact={artifact}", f"-DoutputDirectory={into}"),
        ],
        cwd=into,
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=_FETCH_S,
    )
    archive = into / f"apicurio-registry-app-{_VERSION}-all.tar.gz"
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    archive.unlink()
