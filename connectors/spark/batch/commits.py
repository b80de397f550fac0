"""Carries out the protocol of a batch: what planning, commit and abort do, and what tasks are told.

No Spark here: formats call it from Spark's planning and commit workers, `foreach_batch` from the
driver itself. `core.protocol.batches` decides; this asks, commits and rolls back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import pyarrow as pa

from onceflow.connectors.spark.batch.lost_rows import describe_lost_rows, find_lost_rows
from onceflow.connectors.spark.batch.sink_group import SinkGroup
from onceflow.core.backoff import Backoff
from onceflow.core.commit.batch_plans import around_roll_backs, plan_claimed, plan_sweep
from onceflow.core.commit.loop import TimedSteps, carry_out, error_class, settle
from onceflow.core.commit.queue import Done, StepFailed
from onceflow.core.commit.retries import recovery_retries
from onceflow.core.commit.steps import (
    AbortOne,
    CommitWhole,
    PlannedSteps,
    Step,
    to_aborts,
    to_commits,
    to_committables,
)
from onceflow.core.commit.whole_checkpoints import GlobalCommit
from onceflow.core.crash_points import reach
from onceflow.core.errors import (
    CommitFailed,
    ConfigError,
    PreparedTransactionLost,
    SinkError,
    StagingMissing,
    StorageError,
)
from onceflow.core.protocol.batches import (
    BatchClaim,
    BatchDecision,
    BatchId,
    RefuseBatch,
    RefuseLower,
    SkipBatch,
    batch_checkpoint,
    decision_of,
    judge_batch,
    oldest_proof,
)
from onceflow.core.protocol.committables import (
    AbortOutcome,
    CommitOutcome,
    Committable,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import NO_ATTEMPT
from onceflow.core.spi import (
    CommittedBy,
    Committer,
    CommitterContext,
    OnBadRow,
    Sink,
)
from onceflow.core.spi.batch_decisions import BatchDecisions
from onceflow.core.spi.staging import StagingArea, is_staged
from onceflow.sinks.sql.sink import SqlSink

_log = logging.getLogger("onceflow.spark")
SETTLE_TIMEOUT_S = 120.0
"""How long a target that is down is asked before the batch fails, and with it the query."""
_PROOFS_PRUNED_EVERY = 16
"""Attempts; a prune reads and deletes a bounded number of rows."""


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """Where batches go, and who writes there. Pickles with the sink."""

    sink: Sink
    sink_id: str
    owner: str
    """Who has the sink id to itself: a query, or the batch writes of a table."""
    source: str
    """What numbers the batches; empty when they have no number of their own."""
    staging: StagingArea | None = None
    on_bad_row: OnBadRow = OnBadRow.FAIL
    replaces: bool = False
    """Whether each batch takes the place of all rows that are there."""
    driver: str = ""
    """Who claims: application, process and host."""

    @property
    def claimant(self) -> str:
        """Who claims, and for what: what others are told."""
        return f"{self.owner}, {self.driver}" if self.driver else self.owner

    @property
    def sink_ids(self) -> tuple[str, ...]:
        """Return the sink ids that a decision is about."""
        if isinstance(self.sink, SinkGroup):
            return self.sink.part_ids(self.sink_id)
        return (self.sink_id,)

    def committer_context(self, attempt: AttemptId) -> CommitterContext:
        """Return for whom `attempt` commits."""
        return CommitterContext(
            job=self.claimant,
            uid=self.sink_id,
            sink_id=self.sink_id,
            attempt=attempt,
            log_id=self.owner,
            staging=self.staging,
        )


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What the tasks of one try at a batch are told. Pickles."""

    target: BatchTarget
    attempt: AttemptId
    batch: BatchId
    fingerprint: str = ""
    decided: bool = False
    """Whether the batch is there already: tasks read their rows and drop them."""
    decided_by: str = ""
    """The run of the query that decided it."""
    dead_letters: BatchTarget | None = None
    """Where tasks write the rows that the sink rejects."""
    write: int = 0
    writes: int = 1
    """Which DataFrame of the batch the tasks write, and how many the batch has."""

    def transaction_number(self, partition: int) -> int:
        """Return the number of the transaction of `partition`, which no other of the batch has.

        The dead letters of the partition have the next one. So a server that has room for the
        highest number has room for all of them.
        """
        number = partition * self.writes + self.write
        return number if self.dead_letters is None else number * 2


