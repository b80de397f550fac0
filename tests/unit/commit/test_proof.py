"""Tests the page's comparison of the log with the target of a sink."""

from __future__ import annotations

import pytest

from onceflow.core.commit.proof import Agreement, describe_unreachable, judge_sink
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log.memory import Decided, LogMemory
from onceflow.core.protocol.log.rules import CheckpointDecided, LogView
from onceflow.core.protocol.log.target_records import TargetRecord

SINK = "job.out"


def view(
    checkpoint: int, *transactions: tuple[int, int], known: tuple[int, int] | None = None
) -> LogView:
    """A log whose last decision lists `transactions`, and knows `known` to be committed."""
    listed = tuple(
        Committable(TransactionId(SINK, attempt, number, index), rows=10)
        for index, (attempt, number) in enumerate(transactions)
    )
    snapshot = snapshots.SubtaskSnapshot(
        SubtaskRef("out", 0), (snapshots.OperatorSnapshot("out", committables=listed),)
    )
    completed = snapshots.CompletedCheckpoint(
        CheckpointId(checkpoint), AttemptId(2), 1, 128, (snapshot,), 0, 1_000
    )
    committed = () if known is None else (Committable(TransactionId(SINK, *known, 0)),)
    memory = LogMemory(decided=(Decided(1, 5), Decided(2, checkpoint)), committed=committed)
    return LogView(
        9, "", AttemptId(2), "", (CheckpointDecided(9, AttemptId(2), completed, ""),), memory=memory
    )


def record(*committed: tuple[int, int], through: int = 0) -> TargetRecord:
    marks = tuple(Decided(*one) for one in committed)
    return TargetRecord(SINK, AttemptId(2), marks, CheckpointId(through))


@pytest.mark.parametrize(
    ("before", "said", "after", "agreement"),
    [
        (view(7, (2, 7)), record((1, 5), (2, 7)), view(7, (2, 7)), Agreement.AGREES),
        (view(7, (2, 7)), record((1, 5), (2, 6)), view(7, (2, 7)), Agreement.COMMITTING),
        (view(7, (2, 7)), record(), view(7, (2, 7)), Agreement.COMMITTING),
        # The job has gone on between the readings.
        (view(7, (2, 7)), record((2, 9)), view(9, (2, 9)), Agreement.AGREES),
        (view(7, (2, 7)), record((2, 9)), view(8, (2, 8)), Agreement.AHEAD),
        # It had no row for some time: what is known to be committed must be there still.
        (view(9, known=(2, 7)), record((2, 7)), view(9, known=(2, 7)), Agreement.AGREES),
        (view(9, known=(2, 7)), record((2, 5)), view(9, known=(2, 7)), Agreement.BEHIND),
        (view(9), record(), view(9), Agreement.AGREES),
        (view(7, (2, 7)), None, view(7, (2, 7)), Agreement.SILENT),
        # Whole checkpoints.
        (view(7, (2, 7)), record(through=7), view(7, (2, 7)), Agreement.AGREES),
        (view(7, (2, 7)), record(through=8), view(7, (2, 7)), Agreement.AHEAD),
    ],
)
def test_a_target_proves_what_was_decided_before_it_was_asked_and_no_more_than_is_decided(
    before: LogView, said: TargetRecord | None, after: LogView, agreement: Agreement
) -> None:
    proof = judge_sink("out", SINK, before, said, after, 0)
    assert proof.agreement is agreement, proof.reason


@pytest.mark.parametrize(
    ("subtasks", "agreement"), [((0,), Agreement.COMMITTING), ((0, 1), Agreement.AGREES)]
)
def test_a_target_does_not_prove_a_decision_of_which_one_subtask_has_not_committed(
    subtasks: tuple[int, ...], agreement: Agreement
) -> None:
    """Such as a copy that was made between the commits of two subtasks."""
    log = view(7, (2, 7), (2, 7))
    proofs = frozenset(TransactionId(SINK, 2, 7, subtask) for subtask in subtasks)
    said = TargetRecord(SINK, AttemptId(2), (Decided(2, 7),), proofs=proofs)
    proof = judge_sink("out", SINK, log, said, log, 0)
    assert proof.agreement is agreement, proof.reason


def test_a_proof_counts_what_the_last_decision_lists() -> None:
    log = view(7, (2, 6), (2, 7))
    proof = judge_sink("out", SINK, log, record((2, 7)), log, 3)
    assert (proof.decided, proof.proven) == (Decided(2, 7), Decided(2, 7))
    assert (proof.listed_transactions, proof.listed_rows, proof.in_doubt) == (2, 20, 3)


def test_a_proof_names_the_attempt_that_has_claimed_the_target_or_none() -> None:
    log = view(7, (2, 7))
    for attempt, claimed in ((2, 2), (0, None)):
        said = TargetRecord(SINK, AttemptId(attempt), (Decided(2, 7),), CheckpointId(0))
        assert judge_sink("out", SINK, log, said, log, 0).claimed_attempt == claimed
    assert judge_sink("out", SINK, log, None, log, 0).claimed_attempt is None


def test_a_target_of_whole_checkpoints_proves_the_last_one_also_without_claims() -> None:
    log = view(7, (2, 7))
    unclaimed = TargetRecord(SINK, AttemptId(0), through=CheckpointId(7))
    assert judge_sink("out", SINK, log, unclaimed, log, 0).agreement is Agreement.AGREES
    assert judge_sink("out", SINK, log, record(through=7), log, 0).proven == Decided(2, 7)
    assert judge_sink("out", SINK, log, record(), log, 0).proven is None


def test_a_target_that_cannot_be_asked_says_why() -> None:
    proof = describe_unreachable("out", SINK, view(7, (2, 7)), "SinkError: gone")
    assert (proof.agreement, proof.reason, proof.decided) == (
        Agreement.UNREACHABLE,
        "SinkError: gone",
        Decided(2, 7),
    )
