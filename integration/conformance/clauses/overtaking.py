"""The clauses about a committer that is held while another commits, continues and prunes.

A thread of a closed attempt, a frozen driver or a delayed request may act late. By then the target
may have no proof left that the transaction was committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, repeat
from typing import Generic, TypeVar

from onceflow.core.errors import OnceflowError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.cluster.process_host import Returned
from onceflow.core.spi import Committer
from onceflow.integration.conformance import children
from onceflow.integration.conformance.children import HeldCommit
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses.killing import commit_race, spread
from onceflow.integration.conformance.clauses.listing import prune_keeps_what_is_asked_for
from onceflow.integration.conformance.exchange_proxy import ExchangeProxy
from onceflow.integration.conformance.harness import Harness, Prepared
from onceflow.integration.conformance.lines import LineTracer
from onceflow.integration.conformance.target import NotTestable, Violation, describe_error, expect

_BLOCKED_S_MIN, _BLOCKED_S_MAX = 0.2, 5.0
"""The time after which the held commit is assumed to own a lock that the other waits for. Then the
held commit continues first."""
_PATIENCE = 10
"""The factor of the slowest commit's duration after which a commit counts as blocked."""
_ENDS_S = 120.0
_EXCHANGES_MAX = 60
_T = TypeVar("_T")


@clause(rests_on=[prune_keeps_what_is_asked_for, commit_race])
def commit_after_pruning(harness: Harness) -> None:
    """Commit of a transaction that was committed and pruned applies no row, and says so."""
    committer = harness.job.committer()
    pair = _Series(harness).pair()
    pair.overtake()
    for asked in (committer, harness.job.committer(), harness.job.committer(2)):
        pair.expect_harmless(_answer(asked, pair), "commit of what was committed and pruned")
    harness.expect_in_doubt(when="after commits of what was committed and pruned")


@clause(rests_on=[commit_after_pruning])
def overtaken_in_a_thread(harness: Harness) -> None:
    """A commit held at any line in a thread while another commits and prunes is harmless."""

    def run(pair: _Pair, line: int) -> HeldCommit:
        held, released = threading.Event(), threading.Event()
        context = harness.job.committer_context()

        def hold(location: str) -> None:
            held.set()
            released.wait(_ENDS_S)

        tracer = LineTracer(harness.sink, line, hold)
        thread = _Thread(
            lambda: children.commit_and_hold(harness.sink, context, pair.committable, tracer)
        )
        thread.wait_for(held)
        pair.overtake(released.set)
        return thread.result(f"a {_name_commit(tracer.location)} does not end when it goes on")

    _at_each_line(harness, run, attempts=repeat(1))


@clause(rests_on=[overtaken_in_a_thread])
def overtaken_in_another_process(harness: Harness) -> None:
    """A process frozen at any line of commit while the next attempt continues is harmless."""

    def run(pair: _Pair, line: int) -> HeldCommit:
        context = harness.job.committer_context(pair.attempt)
        arguments = (harness.sink, context, pair.committable, line)
        child = harness.processes.start(children.commit_held_at_line, *arguments)
        ended: HeldCommit
        match child.receive():
            case Returned(ended):
                pair.overtake(attempt=pair.attempt + 1)
            case _:
                child.freeze()
                try:
                    pair.overtake(child.go_on, attempt=pair.attempt + 1)
                    ended = child.result()
                except BaseException:
                    child.kill()
                    raise
        return ended

    _at_each_line(harness, run, attempts=count(1))


@clause(needs=["address", "sink_at"], rests_on=[overtaken_in_a_thread])
def overtaken_on_the_way(harness: Harness) -> None:
    """A commit request that arrives after another has committed and pruned is harmless."""
    series = _Series(harness)
    with ExchangeProxy(harness.target.address()) as proxy:
        harness.job.begin(1)
        remote = harness.job.through(harness.target.sink_at("127.0.0.1", proxy.port))
        for exchange in range(1, _EXCHANGES_MAX):
            pair = series.pair()
            hold = proxy.hold(exchange)
            thread = _Thread(partial(_answer, remote.committer(), pair))
            thread.wait_for(hold.held)
            # Disarm a fault that was not reached, so that it does not affect the next pair.
            proxy.heal()
            pair.overtake(hold.released.set)
            outcome = thread.result(f"a commit of which request {exchange} came late does not end")
            pair.expect_harmless(outcome, f"commit of which request {exchange} came late")
            # The commit had fewer exchanges, so all of them were tried.
            if not hold.held.is_set():
                break
        else:
            raise Violation(f"{_EXCHANGES_MAX} exchanges, and still not done")
    if exchange == 1:
        raise NotTestable("the sink asks no server for this, at least not by the address")
    harness.expect_in_doubt(when="after commits of which a request came late")


