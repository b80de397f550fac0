"""The lag of sources, measured while an attempt runs. Only people and metrics use it.

A source may wait for its server for any time; the attempt's thread never waits for a source.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from onceflow.core.plan.graph import Graph
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.runtime.driver.source_splits import splits_of
from onceflow.core.runtime.events.job_events import JobEvent, LagMeasured
from onceflow.core.runtime.json_logs import carry_fields
from onceflow.core.spi import Source, SourceProgress, SplitOffsets

LAG_INTERVAL_S = 5.0
"""The time between two questions to a source: each opens a connection to its server."""

HELD_S_MIN = 10.0
"""The shortest hold that is reported: most transactions of producers end sooner."""

_log = logging.getLogger("onceflow.runtime.lag")


class LagMonitor:
    """Publishes the lag of the splits in the last completed checkpoint.

    Each source that can count its records or measure its lag has its own daemon thread, so sources
    do not wait for each other.
    """

    def __init__(self, graph: Graph, publish: Callable[[JobEvent], None]) -> None:
        """Create the monitor; `start` asks the first question."""
        self._publish = publish
        self._sources = [
            (uid, source)
            for uid, source in graph.sources()
            if type(source).latest_offsets is not Source.latest_offsets
            or type(source).measure is not Source.measure
        ]
        self._completed: CompletedCheckpoint | None = None
        self._closed = threading.Event()

    def start(self, restored: CompletedCheckpoint) -> None:
        """Start measuring the splits of `restored`."""
        self._completed = restored
        for uid, source in self._sources:
            name, asked = f"lag of {uid}", (uid, source)
            work = carry_fields(self._work)
            threading.Thread(target=work, args=asked, name=name, daemon=True).start()

    def measure_by(self, checkpoint: CompletedCheckpoint) -> None:
        """Measure the positions of `checkpoint` from now on."""
        self._completed = checkpoint

    def close(self) -> None:
        """Stop publishing. A question that is being asked is abandoned. Idempotent."""
        self._closed.set()

    def _work(self, uid: str, source: Source) -> None:
        complains = True
        holds, measurements = _Holds(), _Measurements(uid)
        while not self._closed.is_set():
            assert self._completed is not None
            # Empty if the source gives no answer: the old answer would look like a standstill.
            offsets: tuple[SplitOffsets, ...] = ()
            progress: SourceProgress | None = None
            try:
                asked = splits_of(self._completed, uid) or ()
                offsets = holds.keep_long_ones(source.latest_offsets(asked), time.time())
                progress = measurements.take(source.measure(asked), time.time())
                complains = True
            except Exception as error:
                if complains:
                    _log.warning("the lag of source %s is unknown: %s", uid, error)
                complains = False
            if not self._closed.is_set():
                self._publish(LagMeasured(uid, offsets, progress))
            self._closed.wait(LAG_INTERVAL_S)


class _Holds:
    """The time since when each split of one source has been held at its position."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}
        """The start of each hold in seconds since the epoch, by split and position."""

    def keep_long_ones(
        self, offsets: Iterable[SplitOffsets], now_s: float
    ) -> tuple[SplitOffsets, ...]:
        """Return `offsets` with the start of each hold, without holds below HELD_S_MIN."""
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


class _Measurements:
    """The measurements of one source: the time of its last move, and the warnings in the log."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self._retained_from: str | None = None
        self._moved_at_s = 0.0
        self._warned: set[str] = set()
        """The states whose warnings are in the log."""

    def take(self, progress: SourceProgress | None, now_s: float) -> SourceProgress | None:
        """Return `progress` with the time of the last move. Log warnings that are new or over."""
        if progress is None:
            return None
        if progress.retained_from != self._retained_from:
            self._retained_from, self._moved_at_s = progress.retained_from, now_s
        states = {warning.state for warning in progress.warnings}
        for warning in progress.warnings:
            if warning.state not in self._warned:
                _log.warning("source %s: %s", self._uid, warning.text)
        for state in sorted(self._warned - states):
            _log.warning("source %s: the warning about %s is over", self._uid, state)
        self._warned = states
        return replace(progress, moved_at_s=self._moved_at_s if progress.retained_from else None)
