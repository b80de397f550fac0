"""The ownership of splits that appear while a job runs, and of key groups.

    discovered -> offered to one subtask -> in its snapshots -> decided -> read

After a crash before the decision, the split is discovered again, at its first record. After a crash
later than the decision, the split is restored. At the start of an attempt nothing runs yet, so a
decision of its own adds the new splits (`with_lists`), and every subtask begins with decided
splits.

Invariants:
    a split is read only while the log holds a decision with it
    in one attempt a split is offered once, to one subtask

The ownership of key groups, splits and state without a key after a start or a rescale:

    key group in 0 .. max_parallelism - 1;  owner_of(g) == i  <=>  g in key_group_range(i)
    1 <= parallelism <= max_parallelism <= 32768

Every assignment is a function of its arguments alone, so all processes agree without messages.

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
"""The number of bytes of a position in an error: a whole Kafka position for names of usual
length."""

_Item = TypeVar("_Item")


def key_group_range(max_parallelism: int, parallelism: int, index: int) -> range:
    """Return the contiguous key groups of subtask `index`; never empty."""
    _check(max_parallelism, parallelism)
    if not 0 <= index < parallelism:
        raise ValueError(f"subtask index {index} is not in 0..{parallelism - 1}")
    # Round both up, so that this function is the inverse of `owner_of`, which rounds down.
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
    # Compute in whole numbers, like Flink: a float would round differently near powers of two.
    least = parallelism + (parallelism + 1) // 2
    return min(max(1 << (least - 1).bit_length(), KEY_GROUPS_DEFAULT_MIN), PARALLELISM_MAX)


def assign_splits(split_ids: Sequence[str], parallelism: int) -> tuple[tuple[str, ...], ...]:
    """Return each subtask's split ids: sorted, taken in turn, loads differing by one at most.

    Raises:
        ValueError: An id occurs twice. Two readers of one split would double its records.
    """
    if len(set(split_ids)) != len(split_ids):
        twice = sorted({split for split in split_ids if split_ids.count(split) > 1})
        raise ValueError(f"splits {', '.join(twice)} are listed more than once")
    return redistribute_list([sorted(split_ids)], parallelism)


def redistribute_list(
    parts: Sequence[Sequence[_Item]], parallelism: int
) -> tuple[tuple[_Item, ...], ...]:
    """Return the list state of each subtask: each item goes to one, loads differ by one at most.

    `parts` are the items of each old subtask, by index.
    """
    if parallelism < 1:
        raise ValueError(f"parallelism={parallelism} must be 1 or more")
    items = [item for part in parts for item in part]
    return tuple(tuple(items[index::parallelism]) for index in range(parallelism))


def broadcast_copy(index: int, copies: int) -> int:
    """Return the number of the copy of broadcast state for subtask `index`; all are equal."""
    return index % copies


def _check(max_parallelism: int, parallelism: int) -> None:
    if not 1 <= parallelism <= max_parallelism <= PARALLELISM_MAX:
        raise ValueError(
            f"parallelism={parallelism} and max parallelism={max_parallelism} must be"
            f" 1 <= parallelism <= max parallelism <= {PARALLELISM_MAX}"
        )


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a source that only one reader reads, and the position to continue from.

    `id` is stable over the life of the source (`payments-0`). `position` is the source's own
    encoding of the *next* record to read, never of the last one read.
    """

    id: str
    position: bytes


@dataclass(frozen=True, slots=True)
class SplitState:
    """The state of a split in a checkpoint: the source's fields and the engine's fields.

    Sources and readers take and return `Split`, so they can neither change nor lose the engine's
    fields.
    """

    split: Split
    event_time_ms: int | None = None
    """The latest event time read in the split. None without watermarks, or before the first row.

    Also None if the source has several outputs.
    """
    output_times_ms: tuple[tuple[str, int], ...] = ()
    """(output, latest event time read in the split) for outputs with watermarks that had rows, by
    name."""


def merge_discovered(
    known: Iterable[SplitState], discovered: Iterable[Split]
) -> tuple[SplitState, ...]:
    """Return the state of each of `discovered`; a split of `known` keeps the engine's fields.

    This includes a split that the source has moved to another position: event time never goes back.
    """
    states = {state.split.id: state for state in known}
    return tuple(
        replace(states[split.id], split=split) if split.id in states else SplitState(split)
        for split in discovered
    )


def describe_moved(known: Iterable[Split], discovered: Iterable[Split]) -> list[str]:
    """Return a description of each split of `known` that `discovered` moves or leaves out.

    Both positions are in the description. Empty if a running job can read on.
    """
    positions = {split.id: split.position for split in discovered}
    descriptions: list[str] = []
    for split in sorted(known, key=lambda split: split.id):
        position = positions.get(split.id)
        if position is None:
            descriptions.append(f"split {split.id} is missing")
        elif position != split.position:
            old, new = split.position[:_SHOWN_MAX], position[:_SHOWN_MAX]
            descriptions.append(f"split {split.id} is at {new!r} instead of {old!r}")
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

    Everything else is copied from `restored`: its transactions to commit, its files, and how often
    it may be restored. So a crash before or after the append restores the same state. The whole
    list of an operator, known or new, is stored with its subtask 0: every restore redistributes
    list state.
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
    # This decision repeats the transactions of `restored`. Commits of whole checkpoints go by the
    # first decision that names a transaction, so `restored` must be named as well.
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
    """The driver's record, for one source in one attempt, of the subtask that has each split."""

    def __init__(self, restored: Iterable[str], parallelism: int) -> None:
        self._splits = [set(splits) for splits in assign_splits(sorted(restored), parallelism)]

    def offer(self, discovered: Sequence[Split]) -> dict[int, tuple[Split, ...]]:
        """Offer each unassigned split of `discovered` to the subtask with the fewest splits."""
        offers: dict[int, tuple[Split, ...]] = {}
        for split in sorted(discovered, key=lambda split: split.id):
            if any(split.id in splits for splits in self._splits):
                continue
            # Count again for each split, because the previous one may have changed which subtask
            # has the fewest.
            loads = [len(splits) for splits in self._splits]
            subtask = loads.index(min(loads))
            self._splits[subtask].add(split.id)
            offers[subtask] = (*offers.get(subtask, ()), split)
        return offers


class AwaitedSplits:
    """The subtask's offered splits that it may not read yet. Used by one thread."""

    def __init__(self) -> None:
        self._awaited: dict[str, Split] = {}
        self._snapshots: dict[CheckpointId, tuple[Split, ...]] = {}

    def add_offer(self, splits: Sequence[Split]) -> None:
        """Add the offered `splits`: the next snapshot contains them."""
        self._awaited.update({split.id: split for split in splits})

    def snapshot(self, checkpoint: CheckpointId) -> tuple[Split, ...]:
        """Return the splits in the snapshot for `checkpoint`, besides those that are being read."""
        awaited = tuple(self._awaited.values())
        if awaited:
            self._snapshots[checkpoint] = awaited
        return awaited

    def take_decided(self, checkpoint: CheckpointId) -> tuple[Split, ...]:
        """Return the splits that `checkpoint` decides, each once; the subtask may read them now."""
        decided = self._snapshots.get(checkpoint, ())
        self._snapshots = {n: kept for n, kept in self._snapshots.items() if n > checkpoint}
        return tuple(split for split in decided if self._awaited.pop(split.id, None) is not None)

    def drop_snapshot(self, checkpoint: CheckpointId) -> None:
        """Forget the snapshot of `checkpoint`, which was aborted; its splits still wait."""
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
