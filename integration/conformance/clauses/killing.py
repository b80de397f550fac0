"""The clauses about a process that is killed at any line of the sink's code, and about races."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from onceflow.core.protocol import committables
from onceflow.core.runtime.cluster.process_host import ProcessKilled, Returned
from onceflow.integration.conformance import children
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses.deciding import abort_again, commit_elsewhere
from onceflow.integration.conformance.clauses.recovering import orphans_are_rolled_back_on_start
from onceflow.integration.conformance.clauses.writing import pre_committed_survives_death
from onceflow.integration.conformance.harness import Harness, Prepared
from onceflow.integration.conformance.target import describe_error, expect


@clause(scenarios=[15, 37], rests_on=[commit_elsewhere])
def killed_in_commit(harness: Harness) -> None:
    """A commit that is killed at any line is completed by the next one, with each row once."""
    seen: list[tuple[int, ...]] = []
    checkpoints = iter(range(1, 1 << 20))

    def attempt(line: int) -> int | None:
        prepared = harness.prepare(next(checkpoints))
        seen.append(prepared.ids)
        run = run_until_killed(
            harness,
            children.commit_until_line,
            harness.sink,
            harness.job.committer_context(),
            prepared.committable,
            line,
        )
        outcome = harness.commit(prepared)
        when = (
            f"commit was {run.describe()}; then another process committed the same transaction,"
            f" and returned {outcome}. Rule: whatever line a commit dies at, the next commit of the"
            " transaction ends it, and each of its rows is there once"
        )
        expect(
            isinstance(outcome, (committables.Committed, committables.AlreadyCommitted)),
            f"{when}: it must return Committed() or AlreadyCommitted()",
        )
        harness.expect_seen(*seen, when=when)
        return run.lines

    try_each_line(harness, attempt)
    harness.expect_in_doubt(when="after commits that were killed, and others that ended them")


@clause(scenarios=[37], rests_on=[commit_elsewhere, abort_again])
def killed_in_abort(harness: Harness) -> None:
    """An abort that is killed at any line is completed by the next: nothing visible or in doubt."""
    checkpoints = iter(range(1, 1 << 20))

    def attempt(line: int) -> int | None:
        prepared = harness.prepare(next(checkpoints))
        run = run_until_killed(
            harness,
            children.abort_until_line,
            harness.sink,
            harness.job.committer_context(),
            prepared.committable,
            line,
        )
        outcome = harness.abort(prepared)
        when = (
            f"abort was {run.describe()}; then another process aborted the same transaction, and"
            f" returned {outcome}. Rule: whatever line an abort dies at, the next abort of the"
            " transaction ends it, and none of its rows is there"
        )
        expect(outcome == committables.Aborted(), f"{when}: it must return Aborted()")
        harness.expect_seen(when=when)
        return run.lines

    try_each_line(harness, attempt)
    harness.expect_in_doubt(when="after aborts that were killed, and others that ended them")


@clause(
    scenarios=[16, 23, 32],
    rests_on=[pre_committed_survives_death, orphans_are_rolled_back_on_start],
)
def killed_in_pre_commit(harness: Harness) -> None:
    """A pre_commit that is killed at any line leaves all of its rows in doubt, or none."""
    # Odd attempts write. Even attempts recover.
    attempts = iter(range(1, 1 << 20, 2))
    seen: list[tuple[int, ...]] = []

    def attempt(line: int) -> int | None:
        number = next(attempts)
        harness.job.begin(number)
        ids = harness.ids()
        run = run_until_killed(
            harness,
            children.pre_commit_until_line,
            harness.sink,
            harness.job.writer_context(number, first_checkpoint=number),
            harness.target.batch(ids),
            number,
            line,
        )
        when = (
            f"pre_commit was {run.describe()}. Rule: whatever line a pre_commit dies at, its rows"
            " are in doubt as one transaction, all of them, or nothing is left of them; a reader"
            " sees them only after a commit, once each"
        )
        harness.job.begin(number + 1)
        committer = harness.job.committer(number + 1)
        left = list(committer.in_doubt())
        # One writer has pre-committed one checkpoint. Two transactions would double its rows.
        expect(len(left) <= 1, f"{when}: in doubt are {left}")
        harness.expect_seen(*seen, when=when)
        # Commit as if it had been decided: a transaction in doubt must have all rows.
        replayed = None if left else harness.prepare(number, attempt=number + 1, ids=ids)
        harness.commit_all(replayed or Prepared(left[0], ids))
        seen.append(ids)
        harness.expect_seen(*seen, when=f"{when}. What was in doubt was committed since")
        return run.lines

    try_each_line(harness, attempt)
    harness.expect_in_doubt(when="after pre_commits that were killed")


@clause(scenarios=[21], rests_on=[killed_in_commit])
def commit_race(harness: Harness) -> None:
    """Committers that commit one transaction at the same time write its rows once."""
    seen: list[tuple[int, ...]] = []
    for checkpoint in range(1, 6):
        prepared = harness.prepare(checkpoint)
        seen.append(prepared.ids)
        outcomes = _race_commits(harness, prepared)
        harness.expect_seen(*seen, when=f"after a race that returned {outcomes}")
        for outcome in outcomes:
            expect(
                isinstance(outcome, (committables.Committed, committables.AlreadyCommitted)),
                f"the race returned {outcomes}",
            )


def _race_commits(harness: Harness, prepared: Prepared) -> list[committables.CommitOutcome | str]:
    start = threading.Barrier(4)
    outcomes: list[committables.CommitOutcome | str] = []

    def race() -> None:
        try:
            committer = harness.sink.committer(harness.job.committer_context())
            # Start all commits at once, with open committers: opening takes longer than a commit.
            start.wait(30)
            outcomes.append(harness.commit(prepared, committer))
            committer.close()
        except Exception as error:
            outcomes.append(describe_error(error))

    threads = [threading.Thread(target=race) for _ in range(start.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return outcomes


@dataclass(frozen=True, slots=True)
class KilledRun:
    """The result of running some of the sink's code in a process: finished, or killed."""

    lines: int | None
    """The number of lines that it ran, or None if it was killed."""
    location: str = ""
    """The line before which it was killed: file, line, function and text; empty if not killed."""

    def describe(self) -> str:
        """Return text that completes "commit was …"."""
        return f"killed right before {self.location}" if self.location else "not killed"


