"""A real Prometheus scrapes a job that is killed and hindered: alerts fire, and resolve."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.runtime.test_sink_metrics import GatedSink
from tests.support.counting_source import CountingSource
from tests.support.prometheus import find_program

from onceflow import Checkpointing, FixedDelay, Job, LocalProcesses, Metrics, Pipeline
from onceflow import RuntimeSettings as Settings
from onceflow.integration.servers.process import free_port

PROMETHEUS = find_program("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROMETHEUS, reason="no prometheus of Debian's package"),
]
RULES = Path(__file__).parents[2] / "core" / "runtime" / "metrics" / "files" / "alerts.yaml"


def shorten(rules: str) -> str:
    """Return `rules` with seconds in place of minutes, so that a test can wait for them."""
    in_seconds = re.sub(r"\b(\d+)m\b", r"\1s", rules)
    return in_seconds.replace("oldest_prepared_seconds > 300", "oldest_prepared_seconds > 5")


@contextmanager
def a_prometheus(directory: Path, target: str) -> Generator[str, None, None]:
    (directory / "alerts.yaml").write_text(shorten(RULES.read_text()))
    scrape = {"job_name": "streams", "static_configs": [{"targets": [target]}]}
    intervals = {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    config = {
        "global": intervals | {"evaluation_interval": "500ms"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [scrape],
    }
    (directory / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    with (directory / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={directory}/prometheus.yaml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(30)


def list_firing(url: str) -> set[str]:
    try:
        with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=10) as answer:
            alerts = json.load(answer)["data"]["alerts"]
    except (urllib.error.URLError, ConnectionError):
        return set()
    return {
        alert["labels"]["alertname"]
        for alert in alerts
        if alert["state"] == "firing" and alert["labels"]["job_name"] == "watched"
    }


def await_that(condition: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.2)


def test_alerts_fire_while_something_is_wrong_and_resolve(tmp_path: Path) -> None:
    gate, bind = tmp_path / "gate", f"127.0.0.1:{free_port()}"
    gate.touch()
    pipeline = Pipeline(
        LocalProcesses(tmp_path / "logs"),
        name="watched",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.5),
        restart=FixedDelay(attempts=100, delay_s=0.01),
        settings=Settings(heartbeat_interval_s=0.5, heartbeat_timeout_s=30),
        metrics=Metrics(prometheus_bind=bind),
    )
    source = CountingSource(1_000_000, pause_s=0.05, endless=True)
    pipeline.read(source, uid="records").write(GatedSink(str(tmp_path / "out"), str(gate)), uid="o")
    job = pipeline.start()
    with a_prometheus(tmp_path, bind) as url:
        await_that(lambda: job.status().checkpoints_completed > 1, job)

        # The target takes nothing: what is prepared stays in doubt.
        gate.unlink()
        await_that(lambda: "OnceflowRowsInDoubt" in list_firing(url), job)
        gate.touch()
        await_that(lambda: "OnceflowRowsInDoubt" not in list_firing(url), job)

        # A slot stands still: no checkpoint completes.
        frozen = job.status().slots[0].pid
        os.kill(frozen, signal.SIGSTOP)
        await_that(lambda: "OnceflowNoCheckpoint" in list_firing(url), job)
        os.kill(frozen, signal.SIGCONT)
        await_that(lambda: "OnceflowNoCheckpoint" not in list_firing(url), job)

        # Slots are killed again and again.
        killed: set[int] = set()

        def kill_another() -> bool:
            slots = job.status().slots
            if slots and slots[0].pid not in killed:
                killed.add(slots[0].pid)
                os.kill(slots[0].pid, signal.SIGKILL)
            return "OnceflowRestartsInARow" in list_firing(url)

        await_that(kill_another, job)
        await_that(lambda: not list_firing(url), job)
    job.cancel()
    job.wait(60)
