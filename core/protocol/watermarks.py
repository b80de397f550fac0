"""How far event time has come: by the splits of a source, and by all inputs of a subtask.

A watermark w says that all records up to event time w have come. It is told below in the order of
the rows, so what a subtask knows is the least of what its channels have told. An input that is idle
or has ended is left out: the others need not wait for it. When none is left because the last ones
are idle, time comes to where the latest input is, whichever of them became idle first. Where all
have ended it stands: what goes on from there may still bring what the slowest was at.

Invariants:
    what is told of one input never goes back, nor does what is told below
    current = min(inputs that are neither idle nor ended), and never less
    current = max(all inputs) where there is no such input and one is idle
    the end of time is told  <=>  all inputs have ended
    that all are idle is told after the time up to which they have come
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from onceflow.core.protocol.invariant import require
from onceflow.core.protocol.splits import Split, SplitState

NO_WATERMARK = -(1 << 63)
"""Nothing is known yet."""
MAX_WATERMARK = (1 << 63) - 1
"""The end of the input: all event time has passed."""
IDLE = NO_WATERMARK + 1
"""Not a time: the input has no records at the moment, and nobody is to wait for it."""


class WatermarkMerge:
    """How far event time has come by several inputs' watermarks. Used by one thread."""

    def __init__(self, inputs: Iterable[Hashable]) -> None:
        self._watermarks: dict[Hashable, int] = dict.fromkeys(inputs, NO_WATERMARK)
        """Of an input that has ended the last before its end."""
        self._idle: set[Hashable] = set()
        self._ended: set[Hashable] = set()
        self._told_end: set[Hashable] = set()
        """Those among them that have told the end of time."""
        self.current = NO_WATERMARK
        self._told = NO_WATERMARK
        self._told_idle = False

    def add(self, one: Hashable) -> None:
        """Take in another input, of which nothing is known; nothing happens to a known one."""
        self._watermarks.setdefault(one, NO_WATERMARK)

    def on_watermark(self, one: Hashable, watermark: int) -> None:
        """Take in what input `one` has told: a watermark, its end, or that it is idle."""
        if watermark == IDLE:
            if one not in self._ended:
                self._idle.add(one)
            return
        if watermark == MAX_WATERMARK:
            self._told_end.add(one)
            self.on_ended(one)
            return
        before = MAX_WATERMARK if one in self._told_end else self._watermarks[one]
        require(watermark >= before, f"the watermark of {one} goes back: {before} to {watermark}")
        self._watermarks[one] = watermark
        self._idle.discard(one)
        self._ended.discard(one)

    def on_ended(self, one: Hashable) -> None:
        """Take in that input `one` has no more records, which is not the end of time."""
        self._ended.add(one)
        self._idle.discard(one)

    def next(self) -> int | None:
        """Return what is to be told below next, once: a watermark, or that all are idle.

        Call it until it returns None.
        """
        left_out = self._idle | self._ended
        awake = [w for one, w in self._watermarks.items() if one not in left_out]
        # Only when all inputs have told the end of time has it come. Inputs that are idle or have
        # ended hold nobody up; if there are no others, the furthest of them says how far time is.
        if self._told_end and len(self._told_end) == len(self._watermarks):
            latest = MAX_WATERMARK
        elif awake:
            latest = min(awake)
        elif self._idle:
            latest = max(self._watermarks.values())
        else:
            latest = NO_WATERMARK
        # One that wakes up may be behind; time does not go back for it.
        self.current = max(self.current, latest)
        is_idle = not awake and self.current != MAX_WATERMARK
        if self.current > self._told or (self._told_idle and not is_idle):
            self._told, self._told_idle = self.current, False
            return None if self.current == NO_WATERMARK else self.current
        if is_idle and not self._told_idle:
            self._told_idle = True
            return IDLE
        return None


class SplitWatermarks:
    """The watermarks of a source's splits, from the latest event time seen in each."""

    def __init__(
        self, states: Iterable[SplitState], delay_ms: int, idle_after_s: float | None
    ) -> None:
        """`delay_ms`: by how much a record may be older than one before it."""
        self._delay_ms = delay_ms
        self._idle_after_s = idle_after_s
        self._latest_ms: dict[str, int] = {}
        self._seen_at_s: dict[str, float | None] = {}
        self._merge = WatermarkMerge(())
        self.add(states)

    def add(self, states: Iterable[SplitState]) -> None:
        """Wait for these splits, too, from the event time that each of them has."""
        for state in states:
            split_id = state.split.id
            self._merge.add(split_id)
            self._seen_at_s.setdefault(split_id, None)
            if state.event_time_ms is not None:
                self._see(split_id, state.event_time_ms)

    def on_rows(self, split_id: str, latest_ms: int, now_s: float) -> None:
        """Take in that rows of a split came, the latest of them at event time `latest_ms`."""
        self._see(split_id, max(latest_ms, self._latest_ms.get(split_id, latest_ms)))
        self._seen_at_s[split_id] = now_s

    def on_ended(self, split_id: str) -> None:
        """Take in that no more rows of a split come: nobody waits for it."""
        self._seen_at_s.pop(split_id, None)
        self._merge.on_ended(split_id)

    def next(self, now_s: float) -> int | None:
        """Return what is to be told below now, once."""
        if self._idle_after_s is not None:
            for split_id, seen_at_s in self._seen_at_s.items():
                # A split without any row so far is idle only so long after the first look at it.
                if seen_at_s is None:
                    self._seen_at_s[split_id] = now_s
                elif now_s - seen_at_s >= self._idle_after_s:
                    self._merge.on_watermark(split_id, IDLE)
        return self._merge.next()

    def with_event_times(self, splits: Iterable[Split]) -> tuple[SplitState, ...]:
        """Return the states of `splits`: what a restore needs to go on from here."""
        return tuple(SplitState(split, self._latest_ms.get(split.id)) for split in splits)

    def _see(self, split_id: str, latest_ms: int) -> None:
        self._latest_ms[split_id] = latest_ms
        # A record as late as may be is still to come at latest - delay.
        self._merge.on_watermark(split_id, latest_ms - self._delay_ms - 1)