@dataclass(frozen=True, slots=True)
class TaskReport:
    """What one task has done: Spark carries it from the task to the commit."""

    batch: BatchId
    attempt: AttemptId
    partition: int
    fingerprint: str = ""
    run: str = ""
    rows: int = 0
    committables: tuple[Committable, ...] = ()
    dropped: bool = False
    """Whether the batch was decided before, and the rows were dropped."""
    beside: str = ""
    """The transaction of another try, because of which the rows are staged; empty without one."""


class BatchCommits:
    """Plans, commits and aborts the batches of one target, one after the other. One thread's.

    Keeps its connections between batches. A crash at any place leaves what the next `plan` settles.
    """

    def __init__(self, target: BatchTarget, decisions: BatchDecisions) -> None:
        """Ask nothing yet."""
        self.target = target
        self.decisions = decisions
        self._committer: Committer | None = None
        self._opened: pa.Schema | None = None
        self._claimed: AttemptId | None = None

    def plan(self, schema: pa.Schema, number: int | None, fingerprint: str = "") -> BatchPlan:
        """Return what tasks are to do, with the sink id claimed and all that is decided committed.

        Runs on the driver before the tasks. `number` is the batch's, None for one without; rows
        come in `schema`.

        Raises:
            ConfigError: Rows of `schema` cannot be written, or the batch must not be.
            Fenced: Another run has claimed the sink id since this one did, or keeps claiming it.
            CommitFailed: What is decided cannot be committed now.
            PreparedTransactionLost: What is decided is gone.
            SinkError: The target cannot be asked now.
        """
        if number is not None and self._claimed is None:
            self._check_decided_table(BatchId(self.target.source, number))
        claim = self._claim(schema)
        reach("claimed")
        target = self.target
        batch = BatchId(target.source, claim.attempt if number is None else number)
        # After the claim, and before anything is settled: nobody else decides from here on, and an
        # older copy of a checkpoint must not commit or roll back on its way to being refused.
        verdict = judge_batch(claim, batch, fingerprint)
        if isinstance(verdict, RefuseBatch):
            raise ConfigError(
                f"sink id {target.sink_id!r}: {verdict.reason}. This is an older copy of the "
                "checkpoint, or another job under the same name: nothing of the batch is written, "
                "for part of its rows may be there. Restore the newest copy; or start with a new "
                "checkpoint (and sink id) at the place up to which the rows are there"
            )
        if isinstance(verdict, RefuseLower):
            raise ConfigError(_lower_version(target, batch, verdict))
        self._settle(claim)
        reach("settled")
        decided = isinstance(verdict, SkipBatch)
        sink = self.decisions.task_sink(target.sink)
        return BatchPlan(
            replace(target, sink=sink),
            claim.attempt,
            batch,
            fingerprint,
            decided=decided,
            decided_by=verdict.decision.run if isinstance(verdict, SkipBatch) else "",
        )

    def commit(self, reports: Sequence[TaskReport]) -> BatchDecision | None:
        """Return the decision, with all rows that `reports` tell of visible.

        Runs on the driver after all tasks. None when there is nothing to decide: the batch was
        there already, or is one without rows that replaces nothing and is not remembered. When it
        raises, the batch may be decided; then the next `plan` commits the rest of it.

        Raises:
            Fenced: Another run has claimed the sink id; nothing of this one is decided.
            CommitOutcomeUnknown: The target cannot be asked now what became of it.
            CommitFailed: It is decided, and not all of it committed.
            BadRow: It is not decided: the target refuses a row.
            SinkError: It is not decided; rows are staged where the driver does not see them, say.
        """
        writing = [report for report in reports if not report.dropped]
        if not writing:
            self._log_dropped(reports)
            return None
        first = writing[0]
        written = any(report.committables for report in writing)
        # A query's batch has the same input whenever it comes again, and that the fingerprint
        # holds. A user's number may come again with other rows, so it counts without rows, too.
        is_remembered = bool(first.batch.source) and not first.fingerprint
        if not (written or is_remembered or self.target.replaces):
            return None
        proposed = decision_of(
            first.batch,
            first.attempt,
            [(report.partition, report.committables) for report in writing],
            fingerprint=first.fingerprint,
            run=first.run,
        )
        decision = self._decide(proposed, [report for report in writing if report.beside])
        reach("logged")
        # Prepared rows first, then the roll-backs: both free locks that staged rows may wait for.
        committer = self._committer_for(first.attempt)
        prepared, staged = self._around_roll_backs(decision.committables)
        self._carry_out(committer, self._to_commits(prepared))
        in_doubt = _list_in_doubt(committer)
        orphans = plan_sweep(decision, in_doubt, sink_ids=self.target.sink_ids)
        self._carry_out(committer, [*to_aborts(orphans), *self._to_commits(staged)])
        # Last: a crash before it only has the next plan ask for the same commits again.
        self.decisions.mark_committed(decision)
        if decision.attempt % _PROOFS_PRUNED_EVERY == 0:
            committer.prune(oldest_proof(decision))
        reach("replied")
        return decision

    def abort(self, schema: pa.Schema, attempt: AttemptId | None = None) -> None:
        """Settle the sink id: commit what is decided, roll back the rest.

        Runs on the driver after `attempt` has failed; tasks of it may still be at work, and are
        fenced. Claims first: without that, something rolled back here could be decided elsewhere.
        But not from another run, which has settled all of it and goes on. Without `attempt`, as in
        a process that did not plan, the newest claim of this driver is meant.

        Raises:
            Fenced: Another run has claimed the sink id since; names it. Nothing is changed.
            OnceflowError: As `plan`; the next `plan` does it again.
        """
        newest = self.decisions.claimant()
        # Only our own newest claim: another driver's batch must not be rolled back by this failure.
        if attempt is None and newest.name == self.target.claimant:
            attempt = newest.attempt
        self._settle(self._claim(schema, after=attempt or NO_ATTEMPT))

    def is_decided(self, batch: BatchId) -> bool:
        """Return whether `batch` is decided, and so written or to be committed; changes nothing.

        Raises:
            OnceflowError: As `BatchDecisions.read_claim`.
        """
        return self.decisions.read_claim().decision(batch) is not None

    def has_forgotten(self, batch: BatchId, attempt: AttemptId) -> bool:
        """Return whether a decision for `batch`, of `attempt`, would be forgotten by now.

        One without a number is, once a later attempt has decided.

        Raises:
            OnceflowError: As `BatchDecisions.read_claim`.
        """
        return not batch.source and any(
            one.attempt > attempt for one in self.decisions.read_claim().decisions
        )

    @property
    def has_claimed(self) -> bool:
        """True if this process claimed the sink and knows of no later claim by another driver."""
        return self._claimed is not None

    def has_claimed_after(self, attempt: AttemptId) -> bool:
        """Return whether the newest claim is this driver's own, made right after `attempt`.

        Raises:
            SinkError, StorageError: The target or the log cannot be read now.
        """
        newest = self.decisions.claimant()
        return newest.attempt == attempt + 1 and newest.name == self.target.claimant

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self.decisions.close()
        committer, self._committer = self._committer, None
        if committer is not None:
            committer.close()

    # --- steps --------------------------------------------------------------------------------

    def _log_dropped(self, reports: Sequence[TaskReport]) -> None:
        """Tell of rows that are not written because a user's number is written already."""
        rows = sum(report.rows for report in reports)
        # A query repeats its last batch after every crash: that is no news to anybody.
        if rows and not reports[0].fingerprint:
            _log.warning(
                "sink %s: %s is written already, so the %d rows of this write are dropped",
                self.target.sink_id,
                reports[0].batch,
                rows,
            )

    def _check_decided_table(self, batch: BatchId) -> None:
        """Raise ConfigError if `batch` is written to a table that would be created anew, empty."""
        sink = self.target.sink
        if not isinstance(sink, SqlSink) or not sink.create or not self.is_decided(batch):
            return
        if not sink.has_table():
            raise ConfigError(
                f"{batch} is written already, and table {sink.table} is not there any more: it was"
                " dropped or renamed since. It was not created, for it would have none of these"
                " rows. Restore it; or write the rows again: a job under another txnAppId, a query"
                " with a new checkpointLocation"
            )

    def _claim(self, schema: pa.Schema, *, after: AttemptId | None = None) -> BatchClaim:
        claim = None
        # The usual batch: the target is open for these columns, and one statement raises the
        # attempt.
        if self._claimed is not None and self._opened == schema and after in (None, self._claimed):
            claim = self.decisions.claim_next(self._claimed)
        if claim is None:
            newest = self._require_own_claim() if after is None else after
            claim = self.decisions.claim(lambda one: self._open(one, schema), after=newest)
            self._opened = schema
        self._claimed = claim.attempt
        return claim

    def _require_own_claim(self) -> AttemptId | None:
        """Return the newest claim, which is this driver's own; None before the first one here.

        A driver that stood still may have been overtaken. It must not take the sink id back: its
        successor would end, and Spark's own log then ends this run, too.

        Raises:
            Fenced: Another driver has claimed the sink id since; names it. The next call claims,
                for that is a run that was started after this error.
        """
        if self._claimed is None:
            return None
        newest = self.decisions.claimant()
        # Our other process may have claimed: the one that commits does so when a batch has failed.
        # An old record names nobody.
        if newest.attempt == self._claimed or newest.name in {"", self.target.claimant}:
            return newest.attempt
        own, self._claimed = self._claimed, None
        self.decisions.check_newest(own)
        return None

    def _open(self, attempt: AttemptId, schema: pa.Schema) -> None:
        context = self.target.committer_context(attempt)
        self.target.sink.validate(context, schema)
        try:
            self.target.sink.open(context, schema)
        except StagingMissing as error:
            raise ConfigError(
                f"{error}. Give option stagingLocation: a directory, or the URL of a bucket, that"
                " driver and executors see"
            ) from error

    def _settle(self, claim: BatchClaim) -> None:
        committer = self._committer_for(claim.attempt)
        in_doubt = committer.in_doubt()
        # Settled batches come without their transactions: these are asked for only if there is
        # doubt.
        if in_doubt:
            claim = self.decisions.with_committables(claim)
        plan = plan_claimed(claim, in_doubt, sink_ids=self.target.sink_ids)
        # In this order: staged rows may wait for the locks of what is rolled back.
        prepared, staged = self._around_roll_backs(plan.commit)
        steps = [*self._to_commits(prepared), *to_aborts(plan.abort), *self._to_commits(staged)]
        try:
            self._carry_out(committer, steps)
        except (PreparedTransactionLost, CommitFailed) as error:
            lost = self._find_lost_rows(committer, plan.commit, in_doubt)
            if not lost:
                raise
            raise type(error)(self._describe_lost_rows(claim, lost)) from error
        for decision in claim.decisions:
            if not decision.is_committed:
                self.decisions.mark_committed(decision)

    def _decide(self, proposed: BatchDecision, beside: Sequence[TaskReport]) -> BatchDecision:
        """Return what is decided. Rows staged `beside` a prepared twin wait until that is gone."""
        if not beside:
            return self.decisions.decide_with_rows(proposed)
        self._require_seen(beside)
        return self.decisions.decide(proposed)

    def _require_seen(self, reports: Sequence[TaskReport]) -> None:
        """Check that the rows that tasks have staged beside a twin can be applied from here.

        Raises:
            SinkError: They cannot be seen; nothing is decided.
        """
        seen = {one.transaction for one in self._committer_for(reports[0].attempt).in_doubt()}
        for report in reports:
            for one in report.committables:
                if one.transaction not in seen:
                    raise SinkError(
                        f"{report.batch}: partition {report.partition} was tried again and has"
                        f" staged its rows as {one}, for {report.beside} holds them prepared; the"
                        " driver does not see them. Give option stagingLocation, a place that"
                        " driver and executors share; the next run rolls both back"
                    )

    def _around_roll_backs(
        self, decided: Sequence[Committable]
    ) -> tuple[Sequence[Committable], Sequence[Committable]]:
        """Return what is committed before roll-backs, and what after; never parts of a whole."""
        if self.target.sink.committed_by is CommittedBy.DRIVER:
            return decided, ()
        return around_roll_backs(decided, staged=is_staged)

    def _to_commits(self, committables: Sequence[Committable]) -> Sequence[Step]:
        """Return steps that commit each by itself, or all of an attempt at once."""
        if self.target.sink.committed_by is CommittedBy.SLOTS:
            return to_commits(committables)
        # A whole is one version of the table: those of two attempts are never one.
        by_attempt = groupby(committables, key=lambda one: one.transaction.attempt)
        return [
            CommitWhole(GlobalCommit(batch_checkpoint(AttemptId(attempt)), tuple(listed)))
            for attempt, listed in by_attempt
        ]

    def _carry_out(self, committer: Committer, steps: Sequence[Step]) -> None:
        retries = recovery_retries(SETTLE_TIMEOUT_S, waits_for_people=False)
        source = TimedSteps(PlannedSteps(steps, retries))
        for step, ended in settle(source, partial(_try_step, committer)):
            if isinstance(ended, StepFailed):
                raise _error_of(step, ended)
            if isinstance(step, AbortOne) and isinstance(ended, Done):
                _log.info("sink %s: rolled back %s", self.target.sink_id, step)

    def _find_lost_rows(
        self,
        committer: Committer,
        decided: Sequence[Committable],
        in_doubt: Sequence[Committable],
    ) -> Sequence[Committable]:
        if self.target.sink.committed_by is CommittedBy.DRIVER:
            return ()
        return find_lost_rows(committer, decided, in_doubt)

    def _describe_lost_rows(self, claim: BatchClaim, lost: Sequence[Committable]) -> str:
        sink, sink_id = self.target.sink, self.target.sink_id
        parts = sink.names(sink_id) if isinstance(sink, SinkGroup) else {sink_id: str(sink)}
        return describe_lost_rows(
            [one for one in claim.decisions if not one.is_committed],
            lost,
            part_of=parts.__getitem__,
            owner=self.target.owner,
            can_give_up=self.decisions.can_give_up,
        )

    def _committer_for(self, attempt: AttemptId) -> Committer:
        """Return the committer, with its connection; it commits for any attempt under the id."""
        if self._committer is None:
            sink, context = self.target.sink, self.target.committer_context(attempt)
            self._committer = sink.committer(context)
        return self._committer


