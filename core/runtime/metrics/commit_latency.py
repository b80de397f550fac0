"""The latency from a record's own time until its rows are visible, by sink, and its percentiles.

A source subtask sends the times of its records with its ack. They are kept here until the sink has
committed the records read before that barrier:

    acked -> decided -> committed by every subtask of the sink, by the driver, or by recovery

The next checkpoint takes over the times of an aborted checkpoint, because it decides the same rows.
If an attempt fails, the times of undecided checkpoints are dropped, because their records are read
again.

Bounds: len(_decided) <= UNCOMMITTED_MAX, or the number of sinks + 1, even if a sink never commits.
Each entry has at most 4 KB per source.

Percentiles:

They show the current latency: a histogram of the whole run hides that the last minute was slow.
Latencies are counted in buckets, each 5 % wider than the one before, so the error of a percentile
is at most 5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.record_times import RecordTimes, RecordTimesCounter
from onceflow.core.runtime.events import job_events
from onceflow.core.runtime.metrics import metric_catalog
from onceflow.core.runtime.metrics.metric_catalog import Family, Histogram

WINDOW_S = 60.0
_BOUNDS = tuple(0.001 * 1.05**power for power in range(260))
"""The bounds from 1 ms to 307 s, in seconds: `record_times` does not distinguish older times."""


@dataclass(frozen=True, slots=True)
class RecentLatency:
    """The latency of records that became visible in the last one or two windows of 60 s."""

    records: int
    p50_s: float
    p99_s: float


class RecentTimes:
    """Counts latencies in the current window, and keeps the previous window.

    The owner serializes the calls. Times are those of the wall clock; if the clock goes back, a new
    window begins.
    """

    def __init__(self) -> None:
        self._window: int = 0
        self._now = Histogram(_BOUNDS)
        self._before = Histogram(_BOUNDS)

    def add(self, latencies: Iterable[tuple[float, int]], at_s: float) -> None:
        """Count each (seconds, records) at time `at_s`."""
        self._turn(at_s)
        self._now.observe_all(latencies, 0.0)

    def read(self, now_s: float) -> RecentLatency | None:
        """Return the percentiles at `now_s`, or None if no record has become visible recently."""
        self._turn(now_s)
        pairs = zip(self._now.value().counts, self._before.value().counts, strict=True)
        sums = tuple(accumulate(now + before for now, before in pairs))
        if not sums[-1]:
            return None
        return RecentLatency(sums[-1], _find_percentile(sums, 0.5), _find_percentile(sums, 0.99))

    def _turn(self, now_s: float) -> None:
        window = int(now_s // WINDOW_S)
        if window == self._window:
            return
        is_next = window == self._window + 1
        self._before = self._now if is_next else Histogram(_BOUNDS)
        self._now = Histogram(_BOUNDS)
        self._window = window


def _find_percentile(sums: tuple[int, ...], share: float) -> float:
    """Return the upper bound of the bucket that reaches `share` of all latencies.

    `sums[i]` latencies are <= `_BOUNDS[i]`; those above the last bound count as the last bound.
    """
    rank = share * sums[-1]
    reached = next(index for index, count in enumerate(sums) if count >= rank)
    return _BOUNDS[min(reached, len(_BOUNDS) - 1)]


UNCOMMITTED_MAX = 256
"""The number of decided checkpoints that are kept apart. Further ones are merged, oldest first."""


@dataclass(frozen=True, slots=True)
class SinkInputs:
    """The sources of one sink's rows, and the committer of the sink."""

    uid: str
    chain: str
    sources: frozenset[str]
    """The uids of all sources whose records flow into the sink."""
    committed_by_driver: bool = False


@dataclass(slots=True)
class _Undecided:
    """A checkpoint that is not known to be decided."""

    times: dict[str, RecordTimesCounter] = field(default_factory=dict[str, RecordTimesCounter])
    """The record times by source."""
    subtasks: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """The subtasks that have acked and will commit, by chain with sinks."""


@dataclass(slots=True)
class _Decided:
    """A checkpoint whose rows are not known to be visible in `sinks`, which is not empty."""

    times: Mapping[str, RecordTimes]
    """The record times by source."""
    subtasks: dict[str, set[int]]
    """The subtasks that have not committed, by chain with sinks."""
    sinks: set[str]


