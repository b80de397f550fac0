"""Exactly-once connectors for PySpark: Kafka in, keyed state, Postgres and MySQL out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.lazy_names import lazy_names
from onceflow.core.version import VERSION as _VERSION

if TYPE_CHECKING:
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
    from onceflow.core.protocol.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart
    from onceflow.core.runtime.cluster.local_processes import LocalProcesses
    from onceflow.core.runtime.driver.status import CheckpointStats, JobState, JobStatus, SinkStatus
    from onceflow.core.state import (
        HeapBackend,
        ListState,
        ListStateDescriptor,
        MapState,
        MapStateDescriptor,
        RocksDBBackend,
        Serializer,
        StateBackend,
        ValueState,
        ValueStateDescriptor,
    )
    from onceflow.core.storage import FileSystemStorage
    from onceflow.core.stream import KeyedStream, Stream
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.core.config": "Checkpointing Delivery RuntimeSettings TlsFiles",
            "onceflow.core.dead_letters": "DEAD_LETTERS",
            "onceflow.core.errors": "OnceflowError",
            "onceflow.core.functions": (
                "Aggregate KeyedFunction Record StateAccess count max_ min_ sum_"
            ),
            "onceflow.core.pipeline": "Job Pipeline",
            "onceflow.core.protocol.restart": "ExponentialDelay FailureRate FixedDelay NoRestart",
            "onceflow.core.runtime.cluster.local_processes": "LocalProcesses",
            "onceflow.core.runtime.driver.status": "CheckpointStats JobState JobStatus SinkStatus",
            "onceflow.core.state": (
                "HeapBackend ListState ListStateDescriptor MapState MapStateDescriptor"
                " RocksDBBackend Serializer StateBackend ValueState ValueStateDescriptor"
            ),
            "onceflow.core.storage": "FileSystemStorage",
            "onceflow.core.stream": "KeyedStream Stream",
        },
    )

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
    "ListState",
    "ListStateDescriptor",
    "LocalProcesses",
    "MapState",
    "MapStateDescriptor",
    "NoRestart",
    "OnceflowError",
    "Pipeline",
    "Record",
    "RocksDBBackend",
    "RuntimeSettings",
    "Serializer",
    "SinkStatus",
    "StateAccess",
    "StateBackend",
    "Stream",
    "TlsFiles",
    "ValueState",
    "ValueStateDescriptor",
    "__version__",
    "count",
    "max_",
    "min_",
    "sum_",
]
