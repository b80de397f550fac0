"""The clauses about a whole job of real processes that is killed at each step and restarted."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.core.crash_points import CRASH_POINTS, SINK_POINTS, CrashPoint
from onceflow.core.storage import FileSystemStorage
from onceflow.integration.conformance.clause import Clause, clause
from onceflow.integration.conformance.clauses import beginning
from onceflow.integration.conformance.clauses.killing import (
    killed_in_commit,
    killed_in_pre_commit,
)
from onceflow.integration.conformance.clauses.listing import prune_keeps_what_is_asked_for
from onceflow.integration.conformance.clauses.recovering import (
    crash_and_replay_double_nothing,
    rescaling_loses_nothing,
)
from onceflow.integration.conformance.harness import Harness
from onceflow.integration.conformance.sink_job import JOB
from onceflow.integration.conformance.target import NotTestable, expect
from onceflow.integration.conformance.whole_job import (
    JobParameters,
    KilledJob,
    KillPlan,
    find_decided_rows,
    run_attempt,
)

_ROWS = 120
_ROWS_A_CHECKPOINT = 40
_SOAK_ROWS_A_ROUND = 3 * _ROWS_A_CHECKPOINT
"""The rows for each round. An attempt is killed at its first or second checkpoint, so rows remain
for later attempts."""


_STEPS = (
    crash_and_replay_double_nothing,
    prune_keeps_what_is_asked_for,
    killed_in_commit,
    killed_in_pre_commit,
    beginning.withdrawn_is_in_doubt,
    beginning.begun_by_an_older_attempt,
    beginning.killed_in_begun_commit,
)


class _JobRun(KilledJob):
    """A job with the sink that runs attempt by attempt."""

    def __init__(self, harness: Harness, rows: int) -> None:
        self._harness = harness
        self.ids = harness.ids(rows)
        storage = str(harness.directory / "job")
        work = JobParameters(
            harness.described,
            harness.job.sink_id,
            storage,
            harness.target.batch(self.ids),
            _ROWS_A_CHECKPOINT,
        )
        super().__init__(harness.processes, run_attempt, work)
        self._storage = FileSystemStorage(storage).open(JOB)

    def finish(self) -> None:
        """Run an attempt without kills, and check that every row is there once."""
        expect(self.attempt(KillPlan(2)), f"{self}: an attempt that nobody killed did not end")
        self.expect_all()

    def expect_all(self) -> None:
        """Raise Violation if not every row is there once, or a transaction is in doubt."""
        self._harness.expect_seen(self.ids, when=str(self))
        self._harness.expect_in_doubt(when=str(self))

    def look(self) -> None:
        """Raise Violation if a row is visible twice, or is not decided by the log."""
        seen = self._harness.read_ids()
        expect(len(seen) == len(set(seen)), f"{self}: rows are there more than once")
        decided = find_decided_rows(self._storage.log.read())
        early = set(seen) - {self.ids[at] for at in decided}
        expect(not early, f"{self}: {len(early)} rows are seen that no checkpoint has decided")


def _kill_job(harness: Harness, point: CrashPoint) -> None:
    job = _JobRun(harness, _ROWS)
    crash_at = harness.random.choice((1, 2))
    done = job.attempt(KillPlan(harness.random.choice((1, 2, 3)), point, crash_at))
    missed = harness.processes.disarm()
    if done and missed and point in SINK_POINTS:
        job.expect_all()
        raise NotTestable(f"the sink does not pass crash_points.reach({point!r})")
    expect(not done, f"{job}: no process died at {point}")
    job.finish()


def _make_kill_clause(point: CrashPoint, what: str) -> Clause:
    def test(harness: Harness) -> None:
        _kill_job(harness, point)

    test.__name__ = f"job_killed_at_{point}"
    test.__doc__ = f"A job whose process is killed {what} has each row there once."
    return clause(scenarios=[15, 18, 27], rests_on=_STEPS)(test)


_KILLS = tuple(
    _make_kill_clause(point, what)
    for point, what in zip(
        CRASH_POINTS,
        (
            "while it writes",
            "with all rows at the target and nothing prepared",
            "after pre_commit, before its ack",
            "after its ack",
            "after the decision is written, before anybody hears of it",
            "right before a commit",
            "right after a commit, before anybody hears of it",
            "after everything was committed and reported",
        ),
        strict=True,
    )
)


@clause(scenarios=[15, 18, 27], rests_on=_STEPS)
def job_killed_at_begun(harness: Harness) -> None:
    """A job whose process is killed after a commit has begun has each row there once."""
    # Use another sink id, because the job has its own decision log.
    other = harness.another_job(f"{harness.job.sink_id}.begins", log="begins")
    beginning.require_begin_commit(other.committer())
    _kill_job(harness, "begun")


@clause(scenarios=[15, 27, 29, 30, 33, 42], rests_on=[*_KILLS, rescaling_loses_nothing])
def job_killed_again_and_again(harness: Harness) -> None:
    """A job that is killed at random steps and moments, and rescaled, has each row there once."""
    rounds = harness.effort.rounds
    job = _JobRun(harness, _SOAK_ROWS_A_ROUND * rounds)
    passed: Sequence[CrashPoint] = [
        crash_point for crash_point in CRASH_POINTS if crash_point not in SINK_POINTS
    ]
    points: Sequence[CrashPoint] = harness.random.sample(passed, len(passed))
    deaths = 0
    for number in range(rounds):
        parallelism = harness.random.choice((1, 2, 3))
        if number % 2 == 1:
            done = job.attempt(KillPlan(parallelism), kill_after_s=harness.random.uniform(0.0, 0.5))
        else:
            point = points[number // 2 % len(points)]
            done = job.attempt(KillPlan(parallelism, point, harness.random.choice((1, 2))))
            expect(not done, f"{job}: no process died at {point}")
        harness.processes.disarm()
        if done:
            break
        deaths += 1
    job.finish()
    expect(deaths > 0, f"{job}: no process died")


CLAUSES = (*_KILLS, job_killed_at_begun, job_killed_again_and_again)
