"""Tests a job's metrics over its attempts, in Prometheus' format."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onceflow import JobState, Metrics
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SnapshotTimings,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import SinkMetrics, SubtaskMetrics, Wait
from onceflow.core.runtime.driver.health import Health
from onceflow.core.runtime.driver.http_server import Request, Response
from onceflow.core.runtime.driver.metrics_server import MetricsApi, ShownJob, ShownMetrics
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.listeners import StatusTracker
from onceflow.core.runtime.metrics.commit_latency import SinkInputs
from onceflow.core.runtime.metrics.exposition import Measured, expose
from onceflow.core.runtime.metrics.job_metrics import JobMetrics, SeriesLimits
from onceflow.core.runtime.metrics.metric_catalog import CATALOG, Metric, MetricType
from onceflow.core.spi import CopyProgress, SourceProgress, SourceWarning, SplitOffsets

parser: Any = pytest.importorskip("prometheus_client.parser")

READER, WRITER = SubtaskRef("in", 0), SubtaskRef("in", 1)
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


class Measuring:
    """A job's status and its metrics, as the driver holds them."""

    def __init__(self, job: str = "ledger", limits: SeriesLimits | None = None) -> None:
        self.job = job
        sinks = (SinkInputs("out", "in", frozenset({"in"})),)
        self.metrics = JobMetrics(10.0, limits, sinks)
        self._tracker = StatusTracker(job, (), self.metrics.on_event)

    def take(self, *events: job_events.JobEvent) -> None:
        for event in events:
            self._tracker.publish(event)

    def measure(self) -> Measured:
        return Measured.of_job(self.job, self.metrics.collect())

    def shown(self) -> ShownJob:
        return ShownJob(self.measure, lambda: Health(self.job, "", ""))

    def value(self, name: str, **labels: str) -> float | None:
        return find(read(expose([self.measure()], "").body), name, job_name=self.job, **labels)


def read(body: bytes) -> Samples:
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if v)): sample.value
        for family in parser.text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def find(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"onceflow_{name}", frozenset(labels.items())))


def begin(attempt: int, slots: int = 1) -> Iterable[job_events.JobEvent]:
    yield job_events.AttemptBegan(AttemptId(attempt), CheckpointId(0))
    yield from (job_events.SlotJoined(slot, 100 + slot, 1, "here") for slot in range(slots))


def report(slot: int = 0, **counts: Any) -> job_events.SlotReported:
    sinks = counts.pop("sinks", ())
    return job_events.SlotReported(
        slot, (SubtaskMetrics(SubtaskRef("in", slot), **counts),), sinks, 1 << 20
    )


def sink(**counts: Any) -> SinkMetrics:
    return SinkMetrics("out", "ledger.out", 0, **counts)


def complete(number: int, **parts: float) -> Iterable[job_events.JobEvent]:
    checkpoint = CheckpointId(number)
    yield job_events.CheckpointTriggered(checkpoint, CheckpointKind.PERIODIC)
    timings: Any = {"size_bytes": 70, "uploaded_bytes": 50, **parts}
    yield job_events.CheckpointAcked(checkpoint, READER, SnapshotTimings(**timings))
    yield job_events.CheckpointCompleted(checkpoint, append_ms=12.0)
    yield job_events.SubtaskCommitted(READER, checkpoint)


def fail() -> Iterable[job_events.JobEvent]:
    """Yield what happened now: an event has its time since it was made."""
    yield job_events.AttemptEnded(AttemptId(1), "SlotLost: slot 0 is gone")
    yield job_events.JobRestarting(0.1, "SlotLost: slot 0 is gone")


