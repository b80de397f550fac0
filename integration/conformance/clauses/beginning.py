"""The clauses about commits that begin before their decision, which is optional for a committer.

Each clause begins the commit of a subtask's second transaction, after a normal commit of the first.
A target may need one commit before it can begin another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count, pairwise

from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
    Lost,
)
from onceflow.core.spi import Committer
from onceflow.integration.conformance import children, target
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses import deciding, killing
from onceflow.integration.conformance.clauses.breaking import server_away_changes_nothing
from onceflow.integration.conformance.clauses.listing import in_doubt_is_exact
from onceflow.integration.conformance.harness import SERVER_PATIENCE_S, Harness, Prepared
from onceflow.integration.conformance.target import describe_error

_TRIES = 5
"""The number of commits of a newer attempt that an older attempt may delay by beginning others."""
_AWAY_S = 10.0
_ENDS_S = 120.0


@clause(rests_on=[in_doubt_is_exact, deciding.commit_elsewhere])
def begun_is_hidden(harness: Harness) -> None:
    """A transaction whose commit has begun stays invisible and in doubt until it is committed."""
    begun = _begin(harness)
    harness.expect_seen(begun.first.ids, when="after begin_commit")
    harness.expect_in_doubt(begun.prepared, when="after begin_commit")


@clause(rests_on=[begun_is_hidden])
def begun_is_committed_once(harness: Harness) -> None:
    """The first commit after begin_commit shows the rows, later ones return AlreadyCommitted."""
    committer, writer = harness.job.committer(), harness.job.writer()
    require_begin_commit(committer)
    prepared = [harness.prepare(1, writer=writer)]
    answers: list[bool] = []
    for checkpoint in range(2, 6):
        answers.append(_try_to_begin(committer, prepared[-1]))
        later = harness.prepare(checkpoint, writer=writer)
        outcomes = [harness.commit(prepared[-1], committer) for _ in range(3)]
        when = f"begin_commit returned {answers[-1]}, then three commits returned {outcomes}"
        harness.expect_seen(*(transaction.ids for transaction in prepared), when=when)
        target.expect(outcomes == [Committed(), *[AlreadyCommitted()] * 2], when)
        prepared.append(later)
    # The first transaction of a subtask may not support begin_commit.
    _require_begun(any(answers[1:]))
    *_, last = prepared
    outcomes = [harness.commit(transaction) for transaction in prepared[:-1]]
    harness.expect_seen(
        *(transaction.ids for transaction in prepared[:-1]), when="after another's commits"
    )
    target.expect(outcomes == [AlreadyCommitted()] * 4, f"another committer's commits: {outcomes}")
    harness.expect_in_doubt(last, when="after commits that were begun")


@clause(rests_on=[begun_is_committed_once, deciding.abort_again])
def withdrawn_is_in_doubt(harness: Harness) -> None:
    """A withdrawn transaction is hidden and in doubt, and can be committed or aborted."""
    all_begun = [_begin(harness, subtask=subtask) for subtask in range(3)]
    own, other, aborted = all_begun
    for begun in all_begun:
        _withdraw(begun)
    seen = [begun.first.ids for begun in all_begun]
    harness.expect_seen(*seen, when="after withdraw_commit")
    harness.expect_in_doubt(*(begun.prepared for begun in all_begun), when="after withdraw_commit")
    # After an aborted checkpoint, the next checkpoint commits its transaction, too.
    later = harness.prepare(3)
    outcomes = [
        *(harness.commit(transaction, own.committer) for transaction in (own.prepared, later)),
        harness.commit(other.prepared),
        harness.commit(other.prepared, other.committer),
    ]
    seen += [own.prepared.ids, later.ids, other.prepared.ids]
    when = f"after withdraw_commit, and commits that returned {outcomes}"
    harness.expect_seen(*seen, when=when)
    target.expect(outcomes == [*[Committed()] * 3, AlreadyCommitted()], when)
    outcome = harness.abort(aborted.prepared, aborted.committer)
    target.expect(outcome == Aborted(), f"abort of what was withdrawn returned {outcome}")
    harness.expect_in_doubt(when="after what was withdrawn was committed or aborted")
    harness.expect_seen(*seen, when="after abort of what was withdrawn")


@clause(rests_on=[begun_is_committed_once])
def begun_is_committed_elsewhere(harness: Harness) -> None:
    """A begun transaction that another attempt commits is not harmed by withdraw or late begin."""
    seen: list[tuple[int, ...]] = []
    for attempt, act in zip(count(1, 2), _Act, strict=False):
        begun, outcomes = _overtake(harness, children.commit, attempt, act)
        seen += [begun.first.ids, begun.prepared.ids]
        outcome = harness.commit(begun.prepared, begun.committer)
        when = (
            f"after a commit by the next attempt, which returned {outcomes}, {act.value}, and a"
            f" commit here that returned {outcome}"
        )
        harness.expect_seen(*seen, when=when)
        target.expect([*outcomes, outcome] == [Committed(), AlreadyCommitted()], when)
        harness.expect_in_doubt(when=when)


@clause(rests_on=[begun_is_committed_elsewhere, deciding.commit_after_abort])
def begun_is_aborted_elsewhere(harness: Harness) -> None:
    """A begun transaction that another attempt aborts is not restored by the first attempt."""
    seen: list[tuple[int, ...]] = []
    for attempt, act in zip(count(1, 2), _Act, strict=False):
        begun, outcomes = _overtake(harness, children.abort, attempt, act)
        seen.append(begun.first.ids)
        when = f"after an abort by the next attempt, which returned {outcomes}, and {act.value}"
        harness.expect_in_doubt(when=when)
        outcome = harness.commit(begun.prepared, begun.committer)
        when = f"{when}, and a commit here that returned {outcome}"
        harness.expect_seen(*seen, when=when)
        target.expect(outcomes == [Aborted()] and isinstance(outcome, Lost), when)
        harness.expect_in_doubt(when=when)


@clause(rests_on=[begun_is_committed_once, deciding.abort_again])
def begun_outlives_its_committer(harness: Harness) -> None:
    """A begun transaction survives close of its committer: hidden, in doubt, ended by another."""
    first, second = (_begin(harness, subtask=subtask) for subtask in range(2))
    for begun in (first, second):
        begun.committer.close()
        begun.committer.close()
    seen = [first.first.ids, second.first.ids]
    harness.expect_seen(*seen, when="after the committers were closed")
    harness.expect_in_doubt(
        first.prepared, second.prepared, when="after the committers were closed"
    )
    committer = harness.job.committer(2)
    outcomes = [
        harness.commit(first.prepared, committer),
        harness.abort(second.prepared, committer),
    ]
    when = f"after a commit and an abort of what closed committers had begun: {outcomes}"
    target.expect(outcomes == [Committed(), Aborted()], when)
    harness.expect_seen(*seen, first.prepared.ids, when=when)
    harness.expect_in_doubt(when=when)


@clause(rests_on=[begun_outlives_its_committer])
def begun_outlives_its_process(harness: Harness) -> None:
    """A begun transaction survives SIGKILL of its process: hidden, in doubt, ended by another."""
    # One after the other: a begun commit may block readers of all later transactions.
    first = _begin_in_process(harness, attempt=1)
    when = "after the process was killed"
    _expect_hidden(harness, first, when=when)
    outcomes: list[object] = [harness.commit(first.prepared, harness.job.committer(2))]
    second = _begin_in_process(harness, attempt=3)
    _expect_hidden(harness, second, first.first, first.prepared, when=when)
    outcomes.append(harness.abort(second.prepared, harness.job.committer(4)))
    when = f"{when}, and a commit and an abort of what it had begun, which returned {outcomes}"
    target.expect(outcomes == [Committed(), Aborted()], when)
    harness.expect_seen(first.first.ids, first.prepared.ids, second.first.ids, when=when)
    harness.expect_in_doubt(when=when)


@clause(rests_on=[begun_is_aborted_elsewhere])
def begun_by_an_older_attempt(harness: Harness) -> None:
    """An older attempt that begins commits does not keep a newer one from commits and aborts."""
    lane = _open_second(harness)
    older, seen = lane.committer, [lane.first.ids]
    # Pre-committed before the newer attempt starts, which has not aborted them yet.
    late = [lane.prepared, *(harness.prepare(3 + number) for number in range(2 * _TRIES))]
    _require_begun(_try_to_begin(older, lane.prepared))
    pairs = pairwise(late)
    newer = harness.job.committer(2)
    for checkpoint in (2, 3):
        own = harness.prepare(checkpoint, attempt=2)
        _try_to_begin(newer, own)
        outcomes: list[CommitOutcome] = []
        while len(outcomes) < _TRIES and not _says_committed(outcomes):
            begun, unbegun = next(pairs)
            older.withdraw_commit(begun.committable)
            _try_to_begin(older, unbegun)
            outcomes.append(newer.commit(own.committable))
        when = (
            "after an older attempt had begun a commit before each commit of a newer one, which"
            f" returned {outcomes}"
        )
        target.expect(_says_committed(outcomes), when)
        seen.append(own.ids)
        harness.expect_seen(*seen, when=when)
    aborts = [harness.abort(transaction, newer) for transaction in late]
    target.expect(aborts == [Aborted()] * len(late), f"aborts by a newer attempt returned {aborts}")
    harness.expect_in_doubt(when="after a newer attempt has aborted what an older one began")
    harness.expect_seen(*seen, when="after a newer attempt has aborted what an older one began")


@clause(needs=["kill", "start"], rests_on=[withdrawn_is_in_doubt, server_away_changes_nothing])
def begun_while_the_server_is_away(harness: Harness) -> None:
    """The calls begin and withdraw raise no error while the server is down; commit works later."""
    harness.patience_s = SERVER_PATIENCE_S
    begun, kept = (_begin(harness, subtask=subtask) for subtask in range(2))
    late = _open_second(harness, subtask=2)
    errors: list[target.Violation] = []

    def withdraw_and_begin() -> None:
        try:
            _withdraw(begun)
            _try_to_begin(late.committer, late.prepared)
        except target.Violation as error:
            errors.append(error)

    thread = threading.Thread(target=withdraw_and_begin, daemon=True)
    harness.target.kill()
    try:
        thread.start()
        # Like a commit, they may retry until the server is back.
        thread.join(_AWAY_S)
    finally:
        harness.target.start()
    thread.join(_ENDS_S)
    target.expect(not thread.is_alive(), "begin_commit hangs although the server is back")
    for error in errors:
        raise error
    lanes = (begun, kept, late)
    outcomes = [harness.commit(lane.prepared, lane.committer) for lane in lanes]
    when = f"after the server was away, and commits that returned {outcomes}"
    target.expect(outcomes == [Committed()] * 3, when)
    harness.expect_seen(
        *(transaction.ids for lane in lanes for transaction in (lane.first, lane.prepared)),
        when=when,
    )


@clause(rests_on=[begun_outlives_its_process, killing.killed_in_commit])
def killed_in_begun_commit(harness: Harness) -> None:
    """A commit that is killed at any line, from begin_commit on, is ended by the next committer."""
    lane = _begin(harness, subtask=1)
    outcome = harness.commit(lane.prepared, lane.committer)
    target.expect(outcome == Committed(), f"commit of what was begun returned {outcome}")
    seen = [lane.first.ids, lane.prepared.ids]
    numbers = count()

    def attempt(line: int) -> int | None:
        number = next(numbers)
        first, prepared = harness.prepare(1 + 2 * number), harness.prepare(2 + 2 * number)
        run = killing.run_until_killed(
            harness,
            children.begin_and_commit_until_line,
            harness.sink,
            harness.job.committer_context(),
            first.committable,
            prepared.committable,
            line,
        )
        # Alternate between a decided and an undecided checkpoint.
        outcome = harness.abort(prepared) if number % 2 else harness.commit(prepared)
        when = (
            f"begin_commit and commit were {run.describe()}; then another process ended the same"
            f" transaction, and returned {outcome}. Rule: whatever line it dies at, the next"
            " attempt commits or aborts it as if nothing had been begun"
        )
        target.expect(isinstance(outcome, (Committed, AlreadyCommitted, Aborted)), when)
        seen.append(first.ids)
        if outcome != Aborted():
            seen.append(prepared.ids)
        harness.expect_seen(*seen, when=when)
        return run.lines

    killing.try_each_line(harness, attempt)
    harness.expect_in_doubt(when="after begun commits that were killed, and others that ended them")


class _Act(Enum):
    """The action of a committer after the next attempt has ended its transaction."""

    END = "nothing else"
    WITHDRAW = "withdraw_commit here"
    BEGIN = "begin_commit here, which came late"


@dataclass(frozen=True, slots=True)
class _Lane:
    """A subtask's committer that has committed `first` and can begin `prepared`."""

    committer: Committer
    first: Prepared
    prepared: Prepared


