"""All that is told of one job: its status, its listeners, what it measures, and whether it is well.

One object, so that the driver publishes an event once, and knows none of those who take it.
"""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.core.json_logs import configure_logs
from onceflow.core.protocol.checkpoints.coordinator import CheckpointSettings
from onceflow.core.runtime.driver.health import Health, JobHealth
from onceflow.core.runtime.driver.metrics_server import ShownJob, ShownMetrics
from onceflow.core.runtime.events.event_log import is_event_log_on, log_event
from onceflow.core.runtime.events.job_events import JobEvent
from onceflow.core.runtime.events.listeners import JobListener, StatusTracker
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.metrics.exposition import Measured, require_prometheus
from onceflow.core.runtime.metrics.job_metrics import JobMetrics, SeriesLimits
from onceflow.core.settings.pipeline_settings import Logging, Metrics, RuntimeSettings


class Observation:
    """What is told of one job. Any thread."""

    def __init__(
        self,
        job: str,
        listeners: Sequence[JobListener],
        checkpointing: CheckpointSettings,
        runtime: RuntimeSettings,
        metrics: Metrics,
        logs: Logging,
    ) -> None:
        """Begin to observe; nothing is shown yet.

        Raises:
            ConfigError: Metrics are to be shown, and what writes them is not installed.
        """
        if metrics.prometheus_bind is not None:
            require_prometheus()
        configure_logs(logs)
        self._job = job
        limits = SeriesLimits(metrics.subtasks_max, metrics.splits_max)
        self._metrics = JobMetrics(checkpointing.interval_s, limits)
        self._health = JobHealth(checkpointing, runtime, metrics.unhealthy_after_intervals)
        listeners = (*listeners, log_event) if is_event_log_on() else listeners
        self.tracker = StatusTracker(job, listeners, self._count)
        """Takes the events."""
        self._shown = ShownMetrics(metrics, job, ShownJob(self.measure, self.judge_health))
        self.promise = self._health.promise
        """Says within how many seconds the job's thread turns again."""
        self.show, self.hide = self._shown.show, self._shown.hide
        """Begin and end to answer at the address of metrics."""

    def measure(self) -> Measured:
        """Return what the job has measured up to now."""
        return Measured.of_job(self._job, self._metrics.collect())

    def judge_health(self) -> Health:
        """Return whether the job gets on, and whether it runs."""
        return self._health.judge(self.tracker.status)

    def _count(self, event: JobEvent, status: JobStatus) -> None:
        self._metrics.on_event(event, status)
        self._health.on_event(event)