def test_counters_go_on_over_attempts_and_count_the_reports_of_slots_once() -> None:
    job = Measuring()
    job.take(job_events.JobStarted(frozenset({"in"})), *begin(1))
    job.take(report(records_in=40, busy_s=1.5), report(records_in=100, busy_s=2.0, rejected=3))
    assert job.value("source_records_total", source="in") == 100
    job.take(*fail(), *begin(2))
    assert job.value("source_records_total", source="in") == 100
    job.take(report(records_in=7, busy_s=0.25, rejected=1))
    assert job.value("source_records_total", source="in") == 107
    assert job.value("subtask_busy_seconds_total", chain="in", subtask="0") == 2.25
    assert job.value("rejected_records_total", chain="in") == 4
    assert job.value("restarts_total", reason="SlotLost") == 1
    assert job.value("attempts_total") == 2


def test_rows_committed_by_slots_and_by_recovery_add_up() -> None:
    job = Measuring()
    job.take(job_events.JobStarted(), *begin(1), job_events.SinksRecovered(()))
    job.take(report(sinks=(sink(rows_committed=10, committed=1),)))
    job.take(
        *fail(),
        *begin(2),
        job_events.SinksRecovered((job_events.RecoveredSink("out", "ledger.out", 2, 20, 1),)),
    )
    job.take(
        job_events.LeftoversAborted(
            AttemptId(2), (job_events.RecoveredSink("out", "ledger.out", aborted=3),)
        )
    )
    job.take(report(sinks=(sink(rows_committed=5, committed=1, retried=2, rows_rejected=4),)))
    assert job.value("sink_rows_total", sink="out") == 35
    assert job.value("sink_commits_total", sink="out") == 4
    assert job.value("sink_aborts_total", sink="out") == 4
    assert job.value("sink_commit_retries_total", sink="out") == 2
    assert job.value("sink_rejected_rows_total", sink="out") == 4


def test_what_a_failed_attempt_left_prepared_is_in_doubt_until_recovery_has_resolved_it() -> None:
    job = Measuring()
    job.take(job_events.JobStarted(), *begin(1), job_events.AttemptRunning())
    job.take(report(sinks=(sink(open=1, prepared=2, oldest_prepared_s=30.0),)))

    def states() -> list[float | None]:
        names = ("open", "prepared", "in_doubt")
        return [job.value("sink_transactions", sink="out", state=name) for name in names]

    assert states() == [1, 2, 0]
    assert job.value("sink_oldest_prepared_seconds", sink="out") == 30.0
    job.take(*fail())
    assert states() == [0, 0, 2]
    job.take(*begin(2))
    assert states() == [0, 0, 2]
    age_s = job.value("sink_oldest_prepared_seconds", sink="out")
    assert age_s is not None
    assert 30.0 <= age_s < 60.0, "it ages while nobody reports it"
    job.take(job_events.SinksRecovered((job_events.RecoveredSink("out", "ledger.out", 2, 20),)))
    assert states() == [0, 0, 0]
    assert job.value("sink_oldest_prepared_seconds", sink="out") == 0


def test_a_checkpoint_is_measured_by_parts_once_and_its_commit_when_it_has_ended() -> None:
    job = Measuring()
    job.take(job_events.JobStarted(), *begin(1), job_events.AttemptRunning())
    job.take(*complete(1, alignment_ms=30.0, start_delay_ms=4.0), *complete(2, alignment_ms=3.0))
    job.take(job_events.CheckpointTriggered(CheckpointId(3), CheckpointKind.MANUAL))
    job.take(job_events.CheckpointFailed(CheckpointId(3), "a subtask said no"))

    def count(part: str, bound: str) -> float | None:
        labels = {"kind": "periodic", "part": part, "le": bound}
        return job.value("checkpoint_duration_seconds_bucket", **labels)

    assert [count("alignment", bound) for bound in ("0.005", "0.025", "0.05", "+Inf")] == [
        *(1, 1, 2, 2)
    ]
    assert count("append", "0.01") == 0
    assert count("append", "0.025") == count("commit", "+Inf") == count("whole", "+Inf") == 2
    total = job.value("checkpoint_duration_seconds_sum", kind="periodic", part="alignment")
    assert total == pytest.approx(0.033)
    assert job.value("checkpoints_total", outcome="completed") == 2
    assert job.value("checkpoints_total", outcome="failed") == 1
    assert job.value("checkpoint_last_completed_number") == 2
    assert job.value("checkpoint_uploaded_bytes_total") == 100
    assert job.value("state_bytes") == 70
    assert job.value("checkpoint_interval_seconds") == 10.0


