"""How far sources are behind: asked beside an attempt that runs, for people and metrics alone.

A source may wait for its server as long as it likes; the attempt's thread never waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from onceflow.core.api.graph import Graph
from onceflow.core.json_logs import carry_fields
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.runtime.driver.source_splits import splits_of
from onceflow.core.runtime.events.job_events import JobEvent, LagMeasured
from onceflow.core.spi import Source, SplitOffsets

LAG_INTERVAL_S = 5.0
"""Between two questions to a source: each opens a connection to its server."""

HELD_S_MIN = 10.0
"""A split that is held for less is not told: most transactions of producers end sooner."""

_log = logging.getLogger("onceflow.runtime.lag")


class LagMonitor:
    """Publishes how far the splits of the last completed checkpoint are behind.

    Each source that counts its records has a daemon thread of its own: none waits for another.
    """

    def __init__(self, graph: Graph, publish: Callable[[JobEvent], None]) -> None:
        """Ask nothing yet."""
        self._publish = publish
        self._sources = [
            (uid, source)
            for uid, source in graph.sources()
            if type(source).latest_offsets is not Source.latest_offsets
        ]
        self._completed: CompletedCheckpoint | None = None
        self._closed = threading.Event()

    def start(self, restored: CompletedCheckpoint) -> None:
        """Begin with the splits of `restored`."""
        self._completed = restored
        for uid, source in self._sources:
            name, asked = f"lag of {uid}", (uid, source)
            work = carry_fields(self._work)
            threading.Thread(target=work, args=asked, name=name, daemon=True).start()

    def measure_by(self, checkpoint: CompletedCheckpoint) -> None:
        """Measure by `checkpoint` from now on."""
        self._completed = checkpoint

    def close(self) -> None:
        """Publish nothing more; a question under way is left to itself. Safe to call twice."""
        self._closed.set()

    def _work(self, uid: str, source: Source) -> None:
        complains = True
        holds = _Holds()
        while not self._closed.is_set():
            assert self._completed is not None
            # Empty where it cannot be told now: an old answer would look like a standstill.
            offsets: tuple[SplitOffsets, ...] = ()
            try:
                asked = splits_of(self._completed, uid) or ()
                offsets = holds.keep_long_ones(source.latest_offsets(asked), time.time())
                complains = True
            except Exception as error:
                if complains:
                    _log.warning("source %s does not say how far it goes: %s", uid, error)
                complains = False
            if not self._closed.is_set():
                self._publish(LagMeasured(uid, offsets))
            self._closed.wait(LAG_INTERVAL_S)


class _Holds:
    """Since when splits of one source have been held at the same position."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}
        """By split and position, in seconds since the epoch."""

    def keep_long_ones(
        self, offsets: Iterable[SplitOffsets], now_s: float
    ) -> tuple[SplitOffsets, ...]:
        """Return `offsets` with the start of each hold, and without holds that are young."""
        known, self._since = self._since, {}
        kept: list[SplitOffsets] = []
        for split in offsets:
            if not split.held_by:
                kept.append(split)
                continue
            held_at = (split.split_id, split.next)
            since_s = self._since[held_at] = known.get(held_at, now_s)
            is_long = now_s - since_s >= HELD_S_MIN
            held_by, told_s = (split.held_by, since_s) if is_long else ("", 0.0)
            kept.append(replace(split, held_by=held_by, held_since_s=told_s))
        return tuple(kept)
