"""The claim of a sink id in a table for one attempt."""

from __future__ import annotations

from onceflow.core.errors import PreparedTransactionLost, SinkError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommitterContext
from onceflow.sinks.lake.committer import CONFLICTS_MAX
from onceflow.sinks.lake.sink_record import claim_record, to_target_record
from onceflow.sinks.lake.table import CommitConflict, LakeTable, TableVersion


def claim_table(table: LakeTable, context: CommitterContext) -> None:
    """Record in `table`, in a separate version, that the attempt of `context` owns the sink id.

    Raises:
        ConfigError: Another decision log owns the sink id.
        Fenced: This attempt or a newer one has claimed it.
        PreparedTransactionLost: The table has lost the last commit of the sink id.
        SinkError: The table does not answer, or other commits came first too often.
    """
    conflict: CommitConflict | None = None
    for _ in range(CONFLICTS_MAX):
        version = table.load()
        require_undamaged(version)
        record = claim_record(version.record, context)
        try:
            version.append((), record, ())
        except CommitConflict as error:
            conflict = error
            continue
        return
    raise SinkError(f"sink {context.sink_id}: {CONFLICTS_MAX} commits came first: {conflict}")


def read_target_record(version: TableVersion, context: CommitterContext) -> TargetRecord:
    """Return the table's record of the sink id.

    Raises:
        ConfigError: Another decision log owns the sink id.
        PreparedTransactionLost: The table has lost the last commit of the sink id.
    """
    require_undamaged(version)
    return to_target_record(version.record, context)


def require_undamaged(version: TableVersion) -> None:
    """Raise PreparedTransactionLost unless the last commit of the sink id is part of `version`.

    Raises:
        PreparedTransactionLost: It is not.
    """
    if version.damage:
        raise PreparedTransactionLost(version.damage)
