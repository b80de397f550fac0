"""Who owns what, and from when on: splits that appear while a job exists, and key groups.

    discovered -> offered to one subtask -> in its snapshots -> decided -> read

A crash before the decision leaves a split that is discovered again, at its first record; after it,
one that is restored. At the start of an attempt nothing runs yet: a decision of its own takes in
what has appeared (`with_lists`), and every subtask begins with splits that are decided.

Invariants:
    a split is read only while the log holds a decision with it
    in one attempt a split is offered once, to one subtask

Who owns key groups, splits and state without a key after a start or a rescale:

    key group in 0 .. max_parallelism - 1;  owner_of(g) == i  <=>  g in key_group_range(i)
    1 <= parallelism <= max_parallelism <= 32768

Every assignment is a function of its arguments alone, so all processes agree without talking.
Source: Flink's `KeyGroupRangeAssignment` and `RoundRobinOperatorStateRepartitioner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import PARALLELISM_MAX, AttemptId, CheckpointId, SubtaskRef

KEY_GROUPS_DEFAULT_MIN = 128
_SHOWN_MAX = 200
"""Bytes of a position in an error: a whole position of Kafka, for names of usual length."""

_Item = TypeVar("_Item")


def key_group_range(max_parallelism: int, parallelism: int, index: int) -> range:
    """Return the contiguous key groups of subtask `index`; never empty."""
    _check(max_parallelism, parallelism)
    if not 0 <= index < parallelism:
        raise ValueError(f"subtask index {index} is not in 0..{parallelism - 1}")
    # Both are rounded up, so that this is the inverse of `owner_of`, which rounds down.
    first = -(-index * max_parallelism // parallelism)
    end = -(-(index + 1) * max_parallelism // parallelism)
    return range(first, end)


def owner_of(key_group: int, max_parallelism: int, parallelism: int) -> int:
    """Return the index of the subtask that owns `key_group`."""
    _check(max_parallelism, parallelism)
    if not 0 <= key_group < max_parallelism:
        raise ValueError(f"key group {key_group} is not in 0..{max_parallelism - 1}")
    return key_group * parallelism // max_parallelism


def default_max_parallelism(parallelism: int) -> int:
    """Return the power of two at or above 1.5 x `parallelism`, within 128 and 32768."""
    if not 1 <= parallelism <= PARALLELISM_MAX:
        raise ValueError(f"parallelism={parallelism} must be 1..{PARALLELISM_MAX}")
    # In whole numbers, as Flink computes it: a float would round differently near powers of two.
    least = parallelism + (parallelism + 1) // 2
    return min(max(1 << (least - 1).bit_length(), KEY_GROUPS_DEFAULT_MIN), PARALLELISM_MAX)


def assign_splits(split_ids: Sequence[str], parallelism: int) -> tuple[tuple[str, ...], ...]:
    """Return each subtask's split ids: sorted, taken in turn, loads differing by one at most.

    Raises:
        ValueError: An id comes twice; two readers of one split would double its records.
    """
    if len(set(split_ids)) != len(split_ids):
        twice = sorted({split for split in split_ids if split_ids.count(split) > 1})
        raise ValueError(f"splits {', '.join(twice)} come twice")
    return redistribute_list([sorted(split_ids)], parallelism)


def redistribute_list(
    parts: Sequence[Sequence[_Item]], parallelism: int
) -> tuple[tuple[_Item, ...], ...]:
    """Spread list state anew: every item goes to one subtask, loads differing by one at most.

    `parts` are the items of each old subtask, by index.
    """
    if parallelism < 1:
        raise ValueError(f"parallelism={parallelism} must be 1 or more")
    items = [item for part in parts for item in part]
    return tuple(tuple(items[index::parallelism]) for index in range(parallelism))


def broadcast_copy(index: int, copies: int) -> int:
    """Return whose copy of broadcast state subtask `index` is given: all `copies` are the same."""
    return index % copies


def _check(max_parallelism: int, parallelism: int) -> None:
    if not 1 <= parallelism <= max_parallelism <= PARALLELISM_MAX:
        raise ValueError(
            f"parallelism={parallelism} and max parallelism={max_parallelism} must be"
            f" 1 <= parallelism <= max parallelism <= {PARALLELISM_MAX}"
        )


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a source that one reader reads alone, and where to go on in it.

    `id` is stable over the life of the source (`payments-0`); `position` is the source's own
    encoding of the *next* record to read, never of the last one read.
    """

    id: str
    position: bytes


@dataclass(frozen=True, slots=True)
class SplitState:
    """The state of a split in a checkpoint: the source's fields, and the engine's beside them.

    Sources and readers take and return `Split`, so they can neither change nor lose what the engine
    keeps.
    """

    split: Split
    event_time_ms: int | None = None
    """The latest event time read in the split. None without watermarks, or before the first row."""


def merge_discovered(
    known: Iterable[SplitState], discovered: Iterable[Split]
) -> tuple[SplitState, ...]:
    """Return the state of each of `discovered`; a split of `known` keeps the engine's fields.

    That includes a split that the source has moved to another position: event time never goes back.
    """
    event_times = {state.split.id: state.event_time_ms for state in known}
    return tuple(SplitState(split, event_times.get(split.id)) for split in discovered)


