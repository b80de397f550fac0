"""deploy/docker: the image is built, and the composition runs a job that survives a SIGKILL.

Needs a Docker daemon of this machine: `script/integration tests/integration/test_compose.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from script.images.build import build_debian, build_images
from script.images.compose import find_compose
from script.images.recipes import DEBIAN, PROMETHEUS
from testcontainers.core.config import testcontainers_config
from tests.integration.kafka_feed import produce

from onceflow.integration.servers.container import (
    ContainerKafka,
    ContainerPostgres,
    check_socket,
)
from onceflow.integration.servers.process import free_port
from onceflow.integration.servers.server import ServerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FILE = Path(__file__).parents[2] / "deploy" / "docker" / "compose.yaml"
PASSWORD = "of this test"
ROWS = 3_000


@dataclass(frozen=True)
class Composition:
    """The services that `compose.yaml` starts, under a name and on ports of their own."""

    command: Sequence[str]
    environment: Mapping[str, str]

    def run(self, *words: str, timeout_s: float = 300) -> str:
        """Return what `docker compose` prints, once it has succeeded."""
        done = subprocess.run(
            [*self.command, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, (
            f"compose {words[0]}: {done.stdout[-4000:]}{done.stderr[-6000:]}"
        )
        return done.stdout

    def state_of(self, service: str) -> dict[str, Any]:
        """Return what the daemon knows about the container of `service`."""
        from testcontainers.core.docker_client import DockerClient

        (container,) = self.run("ps", "--all", "--quiet", service).split()
        client = DockerClient().client
        try:
            found: dict[str, Any] = client.containers.get(container).attrs
        finally:
            client.close()
        return found

    def port(self, name: str) -> int:
        return int(self.environment[name])

    def ask_prometheus(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.port('PROMETHEUS_PORT')}/api/v1/{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def read_ids(self) -> list[int]:
        """Return the ids of all rows in the job's target, sorted; none before it exists."""
        with psycopg.connect(
            host="127.0.0.1",
            port=self.port("POSTGRES_PORT"),
            user="onceflow",
            password=PASSWORD,
            connect_timeout=5,
        ) as connection:
            try:
                return [row[0] for row in connection.execute("SELECT id FROM payments ORDER BY id")]
            except psycopg.errors.UndefinedTable:
                return []


def lend_pip_settings(directory: Path) -> Path:
    """Write a second composition file, by which the build reaches what pip here does."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = shlex.split(value)[0]
    lent = ("index-url", "proxy", "trusted-host")
    kept = {name: value for name, value in found.items() if name in lent}
    authorities = directory / "authorities"
    authorities.write_text(Path(found["cert"]).read_text() if "cert" in found else "")
    if "cert" in found:
        kept["cert"] = "/run/secrets/authorities"
    settings = directory / "pip.conf"
    settings.write_text("\n".join(["[global]", *(f"{k} = {v}" for k, v in kept.items())]) + "\n")
    # Containers of script/integration's daemon have no way out: builds use the machine's network.
    build = {"network": "host", "secrets": ["pip", "authorities"]}
    described = {
        "services": {name: {"build": build} for name in ("job", "topic")},
        "secrets": {"pip": {"file": str(settings)}, "authorities": {"file": str(authorities)}},
    }
    override = directory / "override.yaml"
    override.write_text(json.dumps(described))  # JSON is YAML
    return override


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def build_what_cannot_be_pulled() -> dict[str, str]:
    """Return the images of `compose.yaml` by their variables; none where the official ones are."""
    prefix = testcontainers_config.hub_image_name_prefix
    if not prefix:
        return {}
    build_images(prefix, tell, [PROMETHEUS])
    build_debian(prefix, tell)
    return {
        "BASE_IMAGE": prefix + DEBIAN,
        "KAFKA_IMAGE": prefix + ContainerKafka.official_image,
        "POSTGRES_IMAGE": prefix + ContainerPostgres.official_image,
        "PROMETHEUS_IMAGE": prefix + PROMETHEUS.name,
    }


@pytest.fixture
def composition(tmp_path: Path) -> Generator[Composition, None, None]:
    try:
        check_socket()
    except ServerError as error:
        pytest.skip(f"no containers, script/integration has them: {error}")
    project = f"onceflow-{uuid.uuid4().hex[:8]}"
    environment = {
        **os.environ,
        **build_what_cannot_be_pulled(),
        "COMPOSE_PROJECT_NAME": project,
        "POSTGRES_PASSWORD": PASSWORD,
        **{f"{name}_PORT": str(free_port()) for name in ("KAFKA", "POSTGRES", "PROMETHEUS")},
    }
    files = ("--file", str(FILE), "--file", str(lend_pip_settings(tmp_path)))
    made = Composition([*find_compose(), "--progress", "plain", *files], environment)
    try:
        yield made
    finally:
        with contextlib.suppress(AssertionError):
            sys.stdout.write(made.run("logs", "--no-color", "--tail", "60"))
        made.run("down", "--volumes", "--timeout", "5")


def await_that(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def payments(first: int, count: int) -> list[bytes]:
    return [b'{"id": %d, "account": "a", "amount": 1}' % n for n in range(first, first + count)]


def test_the_composed_job_writes_every_row_once_though_its_container_is_killed(
    composition: Composition,
) -> None:
    composition.run("build", "job", timeout_s=1200)
    composition.run("up", "--detach", "--no-build", timeout_s=300)
    broker = f"127.0.0.1:{composition.port('KAFKA_PORT')}"
    produce(broker, "payments", payments(0, 1_000))
    await_that(lambda: len(composition.read_ids()) > 0, "no row has arrived")

    # The kernel's SIGKILL, as when memory is short: `docker kill` would count as a wish to stop.
    before = composition.state_of("job")
    assert composition.run("exec", "job", "id", "--user").strip() == "185"
    produce(broker, "payments", payments(1_000, 1_000), partition=1)
    os.kill(before["State"]["Pid"], signal.SIGKILL)
    produce(broker, "payments", payments(2_000, 1_000))
    await_that(lambda: composition.state_of("job")["RestartCount"] > 0, "it was not restarted")
    await_that(lambda: len(composition.read_ids()) >= ROWS, "rows are missing")
    assert composition.read_ids() == list(range(ROWS))

    def is_scraped() -> bool:
        targets = composition.ask_prometheus("targets")["activeTargets"]
        return [target["health"] for target in targets] == ["up"]

    await_that(is_scraped, "Prometheus does not see the job")
    (group,) = composition.ask_prometheus("rules")["groups"]
    assert "OnceflowNoCheckpoint" in {rule["name"] for rule in group["rules"]}
    decided = composition.ask_prometheus("query?query=onceflow_checkpoints_total")
    assert decided["result"][0]["metric"]["job_name"] == "kafka-to-postgres"

    # SIGTERM reaches the job, which takes a last checkpoint.
    composition.run("stop", "job")
    assert composition.state_of("job")["State"]["ExitCode"] == 0
    assert composition.read_ids() == list(range(ROWS))