class _Series:
    """A series of transactions, each of which is overtaken. All must be visible at the end."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.seen: list[Sequence[int]] = []
        self.blocked_s = _BLOCKED_S_MAX
        self.slowest_s = 0.0
        """The duration of the slowest commit that did not wait for a lock."""
        self._checkpoints = count(1, 2)

    def pair(self, attempt: int = 1) -> _Pair:
        """Return the next pair, pre-committed by `attempt`."""
        first = self.harness.prepare(next(self._checkpoints), attempt=attempt)
        self.seen.append(first.ids)
        return _Pair(self, first)


class _Pair:
    """A transaction, and a later one with new values of the same rows if the sink can update."""

    def __init__(self, series: _Series, first: Prepared) -> None:
        self._series = series
        self._first = first
        self._overtaking: committables.CommitOutcome | None = None

    @property
    def committable(self) -> committables.Committable:
        """The committable that both committers commit."""
        return self._first.committable

    @property
    def attempt(self) -> int:
        """The attempt that has pre-committed it."""
        return self.committable.transaction.attempt

    def overtake(self, release: Callable[[], None] = lambda: None, attempt: int = 1) -> None:
        """Commit both and prune, as `attempt`. Then release the held commit.

        If this commit waits for a lock of the held commit, the held commit is released earlier.
        """
        began = time.monotonic()
        thread = _Thread(lambda: self._go_on(attempt))
        # The held commit may own a lock that this commit waits for. Then it is released, and the
        # order is reversed.
        thread.join(self._series.blocked_s)
        if not thread.is_alive():
            took_s = time.monotonic() - began
            # Adapt the wait to commits that were not blocked, so that a fast target needs less time
            # at each line. Keep a margin: on a busy machine the next commit may take much longer.
            # It would count as blocked and would not overtake the held commit.
            self._series.slowest_s = max(self._series.slowest_s, took_s)
            patience_s = _PATIENCE * self._series.slowest_s
            self._series.blocked_s = min(max(_BLOCKED_S_MIN, patience_s), _BLOCKED_S_MAX)
        release()
        thread.result("a commit does not end that has overtaken another one")

    def expect_harmless(self, outcome: committables.CommitOutcome | str, what: str) -> None:
        """Raise Violation if not both are there once, after a late committer returned `outcome`."""
        when = (
            f"after a {what}. Meanwhile another committer committed the same transaction, which"
            f" returned {self._overtaking}, committed a later one, and pruned; then the first"
            f" commit went on and returned {outcome}. Rule: a transaction is applied once, so a"
            " commit that was overtaken writes nothing, whenever it goes on"
        )
        self._series.harness.expect_seen(*self._series.seen, when=when)
        expect(
            [outcome, self._overtaking] != [committables.Committed(), committables.Committed()],
            f"{when}: Committed() means that this call has applied the rows, and both calls say so;"
            " one has applied them again, or does not know and has to answer AlreadyCommitted()",
        )

    def _go_on(self, attempt: int) -> None:
        harness, first = self._series.harness, self._first
        committer = harness.job.committer(attempt)
        self._overtaking = harness.commit(first, committer)
        expect(
            isinstance(self._overtaking, (committables.Committed, committables.AlreadyCommitted)),
            f"commit of {self.committable.transaction} said {self._overtaking}",
        )
        ids = first.ids
        if not harness.change(ids):
            ids = harness.ids()
            self._series.seen.append(ids)
        later = self.committable.transaction.checkpoint + 1
        harness.commit_all(harness.prepare(later, attempt=attempt, ids=ids))
        committer.prune(CheckpointId(later))


class _Thread(Generic[_T]):
    """A thread with a result."""

    def __init__(self, run: Callable[[], _T]) -> None:
        self._run = run
        self._results: list[_T] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._to_the_end, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def wait_for(self, event: threading.Event) -> None:
        """Wait until `event` is set or the thread has ended.

        Raises:
            Violation: Neither happened within `_ENDS_S`.
        """
        deadline = time.monotonic() + _ENDS_S
        while self.is_alive() and not event.wait(0.005):
            expect(time.monotonic() < deadline, f"a commit did not return in {_ENDS_S:g} s")

    def result(self, if_none: str) -> _T:
        """Return the thread's result, raise its error, or raise Violation on timeout."""
        self._thread.join(_ENDS_S)
        if self._errors:
            raise self._errors[0]
        expect(self._results, if_none)
        return self._results[0]

    def _to_the_end(self) -> None:
        try:
            self._results.append(self._run())
        except BaseException as error:
            self._errors.append(error)


def _answer(committer: Committer, pair: _Pair) -> committables.CommitOutcome | str:
    """Commit and return the outcome, or the text of the error: an overtaken commit may fail."""
    try:
        return committer.commit(pair.committable)
    except OnceflowError as error:
        return describe_error(error)


def _at_each_line(
    harness: Harness, run: Callable[[_Pair, int], HeldCommit], attempts: Iterator[int]
) -> None:
    """Run once to the end, then hold at lines of the sink's own and inherited code."""
    series = _Series(harness)

    def hold(line: int) -> HeldCommit:
        pair = series.pair(next(attempts))
        ended = run(pair, line)
        pair.expect_harmless(ended.outcome, _name_commit(ended.location))
        return ended

    whole = hold(0)
    expect(whole.lines, "no line of the sink's own code ran")
    rounds = harness.effort.rounds
    # Most rounds go to the sink's own module, because inherited code is also tested with other
    # sinks.
    lines = {whole.own[at - 1] for at in spread(harness, len(whole.own), 2 * rounds)}
    for line in sorted(lines.union(spread(harness, whole.lines, rounds))):
        hold(line)
    harness.expect_in_doubt(when="after commits that were held up, and others that overtook them")


def _name_commit(location: str) -> str:
    return f"commit that was held up right before {location}" if location else "commit"


CLAUSES = (
    commit_after_pruning,
    overtaken_in_a_thread,
    overtaken_in_another_process,
    overtaken_on_the_way,
)
