"""How long records take from their own time until their rows are visible, by sink.

A source subtask sends the times of its records with its ack. They are held here until the sink has
committed what was read before that barrier:

    acked -> decided -> committed by every subtask of the sink, by the driver, or by recovery

A checkpoint that is given up passes its times to the next one, which decides its rows, too. Times
of an attempt that fails are dropped unless their checkpoint was decided: such records are read
again.

Bounds: len(_decided) <= UNCOMMITTED_MAX, or one more than there are sinks, however long a sink does
not commit. Each has at most 4 KB a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.record_times import RecordTimes, RecordTimesCounter
from onceflow.core.runtime.events.job_events import (
    AttemptBegan,
    CheckpointAcked,
    CheckpointCommitted,
    CheckpointCompleted,
    JobEvent,
    SinksRecovered,
    SubtaskCommitted,
)
from onceflow.core.runtime.metrics import metric_catalog
from onceflow.core.runtime.metrics.recent_latency import RecentLatency, RecentTimes
from onceflow.core.runtime.metrics.samples import Family, Histogram

UNCOMMITTED_MAX = 256
"""Decided checkpoints that are kept apart. More are merged, the oldest first."""


@dataclass(frozen=True, slots=True)
class SinkInputs:
    """What one sink's rows are made of, and who commits them."""

    uid: str
    chain: str
    sources: frozenset[str]
    """The uids of all sources whose records flow into the sink."""
    committed_by_driver: bool = False


@dataclass(slots=True)
class _Undecided:
    """One checkpoint that is not known to be decided."""

    times: dict[str, RecordTimesCounter] = field(default_factory=dict[str, RecordTimesCounter])
    """By source."""
    subtasks: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """By chain that has sinks, the subtasks that have acked, and so are to commit."""


@dataclass(slots=True)
class _Decided:
    """One checkpoint whose rows are not known to be visible in `sinks`; there is one at least."""

    times: Mapping[str, RecordTimes]
    """By source."""
    subtasks: dict[str, set[int]]
    """By chain that has sinks, the subtasks that have not committed."""
    sinks: set[str]


class CommitLatency:
    """Owned by `JobMetrics`, which serializes the calls."""

    def __init__(self, sinks: Sequence[SinkInputs]) -> None:
        self._sinks = {sink.uid: sink for sink in sinks}
        self._chains = {sink.chain for sink in sinks}
        self._histograms = {
            uid: Histogram(metric_catalog.COMMIT_LATENCY.buckets) for uid in self._sinks
        }
        self._recent = {uid: RecentTimes() for uid in self._sinks}
        self._undecided: dict[int, _Undecided] = {}
        self._decided: dict[int, _Decided] = {}
        """By checkpoint, rising."""

    def on_event(self, event: JobEvent) -> None:
        """Take one event of the job."""
        at_s = event.at.wall_s
        if isinstance(event, AttemptBegan):
            # The decision may be of an append of which the attempt before did not hear.
            if event.restored_checkpoint in self._undecided:
                self._decide(event.restored_checkpoint)
            self._undecided.clear()
        elif isinstance(event, CheckpointAcked):
            self._add_ack(event)
        elif isinstance(event, CheckpointCompleted):
            self._decide(event.checkpoint)
        elif isinstance(event, SubtaskCommitted):
            self._end_subtask(event.subtask, event.checkpoint, at_s)
        elif isinstance(event, CheckpointCommitted):
            uid = event.uid
            self._observe(event.checkpoint, at_s, lambda sink, _: sink.uid == uid)
        elif isinstance(event, SinksRecovered):
            # Recovery has committed all that is decided, before any row of the attempt is read.
            newest = max(self._decided, default=0)
            self._observe(newest, at_s, lambda _sink, _decided: True)

    def collect(self) -> Iterator[Family]:
        """Yield the histogram, where there are sinks."""
        if self._histograms:
            samples = tuple(((uid,), one.value()) for uid, one in sorted(self._histograms.items()))
            yield Family(metric_catalog.COMMIT_LATENCY, samples)

    def read_recent(self, now_s: float) -> dict[str, RecentLatency]:
        """Return, by sink, what records took that became visible shortly before `now_s`."""
        recent = {uid: times.read(now_s) for uid, times in self._recent.items()}
        return {uid: one for uid, one in recent.items() if one is not None}

    def _add_ack(self, ack: CheckpointAcked) -> None:
        chain, times = ack.subtask.chain, ack.record_times
        if chain not in self._chains and times is None:
            return
        pending = self._undecided.setdefault(ack.checkpoint, _Undecided())
        if chain in self._chains:
            pending.subtasks.setdefault(chain, set()).add(ack.subtask.index)
        if times is not None:
            pending.times.setdefault(chain, RecordTimesCounter()).merge(times)

    def _decide(self, checkpoint: int) -> None:
        """Note that `checkpoint` is decided, and with it those before that were given up."""
        subtasks = self._undecided.get(checkpoint, _Undecided()).subtasks
        # Rows of checkpoints that were given up are in this one, too: the stream before n is also
        # before n + 1.
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
        """Count the rows of an older checkpoint with those of the next one.

        They become visible no earlier in any sink that both wait for. Sinks commit in order, so
        two neighbours wait for the same ones, unless there are no more than that of them.
        """
        for older, newer in pairwise(self._decided):
            one, other = self._decided[older], self._decided[newer]
            if one.sinks == other.sinks:
                times = _merge_times((*one.times.items(), *other.times.items()))
                subtasks = {
                    chain: one.subtasks.get(chain, set()) | other.subtasks.get(chain, set())
                    for chain in {*one.subtasks, *other.subtasks}
                }
                self._decided[newer] = _Decided(times, subtasks, other.sinks)
                del self._decided[older]
                return

    def _end_subtask(self, subtask: SubtaskRef, through: int, at_s: float) -> None:
        """Note that `subtask` has committed; a sink has when every subtask of its chain has."""
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
        # A copy of the numbers, for entries are removed on the way.
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
        for one in of_sink:
            values = tuple(one.list_latencies_s(at_ms))
            self._histograms[uid].observe_all(values, one.sum_latencies_s(at_ms))
            self._recent[uid].add(values, at_ms / 1000)


def _merge_times(all_times: Iterable[tuple[str, RecordTimes]]) -> dict[str, RecordTimes]:
    """Return one summary a source of (source, summary)."""
    counters: dict[str, RecordTimesCounter] = {}
    for source, times in all_times:
        counters.setdefault(source, RecordTimesCounter()).merge(times)
    merged = {source: counter.take() for source, counter in counters.items()}
    return {source: times for source, times in merged.items() if times is not None}
