"""The clauses about the sink as a Spark format: whole batches, killed at each step."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from onceflow.connectors.spark.batch.commits import BatchTarget
from onceflow.core.crash_points import CRASH_POINTS, SINK_POINTS, CrashPoint
from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.runtime.cluster.process_host import Link, ProcessKilled
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.integration.conformance.batch_driver import BatchDriver
from onceflow.integration.conformance.clause import clause
from onceflow.integration.conformance.clauses import deciding
from onceflow.integration.conformance.clauses.listing import (
    in_doubt_is_exact,
    in_doubt_of_every_attempt,
)
from onceflow.integration.conformance.clauses.recovering import (
    crash_and_replay_double_nothing,
)
from onceflow.integration.conformance.clauses.writing import pre_committed_survives_death
from onceflow.integration.conformance.harness import Harness
from onceflow.integration.conformance.target import NotTestable, expect

# A batch has no acks, only its tasks' reports. Each round tries one point.
_POINTS: tuple[CrashPoint, ...] = (
    "claimed",
    "settled",
    *(point for point in CRASH_POINTS if point != "acked"),
)


def run_batch(
    link: Link,
    target: BatchTarget,
    directory: str,
    number: int,
    parts: Sequence[pa.RecordBatch],
) -> None:
    """Run a whole batch in a process that may be killed at any step."""
    del link
    driver = BatchDriver(target, parts[0].schema, _itself, directory)
    driver.batch(number, *parts)


def _itself(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows


class _Query:
    """A query that writes to the sink under a separate sink id, and checks of its rows."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        directory = harness.directory / "query"
        directory.mkdir()
        sink_id = f"{harness.job.sink_id}q"
        staging = harness.another_job(sink_id, log="query").storage.staging(sink_id)
        owner = f"query {sink_id}"
        self._target = BatchTarget(harness.described, sink_id, owner, owner, staging)
        self._directory = str(directory)
        self.driver = BatchDriver(
            self._target, harness.target.schema, harness.batch, self._directory
        )
        try:
            self.driver.commits().close()
        except ConfigError as error:
            if getattr(harness.described, "delivery", "") == Delivery.AT_LEAST_ONCE.value:
                raise NotTestable(str(error)) from error
            raise

    def run_killed(self, point: CrashPoint, number: int, *parts: Sequence[int]) -> bool:
        """Run a batch whose process dies at `point`. Return False if it was not reached."""
        self._harness.processes.arm(point)
        rows = [self._harness.batch(part) for part in parts]
        try:
            self._harness.processes.run(run_batch, self._target, self._directory, number, rows)
        except ProcessKilled:
            return True
        finally:
            self._harness.processes.disarm()
        return False

    def expect_settled(self, *seen: Sequence[int], when: str) -> None:
        """Raise Violation if readers do not see exactly `seen`, or a transaction is in doubt."""
        self._harness.expect_seen(*seen, when=when)
        names = sorted(str(committable.transaction) for committable in self.driver.in_doubt())
        expect(not names, f"{when}: in doubt are {names}, but none should be")

    def settle(self) -> None:
        """Resolve all transactions in doubt, also after a failure."""
        try:
            self.driver.abort()
        except OnceflowError:
            return


@clause(rests_on=[deciding.commit_again, deciding.abort_leaves_nothing, in_doubt_is_exact])
def batch_is_visible_whole(harness: Harness) -> None:
    """A Spark batch becomes visible when it is decided, with the rows of all its tasks, once."""
    query = _Query(harness)
    driver, first, second = query.driver, harness.ids(), harness.ids()
    try:
        plan = driver.plan(0)
        report = driver.task(plan, 0, first)
        # Use other rows, as if the input's order had changed: with equal rows, a unique key would
        # make one task wait.
        driver.task(plan, 1, harness.ids())
        again = driver.task(plan, 1, second, task_attempt=1)
        harness.expect_seen(when="with all tasks of a batch done and nothing decided")
        driver.commit([report, again])
        query.expect_settled(first, second, when="after a batch of which one task ran twice")
        driver.batch(0, [*second, *first])
        query.expect_settled(first, second, when="after the same batch was repeated as one task")
        third = harness.ids()
        plan = driver.plan(1)
        driver.task(plan, 0, third)
        driver.abort(plan)
        query.expect_settled(first, second, when="after the abort of a batch")
        driver.batch(1, third)
        query.expect_settled(first, second, third, when="after the batch that was aborted before")
    finally:
        query.settle()


@clause(
    rests_on=[
        batch_is_visible_whole,
        pre_committed_survives_death,
        deciding.commit_elsewhere,
        crash_and_replay_double_nothing,
    ]
)
def batch_killed_at_each_step(harness: Harness) -> None:
    """A Spark batch that is killed at any step and repeated with other tasks is written once."""
    query = _Query(harness)
    written: list[Sequence[int]] = []
    few = min(harness.effort.rounds, len(_POINTS))
    try:
        for number, point in enumerate(harness.random.sample(_POINTS, few)):
            first, second = harness.ids(), harness.ids()
            killed = query.run_killed(point, number, first, second)
            expect(killed or point in SINK_POINTS, f"no process died at {point} of batch {number}")
            seen = {row_id for part in written for row_id in part}
            early = set(harness.read_ids()) - seen - {*first, *second}
            expect(
                not early,
                f"killed at {point}: {len(early)} rows are visible that belong to no batch",
            )
            query.driver.batch(number, [*first, *second])
            written += [first, second]
            how = f"killed at {point}" if killed else f"not killed, {point} is never reached,"
            query.expect_settled(*written, when=f"after batch {number}, {how} and done again")
    finally:
        query.settle()


@clause(rests_on=[batch_is_visible_whole, in_doubt_of_every_attempt])
def batch_overtaken_is_not_decided(harness: Harness) -> None:
    """The last of two drivers to plan a Spark batch is the only one whose rows become visible."""
    query = _Query(harness)
    old, new = query.driver, query.driver.other()
    rows = harness.ids()
    try:
        late = old.task(old.plan(0), 0, rows)
        plan = new.plan(0)
        refused = ""
        try:
            old.commit([late])
        except OnceflowError as error:
            refused = str(error)
        harness.expect_seen(when="after the older of two drivers tried to decide")
        expect(refused, "the older of two drivers got no error")
        new.commit([new.task(plan, 0, rows)])
        query.expect_settled(rows, when="after the newer of two drivers has decided")
    finally:
        query.settle()


CLAUSES = (batch_is_visible_whole, batch_killed_at_each_step, batch_overtaken_is_not_decided)
