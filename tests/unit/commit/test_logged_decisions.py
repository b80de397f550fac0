"""Tests the log's answers about transactions in doubt, and the actions that they allow."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from onceflow.core.commit.logged_decisions import describe_lag, in_doubt_status, refusal
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log import rules
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.protocol.log.target_records import (
    InDoubtStatus,
    LogFacts,
    LoggedDecision,
    RecoveryAction,
    Resolution,
    TargetRecord,
)

SINK = "payments.out"


def transaction(attempt: int, checkpoint: int, sink_id: str = SINK) -> Committable:
    return Committable(TransactionId(sink_id, attempt, checkpoint, 0), rows=3)


def claim(attempt: int) -> AttemptId:
    return AttemptId(attempt)


def completed(attempt: int, checkpoint: int, *listed: Committable) -> CompletedCheckpoint:
    operators = (OperatorSnapshot("records"), OperatorSnapshot("out", committables=listed))
    return CompletedCheckpoint(
        checkpoint=CheckpointId(checkpoint),
        attempt=AttemptId(attempt),
        parallelism=1,
        max_parallelism=128,
        snapshots=(SubtaskSnapshot(SubtaskRef("records", 0), operators),),
        triggered_at_ms=0,
        completed_at_ms=0,
    )


def log_of(*steps: AttemptId | CompletedCheckpoint, alive: bool = False) -> LogFacts:
    """A log to which `steps` were appended: a number is an attempt's claim."""
    view = rules.LogView()
    for step in steps:
        sequence, previous = view.last_sequence + 1, view.last_digest
        record: rules.LogRecord = (
            rules.next_decision(view, step)
            if isinstance(step, CompletedCheckpoint)
            else rules.AttemptClaimed(sequence, step, "host:1", previous)
        )
        view = rules.apply(view, rules.LogEntry(record, f"digest {sequence}"))
    signs = ("a writer is connected",) if alive else ()
    return LogFacts("payments", "log-1", view, signs)


def status_of(committable: Committable, log: LogFacts | None, **more: str) -> InDoubtStatus:
    return in_doubt_status(committable, log, **more)


def test_what_the_last_checkpoint_lists_is_decided_whatever_has_happened_since() -> None:
    one = transaction(1, 4)
    for log in (
        log_of(claim(1), completed(1, 4, one)),
        log_of(claim(1), completed(1, 4, one), alive=True),
        log_of(claim(1), completed(1, 4, one), claim(2), claim(3)),
        # Checkpoint 4 was aborted; 5 decides what it had prepared.
        log_of(claim(1), completed(1, 5, one)),
    ):
        status = status_of(one, log)
        assert (status.decision, status.recovery_action) == (
            LoggedDecision.DECIDED,
            RecoveryAction.COMMIT,
        )


def test_what_a_dead_attempt_did_not_decide_is_undecided_and_rolled_back_next() -> None:
    one = transaction(1, 5)
    for log in (
        log_of(claim(1), completed(1, 4), claim(2)),
        log_of(claim(1), completed(1, 4)),
        log_of(claim(1)),
        # A newer attempt used the number again; that is another checkpoint.
        log_of(claim(1), completed(1, 4), claim(2), completed(2, 5, transaction(2, 5))),
        log_of(claim(1), completed(1, 4), claim(2), alive=True),
    ):
        status = status_of(one, log)
        assert (status.decision, status.recovery_action) == (
            LoggedDecision.UNDECIDED,
            RecoveryAction.ABORT,
        )


def test_what_a_living_attempt_may_still_decide_is_nobodys_to_touch() -> None:
    one = transaction(2, 5)
    log = log_of(claim(1), completed(1, 4), claim(2), alive=True)
    status = status_of(one, log)
    assert status.decision is LoggedDecision.PENDING
    for resolution in Resolution:
        assert refusal(resolution, status, log) is not None
        # Also when the signs are gone meanwhile, and the status is an old one.
        assert refusal(resolution, status, replace(log, liveness=())) is not None


