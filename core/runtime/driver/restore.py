"""From the decision log to what each slot is deployed with."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.core.graph import Graph, ProcessKeyed, ReadFrom, RunAggregates
from onceflow.core.protocol.assignment import assign_splits, key_group_range
from onceflow.core.protocol.ids import GENESIS, AttemptId, SubtaskRef
from onceflow.core.protocol.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.splits import Split, with_lists
from onceflow.core.runtime.dataflow.source_subtask import SPLITS, decode_split, encode_split
from onceflow.core.runtime.messages import RestoredOperator


def genesis_of(
    graph: Graph, attempt: AttemptId, parallelism: int, max_parallelism: int, now_ms: int
) -> CompletedCheckpoint:
    """Return checkpoint 0: where every source starts, resolved now and never again.

    Once it is in the decision log, a crash before the first checkpoint starts from the same
    records, also for a source that starts at the latest.
    """
    snapshots = tuple(
        SubtaskSnapshot(
            SubtaskRef(uid, 0), (OperatorSnapshot(uid, lists={SPLITS: _encoded(source.splits())}),)
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
    """Return the decision with which the attempt begins instead of `restored`, if any is needed.

    It is when a source has splits that `restored` does not hold: one that is new in the job, or one
    that has grown since. In the decision log before any slot begins, it lets a new source resolve
    where it starts once only, and no split be read that a crash would forget.

    Raises:
        SourceError: What is known of a source cannot be read on.
    """
    lists: dict[str, tuple[bytes, ...]] = {}
    for uid, source in graph.sources():
        known = splits_of(restored, uid)
        now = source.splits() if known is None else source.discover(known)
        if known is None or set(now) != set(known):
            lists[uid] = _encoded(now)
    if not lists:
        return None
    return with_lists(restored, SPLITS, lists, attempt=attempt, now_ms=now_ms)


def splits_of(completed: CompletedCheckpoint, uid: str) -> tuple[Split, ...] | None:
    """Return the splits of source `uid` in `completed`; None: it does not know the source."""
    lists = [operator.lists for _, operator in completed.operator(uid)]
    if not any(SPLITS in one for one in lists):
        return None
    return tuple(decode_split(element) for one in lists for element in one.get(SPLITS, ()))


def restored_operators(
    graph: Graph, restored: CompletedCheckpoint, parallelism: int, slot: int
) -> tuple[RestoredOperator, ...]:
    """Return the state with which slot `slot` of `parallelism` begins."""
    operators: list[RestoredOperator] = []
    for operator in graph.operators:
        old = restored.operator(operator.uid)
        match operator.work:
            case ReadFrom():
                elements = [e for _, o in old for e in o.lists.get(SPLITS, ())]
                mine = _dealt_to(elements, parallelism, slot)
                operators.append(RestoredOperator(operator.uid, lists={SPLITS: mine}))
            case ProcessKeyed() | RunAggregates():
                groups = key_group_range(restored.max_parallelism, parallelism, slot)
                handles = _overlapping([h for _, o in old for h in o.keyed], groups)
                operators.append(RestoredOperator(operator.uid, keyed=handles))
            case _:
                pass
    return tuple(operators)


def _encoded(splits: Sequence[Split]) -> tuple[bytes, ...]:
    return tuple(map(encode_split, splits))


def _dealt_to(elements: Sequence[bytes], parallelism: int, slot: int) -> tuple[bytes, ...]:
    by_id = {decode_split(element).id: element for element in elements}
    return tuple(by_id[split] for split in assign_splits(sorted(by_id), parallelism)[slot])


def _overlapping(handles: Sequence[StateHandle], groups: range) -> tuple[StateHandle, ...]:
    return tuple(
        handle
        for handle in handles
        if handle.key_group_first < groups.stop and handle.key_group_last >= groups.start
    )
