"""The complete plan of a job, which a pipeline builds and passes to its job driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onceflow.core.plan.graph import Graph
from onceflow.core.protocol.restart import RestartStrategy
from onceflow.core.runtime.driver.savepoint_restore import RestoreFrom
from onceflow.core.runtime.events.listeners import JobListener
from onceflow.core.settings import pipeline_settings
from onceflow.core.settings.effective_settings import EffectiveSetting
from onceflow.core.spi import Sink
from onceflow.core.state import StateBackend


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The plan of a job: the user's pipeline and settings, checked and complete."""

    name: str
    graph: Graph
    parallelism: int
    max_parallelism: int | None
    """The number of key groups; None = that of the restored checkpoint, or a default by
    parallelism."""
    checkpointing: pipeline_settings.Checkpointing
    backend: StateBackend
    restart: RestartStrategy
    settings: pipeline_settings.RuntimeSettings
    retired_sinks: Mapping[str, Sink | None]
    """Sinks that are no longer written to, by sink id; None leaves their transactions as
    they are."""
    listeners: Sequence[JobListener]
    """The listeners that receive every event of the job."""
    allow_non_restored_state: bool
    """True if restored state without an operator is dropped; the start is refused otherwise."""
    endpoint: pipeline_settings.Endpoint | None = None
    """The settings of the HTTP endpoint; None if the job has none."""
    metrics: pipeline_settings.Metrics = field(default_factory=pipeline_settings.Metrics)
    """The address for Prometheus, in addition to the endpoint."""
    logging: pipeline_settings.Logging = field(default_factory=pipeline_settings.Logging)
    """The settings of the loggers of driver and slots."""
    telemetry: pipeline_settings.OpenTelemetry = field(
        default_factory=pipeline_settings.OpenTelemetry
    )
    """The address to which spans and metrics are sent."""
    restore: RestoreFrom | None = None
    """The savepoint to start from; None if there is none."""
    shown_settings: tuple[EffectiveSetting, ...] = ()
    """Every setting with its origin, for display."""