def _lower_version(target: BatchTarget, batch: BatchId, refused: RefuseLower) -> str:
    message = (
        f"sink id {target.sink_id!r}, {target.owner}: txnVersion {batch.number} is below"
        f" {refused.last}, which is written, and versions rise from write to write. Nothing of it"
        " is written now"
    )
    anew = (
        "give the backfill option txnAppId with a name of its own, whose versions begin anew and"
        " rise, too; several names write to one table"
    )
    if batch.number > refused.oldest:
        return f"{message}, nor was it before. To write it, {anew}"
    return (
        f"{message}. onceflow knows of no write before {refused.oldest} under this name: there was"
        f" none, or it was so long ago that it is forgotten. Look whether the rows are there. If"
        f" they are not, {anew}"
    )


def _list_in_doubt(committer: Committer) -> Sequence[Committable]:
    """Return what is in doubt after a decision, once the target answers.

    The batch is decided: its write is not to fail for a target that restarts now.

    Raises:
        SinkError, StorageError: It could not be asked for `SETTLE_TIMEOUT_S`.
    """
    backoff: Backoff | None = None
    while True:
        try:
            return committer.in_doubt()
        except (SinkError, StorageError):
            # A refusal may take its time, too: it counts from the first one.
            backoff = backoff or Backoff(until=time.monotonic() + SETTLE_TIMEOUT_S)
            if not backoff.pause():
                raise


