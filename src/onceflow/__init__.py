"""Exactly-once connectors for PySpark: Kafka in, keyed state, Postgres and MySQL out."""

from __future__ import annotations

from onceflow.core.config import Checkpointing, Delivery, RuntimeSettings, TlsFiles
from onceflow.core.dead_letters import DEAD_LETTERS
from onceflow.core.errors import OnceflowError
from onceflow.core.functions import (
    Aggregate,
    KeyedFunction,
    Record,
    StateAccess,
    count,
    max_,
    min_,
    sum_,
)
from onceflow.core.pipeline import Job, Pipeline
from onceflow.core.protocol.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
)
from onceflow.core.runtime.cluster.local_processes import LocalProcesses
from onceflow.core.runtime.driver.status import CheckpointStats, JobState, JobStatus, SinkStatus
from onceflow.core.state import (
    HeapBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    RocksDBBackend,
    ValueStateDescriptor,
)
from onceflow.core.storage import FileSystemStorage
from onceflow.core.stream import KeyedStream, Stream
from onceflow.core.version import VERSION as _VERSION

__version__ = _VERSION

__all__ = [
    "DEAD_LETTERS",
    "Aggregate",
    "CheckpointStats",
    "Checkpointing",
    "Delivery",
    "ExponentialDelay",
    "FailureRate",
    "FileSystemStorage",
    "FixedDelay",
    "HeapBackend",
    "Job",
    "JobState",
    "JobStatus",
    "KeyedFunction",
    "KeyedStream",
    "ListStateDescriptor",
    "LocalProcesses",
    "MapStateDescriptor",
    "NoRestart",
    "OnceflowError",
    "Pipeline",
    "Record",
    "RocksDBBackend",
    "RuntimeSettings",
    "SinkStatus",
    "StateAccess",
    "Stream",
    "TlsFiles",
    "ValueStateDescriptor",
    "__version__",
    "count",
    "max_",
    "min_",
    "sum_",
]
