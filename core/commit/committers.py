"""The opening of committers by the engine, with a check against their sink's settings."""

from __future__ import annotations

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommittedBy, CommitterContext, GlobalCommitter, Sink


def open_global_committer(sink: Sink, context: CommitterContext) -> GlobalCommitter:
    """Return the committer of whole checkpoints of `sink`, whose `committed_by` is the driver.

    Raises:
        ConfigError: The sink returns a committer of single transactions.
    """
    committer = sink.committer(context)
    if isinstance(committer, GlobalCommitter):
        return committer
    committer.close()
    raise ConfigError(
        f"sink {context.uid}: {sink!r} sets `committed_by` to the driver, but its committer is a"
        f" {type(committer).__name__}. Derive the committer from GlobalCommitter, or do not set"
        " `committed_by`"
    )


def read_target_record(sink: Sink, context: CommitterContext) -> TargetRecord | None:
    """Return the target's record of the sink id, or None if the target keeps none.

    If the driver commits the sink's checkpoints, the record contains how far they are committed.
    Changes nothing.

    Raises:
        ConfigError: Another job owns the sink id.
        SinkError: The target cannot be asked now.
    """
    record = sink.target_record(context)
    if record is not None or sink.committed_by is CommittedBy.SLOTS:
        return record
    committer = open_global_committer(sink, context)
    try:
        return TargetRecord(context.sink_id, through=committer.read_committed_through())
    finally:
        committer.close()
