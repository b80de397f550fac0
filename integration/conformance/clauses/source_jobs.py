"""The clauses about a whole job that reads the source, is killed at each step, and restarted."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence

from onceflow.core.crash_points import CRASH_POINTS, SINK_POINTS, CrashPoint
from onceflow.integration.conformance.clause import SOURCES, clause
from onceflow.integration.conformance.clauses import ending, growing, reading
from onceflow.integration.conformance.processes import TIMEOUT_S, eventually
from onceflow.integration.conformance.source_harness import SourceHarness
from onceflow.integration.conformance.source_job import (
    SourceWork,
    count_files_rows,
    read_files,
    run_source_attempt,
)
from onceflow.integration.conformance.target import NotTestable, expect
from onceflow.integration.conformance.whole_job import KilledJob, KillPlan

_ROWS_A_SPLIT = 150
"""The rows of a split of a job that is killed at each step: each attempt reads only a few."""
_ROWS_A_CHECKPOINT = 6
_NEW_ROWS = 9
_SPLIT_POINTS: Sequence[CrashPoint] = ("offered", "decided")


class _SourceRun(KilledJob):
    """A job with the source that runs attempt by attempt."""

    def __init__(self, harness: SourceHarness) -> None:
        self._harness = harness
        directory = tempfile.mkdtemp(dir=harness.directory)
        self._target = f"{directory}/rows"
        self._storage = f"{directory}/job"
        super().__init__(harness.processes, run_source_attempt, self._describe_work())

    def attempt_with_new_split(self, plan: KillPlan) -> bool:
        """Run an attempt, and add a split when all rows of the others are committed."""
        committed = self._harness.count_rows()
        source = self._harness.source
        self.work = self._describe_work(_NEW_ROWS)

        def add_split() -> None:
            # At its start, a job finds new splits without an offer.
            expect(
                eventually(
                    lambda: count_files_rows(source, self._target) >= committed, TIMEOUT_S / 2
                ),
                f"{self}: not all {committed} rows were committed before a new split was to come",
            )
            self._harness.add_rows(*self._harness.input.add_split(_NEW_ROWS))

        return self.attempt(plan, once_started=add_split)

    def _describe_work(self, new_rows: int = 0) -> SourceWork:
        return SourceWork(
            self._harness.source,
            self._storage,
            self._target,
            self._harness.count_rows() + new_rows,
            _ROWS_A_CHECKPOINT,
        )

    def look(self) -> None:
        """Raise Violation if a row is visible twice, or if the input has no such row."""
        counts = Counter(self._list_keys())
        for key in counts:
            self._harness.find_split(key)
        doubled = [key for key, count in counts.items() if count > 1]
        expect(
            not doubled, f"{self}: the target has {len(doubled)} rows twice, such as {doubled[:5]}"
        )

    def finish(self) -> None:
        """Run an attempt without kills, and check that every row is there once."""
        expect(self.attempt(KillPlan(2)), f"{self}: an attempt that nobody killed did not end")
        self.expect_all()

    def expect_all(self) -> None:
        """Raise Violation if a row is missing from the target."""
        self._harness.expect_none_missing(self._list_keys(), self._harness.rows, str(self))

    def _list_keys(self) -> list[object]:
        batches = read_files(self._harness.source, self._target)
        return [key for batch in batches for key in self._harness.list_keys(batch)]


@clause(
    kit=SOURCES,
    rests_on=[
        reading.replay_in_another_process,
        reading.rescaling_returns_each_row_once,
        reading.snapshot_again_changes_nothing,
        ending.bounded_end,
        growing.acknowledgement_keeps_later_rows,
        growing.known_splits_keep_their_positions,
    ],
)
def job_killed_at_each_step(harness: SourceHarness) -> None:
    """A job that is killed at each step of a checkpoint, and rescaled, has each row there once."""
    harness.fill_with_end_if_possible(_ROWS_A_SPLIT)
    job = _SourceRun(harness)
    points: list[CrashPoint] = [point for point in CRASH_POINTS if point not in SINK_POINTS]
    for point in harness.random.sample(points, len(points)):
        parallelism = harness.random.choice((1, 2, 3))
        plan = KillPlan(parallelism, point, crash_at=harness.random.choice((1, 2)))
        if not _kill(harness, job, plan):
            # The rows did not last for this step. Another job reads them from their start.
            job.expect_all()
            job = _SourceRun(harness)
            is_killed = _kill(harness, job, KillPlan(parallelism, point))
            expect(is_killed, f"{job}: no process died at {point}")
    job.finish()


def _kill(harness: SourceHarness, job: _SourceRun, plan: KillPlan) -> bool:
    """Run an attempt of `job`. Return True if one of its processes died."""
    done = job.attempt(plan)
    harness.processes.disarm()
    return not done


@clause(
    kit=SOURCES,
    needs=["add_split"],
    rests_on=[growing.splits_that_appear_are_read_whole, job_killed_at_each_step],
)
def job_killed_while_splits_appear(harness: SourceHarness) -> None:
    """A job that is killed when it begins to read new splits has each of their rows there once."""
    harness.fill_endless()
    if harness.source.discovery_interval_s is None:
        raise NotTestable("the source has no discovery_interval_s")
    job = _SourceRun(harness)
    for point in _SPLIT_POINTS:
        harness.processes.arm(point)
        done = job.attempt_with_new_split(KillPlan(2))
        harness.processes.disarm()
        expect(not done, f"{job}: no process died at {point}")
    job.finish()


CLAUSES = (job_killed_at_each_step, job_killed_while_splits_appear)