def run_until_killed(
    harness: Harness, function: Callable[..., object], *arguments: object
) -> KilledRun:
    """Run `function` in a process that may send the location of a line and be killed there."""
    child = harness.processes.start(function, *arguments)
    match child.receive():
        case Returned(lines):
            return KilledRun(cast("int", lines))
        case location:
            # The process has sent its location before the kill, so its death is expected.
            with suppress(ProcessKilled):
                child.result()
            return KilledRun(None, str(location))


def try_each_line(harness: Harness, attempt: Callable[[int], int | None]) -> None:
    """Run once to the end, then with kills at the first line, the last, and some in between."""
    # Line 0 is never reached. This run counts the lines of a whole call.
    lines = attempt(0)
    expect(lines, "no line of the sink's own code ran")
    for line in spread(harness, lines or 1, 2 * harness.effort.rounds):
        # A later run may be shorter, for example with an open connection. Then it is not killed.
        attempt(line)


def spread(harness: Harness, lines: int, count: int) -> Sequence[int]:
    """Return about `count` lines of 1 … `lines`: first, last, and a random one of each part."""
    if lines <= count:
        return range(1, lines + 1)
    # Draw one from each part, so that a few rounds cover the beginning, the middle and the end.
    bounds = [1 + lines * part // count for part in range(count + 1)]
    drawn = {harness.random.randrange(low, high) for low, high in pairwise(bounds)}
    return sorted({*drawn, 1, lines})


CLAUSES = (killed_in_commit, killed_in_abort, killed_in_pre_commit, commit_race)
