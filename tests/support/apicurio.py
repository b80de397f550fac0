"""Apicurio Registry, a real schema registry that speaks Confluent's protocol, as a process."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.archives import unpack_tar
from tests.support.program import Program

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
    command = (java_command(), *flags, "-jar", jar)
    with Program(log, *command, cwd=directory, environment=settings) as program:
        program.wait_until(lambda: program.read_page(f"{address}/subjects"), _START_S)
        yield address


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
    unpack_tar(archive, into)
    archive.unlink()
