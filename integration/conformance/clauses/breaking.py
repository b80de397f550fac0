"""The clauses about a killed or paused server, and a network that loses a request or reply."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import Committer, SinkWriter
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses.deciding import abort_leaves_nothing, commit_elsewhere
from onceflow.integration.conformance.clauses.recovering import orphans_are_rolled_back_on_start
from onceflow.integration.conformance.exchange_proxy import ExchangeProxy, Lose
from onceflow.integration.conformance.harness import SERVER_PATIENCE_S, Harness, Prepared
from onceflow.integration.conformance.target import NotTestable, Violation, expect

_SERVER = ["kill", "start"]
_NETWORK = ["address", "sink_at"]
_EXCHANGES_MAX = 60


@clause(scenarios=[14, 23], needs=_SERVER, rests_on=[commit_elsewhere])
def server_killed_before_commit(harness: Harness) -> None:
    """A pre-committed transaction survives its server's kill: hidden, in doubt, committed once."""
    harness.patience_s = SERVER_PATIENCE_S
    writer, committer = harness.job.writer(), harness.job.committer()
    first = harness.prepare(1, writer=writer)
    open_ids = harness.ids(50)
    expect(len(committer.in_doubt()) == 1, "in_doubt does not list what is pre-committed")
    # Some targets detect only later that a row was sent to a dead server.
    with suppress(OnceflowError):
        writer.write(harness.target.batch(open_ids))
    _bounce(harness)
    harness.expect_seen(when="after the server was killed and started")
    harness.expect_in_doubt(first, when="after the server was killed and started")
    # Use the same committer, whose connection died with the server.
    outcomes = [harness.commit(first, committer)]
    _bounce(harness)
    outcomes.append(harness.commit(first, committer))
    expect(outcomes == [Committed(), AlreadyCommitted()], f"commits after restarts: {outcomes}")
    harness.expect_seen(first.ids, when="after commit and another restart of the server")


@clause(scenarios=[43], needs=_SERVER, rests_on=[commit_elsewhere, abort_leaves_nothing])
def server_away_changes_nothing(harness: Harness) -> None:
    """The sink reports no commit, abort, loss or empty doubt list while the server is down."""
    harness.patience_s = SERVER_PATIENCE_S
    prepared, committer = harness.prepare(1), harness.job.committer()
    writer = harness.job.writer()
    later_ids = harness.ids()
    harness.target.kill()
    try:
        outcomes = [committer.commit(prepared.committable), committer.abort(prepared.committable)]
        listed = _in_doubt_or_error(committer)
        later = _pre_commit_or_error(harness, writer, later_ids)
    finally:
        harness.target.start()
    for outcome in outcomes:
        expect(
            isinstance(outcome, (RetryLater, Unknown)),
            f"the server is away; the outcome is {outcome}",
        )
    expect(listed, "the server is away, and in_doubt says that nothing is in doubt")
    writer.close()
    harness.commit_all(prepared)
    harness.expect_seen(prepared.ids, when="after the server came back, and commit")
    if isinstance(later, Committable):
        # The sink has stored it durably elsewhere, so it can be committed.
        harness.commit_all(Prepared(later, later_ids))
        harness.expect_seen(prepared.ids, later_ids, when="after commit of what came meanwhile")


@clause(scenarios=[37], needs=["pause", "unpause"], rests_on=[commit_elsewhere])
def frozen_server_commits_once(harness: Harness) -> None:
    """A commit that the server answers only after a long pause is applied once."""
    harness.patience_s = SERVER_PATIENCE_S
    prepared, committer = harness.prepare(1), harness.job.committer()
    expect(len(committer.in_doubt()) == 1, "in_doubt does not list what is pre-committed")
    outcomes: list[CommitOutcome | OnceflowError] = []

    def commit() -> None:
        try:
            outcomes.append(committer.commit(prepared.committable))
        except OnceflowError as error:
            outcomes.append(error)

    thread = threading.Thread(target=commit)
    harness.target.pause()
    try:
        thread.start()
        thread.join(1.0)
    finally:
        harness.target.unpause()
    thread.join(150)
    expect(not thread.is_alive(), "a commit hangs although the server answers again")
    outcome = harness.commit(prepared)
    when = f"after commits that returned {outcomes} and {outcome}"
    expect(isinstance(outcome, (Committed, AlreadyCommitted)), when)
    harness.expect_seen(prepared.ids, when=when)


@clause(scenarios=[37], needs=_NETWORK, rests_on=[commit_elsewhere, server_away_changes_nothing])
def reply_lost_at_commit(harness: Harness) -> None:
    """A commit that loses any request or reply can be repeated, and applies its rows once."""
    seen: list[tuple[int, ...]] = []

    def once(job_rig: _Remote, lose: Lose, exchange: int) -> None:
        prepared = harness.prepare(len(seen) + 1)
        seen.append(prepared.ids)
        committer = job_rig.job.committer()
        job_rig.proxy.lose(lose, exchange)
        first = committer.commit(prepared.committable)
        job_rig.proxy.heal()
        outcome = harness.commit(prepared)
        when = (
            f"{lose.value} of exchange {exchange} lost; the calls returned {first}, then {outcome}"
        )
        expect(isinstance(first, (Committed, AlreadyCommitted, RetryLater, Unknown)), when)
        expect(isinstance(outcome, (Committed, AlreadyCommitted)), when)
        said_done = isinstance(first, (Committed, AlreadyCommitted))
        expect(not said_done or outcome == AlreadyCommitted(), when)
        harness.expect_seen(*seen, when=when)

    _each_exchange(harness, once)
    harness.expect_in_doubt(when="after commits of which a reply was lost")


