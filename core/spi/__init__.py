"""The contracts that sources and sinks implement; `onceflow.connectors` exports the public ones.

A source or a sink has three parts. The *description* (`Source`, `Sink`) is built by the user. It is
pickled to the executors, so it holds settings and no open resource. The *reader* or *writer* lives
in one subtask and is used by one thread. The *committer* may be built in any process, at any time,
by any number of owners at once, so its actions must be idempotent.

Call order of a writer, for each checkpoint n:  write* → pre_commit(n) → write* → pre_commit(n+1) …

Call order of a committer:  [commit | abort | in_doubt | prune]*, in any order, → close.
"""

from onceflow.core.spi.sink import (
    CommittedBy,
    Committer,
    CommitterContext,
    GlobalCommitter,
    OnBadRow,
    RejectedRows,
    Sink,
    SinkWriter,
    TransactionNamer,
    WriterContext,
)
from onceflow.core.spi.source import (
    EndOfInput,
    Outage,
    OutputBatch,
    PolledRows,
    ReaderContext,
    Source,
    SourceReader,
    Split,
    SplitOffsets,
)
from onceflow.core.spi.source_progress import CopyProgress, SourceProgress, SourceWarning

__all__ = [
    "CommittedBy",
    "Committer",
    "CommitterContext",
    "CopyProgress",
    "EndOfInput",
    "GlobalCommitter",
    "OnBadRow",
    "Outage",
    "OutputBatch",
    "PolledRows",
    "ReaderContext",
    "RejectedRows",
    "Sink",
    "SinkWriter",
    "Source",
    "SourceProgress",
    "SourceReader",
    "SourceWarning",
    "Split",
    "SplitOffsets",
    "TransactionNamer",
    "WriterContext",
]