class CommitLatency:
    """Measures commit latency from events. `JobMetrics` owns it and serializes the calls."""

    def __init__(self, sinks: Sequence[SinkInputs]) -> None:
        self._sinks = {sink.uid: sink for sink in sinks}
        self._chains = {sink.chain for sink in sinks}
        self._histograms = {
            uid: Histogram(metric_catalog.COMMIT_LATENCY.buckets) for uid in self._sinks
        }
        self._recent = {uid: RecentTimes() for uid in self._sinks}
        self._undecided: dict[int, _Undecided] = {}
        self._decided: dict[int, _Decided] = {}
        """The decided checkpoints by number, ascending."""

    def on_event(self, event: job_events.JobEvent) -> None:
        """Process one event of the job."""
        at_s = event.at.wall_s
        if isinstance(event, job_events.AttemptBegan):
            # The previous attempt may have appended this decision without learning of it.
            if event.restored_checkpoint in self._undecided:
                self._decide(event.restored_checkpoint)
            self._undecided.clear()
        elif isinstance(event, job_events.CheckpointAcked):
            self._add_ack(event)
        elif isinstance(event, job_events.CheckpointCompleted):
            self._decide(event.checkpoint)
        elif isinstance(event, job_events.SubtaskCommitted):
            self._end_subtask(event.subtask, event.checkpoint, at_s)
        elif isinstance(event, job_events.CheckpointCommitted):
            uid = event.uid
            self._observe(event.checkpoint, at_s, lambda sink, _: sink.uid == uid)
        elif isinstance(event, job_events.SinksRecovered):
            # Recovery has committed everything decided, before this attempt reads any row.
            newest = max(self._decided, default=0)
            self._observe(newest, at_s, lambda _sink, _decided: True)

    def collect(self) -> Iterator[Family]:
        """Yield the histogram if there are sinks."""
        if self._histograms:
            samples = tuple(
                ((uid,), histogram.value()) for uid, histogram in sorted(self._histograms.items())
            )
            yield Family(metric_catalog.COMMIT_LATENCY, samples)

    def read_recent(self, now_s: float) -> dict[str, RecentLatency]:
        """Return, by sink, the latency of records that became visible shortly before `now_s`."""
        recent = {uid: times.read(now_s) for uid, times in self._recent.items()}
        return {uid: latency for uid, latency in recent.items() if latency is not None}

    def _add_ack(self, ack: job_events.CheckpointAcked) -> None:
        chain, times = ack.subtask.chain, ack.record_times
        if chain not in self._chains and times is None:
            return
        pending = self._undecided.setdefault(ack.checkpoint, _Undecided())
        if chain in self._chains:
            pending.subtasks.setdefault(chain, set()).add(ack.subtask.index)
        if times is not None:
            pending.times.setdefault(chain, RecordTimesCounter()).merge(times)

    def _decide(self, checkpoint: int) -> None:
        """Record that `checkpoint` is decided, with the times of earlier aborted checkpoints."""
        subtasks = self._undecided.get(checkpoint, _Undecided()).subtasks
        # Rows of aborted checkpoints are in this one, too: the stream before barrier n is also
        # before barrier n + 1.
        earlier = [number for number in self._undecided if number <= checkpoint]
        taken = (self._undecided.pop(number).times.items() for number in earlier)
        decided = _merge_times(
            (source, times)
            for counters in taken
            for source, counter in counters
            if (times := counter.take()) is not None
        )
        sinks = {uid for uid, sink in self._sinks.items() if not sink.sources.isdisjoint(decided)}
        if sinks:
            self._decided[checkpoint] = _Decided(decided, subtasks, sinks)
        if len(self._decided) > UNCOMMITTED_MAX:
            self._merge_oldest()

    def _merge_oldest(self) -> None:
        """Merge the rows of an older checkpoint into the next one that waits for the same sinks.

        They become visible no earlier in any of these sinks. Sinks commit in order, so two
        neighbours wait for the same sinks unless there are at most as many entries as sinks.
        """
        for older, newer in pairwise(self._decided):
            decided, other = self._decided[older], self._decided[newer]
            if decided.sinks == other.sinks:
                times = _merge_times((*decided.times.items(), *other.times.items()))
                subtasks = {
                    chain: decided.subtasks.get(chain, set()) | other.subtasks.get(chain, set())
                    for chain in {*decided.subtasks, *other.subtasks}
                }
                self._decided[newer] = _Decided(times, subtasks, other.sinks)
                del self._decided[older]
                return

    def _end_subtask(self, subtask: SubtaskRef, through: int, at_s: float) -> None:
        """Record a commit of `subtask`.

        A sink has committed when all subtasks of its chain have.
        """
        for number, decided in self._decided.items():
            if number <= through:
                decided.subtasks.get(subtask.chain, set()).discard(subtask.index)

        def has_committed(sink: SinkInputs, decided: _Decided) -> bool:
            by_slots = sink.chain == subtask.chain and not sink.committed_by_driver
            return by_slots and not decided.subtasks.get(sink.chain)

        self._observe(through, at_s, has_committed)

    def _observe(
        self, through: int, at_s: float, has_committed: Callable[[SinkInputs, _Decided], bool]
    ) -> None:
        """Count the records up to checkpoint `through` for sinks that have now committed them."""
        # Iterate over a copy of the numbers, because the loop removes entries.
        for number in [number for number in self._decided if number <= through]:
            decided = self._decided[number]
            ended = {uid for uid in decided.sinks if has_committed(self._sinks[uid], decided)}
            for uid in ended:
                self._count(uid, decided.times, at_s * 1000)
            decided.sinks -= ended
            if not decided.sinks:
                del self._decided[number]

    def _count(self, uid: str, times: Mapping[str, RecordTimes], at_ms: float) -> None:
        of_sink: Iterable[RecordTimes] = (
            of_source for source, of_source in times.items() if source in self._sinks[uid].sources
        )
        for record_times in of_sink:
            values = tuple(record_times.list_latencies_s(at_ms))
            self._histograms[uid].observe_all(values, record_times.sum_latencies_s(at_ms))
            self._recent[uid].add(values, at_ms / 1000)


def _merge_times(all_times: Iterable[tuple[str, RecordTimes]]) -> dict[str, RecordTimes]:
    """Merge (source, summary) pairs to one summary per source."""
    counters: dict[str, RecordTimesCounter] = {}
    for source, times in all_times:
        counters.setdefault(source, RecordTimesCounter()).merge(times)
    merged = {source: counter.take() for source, counter in counters.items()}
    return {source: times for source, times in merged.items() if times is not None}
