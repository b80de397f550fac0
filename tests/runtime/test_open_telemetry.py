"""Spans and metrics arrive at a receiver of OTLP, and a slow or absent one harms no job."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectorySink

from onceflow import (
    Checkpointing,
    FixedDelay,
    Job,
    JobEnded,
    JobEvent,
    JobStatus,
    LocalProcesses,
    Pipeline,
    RuntimeSettings,
)
from onceflow.core.settings.configuration import Configuration

traces: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
metrics: Any = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")

RECORDS = 4_000
SETTINGS = RuntimeSettings(start_timeout_s=90, heartbeat_interval_s=0.2, heartbeat_timeout_s=60)


class Collector(ThreadingHTTPServer):
    """Takes what the protocol's own messages can read, and answers as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.jobs: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in traces.ExportTraceServiceRequest.FromString(body).resource_spans:
                self.jobs |= _read_jobs(resource.resource)
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        else:
            assert path == "/v1/metrics"
            for resource in metrics.ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource.scope_metrics:
                    self.metrics |= {metric.name: metric for metric in scope.metrics}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Collector)
        assert self.headers["Content-Type"] == "application/x-protobuf"
        self.server.take(self.path, body)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        del code, size


def _read_jobs(resource: Any) -> set[str]:
    return {
        attribute.value.string_value
        for attribute in resource.attributes
        if attribute.key == "onceflow.job"
    }


@contextmanager
def a_collector() -> Generator[Collector, None, None]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        thread.join(30)
        collector.server_close()


@pytest.fixture(autouse=True)
def no_exporter_is_left() -> Iterator[None]:
    """Wait for exporters that are still at work when their job has ended.

    They draw from Python's own random numbers. Hypothesis fails a later test in this process if
    that happens while it draws.
    """
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("telemetry of job", "Otel")):
            thread.join(90)
            assert not thread.is_alive(), thread


def start(directory: Path, endpoint: str, ends_with: str = "") -> tuple[Job, DirectorySink]:
    environment = {"ONCEFLOW_OTEL_ENDPOINT": endpoint, "ONCEFLOW_OTEL_METRICS_INTERVAL": "200 ms"}
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="traced",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
        config=Configuration.load(environment=environment),
    )
    source = CountingSource(RECORDS, pause_s=0.02, ends_with=ends_with)
    pipeline.read(source, uid="records").write(sink, uid="out")
    return pipeline.start(), sink


def await_status(job: Job, condition: Callable[[JobStatus], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition(job.status()):
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.02)


@pytest.mark.only_proof
def test_checkpoints_a_restart_and_metrics_arrive_as_the_protocol_says(tmp_path: Path) -> None:
    with a_collector() as collector:
        end = tmp_path / "end"
        job, sink = start(tmp_path, collector.url, str(end))
        await_status(job, lambda status: status.checkpoints_completed >= 3)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        await_status(job, lambda status: status.restores == 1 and len(sink.rows()) == RECORDS)
        end.touch()
        status = job.wait(60)
    assert collector.jobs == {"traced"}
    children: dict[bytes, list[Any]] = defaultdict(list)
    for span in collector.spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        children[span.parent_span_id].append(span)
    roots = children[b""]
    last = f"checkpoint {status.history[-2].checkpoint}"
    (checkpoint,) = [span for span in roots if span.name == last]
    names = {span.name for span in children[checkpoint.span_id]}
    assert names >= {"records[0]", "records[1]", "append", "commit records[0]"}
    (ack,) = [span for span in children[checkpoint.span_id] if span.name == "records[0]"]
    assert {span.name for span in children[ack.span_id]} == {
        *("start_delay", "alignment", "synchronous", "upload"),
    }
    (restart,) = [span for span in roots if span.name == "restart"]
    assert "SlotLost" in str(restart.attributes)
    (recovery,) = children[restart.span_id]
    assert recovery.name == "start of attempt 2"
    assert {span.name for span in children[recovery.span_id]} >= {
        *("claim the job", "recover sinks", "start slots", "deploy", "restore"),
    }
    assert any(span.name == "start of attempt 1" for span in roots)
    rows = collector.metrics["onceflow_sink_rows"].sum
    assert rows.is_monotonic
    assert 0 < rows.data_points[0].as_double + rows.data_points[0].as_int <= RECORDS
    durations = collector.metrics["onceflow_checkpoint_duration_seconds"].histogram
    whole = [
        point
        for point in durations.data_points
        if any(attribute.value.string_value == "whole" for attribute in point.attributes)
    ]
    assert sum(point.count for point in whole) == status.checkpoints_completed
    assert len(whole[0].bucket_counts) == len(whole[0].explicit_bounds) + 1


@pytest.mark.parametrize("way", ["silent", pytest.param("away", marks=pytest.mark.servers)])
def test_a_collector_that_takes_nothing_holds_up_no_job(tmp_path: Path, way: str) -> None:
    # It accepts connections, and reads and answers nothing.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        port = silent.getsockname()[1]
        if way == "away":
            silent.close()
        job, sink = start(tmp_path, f"http://127.0.0.1:{port}")
        ended: list[JobEvent] = []
        job.add_listener(lambda event, _: ended.append(event))
        job.wait(60)
        left_s = time.monotonic() - ended[-1].at.monotonic_s
    assert isinstance(ended[-1], JobEnded)
    assert left_s < 10.0, "after its end the job waits for a few seconds at most"
    assert len(sink.rows()) == RECORDS
    assert job.status().restores == 0
