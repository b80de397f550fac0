"""Asks the sources of a running attempt for splits that have appeared since.

The attempt's thread decides when to ask and whom to offer what; the asking itself may wait for a
server, and has a thread of its own for each question. What may be read when is decided by
`protocol.splits`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onceflow.core.errors import SourceError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.snapshots import CompletedCheckpoint
from onceflow.core.protocol.splits import Split, SplitOffers
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.driver.attempt_events import SplitsDiscovered
from onceflow.core.runtime.driver.restore import splits_of
from onceflow.core.runtime.messages import OfferSplits
from onceflow.core.spi import Source

_log = logging.getLogger("onceflow.runtime.discovery")


@dataclass(slots=True)
class _Growing:
    """A source that may grow while it is read."""

    source: Source
    interval_s: float
    offers: SplitOffers
    due_at: float
    asking: bool = False


class SplitDiscovery:
    """Used by the attempt's thread alone; times are of `time.monotonic`."""

    def __init__(
        self,
        context: AttemptContext,
        tell: Callable[[SplitsDiscovered], None],
        now: float,
    ) -> None:
        plan, restored = context.plan, context.restored
        self._attempt = plan.attempt
        self._tell = tell
        self._sources = {
            uid: _Growing(
                source,
                source.discovery_interval_s,
                SplitOffers(
                    (split.id for split in splits_of(restored, uid) or ()), plan.parallelism
                ),
                now + source.discovery_interval_s,
            )
            for uid, source in context.graph.sources()
            if source.discovery_interval_s is not None and not source.bounded
        }

    def ask(self, completed: CompletedCheckpoint, now: float) -> None:
        """Ask every source that is due for what `completed`, the last decision, does not hold."""
        for uid, growing in self._sources.items():
            if growing.asking or now < growing.due_at:
                continue
            known = splits_of(completed, uid) or ()
            growing.asking = True
            growing.due_at = now + growing.interval_s
            threading.Thread(
                target=self._answer,
                args=(uid, growing.source, known),
                name=f"discover splits of {uid}",
                daemon=True,
            ).start()

    def answered(self, answer: SplitsDiscovered) -> dict[int, OfferSplits]:
        """Return what to offer which slot.

        Raises:
            SourceError: The source cannot be read on as it was.
        """
        if answer.attempt != self._attempt:
            return {}
        if answer.error is not None:
            raise answer.error
        growing = self._sources[answer.uid]
        growing.asking = False
        offers = growing.offers.offer(answer.splits)
        for slot, splits in offers.items():
            names = ", ".join(split.id for split in splits)
            _log.info("source %s: subtask %d is to read %s, too", answer.uid, slot, names)
        return {slot: OfferSplits(answer.uid, splits) for slot, splits in offers.items()}

    def _answer(self, uid: str, source: Source, known: Sequence[Split]) -> None:
        self._tell(_answer_of(self._attempt, uid, source, known))


def _answer_of(
    attempt: AttemptId, uid: str, source: Source, known: Sequence[Split]
) -> SplitsDiscovered:
    """Ask `source`. What a server that is away says now it may not say a minute later."""
    try:
        now = source.discover(known)
    except Exception as error:
        if isinstance(error, SourceError) and error.retry == "never":
            return SplitsDiscovered(attempt, uid, error=error)
        _log.warning("source %s cannot be asked for new splits at the moment: %s", uid, error)
        return SplitsDiscovered(attempt, uid)
    moved = sorted(split.id for split in known if split not in set(now))
    if moved:
        return SplitsDiscovered(
            attempt,
            uid,
            error=SourceError(
                f"source {uid}: {', '.join(moved)} cannot be read on from where they stood (a"
                " warning says why); the next attempt goes on from where they begin now"
            ),
        )
    taken = {split.id for split in known}
    return SplitsDiscovered(attempt, uid, tuple(split for split in now if split.id not in taken))
