"""The lanes that one committer holds, each opened with nothing staged in it that is committed.

A marker is overwritten by the next commit of its lane. Before that, the transaction that it names
must have its receipt, or nobody could tell any more that it was committed. Here is where that is
seen to: when a lane is opened, and again whenever storage failed after a commit.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from onceflow.core.errors import StorageError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.core.staging import StagingArea
from onceflow.sinks.kafka.lane import Lane, lane_name, proven
from onceflow.sinks.kafka.receipts import Receipts
from onceflow.sinks.kafka.settings import KafkaSinkSettings

_logger = logging.getLogger("onceflow.sinks.kafka")

_LANES_MAX = 4
"""Open at once: a slot commits for one subtask, the driver in recovery for all, one by one."""


class Lanes:
    """Opens lanes and keeps the last few open: a producer that is ready commits in milliseconds."""

    def __init__(
        self,
        settings: KafkaSinkSettings,
        context: CommitterContext,
        area: StagingArea,
        receipts: Receipts,
    ) -> None:
        self._settings = settings
        self._context = context
        self._area = area
        self._receipts = receipts
        self._open: OrderedDict[int, Lane] = OrderedDict()
        self._unsettled: set[TransactionId] = set()

    def has(self, subtask: int) -> bool:
        """Return whether the lane of `subtask` is open here; it may be fenced by now."""
        return subtask in self._open

    def opened(self, subtask: int, *, deadline: float) -> Lane:
        """Return the lane of `subtask`, taken over now if it is not ours yet.

        Rows staged in it are not committed, unless its own marker names them; every other
        transaction that was ever committed in it has its receipt.

        Raises:
            LaneFailed: It cannot be opened before `deadline`.
            StorageError: A receipt that is due cannot be written, so nothing may be committed.
        """
        lane = self._open.get(subtask)
        if lane is None:
            lane = Lane(
                self._settings, lane_name(self._context.sink_id, subtask), deadline=deadline
            )
            try:
                self._settle_markers(subtask, lane)
                self._settle_due(subtask)
            except BaseException:
                lane.close()
                raise
            self._open[subtask] = lane
            while len(self._open) > _LANES_MAX:
                self._open.popitem(last=False)[1].close()
        else:
            self._settle_due(subtask)
            self._open.move_to_end(subtask)
        return lane

    def settle(self, transaction: TransactionId) -> None:
        """Write the receipt of `transaction`, which is committed whatever storage says.

        What fails is made up for before the next commit of the lane.
        """
        try:
            self._receipts.settle(transaction)
        except StorageError as error:
            self._unsettled.add(transaction)
            _logger.warning("transaction %s is committed, without receipt: %s", transaction, error)

    def drop(self, subtask: int) -> None:
        """Close the lane of `subtask`, if it is open, so that the next use takes it anew."""
        lane = self._open.pop(subtask, None)
        if lane is not None:
            lane.close()

    def close(self) -> None:
        """Close every lane."""
        while self._open:
            self._open.popitem()[1].close()

    def _settle_markers(self, subtask: int, lane: Lane) -> None:
        # After the lane was taken: nobody else can commit in it any more.
        listing = self._receipts.listed()
        for transaction in listing.leftovers:
            if transaction.subtask == subtask:
                self._area.discard(transaction)
        for transaction in proven(lane.texts.values(), self._context.log_id):
            if transaction not in listing.receipts:
                self._receipts.settle(transaction)

    def _settle_due(self, subtask: int) -> None:
        for transaction in [one for one in self._unsettled if one.subtask == subtask]:
            self._receipts.settle(transaction)
            self._unsettled.discard(transaction)