def _try_step(committer: Committer, step: Step) -> CommitOutcome | AbortOutcome:
    if isinstance(step, AbortOne):
        return carry_out(committer, step)
    reach("commit")
    outcome = carry_out(committer, step)
    reach("committed")
    return outcome


def _error_of(step: Step, failed: StepFailed) -> SinkError:
    committable, outcome = to_committables(step)[0], failed.outcome
    if isinstance(step, AbortOne) and failed.kind != "committed":
        return CommitFailed(f"{committable} could not be rolled back: {outcome}")
    match outcome:
        case Lost(reason):
            text = (
                f"{committable} is decided: {reason}. This target lacks its rows, and the source"
                " still has them. If it is another target than before, write to the former one"
                " again; or begin a new query, which writes everything into this one"
            )
        case Unknown(reason):
            text = f"{committable}: {reason}"
        case RetryLater(reason):
            text = (
                f"{committable} is decided and could not be committed: {reason}. The next run"
                " commits it; `onceflow txn` does so now, or gives it up"
            )
        case _:
            text = (
                f"{committable} is not decided, and its rows are in the target: these decisions"
                " are an older copy, another query writes under this sink id, or somebody has"
                " committed it by hand. The batch would write them again, so nothing was"
                " written. Take its rows out of the target with their proof, or go on from the"
                " newest copy; docs/operations.md says how"
            )
    return error_class(failed)(text)
