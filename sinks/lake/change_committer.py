"""The commit of staged changes: one table version for one checkpoint, or for several together.

The driver reads all changes of a commit into memory and keeps the last change of each key. One
version of the table applies them together with the sink's record. So a repeated commit finds the
record, as with files. Files that were written for a version that was not made are deleted, or
become orphans.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.core.errors import TargetRefused
from onceflow.core.protocol.committables import CommitOutcome, Committed, Lost
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.lake.changes import ChangesLabel, merge_changes, parse_label
from onceflow.sinks.lake.committer import LakeCommitter
from onceflow.sinks.lake.sink_record import SinkRecord
from onceflow.sinks.lake.table import TableVersion


class LakeChangeCommitter(LakeCommitter):
    """A committer of whole checkpoints of changes to one table."""

    @override
    def _make_version(
        self, version: TableVersion, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> CommitOutcome:
        batches: list[pa.RecordBatch] = []
        labels: set[ChangesLabel] = set()
        # By attempt, then by checkpoint: the order in which the changes of a key were made. In one
        # checkpoint all changes of a key come from one subtask.
        ordered = sorted(transactions)
        staged = self._table.requests.ask(self._read_changes, ordered)
        for transaction, changes in zip(ordered, staged, strict=True):
            if changes is None:
                return self._explain_missing(record.through, transaction)
            for part, batch in changes:
                labels.add(parse_label(part))
                batches.append(batch)
        other = next((label for label in labels if label.table_id != version.table_id), None)
        if other is not None:
            return Lost(version.describe_replaced(other.table_id))
        keys = {label.key for label in labels}
        if len(keys) > 1:
            raise TargetRefused(
                f"changes wait that were staged by several keys, {sorted(keys)}: start the job with"
                " the former primary_key and without commit_interval and commit_checkpoints, stop"
                " it, and change the setting then"
            )
        merged = merge_changes(batches, keys.pop())
        return Committed(version.replace_rows(merged, record, transactions))

    def _read_changes(self, transaction: TransactionId) -> list[tuple[str, pa.RecordBatch]] | None:
        parts = self._staging.read(transaction)
        return None if parts is None else list(parts)

    @override
    def _is_in_table(self, version: TableVersion, transaction: TransactionId) -> bool | None:
        if not self._staging.contains(transaction):
            return None
        return version.is_committed(transaction)

    @override
    def _delete_data(self, transaction: TransactionId) -> None:
        """Delete nothing: writers write no files, only the driver does for versions."""
