"""The clauses about commit and abort: idempotent, in any process and order, with exact answers."""

from __future__ import annotations

from onceflow.core.commit.loop import ask_committer
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import Committer
from onceflow.core.spi.staging import is_staged
from onceflow.integration.conformance import children
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses import writing
from onceflow.integration.conformance.harness import Harness, Prepared
from onceflow.integration.conformance.target import NotTestable, expect


@clause(scenarios=[2, 21], rests_on=[writing.close_keeps_what_is_pre_committed])
def commit_again(harness: Harness) -> None:
    """The first commit returns Committed, later ones AlreadyCommitted; rows are written once."""
    prepared = harness.prepare(1)
    committer = harness.job.committer()
    outcomes = [harness.commit(prepared, committer) for _ in range(5)]
    # A new committer knows nothing of the first one. It must ask the target.
    outcomes += [harness.commit(prepared) for _ in range(5)]
    expected = [Committed(), *[AlreadyCommitted()] * 9]
    harness.expect_seen(prepared.ids, when="after ten commits")
    expect(outcomes == expected, f"ten commits of one transaction returned {outcomes}")
    harness.expect_in_doubt(when="after ten commits")


@clause(scenarios=[7, 26, 40], rests_on=[commit_again, writing.pre_committed_survives_death])
def commit_elsewhere(harness: Harness) -> None:
    """Another process can commit with only the sink's description and the committable."""
    prepared = harness.prepare(1)
    context = harness.job.committer_context()
    outcomes = harness.processes.run(children.commit, harness.sink, context, [prepared.committable])
    expect(outcomes == [Committed()], f"commit in another process returned {outcomes}")
    harness.expect_seen(prepared.ids, when="after commit in another process")
    outcomes = harness.processes.run(children.commit, harness.sink, context, [prepared.committable])
    expect(outcomes == [AlreadyCommitted()], f"commit in a third process returned {outcomes}")
    harness.expect_seen(prepared.ids, when="after commit in a third process")


@clause(scenarios=[20, 26], rests_on=[writing.commit_shows_its_rows])
def commit_in_any_order(harness: Harness) -> None:
    """Several prepared transactions can be committed in any order, each independently."""
    if harness.sink is not harness.described:
        raise NotTestable("the sink commits whole checkpoints, in their order")
    writer = harness.job.writer()
    prepared = [harness.prepare(checkpoint, writer=writer) for checkpoint in (1, 2, 3, 4)]
    order = harness.random.sample(prepared, len(prepared))
    for count, transaction in enumerate(order, 1):
        harness.commit_all(transaction)
        harness.expect_seen(
            *(done.ids for done in order[:count]),
            when=f"after commit of {', '.join(map(_name, order[:count]))}",
        )


@clause(scenarios=[3, 17, 40], rests_on=[writing.close_keeps_what_is_pre_committed])
def abort_leaves_nothing(harness: Harness) -> None:
    """Abort returns Aborted, and removes the transaction's rows and no other rows."""
    aborted, kept = harness.prepare(1), harness.prepare(2)
    outcome = harness.abort(aborted)
    expect(outcome == Aborted(), f"abort of {aborted.committable.transaction}: {outcome}")
    harness.expect_in_doubt(kept, when="after abort")
    harness.expect_seen(when="after abort")
    harness.commit_all(kept)
    harness.expect_seen(kept.ids, when="after abort, and commit of another")


@clause(scenarios=[40], rests_on=[abort_leaves_nothing])
def abort_again(harness: Harness) -> None:
    """Abort returns Aborted every time, in any process, and for transactions that never existed."""
    prepared = harness.prepare(1)
    committer = harness.job.committer()
    outcomes = [harness.abort(prepared, committer) for _ in range(3)]
    outcomes.append(harness.abort(prepared))
    outcomes += harness.processes.run(
        children.abort, harness.sink, harness.job.committer_context(), [prepared.committable]
    )
    never = TransactionId(harness.job.sink_id, 1, 7, 2)
    outcomes.append(
        harness.abort(Prepared(Committable(never, 1, prepared.committable.payload), ()))
    )
    expected: list[AbortOutcome] = [Aborted()] * len(outcomes)
    expect(outcomes == expected, f"aborts again and again returned {outcomes}")


@clause(scenarios=[40], rests_on=[commit_again])
def abort_after_commit(harness: Harness) -> None:
    """Abort after commit returns AlreadyCommitted and removes no rows."""
    prepared = harness.prepare(1)
    harness.commit_all(prepared)
    outcomes = [harness.abort(prepared), harness.abort(prepared)]
    harness.expect_seen(prepared.ids, when=f"after commit, and aborts that returned {outcomes}")
    expect(outcomes == [AlreadyCommitted()] * 2, f"abort after commit returned {outcomes}")
    outcome = harness.commit(prepared)
    expect(outcome == AlreadyCommitted(), f"commit after commit and abort returned {outcome}")


