"""The splits of a job's sources: their start positions, restored positions, and new splits.

The attempt's thread decides when to ask a source, and which subtask to offer which split. A
question may wait for a server, so each question has its own thread. `protocol.splits` decides what
may be read when.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onceflow.core.errors import SourceError
from onceflow.core.plan.graph import Graph
from onceflow.core.protocol import splits
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import GENESIS, AttemptId, SubtaskRef
from onceflow.core.protocol.loops.attempt_facts import DiscoveryAnswered
from onceflow.core.protocol.messages import OfferSplits
from onceflow.core.runtime.dataflow.source_operator import SPLITS, decode_split, encode_split
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.json_logs import carry_fields
from onceflow.core.spi import Source

_log = logging.getLogger("onceflow.runtime.discovery")


def genesis_of(
    graph: Graph, attempt: AttemptId, parallelism: int, max_parallelism: int, now_ms: int
) -> CompletedCheckpoint:
    """Return checkpoint 0: the start position of every source, resolved only once.

    Once it is in the decision log, an attempt after an early crash starts from the same records.
    This also holds for a source that starts at the latest position.
    """
    snapshots = tuple(
        SubtaskSnapshot(
            SubtaskRef(uid, 0), (OperatorSnapshot(uid, lists={SPLITS: _encode_new(source)}),)
        )
        for uid, source in graph.sources()
    )
    return CompletedCheckpoint(
        checkpoint=GENESIS,
        attempt=attempt,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
        snapshots=snapshots,
        triggered_at_ms=now_ms,
        completed_at_ms=now_ms,
    )


def with_discovered_splits(
    graph: Graph, restored: CompletedCheckpoint, attempt: AttemptId, now_ms: int
) -> CompletedCheckpoint | None:
    """Return the decision that replaces `restored`, or None if its splits are current.

    A decision is needed if a source has splits that `restored` does not contain: a source that is
    new in the job, or a source that has grown. The decision is logged before any slot begins. So a
    new source resolves its start position only once, and no split is read that a crash would
    forget.

    Raises:
        SourceError: The known splits of a source cannot be read on.
    """
    lists: dict[str, tuple[bytes, ...]] = {}
    for uid, source in graph.sources():
        known = _read_split_states(restored, uid)
        if known is None:
            lists[uid] = _encode_new(source)
            continue
        now = splits.merge_discovered(known, source.discover([state.split for state in known]))
        elements = _encode_splits(now)
        # Compare sets: a source may list the same splits in another order, which needs no
        # decision.
        if set(elements) != set(_encode_splits(known)):
            lists[uid] = elements
    if not lists:
        return None
    return splits.with_lists(restored, SPLITS, lists, attempt=attempt, now_ms=now_ms)


def splits_of(completed: CompletedCheckpoint, uid: str) -> tuple[splits.Split, ...] | None:
    """Return the splits of source `uid` in `completed`, or None if it does not know the source."""
    states = _read_split_states(completed, uid)
    return None if states is None else tuple(state.split for state in states)


def _read_split_states(
    completed: CompletedCheckpoint, uid: str
) -> tuple[splits.SplitState, ...] | None:
    lists = [operator.lists for _, operator in completed.operator(uid)]
    if not any(SPLITS in of_subtask for of_subtask in lists):
        return None
    return tuple(
        decode_split(element) for of_subtask in lists for element in of_subtask.get(SPLITS, ())
    )


def _encode_new(source: Source) -> tuple[bytes, ...]:
    return _encode_splits(map(splits.SplitState, source.splits()))


def _encode_splits(states: Iterable[splits.SplitState]) -> tuple[bytes, ...]:
    return tuple(map(encode_split, states))


@dataclass(slots=True)
class _Growing:
    """A source that may grow while it is read."""

    source: Source
    interval_s: float
    due_at: float
    asking: bool = False


class SplitDiscovery:
    """Asks sources for new splits.

    Used by the attempt's thread alone; times are `time.monotonic`.
    """

    def __init__(
        self,
        context: AttemptContext,
        tell: Callable[[DiscoveryAnswered], None],
        now: float,
    ) -> None:
        self._attempt = context.plan.attempt
        self._tell = tell
        self._sources = {
            uid: _Growing(source, source.discovery_interval_s, now + source.discovery_interval_s)
            for uid, source in context.graph.sources()
            if source.discovery_interval_s is not None and not source.bounded
        }

    def build_offers(
        self, restored: CompletedCheckpoint, parallelism: int
    ) -> dict[str, splits.SplitOffers]:
        """Return, for each source that may grow, the assignment of splits to subtasks."""
        return {
            uid: splits.SplitOffers(
                (split.id for split in splits_of(restored, uid) or ()), parallelism
            )
            for uid in self._sources
        }

    def ask(self, completed: CompletedCheckpoint, now: float) -> None:
        """Ask each source that is due for splits that the last decision, `completed`, lacks."""
        for uid, growing in self._sources.items():
            if growing.asking or now < growing.due_at:
                continue
            known = splits_of(completed, uid) or ()
            growing.asking = True
            # Count from the question, not from the answer, so that a slow server does not lengthen
            # the interval. `asking` prevents a second question before the first is answered.
            growing.due_at = now + growing.interval_s
            threading.Thread(
                target=carry_fields(self._answer),
                args=(uid, growing.source, known),
                name=f"discover splits of {uid}",
                daemon=True,
            ).start()

    def take(self, uid: str, offers: Mapping[int, OfferSplits]) -> None:
        """Record that source `uid` has answered; it may be asked again."""
        self._sources[uid].asking = False
        for slot, offer in offers.items():
            names = ", ".join(split.id for split in offer.splits)
            _log.info("source %s: subtask %d now also reads %s", uid, slot, names)

    def _answer(self, uid: str, source: Source, known: Sequence[splits.Split]) -> None:
        self._tell(_ask_source(self._attempt, uid, source, known))


def _ask_source(
    attempt: AttemptId, uid: str, source: Source, known: Sequence[splits.Split]
) -> DiscoveryAnswered:
    """Ask `source`. If its server is away, return no splits: a later question may succeed."""
    try:
        now = source.discover(known)
    except Exception as error:
        if isinstance(error, SourceError) and error.retry == "never":
            return DiscoveryAnswered(attempt, uid, error=error)
        _log.warning("source %s cannot list new splits at the moment: %s", uid, error)
        return DiscoveryAnswered(attempt, uid)
    # A running reader cannot change its position, so another position for a known split needs a
    # new attempt.
    if moved := splits.describe_moved(known, now):
        return DiscoveryAnswered(
            attempt,
            uid,
            error=SourceError(
                f"source {uid} cannot continue from its last positions: {'; '.join(moved)}. The"
                " next attempt continues from the positions that the source gives now. If the"
                " source logged no warning about it, its discover() must return known splits"
                " unchanged"
            ),
        )
    taken = {split.id for split in known}
    return DiscoveryAnswered(attempt, uid, tuple(split for split in now if split.id not in taken))
