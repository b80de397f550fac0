"""A job's checkpoints, recoveries and restarts as spans, and its metrics, sent by OTLP over HTTP.

    checkpoint 41                       from the trigger to the decision, or to the failure
      out[0]                            from the trigger to the subtask's ack
        start_delay alignment synchronous upload
      append                            the decision's write to the log
      commit out[0]                     from the decision until the subtask's sinks have committed
    restart                             from an attempt's failure until the next one runs
      start of attempt 4                claimed, recovered, slots up, deployed, running
    start of attempt 1                  of a job that starts, possibly from a checkpoint

A listener creates the spans from events on a separate thread, and threads of the SDK send them: the
job never waits for a collector. If a collector is slow or away, spans are lost; one log line says
so.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.core.imports import naming_extras
from onceflow.core.protocol.checkpoints.snapshots import SnapshotTimings
from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.events.status import AttemptStats, JobStatus
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.runtime.metrics.metric_catalog import Family, HistogramValue, MetricType, Value
from onceflow.core.settings.pipeline_settings import OpenTelemetry
from onceflow.core.version import VERSION

SPANS_WAITING_MAX = 8_192
"""The number of spans that wait while a collector is slow: about 10 MB. Further spans are
dropped."""
EXPORT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 2.0
"""The time that a job's end waits for unsent data."""

_log = logging.getLogger("onceflow.metrics")


@dataclass(slots=True)
class _OpenCheckpoint:
    """A checkpoint with an open span, and the subtasks whose commits have not been reported."""

    span: Any
    context: Any
    triggered: job_events.Moment
    acks: list[tuple[job_events.Moment, SubtaskRef, SnapshotTimings]] = field(
        default_factory=list[tuple[job_events.Moment, SubtaskRef, SnapshotTimings]]
    )
    decided: job_events.Moment | None = None
    uncommitted: set[SubtaskRef] = field(default_factory=set[SubtaskRef])


