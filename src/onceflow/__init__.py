"""Exactly-once connectors for PySpark: Kafka in, keyed state, Postgres and MySQL out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.lazy_names import lazy_names
from onceflow.core.version import VERSION as _VERSION

if TYPE_CHECKING:
    from onceflow.core.broadcast_stream import BroadcastStream
    from onceflow.core.config import Checkpointing, Delivery, Endpoint, RuntimeSettings, TlsFiles
    from onceflow.core.configuration import Configuration
    from onceflow.core.connected_streams import KeyedConnectedStreams, WindowedConnectedStreams
    from onceflow.core.dead_letters import DEAD_LETTERS
    from onceflow.core.errors import OnceflowError
    from onceflow.core.event_time import WatermarkStrategy
    from onceflow.core.functions import (
        Aggregate,
        BatchStates,
        KeyedBatchFunction,
        KeyedFunction,
        OperatorAccess,
        OutputTag,
        Record,
        SideOutput,
        StateAccess,
        avg,
        count,
        max_,
        min_,
        sum_,
    )
    from onceflow.core.join_functions import ProcessJoinFunction
    from onceflow.core.joined_streams import IntervalJoin, JoinedStreams
    from onceflow.core.pipeline import Job, Pipeline
    from onceflow.core.process_functions import (
        BroadcastAccess,
        BroadcastProcessFunction,
        CoProcessFunction,
        ProcessFunction,
    )
    from onceflow.core.protocol.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart
    from onceflow.core.runtime.cluster.local_processes import LocalProcesses
    from onceflow.core.runtime.driver.job_events import (
        AttemptBegan,
        AttemptEnded,
        AttemptRunning,
        CheckpointAcked,
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
    from onceflow.core.runtime.driver.listeners import JobListener
    from onceflow.core.runtime.driver.status import (
        AttemptStats,
        CheckpointFailure,
        CheckpointStats,
        JobStatus,
        PendingCheckpoint,
        SavepointStats,
        SinkStatus,
        SlotStatus,
        SubtaskCheckpointStats,
    )
    from onceflow.core.state import (
        AggregateFunction,
        AggregatingState,
        AggregatingStateDescriptor,
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
    from onceflow.core.stream import (
        BroadcastConnectedStream,
        ConnectedStreams,
        KeyedStream,
        Stream,
    )
    from onceflow.core.window_functions import CoGroupFunction, ProcessWindowFunction, TimeWindow
    from onceflow.core.windowed_stream import WindowedStream
    from onceflow.core.windows import (
        EventTimeSessionWindows,
        SlidingEventTimeWindows,
        TumblingEventTimeWindows,
        TumblingProcessingTimeWindows,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.core.broadcast_stream": "BroadcastStream",
            "onceflow.core.config": "Checkpointing Delivery Endpoint RuntimeSettings TlsFiles",
            "onceflow.core.configuration": "Configuration",
            "onceflow.core.connected_streams": "KeyedConnectedStreams WindowedConnectedStreams",
            "onceflow.core.dead_letters": "DEAD_LETTERS",
            "onceflow.core.errors": "OnceflowError",
            "onceflow.core.event_time": "WatermarkStrategy",
            "onceflow.core.functions": (
                "Aggregate BatchStates KeyedBatchFunction KeyedFunction OperatorAccess OutputTag"
                " Record SideOutput StateAccess avg count max_ min_ sum_"
            ),
            "onceflow.core.join_functions": "ProcessJoinFunction",
            "onceflow.core.joined_streams": "IntervalJoin JoinedStreams",
            "onceflow.core.pipeline": "Job Pipeline",
            "onceflow.core.process_functions": (
                "BroadcastAccess BroadcastProcessFunction CoProcessFunction ProcessFunction"
            ),
            "onceflow.core.protocol.restart": "ExponentialDelay FailureRate FixedDelay NoRestart",
            "onceflow.core.runtime.cluster.local_processes": "LocalProcesses",
            "onceflow.core.runtime.driver.job_events": (
                "AttemptBegan AttemptEnded AttemptRunning CheckpointAcked CheckpointCompleted"
                " CheckpointFailed CheckpointTriggered EventsDropped JobEnded JobEvent"
                " JobRestarting JobStarted JobState LeftoversAborted Moment RecoveredSink"
                " SavepointCompleted SavepointRestored SinkBlocked SinksRecovered SlotJoined"
                " SlotLeft SlotReported SlotsDeployed SlotsJoined SplitsDiscovered StateDropped"
                " SubtaskCommitted LagMeasured"
            ),
            "onceflow.core.runtime.driver.listeners": "JobListener",
            "onceflow.core.runtime.driver.status": (
                "AttemptStats CheckpointFailure CheckpointStats JobStatus PendingCheckpoint"
                " SavepointStats SinkStatus SlotStatus SubtaskCheckpointStats"
            ),
            "onceflow.core.state": (
                "AggregateFunction AggregatingState AggregatingStateDescriptor"
                " BatchValueState HeapBackend KeyedBatch ListState ListStateDescriptor MapState"
                " MapStateDescriptor Namespace RawKeyedState ReducingState"
                " ReducingStateDescriptor RocksDBBackend Serializer StateBackend StateTtlConfig"
                " Timer Timers ValueState ValueStateDescriptor"
            ),
            "onceflow.core.storage": "FileSystemStorage HdfsStorage MemoryStorage ObjectStorage",
            "onceflow.core.stream": (
                "BroadcastConnectedStream ConnectedStreams KeyedStream Stream"
            ),
            "onceflow.core.window_functions": "CoGroupFunction ProcessWindowFunction TimeWindow",
            "onceflow.core.windowed_stream": "WindowedStream",
            "onceflow.core.windows": (
                "EventTimeSessionWindows SlidingEventTimeWindows TumblingEventTimeWindows"
                " TumblingProcessingTimeWindows"
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
    "AttemptBegan",
    "AttemptEnded",
    "AttemptRunning",
    "AttemptStats",
    "BatchStates",
    "BatchValueState",
    "BroadcastAccess",
    "BroadcastConnectedStream",
    "BroadcastProcessFunction",
    "BroadcastStream",
    "CheckpointAcked",
    "CheckpointCompleted",
    "CheckpointFailed",
    "CheckpointFailure",
    "CheckpointStats",
    "CheckpointTriggered",
    "Checkpointing",
    "CoGroupFunction",
    "CoProcessFunction",
    "Configuration",
    "ConnectedStreams",
    "Delivery",
    "Endpoint",
    "EventTimeSessionWindows",
    "EventsDropped",
    "ExponentialDelay",
    "FailureRate",
    "FileSystemStorage",
    "FixedDelay",
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
    "Moment",
    "Namespace",
    "NoRestart",
    "ObjectStorage",
    "OnceflowError",
    "OperatorAccess",
    "OutputTag",
    "PendingCheckpoint",
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
    "WindowedConnectedStreams",
    "WindowedStream",
    "__version__",
    "avg",
    "count",
    "max_",
    "min_",
    "sum_",
]