def test_what_the_job_knew_to_be_committed_is_not_called_undecided() -> None:
    one = transaction(1, 4)
    for log in (
        log_of(claim(1), completed(1, 4, one), completed(1, 5)),
        log_of(claim(1), completed(1, 4, one), claim(2), completed(2, 5)),
        # Its own decision is pruned: the attempt's next one acked a later barrier without it.
        log_of(claim(1), completed(1, 6)),
    ):
        status = status_of(one, log)
        assert (status.decision, status.recovery_action) == (
            LoggedDecision.SETTLED,
            RecoveryAction.COMMIT,
        )
        assert refusal(Resolution.COMMIT, status, log) is None
        assert "would lose its rows" in str(refusal(Resolution.ABORT, status, log))


def test_another_jobs_transaction_is_foreign() -> None:
    log = log_of(claim(1), completed(1, 4))
    assert status_of(transaction(1, 5, "other.out"), log).decision is LoggedDecision.FOREIGN
    assert status_of(transaction(1, 5), log, claimed_by="log-2").decision is LoggedDecision.FOREIGN
    assert status_of(transaction(2, 5), log).decision is LoggedDecision.FOREIGN
    assert status_of(transaction(1, 5), log_of()).decision is LoggedDecision.FOREIGN
    # Who claimed the sink id knows better than its name does.
    own = status_of(transaction(1, 5, "named-by-hand"), log, claimed_by="log-1")
    assert own.decision is LoggedDecision.UNDECIDED


def test_without_a_log_nothing_is_known_and_nothing_is_done() -> None:
    status = status_of(transaction(1, 5), None)
    assert (status.decision, status.recovery_action) == (
        LoggedDecision.UNKNOWN,
        RecoveryAction.UNKNOWN,
    )
    assert all(refusal(resolution, status, None) for resolution in Resolution)


def test_only_what_the_log_says_is_done_and_nothing_while_the_job_lives() -> None:
    quiet = log_of(claim(1))
    allowed = {
        (decision, resolution)
        for decision, resolution in product(LoggedDecision, Resolution)
        if refusal(resolution, InDoubtStatus(decision, RecoveryAction.KEEP, "why"), quiet) is None
    }
    assert allowed == {
        (LoggedDecision.DECIDED, Resolution.COMMIT),
        (LoggedDecision.SETTLED, Resolution.COMMIT),
        (LoggedDecision.UNDECIDED, Resolution.ABORT),
    }
    alive = log_of(claim(1), alive=True)
    for decision, resolution in product(LoggedDecision, Resolution):
        said = refusal(resolution, InDoubtStatus(decision, RecoveryAction.KEEP, "why"), alive)
        assert said is not None
        assert "a writer is connected" in said


def test_a_log_that_knows_all_that_its_target_has_is_not_behind() -> None:
    log = log_of(claim(1), completed(1, 4, transaction(1, 4)))
    for record in (
        TargetRecord(SINK),
        TargetRecord(SINK, AttemptId(1), (Decided(AttemptId(1), CheckpointId(4)),)),
        TargetRecord(SINK, AttemptId(1), through=CheckpointId(4)),
    ):
        assert describe_lag(log, record) == ""


def test_a_log_that_lacks_what_its_target_has_is_behind_and_says_of_what() -> None:
    log = log_of(claim(1), completed(1, 4, transaction(1, 4)))
    for record, says in (
        (TargetRecord(SINK, AttemptId(2)), "claimed by attempt 2, and the log knows 1"),
        (
            TargetRecord(SINK, AttemptId(1), (Decided(AttemptId(1), CheckpointId(5)),)),
            "committed checkpoint 5 of attempt 1, and the log ends at checkpoint 4",
        ),
        (
            TargetRecord(SINK, AttemptId(1), through=CheckpointId(5)),
            "committed checkpoint 5, and the log ends at checkpoint 4",
        ),
    ):
        assert says in describe_lag(log, record)
    nothing = log_of(claim(1))
    committed = TargetRecord(SINK, AttemptId(1), (Decided(AttemptId(1), CheckpointId(1)),))
    assert "the log has decided nothing" in describe_lag(nothing, committed)