class JobTraces:
    """Creates spans from events. A listener of the job, on one thread."""

    def __init__(self, tracer: Any, subtasks_max: int) -> None:
        self._tracer = tracer
        self._subtasks_max = subtasks_max
        self._open: dict[int, _OpenCheckpoint] = {}
        self._failed: job_events.AttemptEnded | None = None

    def on_event(self, event: job_events.JobEvent, status: JobStatus) -> None:
        """Process one event."""
        if isinstance(event, job_events.CheckpointTriggered):
            attributes = {"onceflow.checkpoint.kind": event.kind.value}
            name = f"checkpoint {event.checkpoint}"
            attributes |= _describe(status, event.checkpoint)
            span, context = self._begin(name, event.at.wall_s, None, attributes)
            self._open[event.checkpoint] = _OpenCheckpoint(span, context, event.at)
        elif isinstance(event, job_events.CheckpointAcked):
            if (pending := self._open.get(event.checkpoint)) is not None:
                pending.acks.append((event.at, event.subtask, event.timings))
        elif isinstance(event, job_events.CheckpointCompleted):
            self._complete(event)
        elif isinstance(event, job_events.CheckpointFailed):
            if (given_up := self._open.pop(event.checkpoint, None)) is not None:
                self._add_acks(given_up)
                self._end(given_up.span, event.at.wall_s, event.reason)
        elif isinstance(event, job_events.SubtaskCommitted):
            self._commit(event)
        elif isinstance(event, job_events.AttemptEnded):
            self._end_attempt(event)
        elif isinstance(event, job_events.AttemptRunning) and status.attempts:
            self._start(event, status.attempts[-1], status)

    # --- checkpoints ------------------------------------------------------------------------------

    def _complete(self, event: job_events.CheckpointCompleted) -> None:
        pending = self._open.get(event.checkpoint)
        if pending is None:
            return
        self._add_acks(pending)
        end_s = event.at.wall_s
        self._add("append", end_s - event.append_ms / 1000, end_s, pending.context)
        self._end(pending.span, end_s)
        pending.decided = event.at
        subtasks = [subtask for _, subtask, _ in pending.acks]
        # With thousands of subtasks, a span per commit is more than people read and collectors
        # accept.
        pending.uncommitted = set(subtasks if len(subtasks) <= self._subtasks_max else [])
        for number in [number for number in self._open if number < event.checkpoint]:
            if self._open[number].decided is None:
                # A newer decision includes the rows of this checkpoint.
                self._end(self._open.pop(number).span, end_s, "a newer checkpoint is decided")
        if not pending.uncommitted:
            del self._open[event.checkpoint]

    def _add_acks(self, pending: _OpenCheckpoint) -> None:
        acks = pending.acks
        if len(acks) > self._subtasks_max:
            acks = acks[-1:]  # The one that acked last, for which the checkpoint has waited.
        begin_s = pending.triggered.wall_s
        for at, subtask, timings in acks:
            attributes = {
                "onceflow.subtask": str(subtask),
                "onceflow.state.size_bytes": timings.size_bytes,
                "onceflow.state.uploaded_bytes": timings.uploaded_bytes,
                "onceflow.checkpoint.unaligned": timings.overtaken,
            }
            span, context = self._begin(str(subtask), begin_s, pending.context, attributes)
            # The parts follow one another. If a slot's clock differs from the driver's, only this
            # subtask's spans are shifted.
            part_s = begin_s
            for name, duration_ms in (
                ("start_delay", timings.start_delay_ms),
                ("alignment", timings.alignment_ms),
                ("synchronous", timings.sync_ms),
                ("upload", timings.async_ms),
            ):
                self._add(name, part_s, part_s + duration_ms / 1000, context)
                part_s += duration_ms / 1000
            self._end(span, at.wall_s)

    def _commit(self, event: job_events.SubtaskCommitted) -> None:
        for number in [number for number in self._open if number <= event.checkpoint]:
            decided = self._open[number]
            if decided.decided is None or event.subtask not in decided.uncommitted:
                continue
            name, begin_s = f"commit {event.subtask}", decided.decided.wall_s
            self._add(name, begin_s, event.at.wall_s, decided.context)
            decided.uncommitted.discard(event.subtask)
            if not decided.uncommitted:
                del self._open[number]

    # --- attempts ---------------------------------------------------------------------------------

    def _end_attempt(self, event: job_events.AttemptEnded) -> None:
        for pending in self._open.values():
            if pending.decided is None:
                self._end(pending.span, event.at.wall_s, "the attempt has ended")
        self._open.clear()
        self._failed = event if event.error else None

    def _start(
        self, event: job_events.AttemptRunning, stats: AttemptStats, status: JobStatus
    ) -> None:
        parent = restart = None
        if (failed := self._failed) is not None:
            attributes = {"onceflow.error": failed.error, **_describe(status)}
            restart, parent = self._begin("restart", failed.at.wall_s, None, attributes)
            self._failed = None
        name = f"start of attempt {stats.attempt}"
        attributes = {
            "onceflow.restored_checkpoint": stats.restored_checkpoint,
            "onceflow.recovery.committed": stats.committed,
            "onceflow.recovery.aborted": stats.aborted,
            **_describe(status),
        }
        begin_s = stats.began_at_s
        span, context = self._begin(name, begin_s, parent, attributes)
        for step, from_s, to_s in _list_steps(stats):
            self._add(step, begin_s + from_s, begin_s + to_s, context)
        self._end(span, event.at.wall_s)
        if restart is not None:
            self._end(restart, event.at.wall_s)

    # --- steps ------------------------------------------------------------------------------------

    def _begin(
        self, name: str, begin_s: float, parent: Any, attributes: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        from opentelemetry import context, trace

        # A program may have set the context of this thread, so it is not used.
        around = context.Context() if parent is None else parent
        span: Any = self._tracer.start_span(
            name, around, attributes=attributes, start_time=_to_ns(begin_s)
        )
        return span, trace.set_span_in_context(span, context.Context())

    def _add(self, name: str, begin_s: float, end_s: float, parent: Any) -> None:
        span, _ = self._begin(name, begin_s, parent, {})
        self._end(span, max(begin_s, end_s))

    def _end(self, span: Any, end_s: float, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if error:
            span.set_status(Status(StatusCode.ERROR, error[:1_000]))
        span.end(_to_ns(end_s))


def _list_steps(stats: AttemptStats) -> Iterator[tuple[str, float, float]]:
    """Yield the name, begin and end of each step of a start, in seconds since the attempt began.

    The steps "recover sinks" and "start slots" overlap: both run at the same time.
    """
    if stats.slots_ended_s:
        yield "slots end", 0.0, stats.slots_ended_s
    yield "claim the job", stats.slots_ended_s, stats.claimed_s
    yield "recover sinks", stats.claimed_s, stats.recovered_s
    yield "start slots", stats.claimed_s, stats.slots_up_s
    yield "deploy", max(stats.recovered_s, stats.slots_up_s), stats.deployed_s
    yield "restore", stats.deployed_s, stats.running_s


def _describe(status: JobStatus, checkpoint: int | None = None) -> dict[str, Any]:
    described: dict[str, Any] = {"onceflow.job": status.job, "onceflow.attempt": status.attempt}
    return described if checkpoint is None else described | {"onceflow.checkpoint": checkpoint}


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)


# --- metrics -------------------------------------------------------------------------------------


def to_otlp(measured: Measured, resource: Any, began_ns: int) -> Any:
    """Convert `measured` for the SDK's exporter, as cumulative values since `began_ns`."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    now_ns = time.time_ns()
    metrics = [
        _to_metric(family, dict(measured.labels), began_ns, now_ns)
        for family in measured.families
        if family.samples
    ]
    scope = ScopeMetrics(InstrumentationScope("onceflow", VERSION), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _to_metric(family: Family, common: dict[str, str], began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        Metric,
        Sum,
    )

    metric = family.metric
    points = [
        _to_point(common | _name_labels(metric.labels, labels), value, began_ns, now_ns)
        for labels, value in family.samples
    ]
    cumulative = AggregationTemporality.CUMULATIVE
    data: Any
    if metric.type is MetricType.COUNTER:
        data = Sum(points, cumulative, is_monotonic=True)
    elif metric.type is MetricType.HISTOGRAM:
        data = Histogram(points, cumulative)
    else:
        data = Gauge(points)
    # OpenTelemetry requires UCUM's units; units of counted things are written in braces.
    unit = {"seconds": "s", "bytes": "By"}.get(metric.unit, f"{{{metric.unit}}}")
    return Metric(metric.name.removesuffix("_total"), metric.help, unit, data)


def _name_labels(names: Iterable[str], values: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in zip(names, values, strict=True) if value}


def _to_point(attributes: dict[str, str], value: Value, began_ns: int, now_ns: int) -> Any:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, NumberDataPoint

    if not isinstance(value, HistogramValue):
        return NumberDataPoint(attributes, began_ns, now_ns, value)
    # The smallest and the largest value are unknown: None leaves these fields out.
    unknown: Any = None
    return HistogramDataPoint(
        attributes,
        began_ns,
        now_ns,
        value.count,
        value.total,
        value.counts,
        [bound for bound in value.bounds if math.isfinite(bound)],
        unknown,
        unknown,
    )


# --- sending -------------------------------------------------------------------------------------


class TelemetrySender:
    """Sends one job's spans and metrics, from `start` to `close`."""

    def __init__(
        self,
        job: str,
        settings: OpenTelemetry,
        subtasks_max: int,
        measure: Callable[[], Measured],
    ) -> None:
        """Set up the sender; nothing is sent yet.

        Raises:
            MissingExtra: The SDK is not installed.
        """
        with naming_extras():
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        base = str(settings.endpoint).rstrip("/")
        self._job = job
        self._measure = measure
        self._interval_s = settings.parse_interval_s()
        self._began_ns = time.time_ns()
        instance = f"{socket.gethostname()}:{os.getpid()}"
        # The resource also has the attributes of OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.
        self._resource: Any = Resource.create(
            {"onceflow.job": job, "service.instance.id": instance}
            | ({} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "onceflow"})
        )
        self._provider: Any = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        spans = OTLPSpanExporter(f"{base}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(spans, SPANS_WAITING_MAX, schedule_delay_millis=1_000)
        )
        self._metrics: Any = OTLPMetricExporter(f"{base}/v1/metrics", timeout=EXPORT_TIMEOUT_S)
        self.traces = JobTraces(self._provider.get_tracer("onceflow", VERSION), subtasks_max)
        """The listener that creates spans."""
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"telemetry of job {job}", daemon=True
        )

    def start(self) -> None:
        """Start sending metrics; each span is sent when it ends. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Send the remaining data, for at most END_TIMEOUT_S. Data that is unsent then is lost."""
        if self._closing.is_set() or self._thread.ident is None:
            return
        self._closing.set()
        self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("job %s: the collector is slow, so the last telemetry is lost", self._job)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._send_metrics()
        # Spans first: the last metrics repeat earlier ones, but each span is sent only once.
        self._provider.shutdown()
        self._send_metrics()
        self._metrics.shutdown(timeout_millis=0)

    def _send_metrics(self) -> None:
        try:
            self._metrics.export(to_otlp(self._measure(), self._resource, self._began_ns))
        except Exception as error:
            _log.warning("job %s: metrics are not sent: %s", self._job, error)
