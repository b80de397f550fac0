"""The operator at the end of a chain: a sink's writer, as it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from onceflow.core.crash_points import reach
from onceflow.core.dead_letters import letters_of_rows
from onceflow.core.graph import WriteTo
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.elements import Batch
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.runtime.dataflow.sink_metric_group import SinkMetricGroup
from onceflow.core.spi import SinkWriter

_logger = logging.getLogger("onceflow.runtime")


class SinkOperator(RunningOperator):
    """Writes to a sink's writer, and pre-commits at each barrier."""

    def __init__(
        self,
        uid: str,
        work: WriteTo,
        writer: SinkWriter,
        pre_committed: Callable[[CheckpointId, Any], tuple[Any, ...]],
        metrics: SinkMetricGroup,
    ) -> None:
        super().__init__(uid)
        self._metrics = metrics
        self.takes_dead_letters = work.takes_dead_letters
        self._writer = writer
        self._pre_committed = pre_committed
        self._on_bad_row = work.on_bad_row

    def process(self, batch: Batch) -> None:
        """Hand the rows to the writer."""
        self._metrics.written()
        self._writer.write(batch.rows)
        self._take_rejected()
        reach("write")

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Pre-commit; the ack will list all that is pending, this checkpoint's included."""
        committable = self._writer.pre_commit(checkpoint)
        # Before the sink of dead letters, which comes later in the chain, takes its own snapshot.
        self._take_rejected()
        reach("prepared")
        snapshot = OperatorSnapshot(
            self.uid, committables=self._pre_committed(checkpoint, committable)
        )
        return PendingSnapshot(self.uid, lambda _: snapshot)

    def close(self) -> None:
        """Roll back what is open."""
        self._writer.close()

    def _take_rejected(self) -> None:
        for rejected in self._writer.rejected():
            before = self.rejected
            letters = letters_of_rows(rejected.rows, rejected.reasons)
            self.reject(letters)
            self._metrics.rejected(len(letters))
            # At 1, 10, 100 …: a stream of bad rows must not fill the disk with log lines.
            if len(str(before)) < len(str(self.rejected)) or not before:
                _logger.warning(
                    "sink %s leaves out bad rows (%s), %d so far; one of them: %s",
                    self.uid,
                    self._on_bad_row.value,
                    self.rejected,
                    letters[0].reason,
                )
