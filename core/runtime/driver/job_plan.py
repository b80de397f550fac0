"""What a pipeline gives its job driver: all that the user has written, checked and complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onceflow.core.api.graph import Graph
from onceflow.core.protocol.restart import RestartStrategy
from onceflow.core.runtime.driver.savepoint_restore import RestoreFrom
from onceflow.core.runtime.events.listeners import JobListener
from onceflow.core.settings.effective_settings import EffectiveSetting
from onceflow.core.settings.pipeline_settings import (
    Checkpointing,
    Endpoint,
    Logging,
    Metrics,
    OpenTelemetry,
    RuntimeSettings,
)
from onceflow.core.spi import Sink
from onceflow.core.state import StateBackend


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What a pipeline asks for, checked and complete."""

    name: str
    graph: Graph
    parallelism: int
    max_parallelism: int | None
    """Number of key groups; None = that of the restored checkpoint, or a default by parallelism."""
    checkpointing: Checkpointing
    backend: StateBackend
    restart: RestartStrategy
    settings: RuntimeSettings
    retired_sinks: Mapping[str, Sink | None]
    """Sinks that write no more, by sink id; None where transactions are left as they are."""
    listeners: Sequence[JobListener]
    """Told of every event of the job."""
    allow_non_restored_state: bool
    """Whether restored state that no operator takes is dropped; it is refused otherwise."""
    endpoint: Endpoint | None = None
    """Where the job can be asked; None: nowhere."""
    metrics: Metrics = field(default_factory=Metrics)
    """Where Prometheus finds what the job measures, besides the endpoint."""
    logging: Logging = field(default_factory=Logging)
    """What driver and slots do about their loggers."""
    telemetry: OpenTelemetry = field(default_factory=OpenTelemetry)
    """Where spans and metrics are sent."""
    restore: RestoreFrom | None = None
    """The savepoint that the job is to begin from."""
    shown_settings: tuple[EffectiveSetting, ...] = ()
    """Every setting with its origin, for people."""
