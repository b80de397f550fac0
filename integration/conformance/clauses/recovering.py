"""The clauses about late decisions, recovery by newer attempts, and jobs that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from onceflow.core.commit.planner import plan_commits
from onceflow.core.commit.queue import CommitQueue, CommitRetryPolicy, Done, WaitUntil
from onceflow.core.errors import OnceflowError, SinkError
from onceflow.core.protocol.committables import (
    AbortOutcome,
    AlreadyCommitted,
    Committable,
    Committed,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.spi import Committer
from onceflow.integration.conformance import children
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses import deciding, listing
from onceflow.integration.conformance.clauses.writing import (
    close_rolls_back_what_is_open,
    empty_checkpoint,
)
from onceflow.integration.conformance.harness import Harness, Prepared, ask_until_known
from onceflow.integration.conformance.sink_job import WholeCommitter
from onceflow.integration.conformance.target import NotTestable, Violation, expect


@clause(
    scenarios=[1, 2, 11, 20, 21],
    rests_on=[deciding.commit_in_any_order, deciding.commit_again, empty_checkpoint],
)
def notifications_late_and_twice(harness: Harness) -> None:
    """Decisions that arrive late, twice, out of order or not at all commit each checkpoint once."""
    writer, committer = harness.job.writer(), harness.job.committer()
    queue = CommitQueue(CommitRetryPolicy())
    prepared: list[Prepared] = []

    def prepare(checkpoint: int) -> None:
        prepared.append(harness.prepare(checkpoint, writer=writer))
        queue.pre_committed(CheckpointId(checkpoint), [prepared[-1].committable])

    def hear(*checkpoints: int, seen: int) -> None:
        for checkpoint in checkpoints:
            queue.note_decision(CheckpointId(checkpoint))
            _empty(queue, committer)
        harness.expect_seen(*(p.ids for p in prepared[:seen]), when=f"after completed{checkpoints}")

    prepare(1)
    prepare(2)
    hear(1, seen=1)
    # The same decision twice, as when the log is read again.
    hear(1, 1, seen=1)
    prepare(3)
    # The newest decision arrives first and commits the older checkpoints. Their decisions then
    # change nothing.
    hear(3, 2, 1, seen=3)
    # A checkpoint without rows between others must not block the queue.
    queue.pre_committed(CheckpointId(4), writer.pre_commit(CheckpointId(4)))
    prepare(5)
    hear(4, 4, 3, seen=3)
    prepare(6)
    # Decision 5 arrives after 6, which has committed it, and changes nothing.
    hear(6, 5, 6, seen=5)
    harness.expect_in_doubt(when="after every checkpoint was decided")
    expect(queue.committed_through == 6, f"committed through {queue.committed_through}, not 6")


@clause(
    scenarios=[17, 31, 32, 36],
    rests_on=[listing.in_doubt_of_every_attempt, listing.in_doubt_of_every_subtask],
)
def orphans_are_rolled_back_on_start(harness: Harness) -> None:
    """The next attempt rolls back transactions that were pre-committed and never decided."""
    for subtask in range(5):
        harness.prepare(1, subtask=subtask)
    counts = _recover(harness, attempt=2, decided=[])
    expect(counts == (0, 5), f"recovery committed and aborted {counts}, not (0, 5)")
    harness.expect_in_doubt(when="after the recovery of a job that had decided nothing")
    harness.expect_seen(when="after the recovery of a job that had decided nothing")


@clause(scenarios=[7, 18, 35], rests_on=[orphans_are_rolled_back_on_start])
def commit_upon_start(harness: Harness) -> None:
    """The next attempt commits transactions that were decided and not committed, and continues."""
    first, second = harness.prepare(1), harness.prepare(2)
    undecided = harness.prepare(3)
    _recover(harness, attempt=2, decided=[first, second])
    harness.expect_seen(first.ids, second.ids, when="after the start that followed the decision")
    replayed = harness.prepare(3, attempt=2, ids=undecided.ids)
    harness.commit_all(replayed)
    harness.expect_seen(first.ids, second.ids, replayed.ids, when="after the next checkpoint")


@clause(scenarios=[3, 15, 29], rests_on=[commit_upon_start, close_rolls_back_what_is_open])
def crash_and_replay_double_nothing(harness: Harness) -> None:
    """Rows that are sent again after a crash are written once, committed before or not."""
    writer = harness.job.writer()
    first = harness.prepare(1, writer=writer)
    harness.commit_all(first)
    second = harness.prepare(2, writer=writer)
    open_ids = harness.ids()
    writer.write(harness.target.batch(open_ids))
    writer.close()
    for attempt in (2, 3):
        # Checkpoint 1 may be committed again. Checkpoint 2 was never decided and is sent again.
        _recover(harness, attempt=attempt, decided=[first])
        harness.expect_seen(first.ids, when=f"after the recovery of attempt {attempt}")
        replayed = harness.prepare(2, attempt=attempt, ids=(*second.ids, *open_ids))
    harness.commit_all(replayed)
    _recover(harness, attempt=4, decided=[replayed])
    harness.expect_seen(first.ids, second.ids, open_ids, when="after the replay was committed")
    harness.expect_in_doubt(when="after the replay was committed")


@clause(scenarios=[7, 25, 32, 33, 38], rests_on=[commit_upon_start])
def rescaling_loses_nothing(harness: Harness) -> None:
    """Recovery at any other parallelism commits decided transactions and aborts the others."""
    attempt, checkpoint = 1, 1
    seen: list[tuple[int, ...]] = []
    for parallelism, after in ((3, 1), (1, 5), (5, 2), (2, 3)):
        decided = [
            harness.prepare(checkpoint, attempt=attempt, subtask=subtask)
            for subtask in range(parallelism)
        ]
        for subtask in range(parallelism):
            # Prepared for the next checkpoint and not decided. Any subtask of the next attempt
            # aborts it.
            harness.prepare(checkpoint + 1, attempt=attempt, subtask=subtask)
        attempt += 1
        _recover(harness, attempt=attempt, decided=decided)
        seen += [transaction.ids for transaction in decided]
        harness.expect_seen(*seen, when=f"after rescaling from {parallelism} to {after}")
        harness.expect_in_doubt(when=f"after rescaling from {parallelism} to {after}")
        checkpoint += 1


@clause(scenarios=[3], rests_on=[commit_upon_start, deciding.commit_elsewhere])
def recovery_again_changes_nothing(harness: Harness) -> None:
    """Recovery that runs three times, or was killed halfway, has the same result."""
    decided = [harness.prepare(1 + number, subtask=number) for number in range(4)]
    for subtask in range(2):
        harness.prepare(5, subtask=subtask)
    # Killed after two of four commits.
    harness.job.begin(2)
    child = harness.processes.start(
        children.commit_some_and_wait,
        harness.sink,
        harness.job.committer_context(2),
        [transaction.committable for transaction in decided[:2]],
    )
    child.receive()
    child.kill()
    for attempt in (3, 4, 5):
        _recover(harness, attempt=attempt, decided=decided)
        harness.expect_seen(
            *(transaction.ids for transaction in decided), when=f"after recovery {attempt - 2}"
        )
        harness.expect_in_doubt(when=f"after recovery {attempt - 2}")


@clause(scenarios=[17], rests_on=[listing.in_doubt_of_every_attempt])
def replay_beside_an_orphan(harness: Harness) -> None:
    """A newer attempt can reuse a checkpoint number without conflict with the older transaction."""
    # Use other rows: with equal rows, a unique key would make the replay wait for the orphan.
    orphan = harness.prepare(1)
    replayed = harness.prepare(1, attempt=2)
    harness.expect_in_doubt(orphan, replayed, when="after attempt 2 has replayed checkpoint 1")
    harness.abort(orphan, harness.job.committer(2))
    harness.expect_in_doubt(replayed, when="after the orphan was aborted")
    harness.commit_all(replayed)
    harness.expect_seen(replayed.ids, when="after the orphan was aborted and the replay committed")


@clause(scenarios=[25, 41])
def another_job_is_refused(harness: Harness) -> None:
    """A job with another decision log is refused the sink id, for any attempt number."""
    harness.job.check(3)
    # Lower, equal and higher than the known attempt: numbers of another log are not comparable.
    for attempt in (1, 3, 9):
        other = harness.another_job(harness.job.sink_id, log="another-log")
        try:
            other.check(attempt)
        except OnceflowError as error:
            expect(
                error.retry == "never",
                f"refused by an error that may be retried: {type(error).__name__}: {error}",
            )
            continue
        raise Violation(
            f"check of attempt {attempt} with another decision log was let in: two jobs would"
            " commit and abort each other's rows"
        )
    # The refusals must not change anything: the owner continues.
    harness.job.check(4)


@clause(scenarios=[25])
def older_attempt_is_refused(harness: Harness) -> None:
    """`Sink.open` refuses an attempt that is not newer than the last one."""
    harness.job.check(2)
    for attempt in (2, 1):
        try:
            harness.job.check(attempt)
        except OnceflowError:
            continue
        raise Violation(f"open() accepted attempt {attempt} after attempt 2")
    harness.job.check(3)


@clause(scenarios=[36], rests_on=[older_attempt_is_refused, crash_and_replay_double_nothing])
def older_attempt_is_harmless(harness: Harness) -> None:
    """A writer that outlives its attempt is fenced, or the next attempt rolls its rows back."""
    old = harness.job.writer()
    before = harness.prepare(1, writer=old)
    ids = harness.ids()
    # Write before the newer attempt starts, so that the transaction is open when it is fenced.
    old.write(harness.target.batch(ids))
    _recover(harness, attempt=2, decided=[before])
    try:
        late = next(iter(old.pre_commit(CheckpointId(2))), None)
    except SinkError:
        late = None
    except OnceflowError as error:
        expect(type(error).__name__ == "Fenced", f"pre_commit of an older attempt: {error!r}")
        late = None
    old.close()
    harness.expect_seen(before.ids, when="after an older attempt has pre-committed or was refused")
    committer = harness.job.committer(2)
    left = [str(committable.transaction) for committable in committer.in_doubt()]
    if late is not None:
        # The newer attempt must find the transaction and abort it.
        expect(str(late.transaction) in left, f"{late.transaction} is not in doubt: {left}")
        harness.abort(Prepared(late, ids), committer)
    replayed = harness.prepare(2, attempt=2, ids=ids)
    harness.commit_all(replayed)
    harness.expect_seen(before.ids, ids, when="after the newer attempt has replayed the rows")
    harness.expect_in_doubt(when="after the newer attempt has replayed the rows")


@clause(
    rests_on=[
        commit_upon_start,
        listing.prune_keeps_what_is_asked_for,
        another_job_is_refused,
        older_attempt_is_refused,
    ]
)
def commits_are_told_before_a_start(harness: Harness) -> None:
    """The target record has the newest attempt and its last commit, or the sink provides none."""
    _expect_record(harness, None, when="before the sink id was claimed")
    first = [harness.prepare(number, subtask=subtask) for number, subtask in ((2, 1), (3, 0))]
    _expect_record(harness, Decided(1, 0), when="while everything is in doubt")
    harness.commit_all(*first)
    _expect_record(harness, Decided(1, 3), when="after the commit of checkpoint 3")
    harness.commit_all(harness.prepare(5, attempt=2))
    # Pruning removes proofs, but the record must still have the last commit.
    harness.job.committer(2).prune(CheckpointId(5))
    harness.prepare(7, attempt=2)
    _expect_record(harness, Decided(2, 5), when="after the commit of checkpoint 5, and pruning")
    another = harness.another_job(harness.job.sink_id, log="another-log")
    try:
        record = harness.described.target_record(another.committer_context(9))
    except OnceflowError:
        return
    raise Violation(
        f"a job with another decision log is told {record}: its storage is empty or the wrong one,"
        " and nothing else says so before it begins"
    )


def _expect_record(harness: Harness, last: Decided | None, *, when: str) -> None:
    """Raise Violation if the target record differs from `last`, the newest attempt and commit."""
    record = harness.described.target_record(harness.job.committer_context(9))
    if record is None:
        if last is None:
            return
        raise NotTestable("target_record() tells nothing")
    if last is None:
        expect(not record.attempt and not record.checkpoint_last, f"{when}: told is {record}")
        return
    prefix = f"{when}: told is {record}"
    expect(record.sink_id == harness.job.sink_id, f"{prefix}, of another sink id")
    expect(record.attempt == last.attempt, f"{prefix}, and the newest attempt is {last.attempt}")
    expect(
        max(record.checkpoint_last, record.through) == last.checkpoint,
        f"{prefix}, and the last checkpoint committed is {last.checkpoint}: a start from an older"
        " copy of checkpoint storage would write again what came since, or be refused for nothing",
    )
    if not record.through and last.checkpoint:
        expect(last in record.committed, f"{prefix}, which does not say what attempt committed it")


def _empty(queue: CommitQueue, committer: Committer) -> None:
    """Commit all transactions that the queue returns, like a slot."""
    now_s = 0.0
    while (step := queue.next_commit(now_s)) is not None:
        if isinstance(step, WaitUntil):
            now_s = step.at_s
            continue
        ended = queue.outcome(step, committer.commit(step), now_s)
        expect(isinstance(ended, Done), f"commit of {step.transaction}: {ended}")


def _recover(harness: Harness, *, attempt: int, decided: Sequence[Prepared]) -> tuple[int, int]:
    """Recover like the driver before an attempt. Return the numbers of commits and aborts."""
    harness.job.check(attempt)
    committer = harness.job.committer(attempt)
    listed = [listing.through_the_log(transaction.committable) for transaction in decided]
    plan = plan_commits(
        listed, committer.in_doubt(), sink_ids=(harness.job.sink_id,), attempt=AttemptId(attempt)
    )
    others = [
        committable
        for committable in plan.keep
        if committable.transaction.sink_id != harness.job.sink_id
    ]
    expect(not others, f"in_doubt lists other sinks' transactions: {others}")
    committed = [_commit_some(harness, some, committer) for some in _commits(harness, plan.commit)]
    for committable in plan.abort:
        outcome: AbortOutcome = harness.abort(Prepared(committable, ()), committer)
        expect(
            not isinstance(outcome, AlreadyCommitted),
            f"{committable.transaction} was never decided, and its abort says {outcome}",
        )
    committer.close()
    return sum(committed), len(plan.abort)


def _commits(
    harness: Harness, committables: Sequence[Committable]
) -> list[tuple[Committable, ...]]:
    """Return the groups that are committed together: single transactions or whole checkpoints."""
    if harness.sink is harness.described:
        return [(committable,) for committable in committables]
    return [
        tuple(some)
        for _, some in groupby(committables, key=lambda committable: committable.checkpoint)
    ]


def _commit_some(harness: Harness, some: Sequence[Committable], committer: Committer) -> int:
    """Commit `some`. Return the number of transactions that this call has committed."""
    if isinstance(committer, WholeCommitter):
        outcome = ask_until_known(lambda: committer.commit_whole(some), harness.patience_s)
    else:
        (committable,) = some
        outcome = harness.commit(Prepared(committable, ()), committer)
    expect(
        isinstance(outcome, (Committed, AlreadyCommitted)),
        f"{some[0].transaction} is decided, and its commit says {outcome}",
    )
    return len(some) if isinstance(outcome, Committed) else 0


CLAUSES = (
    notifications_late_and_twice,
    orphans_are_rolled_back_on_start,
    commit_upon_start,
    crash_and_replay_double_nothing,
    rescaling_loses_nothing,
    recovery_again_changes_nothing,
    replay_beside_an_orphan,
    another_job_is_refused,
    older_attempt_is_refused,
    older_attempt_is_harmless,
    commits_are_told_before_a_start,
)
