"""Tests the number of checkpoints for which proofs of commits are kept."""

from __future__ import annotations

from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
    committables_of,
    retain_ledger_from,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId


def checkpoint(number: int, lists: list[int]) -> CompletedCheckpoint:
    committables = tuple(Committable(TransactionId("s", 1, listed, 0), 1) for listed in lists)
    sink = OperatorSnapshot("sink", committables=committables)
    snapshots = (SubtaskSnapshot(SubtaskRef("sink", 0), (sink,)),)
    return CompletedCheckpoint(CheckpointId(number), AttemptId(1), 1, 128, snapshots, 0, 0)


def test_proofs_of_aborted_checkpoints_are_kept_while_a_retained_one_lists_them() -> None:
    """Checkpoints 5 and 6 were aborted after their pre-commit; 7 decided their transactions."""
    assert retain_ledger_from([checkpoint(7, [5, 6, 7])]) == 5


def test_without_older_committables_the_oldest_retained_checkpoint_counts() -> None:
    assert retain_ledger_from([checkpoint(7, [7]), checkpoint(8, [])]) == 7
    assert retain_ledger_from([]) == 0


def test_proofs_that_a_savepoint_lists_are_kept_until_something_is_committed_after_it() -> None:
    """A start from it in other storage asks for them, and later commits would tell it enough."""
    retained, savepoint = [checkpoint(9, [])], checkpoint(8, [6, 7])
    assert retain_ledger_from(retained, committables_of(checkpoint(7, [7])), savepoint) == 6
    assert retain_ledger_from(retained, committables_of(checkpoint(9, [9])), savepoint) == 9