@clause(
    scenarios=[37],
    needs=_NETWORK,
    rests_on=[commit_elsewhere, abort_leaves_nothing, server_away_changes_nothing],
)
def reply_lost_at_abort(harness: Harness) -> None:
    """An abort that loses any request or reply can be repeated, and leaves no row."""
    checkpoints = iter(range(1, 1 << 20))

    def once(job_rig: _Remote, lose: Lose, exchange: int) -> None:
        prepared = harness.prepare(next(checkpoints))
        committer = job_rig.job.committer()
        job_rig.proxy.lose(lose, exchange)
        first = committer.abort(prepared.committable)
        job_rig.proxy.heal()
        outcome = harness.abort(prepared)
        when = (
            f"{lose.value} of exchange {exchange} lost; the calls returned {first}, then {outcome}"
        )
        expect(isinstance(first, (Aborted, RetryLater, Unknown)), when)
        expect(outcome == Aborted(), when)

    _each_exchange(harness, once)
    harness.expect_in_doubt(when="after aborts of which a reply was lost")
    harness.expect_seen(when="after aborts of which a reply was lost")


@clause(
    scenarios=[16, 23, 43],
    needs=_NETWORK,
    rests_on=[orphans_are_rolled_back_on_start, server_away_changes_nothing],
)
def reply_lost_at_pre_commit(harness: Harness) -> None:
    """A pre_commit that loses any reply fails or is durable, and the replay is written once."""
    attempts = iter(range(1, 1 << 20, 2))
    seen: list[tuple[int, ...]] = []

    def once(job_rig: _Remote, lose: Lose, exchange: int) -> None:
        attempt = next(attempts)
        harness.job.begin(attempt)
        ids = harness.ids()
        writer = job_rig.sink.writer(harness.job.writer_context(attempt))
        writer.write(harness.target.batch(ids))
        job_rig.proxy.lose(lose, exchange)
        try:
            committable = next(iter(writer.pre_commit(CheckpointId(1))), None)
        except OnceflowError:
            committable = None
        finally:
            job_rig.proxy.heal()
            writer.close()
        when = f"{lose.value} of exchange {exchange} of pre_commit lost"
        harness.expect_seen(*seen, when=when)
        harness.job.begin(attempt + 1)
        committer = harness.job.committer(attempt + 1)
        if committable is not None:
            # The pre-commit was acknowledged, so it may be decided.
            harness.commit_all(Prepared(committable, ids))
        for leftover in committer.in_doubt():
            expect(leftover != committable, f"{when}: {leftover} is committed and still in doubt")
            harness.abort(Prepared(leftover, ids), committer)
        if committable is None:
            harness.commit_all(harness.prepare(1, attempt=attempt + 1, ids=ids))
        seen.append(ids)
        harness.expect_seen(*seen, when=when)

    _each_exchange(harness, once)


class _Remote:
    """The clause's job, connected through the proxy."""

    def __init__(self, harness: Harness, proxy: ExchangeProxy) -> None:
        self.proxy = proxy
        self.sink = harness.target.sink_at("127.0.0.1", proxy.port)
        harness.job.begin(1)
        self.job = harness.job.through(self.sink)


def _each_exchange(harness: Harness, once: Callable[[_Remote, Lose, int], None]) -> None:
    """Run `once` with a loss at exchange 1, 2, … until a run has fewer exchanges."""
    harness.patience_s = SERVER_PATIENCE_S
    with ExchangeProxy(harness.target.address()) as proxy:
        for lose in Lose:
            for exchange in range(1, _EXCHANGES_MAX):
                # If the fault was not reached, the run had fewer exchanges, so all of them were
                # tried.
                broken = proxy.breaks
                once(_Remote(harness, proxy), lose, exchange)
                if proxy.breaks == broken:
                    break
            else:
                raise Violation(f"{_EXCHANGES_MAX} exchanges, and still not done")
        if not proxy.breaks:
            raise NotTestable("the sink asks no server for this, at least not by the address")


def _bounce(harness: Harness) -> None:
    harness.target.kill()
    harness.target.start()


def _in_doubt_or_error(committer: Committer) -> Sequence[Committable] | OnceflowError:
    try:
        return committer.in_doubt()
    except OnceflowError as error:
        return error


def _pre_commit_or_error(
    harness: Harness, writer: SinkWriter, ids: Sequence[int]
) -> Committable | OnceflowError:
    try:
        return harness.prepare(2, writer=writer, ids=ids).committable
    except OnceflowError as error:
        return error


CLAUSES = (
    server_killed_before_commit,
    server_away_changes_nothing,
    frozen_server_commits_once,
    reply_lost_at_commit,
    reply_lost_at_abort,
    reply_lost_at_pre_commit,
)
