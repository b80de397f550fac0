"""The progress of event time, over splits and inputs, and the arithmetic of windows.

A watermark w says that all records up to event time w have arrived. It is sent downstream in the
order of the rows, so a subtask's watermark is the lowest of its channels' watermarks. An input that
is idle or has ended is left out, so that the others need not wait for it. If no input is left
because the last ones are idle, time advances to that of the latest input, in whichever order they
became idle. If all inputs have ended, time stays: rows that follow may still belong to the slowest
input's time.

Invariants:
    the watermark of an input never goes back, nor does the watermark sent downstream
    current = min(inputs that are neither idle nor ended), and never less
    current = max(all inputs) if there is no such input and one is idle
    the end of time is sent  <=>  all inputs have ended
    IDLE is sent only after the time up to which all inputs have come

Windows:

Time is cut into panes. Each pane lies wholly inside or outside of any window: pane p holds offset +
p * pane <= t < offset + (p + 1) * pane, in milliseconds since 1970. The state of a key is stored
once per pane, even if many windows overlap there.

Invariants, for a window start <= t < end and a watermark w:
    it is due   <=>  end - 1 <= w;  it is over  <=>  end - 1 + lateness <= w
    a record is late  <=>  all windows that it is in are over
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from onceflow.core.errors import require
from onceflow.core.protocol.splits import Split, SplitState

NO_WATERMARK = -(1 << 63)
"""The watermark before any time is known."""
MAX_WATERMARK = (1 << 63) - 1
"""The end of the input: all event time has passed."""
IDLE = NO_WATERMARK + 1
"""The mark of an input that has no records at the moment, for which no input waits. It is not a
time."""


class WatermarkMerge:
    """The event time of several inputs, merged from their watermarks. Used by one thread."""

    def __init__(self, inputs: Iterable[Hashable]) -> None:
        self._watermarks: dict[Hashable, int] = dict.fromkeys(inputs, NO_WATERMARK)
        """The watermark of each input; for an ended input, the last before its end."""
        self._idle: set[Hashable] = set()
        self._ended: set[Hashable] = set()
        self._told_end: set[Hashable] = set()
        """The ended inputs that have sent the end of time."""
        self.current = NO_WATERMARK
        self._told = NO_WATERMARK
        self._told_idle = False

    def add(self, input_id: Hashable) -> None:
        """Add an input without a watermark; a known input stays as it is."""
        self._watermarks.setdefault(input_id, NO_WATERMARK)

    def on_watermark(self, input_id: Hashable, watermark: int) -> None:
        """Record what input `input_id` has sent: a watermark, its end, or that it is idle."""
        if watermark == IDLE:
            if input_id not in self._ended:
                self._idle.add(input_id)
            return
        if watermark == MAX_WATERMARK:
            self._told_end.add(input_id)
            self.on_ended(input_id)
            return
        before = MAX_WATERMARK if input_id in self._told_end else self._watermarks[input_id]
        require(
            watermark >= before, f"the watermark of {input_id} goes back: {before} to {watermark}"
        )
        self._watermarks[input_id] = watermark
        self._idle.discard(input_id)
        self._ended.discard(input_id)

    def on_ended(self, input_id: Hashable) -> None:
        """Record that input `input_id` has no more records, which is not the end of time."""
        self._ended.add(input_id)
        self._idle.discard(input_id)

    def next(self) -> int | None:
        """Return the next mark to send downstream, once: a watermark, or IDLE if all are idle.

        Call it until it returns None.
        """
        left_out = self._idle | self._ended
        awake = [w for input_id, w in self._watermarks.items() if input_id not in left_out]
        # The end of time comes only when all inputs have sent it. Idle or ended inputs do not delay
        # the others. If there are no others, the time is that of the furthest input.
        if self._told_end and len(self._told_end) == len(self._watermarks):
            latest = MAX_WATERMARK
        elif awake:
            latest = min(awake)
        elif self._idle:
            latest = max(self._watermarks.values())
        else:
            latest = NO_WATERMARK
        # An input that becomes active may be behind. Time does not go back for it.
        self.current = max(self.current, latest)
        is_idle = not awake and self.current != MAX_WATERMARK
        if self.current > self._told or (self._told_idle and not is_idle):
            self._told, self._told_idle = self.current, False
            return None if self.current == NO_WATERMARK else self.current
        if is_idle and not self._told_idle:
            self._told_idle = True
            return IDLE
        return None


@dataclass(frozen=True, slots=True)
class WatermarkRule:
    """The settings of the watermarks of one output of a source."""

    delay_ms: int
    """The time by which a record may be older than a record before it."""
    idle_after_s: float | None
    """The time without records after which a split is idle, or None for never."""


class SplitWatermarks:
    """The watermarks of a source's splits, from the latest event time seen in each.

    A source with several outputs has an event time for each split and output. The watermark is the
    lowest over all of them that are neither idle nor ended.
    """

    def __init__(
        self, states: Iterable[SplitState], rules: Mapping[str | None, WatermarkRule]
    ) -> None:
        """Start with `states`. `rules` are by output; the key is None without several outputs."""
        self._rules = rules
        self._latest_ms: dict[tuple[str | None, str], int] = {}
        self._seen_at_s: dict[tuple[str | None, str], float | None] = {}
        self._merge = WatermarkMerge(())
        self.add(states)

    def add(self, states: Iterable[SplitState]) -> None:
        """Add these splits, each with its event times; the watermark waits for them, too."""
        for state in states:
            times_ms: dict[str | None, int | None] = {None: state.event_time_ms}
            times_ms.update(state.output_times_ms)
            for output in self._rules:
                key = (output, state.split.id)
                self._merge.add(key)
                self._seen_at_s.setdefault(key, None)
                latest_ms = times_ms.get(output)
                if latest_ms is not None:
                    self._see(key, latest_ms)

    def on_rows(
        self, split_id: str, latest_ms: int, now_s: float, output: str | None = None
    ) -> None:
        """Record that rows of a split came, the latest of them at event time `latest_ms`."""
        key = (output, split_id)
        self._see(key, max(latest_ms, self._latest_ms.get(key, latest_ms)))
        self._seen_at_s[key] = now_s

    def on_ended(self, split_id: str) -> None:
        """Record that no more rows of a split come, so that the watermark does not wait for it."""
        for output in self._rules:
            self._seen_at_s.pop((output, split_id), None)
            self._merge.on_ended((output, split_id))

    def next(self, now_s: float) -> int | None:
        """Return the mark to send downstream now, once."""
        for key, seen_at_s in self._seen_at_s.items():
            idle_after_s = self._rules[key[0]].idle_after_s
            if idle_after_s is None:
                continue
            # A split without any row is idle only after this time has passed since the first look
            # at it.
            if seen_at_s is None:
                self._seen_at_s[key] = now_s
            elif now_s - seen_at_s >= idle_after_s:
                self._merge.on_watermark(key, IDLE)
        return self._merge.next()

    def with_event_times(self, splits: Iterable[Split]) -> tuple[SplitState, ...]:
        """Return the states of `splits`, from which a restore can go on."""
        return tuple(
            SplitState(split, self._latest_ms.get((None, split.id)), self._output_times(split.id))
            for split in splits
        )

    def _output_times(self, split_id: str) -> tuple[tuple[str, int], ...]:
        return tuple(
            (output, self._latest_ms[output, split_id])
            for output in sorted(filter(None, self._rules))
            if (output, split_id) in self._latest_ms
        )

    def _see(self, key: tuple[str | None, str], latest_ms: int) -> None:
        self._latest_ms[key] = latest_ms
        # A record that is late by the full delay may still arrive at latest - delay.
        self._merge.on_watermark(key, latest_ms - self._rules[key[0]].delay_ms - 1)


@dataclass(frozen=True, slots=True)
class PaneWindows:
    """Windows of `size_ms`, one beginning every `slide_ms`, which is at most `size_ms`."""

    size_ms: int
    slide_ms: int
    offset_ms: int = 0
    lateness_ms: int = 0

    @property
    def pane_ms(self) -> int:
        """The length of a pane."""
        return gcd(self.size_ms, self.slide_ms)

    @property
    def overlap(self) -> bool:
        """True if a moment is in more than one window."""
        return self.slide_ms < self.size_ms

    def start_of(self, pane: int) -> int:
        """Return the time at which a pane begins."""
        return self.offset_ms + pane * self.pane_ms

    def ends_of(self, pane: int) -> range:
        """Return the ends of the windows that contain a pane, in order."""
        since = self.start_of(pane) - self.offset_ms
        last = self.offset_ms + since // self.slide_ms * self.slide_ms + self.size_ms
        windows = (last - self.start_of(pane) - 1) // self.slide_ms + 1
        return range(last - (windows - 1) * self.slide_ms, last + 1, self.slide_ms)

    def panes_of(self, end_ms: int) -> range:
        """Return the panes of the window that ends at `end_ms`."""
        stop = (end_ms - self.offset_ms) // self.pane_ms
        return range(stop - self.size_ms // self.pane_ms, stop)

    def last_over(self, watermark: int) -> int:
        """Return the last pane whose windows are all over. Records up to this pane are late."""
        ended = (watermark + 1 - self.lateness_ms - self.size_ms - self.offset_ms) // self.slide_ms
        return (ended + 1) * (self.slide_ms // self.pane_ms) - 1

    def due(self, panes: Iterable[int], after: int, watermark: int) -> list[int]:
        """Return the ends of the windows of `panes` due after `after`, up to `watermark`."""
        ends = {end for pane in panes for end in self.ends_of(pane)}
        return sorted(end for end in ends if after < end - 1 <= watermark)

    def next_ms(self, panes: Iterable[int], watermark: int) -> int | None:
        """Return the watermark at which the next window of `panes` is due, or a pane is over."""
        moments: list[int] = []
        for pane in panes:
            ends = self.ends_of(pane)
            moments += [end - 1 for end in ends if end - 1 > watermark][:1]
            moments.append(ends[-1] - 1 + self.lateness_ms)
        return min(moments, default=None)
