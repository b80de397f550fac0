"""Counts what one subtask's transactions of one sink go through.

open -> prepared -> committed
"""

from __future__ import annotations

import threading
import time

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.runtime.messages import SinkMetrics


class SinkMetricGroup:
    """Told by the writing thread and by the committing one, read by the heartbeat's."""

    def __init__(self, uid: str, sink_id: str, subtask: int) -> None:
        self._uid = uid
        self.sink_id = sink_id
        self._subtask = subtask
        self._lock = threading.Lock()
        self._open = False
        self._prepared_at: dict[TransactionId, float] = {}
        self._decided_at: dict[TransactionId, float] = {}
        self._committed = 0
        self._retried = 0
        self._rows = 0
        self._rejected = 0
        self._commit_ms = 0.0

    def written(self) -> None:
        """Rows are in the writer that no pre-commit has taken yet."""
        self._open = True

    def rejected(self, rows: int) -> None:
        """The writer left `rows` bad rows out."""
        self._rejected += rows

    def pre_committed(self, committable: Committable | None) -> None:
        """Everything written is prepared, if there was anything."""
        with self._lock:
            self._open = False
            if committable is not None:
                self._prepared_at[committable.transaction] = time.monotonic()

    def decided(self, checkpoint: CheckpointId) -> None:
        """Everything up to `checkpoint` is to be committed. Repeated or late it changes nothing."""
        now = time.monotonic()
        with self._lock:
            for transaction in self._prepared_at:
                if transaction.checkpoint <= checkpoint:
                    self._decided_at.setdefault(transaction, now)

    def committed(self, committable: Committable) -> None:
        """The target says that the rows are visible."""
        now = time.monotonic()
        with self._lock:
            self._prepared_at.pop(committable.transaction, None)
            decided_at = self._decided_at.pop(committable.transaction, now)
            self._commit_ms = round((now - decided_at) * 1000, 3)
            self._committed += 1
            self._rows += committable.rows

    def retried(self) -> None:
        """A commit did not succeed and is tried again."""
        with self._lock:
            self._retried += 1

    def read(self) -> SinkMetrics:
        """Return the counts as of now."""
        with self._lock:
            oldest = min(self._prepared_at.values(), default=None)
            return SinkMetrics(
                uid=self._uid,
                sink_id=self.sink_id,
                subtask=self._subtask,
                open=int(self._open),
                prepared=len(self._prepared_at),
                committed=self._committed,
                retried=self._retried,
                rows_committed=self._rows,
                rows_rejected=self._rejected,
                oldest_prepared_s=(0.0 if oldest is None else round(time.monotonic() - oldest, 3)),
                last_commit_ms=self._commit_ms,
            )