def checkpoint(number: int, *handles: StateHandle) -> CompletedCheckpoint:
    operator = OperatorSnapshot("balance", keyed=handles)
    snapshots = (SubtaskSnapshot(READER, (operator,)),)
    return CompletedCheckpoint(CheckpointId(number), AttemptId(1), 1, 8, snapshots, 0, 0)


def test_storage_is_the_files_of_retained_checkpoints_each_once() -> None:
    job = Measuring()
    job.take(job_events.JobStarted())
    assert job.value("storage_bytes") is None
    shared, own = StateHandle("a", "shared/a", 100, ""), StateHandle("b", "chk-2/b", 20, "")
    inline = StateHandle("c", "", 5, "", inline=b"12345")
    job.metrics.retain([checkpoint(1, shared), checkpoint(2, shared, own, inline)])
    assert job.value("storage_bytes") == 120
    job.metrics.retain([checkpoint(3, own)])
    assert job.value("storage_bytes") == 20


def test_series_are_bounded_and_sums_stay_whole_above_the_limits() -> None:
    job = Measuring(limits=SeriesLimits(subtasks_max=2, splits_max=1))
    job.take(job_events.JobStarted(frozenset({"in"})), *begin(1, slots=3))
    job.take(*(report(slot, records_in=10, input_batches=2) for slot in range(3)))
    job.take(job_events.LagMeasured("in", (SplitOffsets("0", 3, 10), SplitOffsets("1", 5, 10))))
    assert job.value("subtask_records_in_total", chain="in") == 30
    assert job.value("subtask_input_batches", chain="in") == 6
    assert job.value("subtask_records_in_total", chain="in", subtask="0") is None
    assert job.value("slot_memory_bytes", slot="0") is None
    assert job.value("source_lag_records", source="in") == 12
    for number in range(50):
        job.take(
            job_events.JobRestarting(0.0, f"Error{number}: x"),
            job_events.JobRestarting(0.0, "no class: x"),
        )
    found = read(expose([job.measure()], "").body)
    assert sum(name == "onceflow_restarts_total" for name, _ in found) <= 21
    assert find(found, "restarts_total", job_name="ledger", reason="other") == 81


def measure_scrape(subtasks: int) -> float:
    """Return the processor time of the best of five scrapes with a series each, in seconds."""
    job = Measuring(limits=SeriesLimits(subtasks_max=1_000))
    job.take(job_events.JobStarted(frozenset({"in"})), *begin(1, slots=subtasks))
    job.take(*(report(slot, records_in=10, busy_s=0.5) for slot in range(subtasks)))
    body, best_s = b"", float("inf")
    for _ in range(5):
        began_s = time.thread_time()
        body = expose([job.measure()], "").body
        best_s = min(best_s, time.thread_time() - began_s)
    assert body.count(b"onceflow_subtask_busy_seconds_total{") == subtasks
    return best_s


def test_a_scrape_of_1000_subtasks_costs_no_more_for_each_than_one_of_100() -> None:
    """The absolute cost depends on the machine: docs/internals/measurements.md has a figure."""
    assert measure_scrape(1_000) <= 20 * measure_scrape(100)


def test_versions_of_tables_and_their_files_are_counted_over_all_attempts() -> None:
    """A checkpoint without rows has no version, and neither have sinks of other targets."""
    job = Measuring()
    job.take(
        job_events.JobStarted(frozenset({"in"})), *begin(1), report(sinks=(sink(committed=1),))
    )
    assert job.value("sink_versions_total", sink="out") is None
    for number, versions, files in ((1, 1, 4), (2, 0, 0), (3, 1, 2)):
        job.take(
            job_events.CheckpointCommitted(
                "out", CheckpointId(number), versions=versions, files=files
            )
        )
    job.take(*begin(2), job_events.CheckpointCommitted("out", CheckpointId(4), versions=1, files=1))
    assert job.value("sink_versions_total", sink="out") == 3
    assert job.value("sink_version_files_total", sink="out") == 7


