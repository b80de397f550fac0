"""What the log says about a transaction in doubt, and what may be done about it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.in_doubt import (
    Action,
    Judgement,
    LogFacts,
    NextStart,
    Verdict,
    judge,
    objection,
)
from onceflow.core.protocol.log import (
    AttemptClaimed,
    CheckpointDecided,
    LogEntry,
    LogRecord,
    LogView,
    extend,
)
from onceflow.core.protocol.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
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
    view = LogView()
    for step in steps:
        sequence, previous = view.last_sequence + 1, view.last_digest
        record: LogRecord = (
            CheckpointDecided(sequence, step.attempt, step, previous)
            if isinstance(step, CompletedCheckpoint)
            else AttemptClaimed(sequence, step, "host:1", previous)
        )
        view = extend(view, LogEntry(record, f"digest {sequence}"))
    signs = ("a writer is connected",) if alive else ()
    return LogFacts("payments", "log-1", view, signs)


def verdict_of(committable: Committable, log: LogFacts | None, **more: str) -> Judgement:
    return judge(committable, log, **more)


def test_what_the_last_checkpoint_lists_is_decided_whatever_has_happened_since() -> None:
    one = transaction(1, 4)
    for log in (
        log_of(claim(1), completed(1, 4, one)),
        log_of(claim(1), completed(1, 4, one), alive=True),
        log_of(claim(1), completed(1, 4, one), claim(2), claim(3)),
        # Checkpoint 4 was aborted; 5 decides what it had prepared.
        log_of(claim(1), completed(1, 5, one)),
    ):
        judged = verdict_of(one, log)
        assert (judged.verdict, judged.next_start) == (Verdict.DECIDED, NextStart.COMMIT)


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
        judged = verdict_of(one, log)
        assert (judged.verdict, judged.next_start) == (Verdict.UNDECIDED, NextStart.ABORT)


def test_what_a_living_attempt_may_still_decide_is_nobodys_to_touch() -> None:
    one = transaction(2, 5)
    log = log_of(claim(1), completed(1, 4), claim(2), alive=True)
    judged = verdict_of(one, log)
    assert judged.verdict is Verdict.PENDING
    for action in Action:
        assert objection(action, judged, log) is not None
        # Also when the signs are gone meanwhile, and the judgement is an old one.
        assert objection(action, judged, replace(log, signs_of_life=())) is not None


def test_what_the_job_knew_to_be_committed_is_not_called_undecided() -> None:
    one = transaction(1, 4)
    for log in (
        log_of(claim(1), completed(1, 4, one), completed(1, 5)),
        log_of(claim(1), completed(1, 4, one), claim(2), completed(2, 5)),
        # Its own decision is pruned: the attempt's next one acked a later barrier without it.
        log_of(claim(1), completed(1, 6)),
    ):
        judged = verdict_of(one, log)
        assert (judged.verdict, judged.next_start) == (Verdict.SETTLED, NextStart.COMMIT)
        assert objection(Action.COMMIT, judged, log) is None
        assert "loses its rows" in str(objection(Action.ABORT, judged, log))


def test_another_jobs_transaction_is_foreign() -> None:
    log = log_of(claim(1), completed(1, 4))
    assert verdict_of(transaction(1, 5, "other.out"), log).verdict is Verdict.FOREIGN
    assert verdict_of(transaction(1, 5), log, claimed_by="log-2").verdict is Verdict.FOREIGN
    assert verdict_of(transaction(2, 5), log).verdict is Verdict.FOREIGN
    assert verdict_of(transaction(1, 5), log_of()).verdict is Verdict.FOREIGN
    # Who claimed the sink id knows better than its name does.
    own = verdict_of(transaction(1, 5, "named-by-hand"), log, claimed_by="log-1")
    assert own.verdict is Verdict.UNDECIDED


def test_without_a_log_nothing_is_known_and_nothing_is_done() -> None:
    judged = verdict_of(transaction(1, 5), None)
    assert (judged.verdict, judged.next_start) == (Verdict.UNKNOWN, NextStart.UNKNOWN)
    assert all(objection(action, judged, None) for action in Action)


def test_only_what_the_log_says_is_done_and_nothing_while_the_job_lives() -> None:
    quiet = log_of(claim(1))
    allowed = {
        (verdict, action)
        for verdict, action in product(Verdict, Action)
        if objection(action, Judgement(verdict, NextStart.KEEP, "why"), quiet) is None
    }
    assert allowed == {
        (Verdict.DECIDED, Action.COMMIT),
        (Verdict.SETTLED, Action.COMMIT),
        (Verdict.UNDECIDED, Action.ABORT),
    }
    alive = log_of(claim(1), alive=True)
    for verdict, action in product(Verdict, Action):
        said = objection(action, Judgement(verdict, NextStart.KEEP, "why"), alive)
        assert said is not None
        assert "a writer is connected" in said