def _begin(harness: Harness, *, attempt: int = 1, subtask: int = 0) -> _Lane:
    """Return a lane whose second transaction is begun.

    Raises:
        NotTestable: begin_commit returned False.
    """
    lane = _open_second(harness, attempt=attempt, subtask=subtask)
    _require_begun(_try_to_begin(lane.committer, lane.prepared))
    return lane


def _open_second(harness: Harness, *, attempt: int = 1, subtask: int = 0) -> _Lane:
    committer = harness.job.committer(attempt)
    require_begin_commit(committer)
    first, prepared = (
        harness.prepare(checkpoint, attempt=attempt, subtask=subtask) for checkpoint in (1, 2)
    )
    outcome = harness.commit(first, committer)
    target.expect(outcome == Committed(), f"commit of the first transaction returned {outcome}")
    return _Lane(committer, first, prepared)


def _begin_in_process(harness: Harness, attempt: int) -> _Lane:
    """Return a lane whose second transaction was begun by a process that was then killed."""
    committer = harness.job.committer(attempt)
    require_begin_commit(committer)
    first, prepared = (harness.prepare(checkpoint, attempt=attempt) for checkpoint in (1, 2))
    child = harness.processes.start(
        children.begin_and_wait,
        harness.sink,
        harness.job.committer_context(attempt),
        first.committable,
        prepared.committable,
    )
    is_begun = child.receive()
    child.kill()
    _require_begun(is_begun)
    return _Lane(committer, first, prepared)


