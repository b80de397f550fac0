"""The commit progress of every subtask, as an immutable value that is cheap to update.

The status fold creates a new tally for each event. With a single dict of all subtasks, each event
would copy the whole dict: quadratic work per checkpoint. Here an event copies one block of
subtasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onceflow.core.protocol.ids import SubtaskRef

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class CommitTally:
    """The newest checkpoint that each subtask is known to have committed."""

    blocks: Mapping[tuple[str, int], Mapping[int, int]] = field(
        default_factory=dict[tuple[str, int], Mapping[int, int]]
    )
    """The checkpoints by chain and index // `_BLOCK`, then by index."""
    counts: Mapping[int, int] = field(default_factory=dict[int, int])
    """The number of subtasks by the newest checkpoint that they have committed."""

    def lowest_of(self, subtasks: int) -> int:
        """Return the newest checkpoint that all `subtasks` have committed; 0 if one is missing."""
        return min(self.counts) if sum(self.counts.values()) >= subtasks and self.counts else 0

    def with_commit(self, subtask: SubtaskRef, checkpoint: int) -> CommitTally:
        """Return the tally after `subtask` has committed `checkpoint`.

        An older one has no effect.
        """
        number = subtask.chain, subtask.index // _BLOCK
        block = self.blocks.get(number, {})
        before = block.get(subtask.index)
        newest = max(checkpoint, before or 0)
        counts = {**self.counts}
        if before is not None:
            counts[before] -= 1
        counts[newest] = counts.get(newest, 0) + 1
        return CommitTally(
            {**self.blocks, number: {**block, subtask.index: newest}},
            {n: count for n, count in counts.items() if count},
        )
