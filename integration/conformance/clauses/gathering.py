"""The clauses for sinks that commit whole checkpoints: all subtasks in one commit, in order."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.core.protocol.committables import AlreadyCommitted, CommitOutcome, Committed, Lost
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import GlobalCommitter
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses.deciding import abort_leaves_nothing, commit_again
from onceflow.integration.conformance.clauses.listing import in_doubt_is_exact
from onceflow.integration.conformance.harness import Harness, Prepared, ask_until_known
from onceflow.integration.conformance.target import NotTestable, expect


@clause(rests_on=[commit_again, in_doubt_is_exact])
def checkpoint_is_committed_whole(harness: Harness) -> None:
    """A global commit shows the rows of all its subtasks, no others, and records its checkpoint."""
    with harness.global_committer() as committer:
        expect(
            committer.read_committed_through() == 0,
            f"at first {committer.read_committed_through()}",
        )
        whole = [harness.prepare(1, subtask=subtask) for subtask in (0, 1, 11)]
        later = harness.prepare(2)
        outcome = _commit(harness, committer, 1, whole)
        expect(outcome == Committed(), f"the first commit of checkpoint 1: {outcome}")
        harness.expect_seen(
            *(transaction.ids for transaction in whole), when="after the commit of checkpoint 1"
        )
        harness.expect_in_doubt(later, when="after the commit of checkpoint 1")
    with harness.global_committer(2) as other:
        through = other.read_committed_through()
        expect(through == 1, f"another committer says {through}, and checkpoint 1 is committed")


@clause(rests_on=[checkpoint_is_committed_whole])
def committed_checkpoint_only_rises(harness: Harness) -> None:
    """A checkpoint up to the highest committed one returns AlreadyCommitted and is not applied."""
    first, second, early = harness.prepare(3), harness.prepare(5), harness.prepare(4)
    with harness.global_committer() as committer, harness.global_committer() as other:
        for checkpoint, transaction in ((3, first), (5, second)):
            outcome = _commit(harness, committer, checkpoint, [transaction])
            expect(outcome == Committed(), f"the first commit of {checkpoint}: {outcome}")
        for checkpoint, transaction in ((3, first), (5, second), (4, early)):
            outcome = _commit(harness, other, checkpoint, [transaction])
            expect(outcome == AlreadyCommitted(), f"commit of {checkpoint} after 5: {outcome}")
            through = committer.read_committed_through()
            expect(through == 5, f"after 5 and then {checkpoint}, committed through {through}")
    harness.expect_seen(first.ids, second.ids, when="after late commits of 3, 5 and 4")


@clause(rests_on=[checkpoint_is_committed_whole, abort_leaves_nothing])
def checkpoint_is_whole_or_lost(harness: Harness) -> None:
    """A checkpoint with a missing transaction returns Lost, and nothing is shown or recorded."""
    first, gone, last = (harness.prepare(1, subtask=subtask) for subtask in range(3))
    with harness.global_committer() as committer:
        ask_until_known(lambda: committer.abort(gone.committable), harness.patience_s)
        outcome = _commit(harness, committer, 1, [first, gone, last])
        expect(isinstance(outcome, Lost), f"commit of a checkpoint with a part gone: {outcome}")
        harness.expect_seen(when="after the commit of a checkpoint of which a part is gone")
        through = committer.read_committed_through()
        expect(through == 0, f"nothing is committed, and the proof says {through}")
        harness.expect_in_doubt(first, last, when="after the commit of which a part was gone")


@clause(rests_on=[committed_checkpoint_only_rises])
def gathered_commit_leaves_out_what_is_committed(harness: Harness) -> None:
    """A commit of several decisions applies only those that are not committed yet."""
    if harness.described.gathering is None:
        raise NotTestable("the sink does not gather decisions")
    first, second, third = (harness.prepare(checkpoint) for checkpoint in (1, 2, 3))
    with harness.global_committer() as committer, harness.global_committer() as other:
        outcome = _commit(harness, committer, 2, [first, second])
        expect(outcome == Committed(), f"the commit of checkpoints 1 and 2: {outcome}")
        harness.expect_seen(first.ids, second.ids, when="after the commit of 1 and 2")
        outcome = _commit(harness, other, 3, [second, third])
        expect(outcome == Committed(), f"the commit of 2 and 3 by another driver: {outcome}")
        outcome = _commit(harness, committer, 3, [first, second, third])
        expect(outcome == AlreadyCommitted(), f"the commit of 1, 2 and 3 after that: {outcome}")
    harness.expect_seen(first.ids, second.ids, third.ids, when="after the commits of 1, 2 and 3")


def _commit(
    harness: Harness, committer: GlobalCommitter, checkpoint: int, prepared: Sequence[Prepared]
) -> CommitOutcome:
    committables = [transaction.committable for transaction in prepared]
    return ask_until_known(
        lambda: committer.commit_checkpoint(CheckpointId(checkpoint), committables),
        harness.patience_s,
    )


CLAUSES = (
    checkpoint_is_committed_whole,
    committed_checkpoint_only_rises,
    checkpoint_is_whole_or_lost,
    gathered_commit_leaves_out_what_is_committed,
)
