"""A real Prometheus scrapes a job that is killed and hindered: every alert fires, and resolves."""

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
from tests.support import switched_job
from tests.support.prometheus import find_program

from onceflow import Checkpointing, FixedDelay, Job, LocalProcesses, Metrics, Pipeline
from onceflow import RuntimeSettings as Settings
from onceflow.core.storage import FileSystemStorage
from onceflow.integration.servers.process import free_port

PROMETHEUS = find_program("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROMETHEUS, reason="no prometheus of Debian's package"),
]
RULES = Path(__file__).parents[2] / "core" / "runtime" / "metrics" / "files" / "alerts.yaml"
SHORTER = {
    "oldest_prepared_seconds > 300": "oldest_prepared_seconds > 5",
    "attempts_total[10m]": "attempts_total[40s]",
    "offset 1d": "offset 30s",
    "for: 1h": "for: 5s",
    "source_lag_records) > 10000": "source_lag_records) > 2000",
    "storage_bytes > 1e9": "storage_bytes > 5e4",
}
"""What a test cannot wait for, or fill; every other minute becomes a second."""


def shorten(rules: str) -> str:
    """Return `rules` with times, and an amount of state, that a test can reach."""
    for long, short in SHORTER.items():
        assert rules.count(long) == 1, long
        rules = rules.replace(long, short)
    return re.sub(r"\b(\d+)m\b", r"\1s", rules)


def list_alerts() -> set[str]:
    return set(re.findall(r"- alert: (\w+)", RULES.read_text()))


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


def start(directory: Path, bind: str, switches: switched_job.Switches) -> Job:
    storage = FileSystemStorage(str(directory / "checkpoints"), inline_threshold_bytes=0)
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="watched",
        parallelism=2,
        checkpointing=Checkpointing(storage=storage, interval=0.5),
        restart=FixedDelay(attempts=100, delay_s=0.01),
        settings=Settings(start_timeout_s=90, heartbeat_interval_s=0.5, heartbeat_timeout_s=60),
        metrics=Metrics(prometheus_bind=bind),
    )
    source = switched_job.SwitchedSource(
        0,
        accounts=switched_job.KEYS,
        endless=True,
        batch_rows=100,
        switches=switches,
        began_s=time.time(),
        per_second=300,
    )
    records = pipeline.read(source, uid="in").key_by("account")
    kept = records.process(switched_job.SwitchedState(switches), uid="kept")
    sink = switched_job.SwitchedSink(str(directory / "out"), switches=switches)
    kept.write(sink, uid="out", on_bad_row="drop")
    return pipeline.start()


class Watching:
    """A job, and what Prometheus says of it."""

    def __init__(self, job: Job, url: str) -> None:
        self.job = job
        self._url = url
        self.resolved: set[str] = set()
        """The alerts that were seen to fire, and then to resolve."""

    def list_firing(self) -> set[str]:
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/alerts", timeout=10) as answer:
                alerts = json.load(answer)["data"]["alerts"]
        except (urllib.error.URLError, ConnectionError):
            return set()
        return {
            alert["labels"]["alertname"]
            for alert in alerts
            if alert["state"] == "firing" and alert["labels"]["job_name"] == "watched"
        }

    def await_alert(
        self, name: str, *, fires: bool, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        deadline = time.monotonic() + 120
        while (name in self.list_firing()) is not fires:
            assert time.monotonic() < deadline, (name, self.list_firing(), self.job.status())
            meanwhile()
            time.sleep(0.2)

    def expect(
        self,
        name: str,
        begin: Callable[[], None],
        end: Callable[[], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Have a trouble begin and end; assert that alert `name` fires between, and resolves."""
        alert = f"Onceflow{name}"
        # Another trouble may have been one of this kind, too.
        self.await_alert(alert, fires=False)
        begin()
        self.await_alert(alert, fires=True, meanwhile=meanwhile)
        end()
        self.await_alert(alert, fires=False)
        self.resolved.add(alert)


def test_every_alert_fires_while_something_is_wrong_and_resolves(tmp_path: Path) -> None:
    switches = switched_job.Switches(str(tmp_path / "switches"))
    Path(switches.directory).mkdir()
    bind = f"127.0.0.1:{free_port()}"
    switches.turn_on("held")
    job = start(tmp_path, bind, switches)

    def switch(trouble: str) -> tuple[Callable[[], None], Callable[[], None]]:
        return lambda: switches.turn_on(trouble), lambda: switches.turn_off(trouble)

    killed: set[int] = set()

    def kill_another() -> None:
        slots = job.status().slots
        if slots and slots[0].pid not in killed:
            killed.add(slots[0].pid)
            os.kill(slots[0].pid, signal.SIGKILL)

    def signal_slot(number: int) -> None:
        os.kill(job.status().slots[0].pid, number)

    with a_prometheus(tmp_path, bind) as url:
        watched = Watching(job, url)
        watched.expect("FirstCheckpointMissing", *switch("held"))
        watched.expect("RejectedRecords", *switch("unreadable"))
        watched.expect("RejectedRows", *switch("refused"))
        watched.expect("StorageGrows", *switch("grown"))
        watched.expect("LagGrows", *switch("unread"))
        watched.expect("RowsInDoubt", *switch("shut"))
        watched.expect("CommitStuck", *switch("barred"))
        watched.expect(
            "NoCheckpoint",
            lambda: signal_slot(signal.SIGSTOP),
            lambda: signal_slot(signal.SIGCONT),
        )
        watched.expect("RestartsInARow", lambda: None, lambda: None, kill_another)
        assert watched.resolved == list_alerts()
    job.cancel()
    job.wait(60)