def _overtake(
    harness: Harness, end: Callable[..., object], attempt: int, act: _Act
) -> tuple[_Lane, list[object]]:
    """Begin, run `end` as the next attempt in another process, then act. Return its outcomes."""
    lane = _open_second(harness, attempt=attempt)
    if act is not _Act.BEGIN:
        _require_begun(_try_to_begin(lane.committer, lane.prepared))
    harness.job.begin(attempt + 1)
    context = harness.job.committer_context(attempt + 1)
    outcomes = harness.processes.run(end, harness.sink, context, [lane.prepared.committable])
    if act is _Act.WITHDRAW:
        _withdraw(lane)
    if act is _Act.BEGIN:
        _try_to_begin(lane.committer, lane.prepared)
    return lane, outcomes


def _expect_hidden(harness: Harness, lane: _Lane, *seen: Prepared, when: str) -> None:
    """Raise Violation unless the begun transaction is hidden and in doubt, and `seen` visible."""
    harness.expect_seen(lane.first.ids, *(transaction.ids for transaction in seen), when=when)
    harness.expect_in_doubt(lane.prepared, when=when)


def _says_committed(outcomes: Sequence[CommitOutcome]) -> bool:
    return any(isinstance(outcome, (Committed, AlreadyCommitted)) for outcome in outcomes)