def describe_moved(known: Iterable[Split], discovered: Iterable[Split]) -> list[str]:
    """Return a description of each split of `known` that `discovered` moves or leaves out.

    Both positions are in the description. Empty if a running job can read on.
    """
    positions = {split.id: split.position for split in discovered}
    descriptions: list[str] = []
    for split in sorted(known, key=lambda split: split.id):
        position = positions.get(split.id)
        if position is None:
            descriptions.append(f"split {split.id} is left out")
        elif position != split.position:
            old, new = split.position[:_SHOWN_MAX], position[:_SHOWN_MAX]
            descriptions.append(f"split {split.id} stands at {new!r} instead of {old!r}")
    return descriptions


def with_lists(
    restored: CompletedCheckpoint,
    name: str,
    lists: Mapping[str, tuple[bytes, ...]],
    *,
    attempt: AttemptId,
    now_ms: int,
) -> CompletedCheckpoint:
    """Return the decision after `restored` in which the operators of `lists` have that list state.

    Everything else is `restored`'s: what it decides to commit, whose files it names, how often it
    may be restored. So a crash before or after the append restores the same state. The list of an
    operator, known or new, is all with its subtask 0: every restore spreads list state anew.
    """
    snapshots = {
        snapshot.subtask: replace(
            snapshot,
            operators=tuple(
                replace(operator, lists={**operator.lists, name: ()})
                if operator.uid in lists
                else operator
                for operator in snapshot.operators
            ),
        )
        for snapshot in restored.snapshots
    }
    for uid, elements in lists.items():
        first = SubtaskRef(uid, 0)
        old = snapshots.get(first, SubtaskSnapshot(first))
        known = next((o for o in old.operators if o.uid == uid), OperatorSnapshot(uid))
        others = tuple(operator for operator in old.operators if operator.uid != uid)
        held = replace(known, lists={**known.lists, name: elements})
        snapshots[first] = replace(old, operators=(held, *others))
    # This decision repeats what `restored` lists. Commits of whole checkpoints go by the first
    # decision that names a transaction, so that one must be named as well.
    listed = any(operator.committables for s in snapshots.values() for operator in s.operators)
    return replace(
        restored,
        checkpoint=CheckpointId(restored.checkpoint + 1),
        attempt=attempt,
        snapshots=tuple(snapshots[subtask] for subtask in sorted(snapshots)),
        triggered_at_ms=now_ms,
        completed_at_ms=now_ms,
        final=False,
        undelivered=(*restored.undelivered, restored.checkpoint) if listed else (),
    )


class SplitOffers:
    """The driver's side, for one source in one attempt: which subtask has which split."""

    def __init__(self, restored: Iterable[str], parallelism: int) -> None:
        self._splits = [set(splits) for splits in assign_splits(sorted(restored), parallelism)]

    def offer(self, discovered: Sequence[Split]) -> dict[int, tuple[Split, ...]]:
        """Offer each of `discovered` that nobody has to the subtask with the fewest splits."""
        offers: dict[int, tuple[Split, ...]] = {}
        for split in sorted(discovered, key=lambda split: split.id):
            if any(split.id in splits for splits in self._splits):
                continue
            # Counted anew for each split, for the one before may have changed which subtask has the
            # fewest.
            loads = [len(splits) for splits in self._splits]
            subtask = loads.index(min(loads))
            self._splits[subtask].add(split.id)
            offers[subtask] = (*offers.get(subtask, ()), split)
        return offers


class AwaitedSplits:
    """The subtask's side: splits that it was offered and may not read yet. Used by one thread."""

    def __init__(self) -> None:
        self._awaited: dict[str, Split] = {}
        self._snapshots: dict[CheckpointId, tuple[Split, ...]] = {}

    def add_offer(self, splits: Sequence[Split]) -> None:
        """Take in an offer: the next snapshot holds `splits`."""
        self._awaited.update({split.id: split for split in splits})

    def snapshot(self, checkpoint: CheckpointId) -> tuple[Split, ...]:
        """Return what the snapshot for `checkpoint` holds besides the splits that are read."""
        awaited = tuple(self._awaited.values())
        if awaited:
            self._snapshots[checkpoint] = awaited
        return awaited

    def take_decided(self, checkpoint: CheckpointId) -> tuple[Split, ...]:
        """Return the splits that `checkpoint` decides, each once: they are to be read from now."""
        decided = self._snapshots.get(checkpoint, ())
        self._snapshots = {n: kept for n, kept in self._snapshots.items() if n > checkpoint}
        return tuple(split for split in decided if self._awaited.pop(split.id, None) is not None)

    def drop_snapshot(self, checkpoint: CheckpointId) -> None:
        """Take in that `checkpoint` will never be: what it held is awaited still."""
        self._snapshots.pop(checkpoint, None)


__all__ = [
    "AwaitedSplits",
    "Split",
    "SplitOffers",
    "SplitState",
    "describe_moved",
    "merge_discovered",
    "with_lists",
]