def test_a_source_that_measures_bytes_has_no_series_for_what_it_does_not_know() -> None:
    job = Measuring()
    job.take(job_events.JobStarted(frozenset({"in"})), *begin(1))
    copies = (CopyProgress("public.t", 5, 1), CopyProgress("public.u", 6, 1, rows_expected=9))
    job.take(job_events.LagMeasured("in", (), SourceProgress(lag_bytes=7, copies=copies)))
    assert job.value("source_lag_bytes", source="in") == 7
    assert job.value("source_lag_seconds", source="in") is None
    assert job.value("source_warnings", source="in") == 0
    assert job.value("source_copied_rows", source="in", table="public.t") == 5
    assert job.value("source_copy_expected_rows", source="in", table="public.t") is None
    assert job.value("source_copy_expected_rows", source="in", table="public.u") == 9


def test_names_with_quotes_and_newlines_are_read_back_as_they_are() -> None:
    job = Measuring(odd := 'o"d\\d\n}')
    job.take(job_events.JobStarted(frozenset({odd})), *begin(1))
    job.take(job_events.LagMeasured(odd, (SplitOffsets(odd, 3, 10),)))
    assert job.value("source_lag_records", source=odd, split=odd) == 7


def every_event() -> Iterable[job_events.JobEvent]:
    yield from (job_events.JobStarted(frozenset({"in"})), *begin(1), job_events.AttemptRunning())
    yield report(records_in=40, sinks=(sink(prepared=1),))
    yield job_events.SinkBlocked("out", ("session 7",))
    yield job_events.CommitRefused("out", "checkpoint 1: read-only")
    yield job_events.LagMeasured("in", (SplitOffsets("0", 3, 10),))
    yield from complete(1)
    yield job_events.CheckpointCommitted("out", CheckpointId(1), versions=1, files=2)
    yield job_events.CheckpointTriggered(CheckpointId(2), CheckpointKind.SAVEPOINT)
    yield job_events.SavepointCompleted(CheckpointId(2), "/kept", 100)
    yield from (*fail(), *begin(2), job_events.SinksRecovered(()), job_events.AttemptRunning())
    yield job_events.SinkBlocked("out", ("session 7",))
    copy = CopyProgress("public.t", 5, 1, rows_expected=10)
    progress = SourceProgress(7, 0.5, 70, "0/1", 1.0, (copy,), (SourceWarning("lost", "x"),))
    yield job_events.LagMeasured("in", (SplitOffsets("0", 3, 10),), progress)
    yield job_events.SlotJoined(0, 1, 1, "here")
    waits = (Wait("out", "database 'shop' at db:5432 (to commit)", 12.0),)
    yield replace(report(records_in=40, sinks=(sink(prepared=1),)), waits=waits)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_the_catalog_is_what_is_scraped_with_types_and_labels(accept: str) -> None:
    job = Measuring()
    job.take(*every_event())
    job.metrics.retain([checkpoint(1)])
    shown = expose([job.measure()], accept)
    openmetrics: Any = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = (openmetrics if accept else parser).text_string_to_metric_families(
        shown.body.decode()
    )
    assert ("openmetrics" in shown.content_type) == bool(accept)
    found = {}
    for family in families:
        suffix = "_total" if family.type == "counter" else ""
        labels = {name for sample in family.samples for name in sample.labels} - {"le", "job_name"}
        found[family.name.removesuffix("_total") + suffix] = (family.type, labels)
    assert found == {metric.name: (metric.type.value, set(metric.labels)) for metric in CATALOG}


