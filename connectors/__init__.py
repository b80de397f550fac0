"""The public names of connectors: Spark formats, and the contracts for sources and sinks.

`register` and `data_source` create formats of Spark. The other names are contracts, their values
and their errors. This layer may import all others. Each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.imports import lazy_names

if TYPE_CHECKING:
    from onceflow.connectors.catalog import SINKS, SOURCES, STATE_BACKENDS, ConnectorCatalog
    from onceflow.connectors.spark.formats import data_source, register
    from onceflow.connectors.spark.streaming.foreach_batch import foreach_batch
    from onceflow.connectors.spark.streaming.query_events import QueryEvents
    from onceflow.core.commit.by_hand import (
        ContradictsLog,
        InDoubtTransaction,
        InDoubtTransactions,
        SinkResourceManager,
    )
    from onceflow.core.crash_points import reach
    from onceflow.core.errors import (
        BadRecord,
        BadRow,
        ConfigError,
        Fenced,
        OffsetOutOfRange,
        PreCommitFailed,
        SinkError,
        SourceError,
        SourceUnavailable,
        StateIncompatible,
        StorageError,
        TargetRefused,
    )
    from onceflow.core.protocol.committables import (
        Aborted,
        AbortOutcome,
        AlreadyCommitted,
        CommitInterval,
        CommitOutcome,
        Committable,
        Committed,
        Lost,
        RetryLater,
        Unknown,
    )
    from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
    from onceflow.core.protocol.log.target_records import (
        InDoubtStatus,
        LogFacts,
        LoggedDecision,
        RecoveryAction,
        Resolution,
        TargetRecord,
        to_record,
    )
    from onceflow.core.secret_references import follow_references
    from onceflow.core.spi import (
        CommittedBy,
        Committer,
        CommitterContext,
        CopyProgress,
        EndOfInput,
        GlobalCommitter,
        OnBadRow,
        Outage,
        OutputBatch,
        PolledRows,
        ReaderContext,
        RejectedRows,
        Sink,
        SinkWriter,
        Source,
        SourceProgress,
        SourceReader,
        SourceWarning,
        Split,
        SplitOffsets,
        TransactionNamer,
        WriterContext,
    )
    from onceflow.core.spi.connector import (
        Area,
        Diagnosis,
        Finding,
        Level,
        Questions,
        ResourceManager,
        ServerAccess,
        SinkConnector,
        SourceConnector,
    )
    from onceflow.core.spi.dead_letters import DeadLetter
    from onceflow.core.spi.lookups import LookupReader, LookupSource
    from onceflow.core.spi.options import OptionRules, OptionValue
    from onceflow.core.spi.staging import StagedRows, StagingArea, make_staged_committable
    from onceflow.sinks.base.staged import StagedSink
    from onceflow.sinks.files.checkpoint_files import (
        CheckpointFiles,
        claim_in_files,
        record_in_files,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.connectors.catalog": "ConnectorCatalog SINKS SOURCES STATE_BACKENDS",
            "onceflow.connectors.spark.streaming.foreach_batch": "foreach_batch",
            "onceflow.connectors.spark.formats": "data_source register",
            "onceflow.connectors.spark.streaming.query_events": "QueryEvents",
            "onceflow.core.spi.options": "OptionRules OptionValue",
            "onceflow.core.spi.connector": (
                "Area Diagnosis Finding Level Questions ResourceManager ServerAccess "
                "SinkConnector SourceConnector"
            ),
            "onceflow.core.crash_points": "reach",
            "onceflow.core.spi.dead_letters": "DeadLetter",
            "onceflow.core.spi.lookups": "LookupReader LookupSource",
            "onceflow.core.errors": (
                "BadRecord BadRow ConfigError Fenced OffsetOutOfRange PreCommitFailed SinkError "
                "SourceError SourceUnavailable StateIncompatible StorageError TargetRefused"
            ),
            "onceflow.core.commit.by_hand": (
                "ContradictsLog InDoubtTransaction InDoubtTransactions SinkResourceManager"
            ),
            "onceflow.core.protocol.committables": (
                "AbortOutcome Aborted AlreadyCommitted CommitInterval CommitOutcome Committable "
                "Committed Lost RetryLater Unknown"
            ),
            "onceflow.core.protocol.ids": "AttemptId CheckpointId TransactionId",
            "onceflow.core.protocol.log.target_records": (
                "InDoubtStatus LogFacts LoggedDecision RecoveryAction Resolution TargetRecord "
                "to_record"
            ),
            "onceflow.core.secret_references": "follow_references",
            "onceflow.core.spi": (
                "CommittedBy Committer CommitterContext CopyProgress EndOfInput GlobalCommitter "
                "OnBadRow Outage OutputBatch PolledRows ReaderContext RejectedRows Sink "
                "SinkWriter Source SourceProgress SourceReader SourceWarning Split SplitOffsets "
                "TransactionNamer WriterContext"
            ),
            "onceflow.core.spi.staging": "StagedRows StagingArea make_staged_committable",
            "onceflow.sinks.files.checkpoint_files": (
                "CheckpointFiles claim_in_files record_in_files"
            ),
            "onceflow.sinks.base.staged": "StagedSink",
        },
    )

__all__ = [
    "SINKS",
    "SOURCES",
    "STATE_BACKENDS",
    "AbortOutcome",
    "Aborted",
    "AlreadyCommitted",
    "Area",
    "AttemptId",
    "BadRecord",
    "BadRow",
    "CheckpointFiles",
    "CheckpointId",
    "CommitInterval",
    "CommitOutcome",
    "Committable",
    "Committed",
    "CommittedBy",
    "Committer",
    "CommitterContext",
    "ConfigError",
    "ConnectorCatalog",
    "ContradictsLog",
    "CopyProgress",
    "DeadLetter",
    "Diagnosis",
    "EndOfInput",
    "Fenced",
    "Finding",
    "GlobalCommitter",
    "InDoubtStatus",
    "InDoubtTransaction",
    "InDoubtTransactions",
    "Level",
    "LogFacts",
    "LoggedDecision",
    "LookupReader",
    "LookupSource",
    "Lost",
    "OffsetOutOfRange",
    "OnBadRow",
    "OptionRules",
    "OptionValue",
    "Outage",
    "OutputBatch",
    "PolledRows",
    "PreCommitFailed",
    "QueryEvents",
    "Questions",
    "ReaderContext",
    "RecoveryAction",
    "RejectedRows",
    "Resolution",
    "ResourceManager",
    "RetryLater",
    "ServerAccess",
    "Sink",
    "SinkConnector",
    "SinkError",
    "SinkResourceManager",
    "SinkWriter",
    "Source",
    "SourceConnector",
    "SourceError",
    "SourceProgress",
    "SourceReader",
    "SourceUnavailable",
    "SourceWarning",
    "Split",
    "SplitOffsets",
    "StagedRows",
    "StagedSink",
    "StagingArea",
    "StateIncompatible",
    "StorageError",
    "TargetRecord",
    "TargetRefused",
    "TransactionId",
    "TransactionNamer",
    "Unknown",
    "WriterContext",
    "claim_in_files",
    "data_source",
    "follow_references",
    "foreach_batch",
    "make_staged_committable",
    "reach",
    "record_in_files",
    "register",
    "to_record",
]