@clause(scenarios=[4], rests_on=[commit_again, abort_leaves_nothing])
def unknown_is_lost(harness: Harness) -> None:
    """Commit of a transaction that the target does not know returns Lost, not AlreadyCommitted."""
    gone, kept = harness.prepare(1), harness.prepare(2)
    harness.abort(gone)
    # Use a real payload of the sink, whose transaction no longer exists.
    unknown = Committable(TransactionId(harness.job.sink_id, 1, 3, 0), 3, gone.committable.payload)
    outcome = harness.commit(Prepared(unknown, ()))
    expect(isinstance(outcome, Lost), f"commit of {unknown}, never pre-committed: {outcome}")
    harness.expect_seen(when="after commit of an unknown transaction")
    harness.expect_in_doubt(kept, when="after commit of an unknown transaction")


@clause(scenarios=[4], rests_on=[unknown_is_lost, abort_again])
def lost_is_reported(harness: Harness) -> None:
    """Commit of a transaction that was rolled back from outside returns Lost, not a success."""
    lost, other = harness.prepare(1), harness.prepare(2)
    if is_staged(lost.committable):
        harness.job.storage.staging(harness.job.sink_id).discard(lost.committable.transaction)
    else:
        harness.target.lose(lost.committable)
    outcome = harness.commit(lost)
    expect(isinstance(outcome, Lost), f"commit of what was rolled back from outside: {outcome}")
    harness.expect_in_doubt(other, when="after one transaction was lost")
    aborted = harness.abort(lost)
    expect(aborted == Aborted(), f"abort of what was rolled back from outside: {aborted}")
    harness.commit_all(other)
    harness.expect_seen(other.ids, when="after one transaction was lost and another committed")


@clause(scenarios=[40], rests_on=[abort_leaves_nothing, unknown_is_lost])
def commit_after_abort(harness: Harness) -> None:
    """Commit after abort returns Lost, never Committed, and shows no rows."""
    prepared = harness.prepare(1)
    harness.abort(prepared)
    outcome = harness.commit(prepared)
    expect(isinstance(outcome, Lost), f"commit after abort returned {outcome}")
    harness.expect_seen(when="after abort and commit")


def _name(prepared: Prepared) -> str:
    return str(prepared.committable.transaction)


@clause(
    scenarios=[43],
    needs=["obstruct", "remove_obstacle"],
    rests_on=[commit_again, abort_leaves_nothing],
)
def refused_commit_waits_for_a_person(harness: Harness) -> None:
    """A commit that the target refuses reports that a person must act, and succeeds afterwards."""
    prepared = harness.prepare(1)
    harness.target.obstruct(prepared.ids)
    committer = harness.job.committer()
    for _ in range(3):
        outcome, error = _commit_refused(committer, prepared)
        expect(
            error is not None or (isinstance(outcome, RetryLater) and outcome.until_fixed),
            f"commit of rows that the target refuses returned {outcome}, and should be"
            " RetryLater(…, until_fixed=True): otherwise nobody is told that it is stuck",
        )
    harness.expect_in_doubt(prepared, when="after a commit that the target refused")
    harness.target.remove_obstacle()
    outcome = harness.commit(prepared, committer)
    expect(outcome == Committed(), f"commit after the obstacle was removed returned {outcome}")
    harness.expect_seen(prepared.ids, when="after the obstacle was removed")


@clause(
    scenarios=[43],
    needs=["obstruct", "remove_obstacle"],
    rests_on=[refused_commit_waits_for_a_person],
)
def own_error_of_a_refused_commit_waits_for_a_person(harness: Harness) -> None:
    """A refused commit that raises the sink's own error class is reported as stuck."""
    prepared = harness.prepare(1)
    harness.target.obstruct(prepared.ids)
    outcome, error = _commit_refused(harness.job.committer(), prepared)
    harness.target.remove_obstacle()
    expect(
        error is None or (isinstance(outcome, Unknown) and outcome.until_fixed),
        f"commit of rows that the target refuses raised {error!r}: a job takes an error of this"
        " name, or with this cause, for a network or a disk that fails, and nobody is told that the"
        " commit is stuck; return RetryLater(…, until_fixed=True), or raise an error class that"
        " has no word for a connection in its name",
    )
    harness.commit_all(prepared)


def _commit_refused(
    committer: Committer, prepared: Prepared
) -> tuple[CommitOutcome, Exception | None]:
    """Commit once, as a job does; return the outcome, and the error that the sink raised."""
    raised: list[Exception] = []

    def commit() -> CommitOutcome:
        try:
            return committer.commit(prepared.committable)
        except Exception as error:
            raised.append(error)
            raise

    return ask_committer(commit), next(iter(raised), None)


CLAUSES = (
    commit_again,
    commit_elsewhere,
    commit_in_any_order,
    abort_leaves_nothing,
    abort_again,
    abort_after_commit,
    unknown_is_lost,
    lost_is_reported,
    commit_after_abort,
    refused_commit_waits_for_a_person,
    own_error_of_a_refused_commit_waits_for_a_person,
)