def require_begin_commit(committer: Committer) -> None:
    """Raise NotTestable unless the class of `committer` overrides `begin_commit`.

    Raises:
        NotTestable: The class does not override it.
    """
    if type(committer).begin_commit is Committer.begin_commit:
        raise target.NotTestable("the sink's committer has no begin_commit()")


def _require_begun(is_begun: object) -> None:
    """Raise NotTestable unless `is_begun`.

    Raises:
        NotTestable: `is_begun` is false.
    """
    if not is_begun:
        raise target.NotTestable(
            "begin_commit() returned False for the second transaction of a subtask"
        )


def _try_to_begin(committer: Committer, prepared: Prepared) -> bool:
    """Call `begin_commit` and return its answer.

    Raises:
        Violation: The call raises an error.
    """
    try:
        return committer.begin_commit(prepared.committable)
    except Exception as error:
        raise target.Violation(
            f"begin_commit raised {describe_error(error)}; it has to return False"
        ) from error


def _withdraw(lane: _Lane) -> None:
    """Withdraw the second transaction.

    Raises:
        Violation: The call raises an error.
    """
    try:
        lane.committer.withdraw_commit(lane.prepared.committable)
    except Exception as error:
        raise target.Violation(
            f"withdraw_commit raised {describe_error(error)}; it may raise nothing"
        ) from error


CLAUSES = (
    begun_is_hidden,
    begun_is_committed_once,
    withdrawn_is_in_doubt,
    begun_is_committed_elsewhere,
    begun_is_aborted_elsewhere,
    begun_outlives_its_committer,
    begun_outlives_its_process,
    begun_by_an_older_attempt,
    begun_while_the_server_is_away,
    killed_in_begun_commit,
)