def test_the_table_of_the_document_is_the_catalog() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("<!-- metrics -->\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [
        "| metric | type | unit | labels | meaning |",
        "|---|---|---|---|---|",
        *(describe(metric) for metric in CATALOG),
    ]


def describe(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    return f"| `{metric.name}` | {metric.type.value} | {metric.unit} | {labels} | {metric.help} |"


def test_names_are_as_prometheus_asks() -> None:
    for metric in CATALOG:
        assert re.fullmatch(r"onceflow(_[a-z]+)+", metric.name)
        assert not re.search(r"_(ms|millis\w*|minutes|kb|mb)(_|$)", metric.name)
        if metric.unit in {"seconds", "bytes"}:
            assert f"_{metric.unit}" in metric.name
    with pytest.raises(ValueError, match="_total"):
        Metric("onceflow_rows", MetricType.COUNTER, "rows", "Rows.")


def test_an_event_that_cannot_be_counted_harms_no_job(caplog: pytest.LogCaptureFixture) -> None:
    metrics = JobMetrics()
    tracker = StatusTracker("ledger", (), metrics.on_event)
    for _ in range(2):
        tracker.publish(job_events.JobRestarting(0.1, None))  # type: ignore[arg-type]
    tracker.publish(job_events.JobEnded(JobState.STOPPED))
    assert tracker.status.state is JobState.STOPPED
    assert [record.name for record in caplog.records] == ["onceflow.metrics"], "said once"
    assert metrics.collect()


# --- the address of its own ----------------------------------------------------------------------


def ask(api: MetricsApi, path: str, method: str = "GET") -> Response:
    request = Request(method, path, {"host": "localhost"})
    return api.refuse(request) or api.answer(request)


def test_jobs_at_one_address_share_each_metric_and_keep_their_names() -> None:
    api, jobs = MetricsApi(), [Measuring("one"), Measuring("two")]
    for job in jobs:
        job.take(job_events.JobStarted(), *begin(1))
        api.add(job, job.shown())
    body = ask(api, "/metrics").body
    assert body.count(b"# TYPE onceflow_attempts_total") == 1
    found = read(body)
    assert find(found, "attempts_total", job_name="one") == 1
    assert find(found, "attempts_total", job_name="two") == 1
    assert [api.remove(job) for job in jobs] == [False, True]
    assert ask(api, "/metrics").status == 200, "a scrape while the last job ends"


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/", "GET", 404), ("/v1/status", "GET", 404), ("/metrics", "POST", 405)],
)
def test_nothing_else_is_there(path: str, method: str, status: int) -> None:
    refused = ask(MetricsApi(), path, method)
    assert refused.status == status
    assert b"/metrics" in refused.body or b"GET" in refused.body


def test_an_address_in_use_is_named_and_nothing_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        shown = ShownMetrics(Metrics(prometheus_bind=bind), "in-vain", Measuring().shown())
        shown.show()
        for thread in threading.enumerate():
            if thread.name == "metrics of job in-vain":
                thread.join(30)
        shown.hide()
    assert f"no metrics can be served at {bind}: " in caplog.text
    assert "metrics.prometheus.bind" in caplog.text


@pytest.mark.parametrize(
    "bind", ["9249", ":9249", "127.0.0.1", "here:x", "here:0", "here:65536", ""]
)
def test_what_is_no_address_is_refused_by_name(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"prometheus_bind=.*127\.0\.0\.1:9249"):
        Metrics(prometheus_bind=bind)


def test_addresses_are_taken_with_names_and_in_brackets() -> None:
    assert Metrics(prometheus_bind="[::1]:9249").parse_bind() == ("::1", 9249)
    assert Metrics(prometheus_bind="driver.example:80").parse_bind() == ("driver.example", 80)
    assert Metrics().parse_bind() is None


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    api, job = MetricsApi(), Measuring()
    api.add(job, job.shown())
    refused = ask(api, "/metrics")
    assert refused.status == 501
    assert b"onceflow[metrics]" in refused.body
