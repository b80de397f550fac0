"""The observation of one job: its status, listeners, metrics and health, and the record of its run.

The driver publishes each event to this object once, and does not know who receives it.

The state of the run is written into checkpoint storage in the background.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from onceflow.core.errors import OnceflowError
from onceflow.core.imports import require_package
from onceflow.core.plan.graph import Graph
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.runtime.driver.background import Background
from onceflow.core.runtime.driver.health import Health, JobHealth
from onceflow.core.runtime.driver.metrics_server import ShownJob, ShownMetrics
from onceflow.core.runtime.events.event_log import is_event_log_on, log_event
from onceflow.core.runtime.events.job_events import JobEvent, JobState
from onceflow.core.runtime.events.listeners import JobListener, StatusTracker
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.json_logs import configure_logs
from onceflow.core.runtime.metrics.commit_latency import SinkInputs
from onceflow.core.runtime.metrics.exposition import Measured
from onceflow.core.runtime.metrics.job_metrics import JobMetrics, SeriesLimits
from onceflow.core.runtime.metrics.open_telemetry import TelemetrySender
from onceflow.core.settings import pipeline_settings
from onceflow.core.spi import CommittedBy
from onceflow.core.storage import JobStorage
from onceflow.core.storage.log.driver_files import ERROR_LENGTH_MAX, LastRun

END_TIMEOUT_S = 10.0
"""The time in seconds that an ended job waits until storage has the record. It ends in any case."""

_log = logging.getLogger("onceflow.runtime.driver")


@dataclass(slots=True)
class RunRecorder:
    """The record of one driver's run. Called by the job's own thread; errors never fail the job."""

    storage: JobStorage
    _run: LastRun | None = None
    _writer: Background = field(default_factory=lambda: Background("last run"))

    def begin(self) -> None:
        """Write, in the background, that this driver owns the job. Idempotent."""
        if self._run is None:
            self._run = run = LastRun(
                run=secrets.token_hex(8),
                state=JobState.RUNNING.value,
                host=socket.gethostname(),
                pid=os.getpid(),
                began_ms=int(time.time() * 1000),
            )
            self._writer.submit(lambda: self._write(run))

    def end(self, state: JobState, attempt: int, error: str) -> None:
        """Write how the job ended. Returns when that is written, or after a timeout.

        A driver that never owned the job writes nothing.
        """
        run = self._run
        if run is not None:
            run = msgspec.structs.replace(
                run,
                state=state.value,
                ended_ms=int(time.time() * 1000),
                attempt=attempt,
                error=error[:ERROR_LENGTH_MAX],
            )
            ended = run
            self._writer.submit(lambda: self._write(ended))
            if not self._writer.finish(END_TIMEOUT_S):
                _log.warning("the end of the job is not recorded in %s yet", self.storage)
        self._writer.end(lambda: None, 0)

    def _write(self, run: LastRun) -> None:
        try:
            if run.ended_ms:
                self.storage.last_run.end(run)
            else:
                self.storage.last_run.begin(run)
        except OnceflowError as error:
            _log.warning("the state of the job cannot be written into %s: %s", self.storage, error)


class Observation:
    """The status, metrics and health of one job. Any thread."""

    def __init__(
        self,
        job: str,
        graph: Graph,
        listeners: Sequence[JobListener],
        checkpointing: CheckpointSettings,
        runtime: pipeline_settings.RuntimeSettings,
        metrics: pipeline_settings.Metrics,
        logs: pipeline_settings.Logging,
        telemetry: pipeline_settings.OpenTelemetry,
    ) -> None:
        """Set up the observation; nothing is shown yet.

        Raises:
            ConfigError: The settings turn on metrics or spans, and the package for them is not
                installed.
        """
        if metrics.prometheus_bind is not None:
            require_package("prometheus_client")
        configure_logs(logs)
        self._job = job
        limits = SeriesLimits(metrics.subtasks_max, metrics.splits_max)
        self._metrics = JobMetrics(checkpointing.interval_s, limits, _find_sinks(graph))
        self._health = JobHealth(checkpointing, runtime, metrics.unhealthy_after_intervals)
        self._sender = (
            None
            if telemetry.endpoint is None
            else TelemetrySender(job, telemetry, metrics.subtasks_max, self.measure)
        )
        if self._sender is not None:
            listeners = (*listeners, self._sender.traces.on_event)
        if is_event_log_on():
            listeners = (*listeners, log_event)
        self.tracker = StatusTracker(job, listeners, self._count)
        """Receives the events."""
        self._shown = ShownMetrics(metrics, job, ShownJob(self.measure, self.judge_health))
        self.promise = self._health.promise
        """Promises that the job's thread runs its loop again within the given seconds."""
        self.read_latencies = self._metrics.read_latencies
        """Returns, by sink, the recent latency until records became visible."""
        self.retain = self._metrics.retain
        """Takes the checkpoints that the log retains now."""

    def show(self) -> None:
        """Start answering at the metrics address, and start sending. Idempotent."""
        self._shown.show()
        if self._sender is not None:
            self._sender.start()

    def hide(self) -> None:
        """Stop answering and sending. Waits at most a few seconds."""
        self._shown.hide()
        if self._sender is not None:
            self._sender.close()

    def measure(self) -> Measured:
        """Return the job's metrics up to now."""
        return Measured.of_job(self._job, self._metrics.collect())

    def judge_health(self) -> Health:
        """Return the job's health: whether it makes progress, and whether it runs."""
        return self._health.judge(self.tracker.status)

    def _count(self, event: JobEvent, status: JobStatus) -> None:
        self._metrics.on_event(event, status)
        self._health.on_event(event)


def _find_sinks(graph: Graph) -> tuple[SinkInputs, ...]:
    """Return every sink of rows that come from records, which excludes dead-letter sinks."""
    home = {operator.uid: chain.id for chain in graph.chains() for operator in chain.operators}
    return tuple(
        SinkInputs(
            operator.uid,
            home[operator.uid],
            graph.sources_of(operator.uid),
            committed_by_driver=work.sink.committed_by is CommittedBy.DRIVER,
        )
        for operator, work in graph.sinks()
        if not work.takes_dead_letters
    )
