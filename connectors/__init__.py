"""What a source or a sink of one's own is written with: contracts, their values and their errors.

The layer that may import all others.
"""

from onceflow.connectors.catalog import SINKS, SOURCES, STATE_BACKENDS, ConnectorCatalog
from onceflow.core.client_options import OptionRules, OptionValue
from onceflow.core.connector import (
    Diagnosis,
    Questions,
    ServerAccess,
    SinkConnector,
    SourceConnector,
)
from onceflow.core.crash_points import reach
from onceflow.core.dead_letters import DeadLetter
from onceflow.core.diagnosis import Area, Finding, Level
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
)
from onceflow.core.in_doubt import (
    ContradictsLog,
    InDoubtTransaction,
    InDoubtTransactions,
    ResourceManager,
    SinkResourceManager,
)
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.in_doubt import (
    InDoubtStatus,
    LoggedDecision,
    RecoveryAction,
    Resolution,
)
from onceflow.core.secret_references import followed
from onceflow.core.spi import (
    Committer,
    CommitterContext,
    EndOfInput,
    GlobalCommitter,
    GlobalSink,
    MultiCommitWriter,
    OnBadRow,
    ReaderContext,
    RejectedRows,
    Sink,
    SinkWriter,
    Source,
    SourceReader,
    Split,
    TransactionNamer,
    WriterContext,
)
from onceflow.core.staging import StagedRows, StagingArea, staged_committable
from onceflow.sinks.staged import StagedSink

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
    "CheckpointId",
    "CommitOutcome",
    "Committable",
    "Committed",
    "Committer",
    "CommitterContext",
    "ConfigError",
    "ConnectorCatalog",
    "ContradictsLog",
    "DeadLetter",
    "Diagnosis",
    "EndOfInput",
    "Fenced",
    "Finding",
    "GlobalCommitter",
    "GlobalSink",
    "InDoubtStatus",
    "InDoubtTransaction",
    "InDoubtTransactions",
    "Level",
    "LoggedDecision",
    "Lost",
    "MultiCommitWriter",
    "OffsetOutOfRange",
    "OnBadRow",
    "OptionRules",
    "OptionValue",
    "PreCommitFailed",
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
    "SourceReader",
    "SourceUnavailable",
    "Split",
    "StagedRows",
    "StagedSink",
    "StagingArea",
    "StateIncompatible",
    "StorageError",
    "TransactionId",
    "TransactionNamer",
    "Unknown",
    "WriterContext",
    "followed",
    "reach",
    "staged_committable",
]
