"""A running job is scraped over HTTP while its slots are killed."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink

from onceflow import (
    Checkpointing,
    FixedDelay,
    Job,
    KeyedFunction,
    LocalProcesses,
    Metrics,
    Pipeline,
    Record,
    RuntimeSettings,
    StateAccess,
)
from onceflow.integration.servers.process import free_port

parser: Any = pytest.importorskip("prometheus_client.parser")

RECORDS = 6_000
SETTINGS = RuntimeSettings(start_timeout_s=90, heartbeat_interval_s=0.2, heartbeat_timeout_s=60)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str, token: str = "") -> Samples:
    request = urllib.request.Request(f"{url}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix("onceflow_"), frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if family.type == "counter" or not sample.name.endswith("_bucket")
    }


def find(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset({"job_name": "scraped", **labels}.items())), 0.0)


def await_scrape(job: Job, url: str, condition: Callable[[Samples], bool]) -> Samples:
    deadline = time.monotonic() + 60
    while True:
        try:
            if condition(samples := scrape(url)):
                return samples
        except (urllib.error.URLError, ConnectionError):
            samples = {}
        assert time.monotonic() < deadline, (samples, job.status())
        time.sleep(0.05)


def probe(url: str, path: str) -> tuple[int, dict[str, str]]:
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=30) as answer:
            return answer.status, json.load(answer)["jobs"]
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)["jobs"]


class Checking(KeyedFunction):
    """Counts what it is given, as a user's function does."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def open(self, state: StateAccess) -> None:
        self._debits = state.metrics.counter("debits")
        self._subtask = state.operator.metrics.gauge("subtask")
        self._amounts = state.metrics.histogram("amount", buckets=(0, 500))

    def process(self, record: Record) -> Record:
        self._amounts.observe(record["amount"])
        self._subtask.set(7)
        if record["amount"] < 0:
            self._debits.add()
        return record


def counters(samples: Samples) -> Samples:
    return {key: value for key, value in samples.items() if key[0].endswith("_total")}


def start(directory: Path, bind: str, sink: DirectorySink, end: Path) -> Job:
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="scraped",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
        metrics=Metrics(prometheus_bind=bind),
    )
    source = CountingSource(RECORDS, pause_s=0.02, ends_with=str(end))
    records = pipeline.read(source, uid="records").key_by("account")
    records.process(Checking(), uid="check").write(sink, uid="out")
    return pipeline.start()


def check_functions(last: Samples, job: Job) -> None:
    """Assert that functions have counted what they were given in both attempts."""
    for subtask in ("0", "1"):
        assert find(last, "user_subtask", operator="check", subtask=subtask) == 7
    seen = sum(value for (name, _), value in last.items() if name == "user_amount_count")
    debits = sum(value for (name, _), value in last.items() if name == "user_debits_total")
    assert seen >= job.status().records_in, "of the first attempt, too"
    share = sum(amount_of(number) < 0 for number in range(RECORDS)) / RECORDS
    assert debits / seen == pytest.approx(share, abs=0.1)


def test_counters_of_a_job_go_on_when_a_slot_is_killed_and_end_at_what_the_target_holds(
    tmp_path: Path,
) -> None:
    bind = f"127.0.0.1:{free_port()}"
    url, end = f"http://{bind}", tmp_path / "end"
    sink = DirectorySink(str(tmp_path / "out"))
    job = start(tmp_path, bind, sink, end)
    before = await_scrape(job, url, lambda found: find(found, "sink_rows_total", sink="out") > 100)
    assert find(before, "job_state", state="running") == 1
    assert find(before, "checkpoints_total", outcome="completed") > 0
    assert probe(url, "/healthz") == probe(url, "/readyz") == (200, {"scraped": "ok"})
    os.kill(job.status().slots[0].pid, signal.SIGKILL)

    def is_recovered(found: Samples) -> bool:
        return find(found, "attempts_total") == 2 and len(sink.rows()) == RECORDS

    after = await_scrape(job, url, is_recovered)
    # What slots count in the second attempt comes on top of the first.
    lower = {key for key, value in counters(before).items() if after.get(key, 0) < value}
    assert lower == set()
    assert sum(value for key, value in after.items() if key[0] == "restarts_total") == 1

    def is_quiet(found: Samples) -> bool:
        states = ("open", "prepared", "in_doubt")
        waiting = sum(find(found, "sink_transactions", sink="out", state=state) for state in states)
        runs = find(found, "job_state", state="running") == 1
        return (
            runs
            and waiting == 0
            and find(found, "source_records_total", source="records") >= (job.status().records_in)
        )

    last = await_scrape(job, url, is_quiet)
    shown = find(last, "checkpoint_last_completed_timestamp_seconds")
    assert abs(time.time() - shown) < 60
    assert ("storage_bytes", frozenset({("job_name", "scraped")})) in last
    driver_files = tmp_path / "checkpoints" / "scraped"
    endpoint = json.loads((driver_files / "driver.json").read_text())["url"]
    token = (driver_files / "driver.token").read_text()
    assert counters(scrape(endpoint, token)).keys() == counters(last).keys()
    assert probe(endpoint, "/readyz") == (200, {"scraped": "ok"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        scrape(endpoint)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape(f"{url}/v1/status")
    check_functions(last, job)
    end.touch()
    status = job.wait(60)
    rows = len(sink.rows())
    assert rows == RECORDS
    # Only what a killed slot committed after its last heartbeat is not counted.
    assert 0 < find(last, "sink_rows_total", sink="out") <= rows
    assert status.restores == 1
    with pytest.raises(urllib.error.URLError):
        scrape(url)
