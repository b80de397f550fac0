"""Exactly-once connectors for PySpark: Kafka in, keyed state, databases and tables out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.imports import lazy_names
from onceflow.core.version import VERSION as _VERSION

if TYPE_CHECKING:
    from onceflow.connectors.spark.session import session
    from onceflow.core.api.connected_streams import (
        BroadcastConnectedStream,
        BroadcastStream,
        KeyedConnectedStreams,
        WindowedConnectedStreams,
    )
    from onceflow.core.api.joined_streams import IntervalJoin, JoinedStreams
    from onceflow.core.api.pipeline import Job, Pipeline
    from onceflow.core.api.stream import ConnectedStreams, KeyedStream, Stream
    from onceflow.core.api.windowed_stream import (
        AllWindowedStream,
        CountWindowedStream,
        PerWindowStream,
        WindowedStream,
    )
    from onceflow.core.errors import OnceflowError
    from onceflow.core.plan.aggregates import (
        Aggregate,
        avg,
        count,
        count_distinct,
        first,
        last,
        max_,
        min_,
        sum_,
    )
    from onceflow.core.plan.async_functions import AsyncFunction, CallRetries
    from onceflow.core.plan.event_time import WatermarkStrategy
    from onceflow.core.plan.function_metrics import (
        FunctionCounter,
        FunctionGauge,
        FunctionHistogram,
        MetricsAccess,
    )
    from onceflow.core.plan.functions import (
        BatchStates,
        KeyedBatchFunction,
        KeyedFunction,
        OperatorAccess,
        OutputTag,
        Record,
        SideOutput,
        StateAccess,
    )
    from onceflow.core.plan.join_functions import ProcessJoinFunction
    from onceflow.core.plan.process_functions import (
        BroadcastAccess,
        BroadcastProcessFunction,
        CoProcessFunction,
        ProcessFunction,
    )
    from onceflow.core.plan.sql_functions import SqlFunction
    from onceflow.core.plan.window_batches import CoGroupBatch, CoGroupBatchFunction, WindowRows
    from onceflow.core.plan.window_functions import (
        CoGroupFunction,
        ProcessWindowFunction,
        TimeWindow,
    )
    from onceflow.core.plan.windows import (
        EventTimeSessionWindows,
        SlidingEventTimeWindows,
        TumblingEventTimeWindows,
        TumblingProcessingTimeWindows,
    )
    from onceflow.core.plan.work import Order, desc
    from onceflow.core.protocol.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart
    from onceflow.core.runtime.cluster.local_processes import LocalProcesses
    from onceflow.core.runtime.events.job_events import (
        AttemptBegan,
        AttemptEnded,
        AttemptRunning,
        CheckpointAcked,
        CheckpointCommitted,
        CheckpointCompleted,
        CheckpointFailed,
        CheckpointTriggered,
        EventsDropped,
        JobEnded,
        JobEvent,
        JobRestarting,
        JobStarted,
        JobState,
        LagMeasured,
        LeftoversAborted,
        Moment,
        RecoveredSink,
        SavepointCompleted,
        SavepointRestored,
        SinkBlocked,
        SinksRecovered,
        SlotJoined,
        SlotLeft,
        SlotReported,
        SlotsDeployed,
        SlotsJoined,
        SplitsDiscovered,
        StateDropped,
        SubtaskCommitted,
    )
    from onceflow.core.runtime.events.listeners import JobListener
    from onceflow.core.runtime.events.status import (
        AttemptStats,
        CheckpointFailure,
        CheckpointStats,
        JobStatus,
        PendingCheckpoint,
        SavepointStats,
        SlotStatus,
        SubtaskCheckpointStats,
    )
    from onceflow.core.runtime.events.status_parts import SinkStatus
    from onceflow.core.settings.configuration import Configuration
    from onceflow.core.settings.pipeline_settings import (
        Checkpointing,
        Delivery,
        Endpoint,
        Metrics,
        RuntimeSettings,
        TlsFiles,
    )
    from onceflow.core.spi.dead_letters import DEAD_LETTERS
    from onceflow.core.state import (
        AggregateFunction,
        AggregatingState,
        AggregatingStateDescriptor,
        BatchTimers,
        BatchValueState,
        HeapBackend,
        KeyedBatch,
        ListState,
        ListStateDescriptor,
        MapState,
        MapStateDescriptor,
        Namespace,
        RawKeyedState,
        ReducingState,
        ReducingStateDescriptor,
        RocksDBBackend,
        Serializer,
        StateBackend,
        StateTtlConfig,
        Timer,
        Timers,
        ValueState,
        ValueStateDescriptor,
    )
    from onceflow.core.storage import (
        FileSystemStorage,
        HdfsStorage,
        MemoryStorage,
        ObjectStorage,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.connectors.spark.session": "session",
            "onceflow.core.api.connected_streams": (
                "BroadcastConnectedStream BroadcastStream KeyedConnectedStreams "
                "WindowedConnectedStreams"
            ),
            "onceflow.core.settings.pipeline_settings": (
                "Checkpointing Delivery Endpoint Metrics RuntimeSettings TlsFiles"
            ),
            "onceflow.core.settings.configuration": "Configuration",
            "onceflow.core.spi.dead_letters": "DEAD_LETTERS",
            "onceflow.core.errors": "OnceflowError",
            "onceflow.core.plan.aggregates": (
                "Aggregate avg count count_distinct first last max_ min_ sum_"
            ),
            "onceflow.core.plan.work": "Order desc",
            "onceflow.core.plan.async_functions": "AsyncFunction CallRetries",
            "onceflow.core.plan.event_time": "WatermarkStrategy",
            "onceflow.core.plan.function_metrics": (
                "FunctionCounter FunctionGauge FunctionHistogram MetricsAccess"
            ),
            "onceflow.core.plan.functions": (
                "BatchStates KeyedBatchFunction KeyedFunction OperatorAccess OutputTag Record "
                "SideOutput StateAccess"
            ),
            "onceflow.core.plan.join_functions": "ProcessJoinFunction",
            "onceflow.core.api.joined_streams": "IntervalJoin JoinedStreams",
            "onceflow.core.api.pipeline": "Job Pipeline",
            "onceflow.core.plan.process_functions": (
                "BroadcastAccess BroadcastProcessFunction CoProcessFunction ProcessFunction"
            ),
            "onceflow.core.protocol.restart": "ExponentialDelay FailureRate FixedDelay NoRestart",
            "onceflow.core.runtime.cluster.local_processes": "LocalProcesses",
            "onceflow.core.runtime.events.job_events": (
                "AttemptBegan AttemptEnded AttemptRunning CheckpointAcked CheckpointCommitted "
                "CheckpointCompleted CheckpointFailed CheckpointTriggered EventsDropped "
                "JobEnded JobEvent JobRestarting JobStarted JobState LagMeasured "
                "LeftoversAborted Moment RecoveredSink SavepointCompleted SavepointRestored "
                "SinkBlocked SinksRecovered SlotJoined SlotLeft SlotReported SlotsDeployed "
                "SlotsJoined SplitsDiscovered StateDropped SubtaskCommitted"
            ),
            "onceflow.core.runtime.events.listeners": "JobListener",
            "onceflow.core.runtime.events.status_parts": "SinkStatus",
            "onceflow.core.runtime.events.status": (
                "AttemptStats CheckpointFailure CheckpointStats JobStatus PendingCheckpoint "
                "SavepointStats SlotStatus SubtaskCheckpointStats"
            ),
            "onceflow.core.state": (
                "AggregateFunction AggregatingState AggregatingStateDescriptor BatchTimers "
                "BatchValueState HeapBackend KeyedBatch ListState ListStateDescriptor MapState "
                "MapStateDescriptor Namespace RawKeyedState ReducingState "
                "ReducingStateDescriptor RocksDBBackend Serializer StateBackend StateTtlConfig "
                "Timer Timers ValueState ValueStateDescriptor"
            ),
            "onceflow.core.storage": "FileSystemStorage HdfsStorage MemoryStorage ObjectStorage",
            "onceflow.core.api.stream": "ConnectedStreams KeyedStream Stream",
            "onceflow.core.plan.sql_functions": "SqlFunction",
            "onceflow.core.plan.window_batches": "CoGroupBatch CoGroupBatchFunction WindowRows",
            "onceflow.core.plan.window_functions": (
                "CoGroupFunction ProcessWindowFunction TimeWindow"
            ),
            "onceflow.core.api.windowed_stream": (
                "AllWindowedStream CountWindowedStream PerWindowStream WindowedStream"
            ),
            "onceflow.core.plan.windows": (
                "EventTimeSessionWindows SlidingEventTimeWindows TumblingEventTimeWindows "
                "TumblingProcessingTimeWindows"
            ),
        },
    )

__version__ = _VERSION

__all__ = [
    "DEAD_LETTERS",
    "Aggregate",
    "AggregateFunction",
    "AggregatingState",
    "AggregatingStateDescriptor",
    "AllWindowedStream",
    "AsyncFunction",
    "AttemptBegan",
    "AttemptEnded",
    "AttemptRunning",
    "AttemptStats",
    "BatchStates",
    "BatchTimers",
    "BatchValueState",
    "BroadcastAccess",
    "BroadcastConnectedStream",
    "BroadcastProcessFunction",
    "BroadcastStream",
    "CallRetries",
    "CheckpointAcked",
    "CheckpointCommitted",
    "CheckpointCompleted",
    "CheckpointFailed",
    "CheckpointFailure",
    "CheckpointStats",
    "CheckpointTriggered",
    "Checkpointing",
    "CoGroupBatch",
    "CoGroupBatchFunction",
    "CoGroupFunction",
    "CoProcessFunction",
    "Configuration",
    "ConnectedStreams",
    "CountWindowedStream",
    "Delivery",
    "Endpoint",
    "EventTimeSessionWindows",
    "EventsDropped",
    "ExponentialDelay",
    "FailureRate",
    "FileSystemStorage",
    "FixedDelay",
    "FunctionCounter",
    "FunctionGauge",
    "FunctionHistogram",
    "HdfsStorage",
    "HeapBackend",
    "IntervalJoin",
    "Job",
    "JobEnded",
    "JobEvent",
    "JobListener",
    "JobRestarting",
    "JobStarted",
    "JobState",
    "JobStatus",
    "JoinedStreams",
    "KeyedBatch",
    "KeyedBatchFunction",
    "KeyedConnectedStreams",
    "KeyedFunction",
    "KeyedStream",
    "LagMeasured",
    "LeftoversAborted",
    "ListState",
    "ListStateDescriptor",
    "LocalProcesses",
    "MapState",
    "MapStateDescriptor",
    "MemoryStorage",
    "Metrics",
    "MetricsAccess",
    "Moment",
    "Namespace",
    "NoRestart",
    "ObjectStorage",
    "OnceflowError",
    "OperatorAccess",
    "Order",
    "OutputTag",
    "PendingCheckpoint",
    "PerWindowStream",
    "Pipeline",
    "ProcessFunction",
    "ProcessJoinFunction",
    "ProcessWindowFunction",
    "RawKeyedState",
    "Record",
    "RecoveredSink",
    "ReducingState",
    "ReducingStateDescriptor",
    "RocksDBBackend",
    "RuntimeSettings",
    "SavepointCompleted",
    "SavepointRestored",
    "SavepointStats",
    "Serializer",
    "SideOutput",
    "SinkBlocked",
    "SinkStatus",
    "SinksRecovered",
    "SlidingEventTimeWindows",
    "SlotJoined",
    "SlotLeft",
    "SlotReported",
    "SlotStatus",
    "SlotsDeployed",
    "SlotsJoined",
    "SplitsDiscovered",
    "SqlFunction",
    "StateAccess",
    "StateBackend",
    "StateDropped",
    "StateTtlConfig",
    "Stream",
    "SubtaskCheckpointStats",
    "SubtaskCommitted",
    "TimeWindow",
    "Timer",
    "Timers",
    "TlsFiles",
    "TumblingEventTimeWindows",
    "TumblingProcessingTimeWindows",
    "ValueState",
    "ValueStateDescriptor",
    "WatermarkStrategy",
    "WindowRows",
    "WindowedConnectedStreams",
    "WindowedStream",
    "__version__",
    "avg",
    "count",
    "count_distinct",
    "desc",
    "first",
    "last",
    "max_",
    "min_",
    "session",
    "sum_",
]
