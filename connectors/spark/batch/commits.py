"""The protocol of a batch: planning, commit and abort, and the data that tasks get.

This module does not use Spark. Formats call it from Spark's planning and commit workers, and
`foreach_batch` calls it on the driver. `core.protocol.batches` decides; this module queries,
commits and rolls back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import pyarrow as pa

from onceflow.connectors.spark.batch.lost_rows import describe_lost_rows, find_lost_rows
from onceflow.connectors.spark.batch.sink_group import SinkGroup
from onceflow.connectors.spark.batch.traces import record_claim, record_decision, record_settled
from onceflow.core import errors, spi
from onceflow.core.backoff import Backoff
from onceflow.core.commit.loop import TimedSteps, carry_out, error_class, settle
from onceflow.core.commit.planner import around_roll_backs, plan_claimed, plan_sweep
from onceflow.core.commit.queue import Done, StepFailed, recovery_retries
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
from onceflow.core.protocol import batches
from onceflow.core.protocol.committables import (
    AbortOutcome,
    CommitOutcome,
    Committable,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.rules import NO_ATTEMPT
from onceflow.core.spi.batch_decisions import BatchDecisions
from onceflow.core.spi.staging import StagingArea, is_staged
from onceflow.core.traces import Trace
from onceflow.sinks.sql.sink import SqlSink

_log = logging.getLogger("onceflow.spark")
SETTLE_TIMEOUT_S = 120.0
"""The time in seconds for which a target that is down is retried.

Then the batch and its query fail.
"""
_PROOFS_PRUNED_EVERY = 16
"""The number of attempts between two prunes. A prune reads and deletes a limited number of rows."""


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """A target of batches, with its sink id and owner. Pickles with the sink."""

    sink: spi.Sink
    sink_id: str
    owner: str
    """The exclusive owner of the sink id: a query, or the batch writes of a table."""
    source: str
    """The name of the source that numbers the batches; empty if they have no own numbers."""
    staging: StagingArea | None = None
    on_bad_row: spi.OnBadRow = spi.OnBadRow.FAIL
    replaces: bool = False
    """True if each batch replaces all existing rows."""
    driver: str = ""
    """The application, process and host of the driver that claims."""

    @property
    def claimant(self) -> str:
        """The name of the claimant, with its driver, for messages to other drivers."""
        return f"{self.owner}, {self.driver}" if self.driver else self.owner

    @property
    def sink_ids(self) -> tuple[str, ...]:
        """The sink ids that a decision covers."""
        if isinstance(self.sink, SinkGroup):
            return self.sink.part_ids(self.sink_id)
        return (self.sink_id,)

    def committer_context(self, attempt: AttemptId) -> spi.CommitterContext:
        """Return the context in which `attempt` commits."""
        return spi.CommitterContext(
            job=self.claimant,
            uid=self.sink_id,
            sink_id=self.sink_id,
            attempt=attempt,
            log_id=self.owner,
            staging=self.staging,
        )


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The plan of one try at a batch, for its tasks. Pickles."""

    target: BatchTarget
    attempt: AttemptId
    batch: batches.BatchId
    fingerprint: str = ""
    decided: bool = False
    """True if the batch is written already. Tasks then read their rows and drop them."""
    decided_by: str = ""
    """The run of the query that decided the batch."""
    dead_letters: BatchTarget | None = None
    """The target for rows that the sink rejects."""
    write: int = 0
    writes: int = 1
    """The index of the DataFrame that the tasks write, and the number of DataFrames of the batch.
    """
    traced_as: str = ""
    """The name of the sink id's decisions in traces."""

    def transaction_number(self, partition: int) -> int:
        """Return the number of the transaction of `partition`, which is unique within the batch.

        The dead letters of the partition have the next number. So a server that has room for the
        highest number has room for all of them.
        """
        number = partition * self.writes + self.write
        return number if self.dead_letters is None else number * 2


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The result of one task. Spark carries it from the task to the commit."""

    batch: batches.BatchId
    attempt: AttemptId
    partition: int
    fingerprint: str = ""
    run: str = ""
    rows: int = 0
    committables: tuple[Committable, ...] = ()
    dropped: bool = False
    """True if the batch was decided before, and the rows were dropped."""
    beside: str = ""
    """The transaction of another try, because of which the rows are staged; empty without one."""


class BatchCommits:
    """The planning, commit and abort of one target's batches, one after the other.

    One thread may use it.

    It keeps its connections between batches. After a crash at any point, the next `plan` commits or
    rolls back the transactions that were left.
    """

    def __init__(self, target: BatchTarget, decisions: BatchDecisions) -> None:
        """Prepare without sending a request."""
        self.target = target
        self.decisions = decisions
        self._committer: spi.Committer | None = None
        self._opened: pa.Schema | None = None
        self._claimed: AttemptId | None = None

    def plan(self, schema: pa.Schema, number: int | None, fingerprint: str = "") -> BatchPlan:
        """Claim the sink id, commit all decided transactions, and return the plan for the tasks.

        Runs on the driver before the tasks. `number` is the batch's number, or None if it has none.
        The rows have the `schema`.

        Raises:
            ConfigError: Rows of `schema` cannot be written, or the batch must not be written.
            Fenced: Another run has claimed the sink id since this run did, or keeps claiming it.
            CommitFailed: A decided transaction cannot be committed now.
            PreparedTransactionLost: A decided transaction is gone.
            SinkError: The target does not answer now.
        """
        if number is not None and self._claimed is None:
            self._check_decided_table(batches.BatchId(self.target.source, number))
        claim = self._claim(schema)
        reach("claimed")
        target = self.target
        batch = batches.BatchId(target.source, claim.attempt if number is None else number)
        # Judge after the claim, because from then on no other run can decide. Judge before any
        # commit or roll-back, because an older copy of a checkpoint must not cause either before it
        # is refused.
        verdict = batches.judge_batch(claim, batch, fingerprint)
        if isinstance(verdict, batches.RefuseBatch):
            raise errors.ConfigError(
                f"sink id {target.sink_id!r}: {verdict.reason}. The checkpoint is an older copy,"
                " or belongs to another job of the same name. Part of the batch's rows may be"
                " in the target, so nothing was written. Restore the newest copy; or start with"
                " a new checkpoint (and sink id) right after the last rows that are in the"
                " target"
            )
        if isinstance(verdict, batches.RefuseLower):
            raise errors.ConfigError(_lower_version(target, batch, verdict))
        self._settle(claim)
        reach("settled")
        decided = isinstance(verdict, batches.SkipBatch)
        sink = self.decisions.task_sink(target.sink)
        return BatchPlan(
            replace(target, sink=sink),
            claim.attempt,
            batch,
            fingerprint,
            decided=decided,
            decided_by=verdict.decision.run if isinstance(verdict, batches.SkipBatch) else "",
            traced_as=self._traced_as,
        )

    def commit(self, reports: Sequence[TaskReport]) -> batches.BatchDecision | None:
        """Decide the batch and commit all rows in `reports`. Return the decision.

        Runs on the driver after all tasks. Returns None if there is nothing to decide: the batch
        was written before, or it has no rows, replaces nothing and is not remembered. If it raises,
        the batch may be decided; then the next `plan` commits the remaining transactions.

        Raises:
            Fenced: Another run has claimed the sink id. Nothing of this run is decided.
            CommitOutcomeUnknown: The target does not answer now, so the outcome is unknown.
            CommitFailed: The batch is decided, but not completely committed.
            BadRow: The target refuses a row. The batch is not decided.
            SinkError: The batch is not decided, for example because the driver does not see staged
                rows.
        """
        writing = [report for report in reports if not report.dropped]
        if not writing:
            self._log_dropped(reports)
            return None
        first = writing[0]
        written = any(report.committables for report in writing)
        # A repeated batch of a query has the same input, which the fingerprint ensures. A user's
        # number may be repeated with other rows, so it is remembered even without rows.
        is_remembered = bool(first.batch.source) and not first.fingerprint
        if not (written or is_remembered or self.target.replaces):
            return None
        proposed = batches.decision_of(
            first.batch,
            first.attempt,
            [(report.partition, report.committables) for report in writing],
            fingerprint=first.fingerprint,
            run=first.run,
        )
        trace, beside = self._trace(first.attempt), [each for each in writing if each.beside]
        decision = record_decision(
            trace, proposed, self.target.sink_ids, partial(self._decide, proposed, beside)
        )
        reach("logged")
        # Commit prepared rows first, then roll back: both release locks that staged rows may wait
        # for.
        committer = self._committer_for(first.attempt)
        prepared, staged = self._around_roll_backs(decision.committables)
        self._carry_out(trace, committer, self._to_commits(prepared))
        in_doubt = _list_in_doubt(committer)
        orphans = plan_sweep(decision, in_doubt, sink_ids=self.target.sink_ids)
        self._carry_out(trace, committer, [*to_aborts(orphans), *self._to_commits(staged)])
        # Do this last: after a crash before it, the next plan only repeats the same commits.
        record_settled(trace, decision)
        self.decisions.mark_committed(decision)
        if decision.attempt % _PROOFS_PRUNED_EVERY == 0:
            committer.prune(batches.oldest_proof(decision))
        reach("replied")
        return decision

    def abort(self, schema: pa.Schema, attempt: AttemptId | None = None) -> None:
        """Claim the sink id, commit its decided transactions, and roll back the others.

        Runs on the driver after `attempt` has failed. Its tasks may still be running; they are
        fenced. The claim comes first: without it, another run could decide a transaction that is
        rolled back here. Do nothing if a newer run has claimed the sink id; that run has committed
        or rolled back everything already. Without `attempt`, as in a process that did not plan,
        this driver's newest claim is used.

        Raises:
            Fenced: Another run has claimed the sink id since. The message names it. Nothing is
                changed.
            OnceflowError: See `plan`. The next `plan` repeats these steps.
        """
        newest = self.decisions.claimant()
        # Use only this driver's newest claim: this failure must not roll back another driver's
        # batch.
        if attempt is None and newest.name == self.target.claimant:
            attempt = newest.attempt
        self._settle(self._claim(schema, after=attempt or NO_ATTEMPT))

    def is_decided(self, batch: batches.BatchId) -> bool:
        """Return True if `batch` is decided, and so is or will be committed. Changes nothing.

        Raises:
            OnceflowError: See `BatchDecisions.read_claim`.
        """
        return self.decisions.read_claim().decision(batch) is not None

    def has_forgotten(self, batch: batches.BatchId, attempt: AttemptId) -> bool:
        """Return True if a decision for `batch` by `attempt` would be forgotten by now.

        A decision without a number is forgotten once a later attempt has decided.

        Raises:
            OnceflowError: See `BatchDecisions.read_claim`.
        """
        return not batch.source and any(
            decision.attempt > attempt for decision in self.decisions.read_claim().decisions
        )

    @property
    def has_claimed(self) -> bool:
        """True if this process claimed the sink and knows of no later claim by another driver."""
        return self._claimed is not None

    def has_claimed_after(self, attempt: AttemptId) -> bool:
        """Return True if the newest claim is this driver's, and directly follows `attempt`.

        Raises:
            SinkError, StorageError: The target or the log cannot be read now.
        """
        newest = self.decisions.claimant()
        return newest.attempt == attempt + 1 and newest.name == self.target.claimant

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        self.decisions.close()
        committer, self._committer = self._committer, None
        if committer is not None:
            committer.close()

    # --- steps --------------------------------------------------------------------------------

    def _log_dropped(self, reports: Sequence[TaskReport]) -> None:
        """Log that the rows of a repeated write are dropped: its txnVersion is already written."""
        rows = sum(report.rows for report in reports)
        # A query repeats its last batch after every crash, so this is not worth a message.
        if rows and not reports[0].fingerprint:
            _log.warning(
                "sink %s: %s is already written, so the %d rows of this write are dropped",
                self.target.sink_id,
                reports[0].batch,
                rows,
            )

    def _check_decided_table(self, batch: batches.BatchId) -> None:
        """Raise ConfigError if `batch` is written, but its table would be created again, empty."""
        sink = self.target.sink
        if not isinstance(sink, SqlSink) or not sink.create or not self.is_decided(batch):
            return
        if not sink.has_table():
            raise errors.ConfigError(
                f"{batch} is already written, but table {sink.table} no longer exists: it was"
                " dropped or renamed since. onceflow did not create it, because it would have"
                " none of these rows. Restore it; or write the rows again: a job under another"
                " txnAppId, a query with a new checkpointLocation and a source that begins at its"
                " first row (startingOffsets=earliest, firstCopy=all)"
            )

    def _claim(self, schema: pa.Schema, *, after: AttemptId | None = None) -> batches.BatchClaim:
        claim = None
        # Usually the target is open for these columns, and one statement increments the attempt.
        if self._claimed is not None and self._opened == schema and after in (None, self._claimed):
            claim = self.decisions.claim_next(self._claimed)
        if claim is None:
            newest = self._require_own_claim() if after is None else after
            claim = self.decisions.claim(lambda attempt: self._open(attempt, schema), after=newest)
            self._opened = schema
        self._claimed = claim.attempt
        record_claim(self._trace(claim.attempt), claim, self.target.sink_ids)
        return claim

    def _require_own_claim(self) -> AttemptId | None:
        """Return the newest claim if it is this driver's own, or None before its first claim.

        Another driver may have claimed the sink id while this one was paused. This driver must not
        claim it again: that would end the other driver's run, and afterwards Spark's own log would
        end this run, so that no run is left.

        Raises:
            Fenced: Another driver has claimed the sink id since. The message names it. A later
                call claims the sink id again: it belongs to a run that was started after the
                error.
        """
        if self._claimed is None:
            return None
        newest = self.decisions.claimant()
        # This driver's commit process may have claimed, because it does so when a batch has failed.
        # Old records have no name.
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
        except errors.StagingMissing as error:
            raise errors.ConfigError(
                f"{error}. Give option stagingLocation: a directory, or the URL of a bucket, that"
                " driver and executors see"
            ) from error

    def _settle(self, claim: batches.BatchClaim) -> None:
        committer, trace = self._committer_for(claim.attempt), self._trace(claim.attempt)
        in_doubt = committer.in_doubt()
        trace.record("listed", sink=self.target.sink_id, transactions=_names(in_doubt))
        # Committed batches are loaded without their transactions. Load these only if some are in
        # doubt.
        if in_doubt:
            claim = self.decisions.with_committables(claim)
        plan = plan_claimed(claim, in_doubt, sink_ids=self.target.sink_ids)
        if plan.returned:
            trace.record("returned", transactions=_names(plan.returned))
        # The order matters: staged rows may wait for the locks of transactions that are rolled
        # back.
        prepared, staged = self._around_roll_backs(plan.commit)
        steps = [*self._to_commits(prepared), *to_aborts(plan.abort), *self._to_commits(staged)]
        try:
            self._carry_out(trace, committer, steps)
        except (errors.PreparedTransactionLost, errors.CommitFailed) as error:
            lost = self._find_lost_rows(committer, plan.commit, in_doubt)
            if not lost:
                raise
            raise type(error)(self._describe_lost_rows(claim, lost)) from error
        trace.record("swept", checkpoint=batches.batch_checkpoint(claim.attempt))
        for decision in claim.decisions:
            if not decision.is_committed:
                record_settled(trace, decision)
                self.decisions.mark_committed(decision)

    def _decide(
        self, proposed: batches.BatchDecision, beside: Sequence[TaskReport]
    ) -> batches.BatchDecision:
        """Decide, and return the decision.

        If the list `beside` has reports, their rows were staged because of a prepared twin. They
        are applied later, so the driver must see them.
        """
        if not beside:
            return self.decisions.decide_with_rows(proposed)
        self._require_seen(beside)
        return self.decisions.decide(proposed)

    def _require_seen(self, reports: Sequence[TaskReport]) -> None:
        """Check that the driver sees the rows that tasks have staged because of a prepared twin.

        Raises:
            SinkError: The driver does not see them. Nothing is decided.
        """
        seen = {
            committable.transaction
            for committable in self._committer_for(reports[0].attempt).in_doubt()
        }
        for report in reports:
            for committable in report.committables:
                if committable.transaction not in seen:
                    raise errors.SinkError(
                        f"{report.batch}: the first task of partition {report.partition} holds"
                        f" its rows prepared as {report.beside}, and its repetition has staged"
                        f" them as {committable} in a directory that the driver does not see."
                        " Give option stagingLocation: a directory or bucket URL that driver"
                        " and executors share. The next run rolls both back"
                    )

    def _around_roll_backs(
        self, decided: Sequence[Committable]
    ) -> tuple[Sequence[Committable], Sequence[Committable]]:
        """Return the transactions to commit before the roll-backs, and those to commit after.

        If the driver commits all transactions as a whole, it commits all of them before.
        """
        if self.target.sink.committed_by is spi.CommittedBy.DRIVER:
            return decided, ()
        return around_roll_backs(decided, staged=is_staged)

    def _to_commits(self, committables: Sequence[Committable]) -> Sequence[Step]:
        """Return steps that commit each transaction, or all transactions of an attempt together."""
        if self.target.sink.committed_by is spi.CommittedBy.SLOTS:
            return to_commits(committables)
        # Such a commit is one version of the table. Two attempts never share a version.
        by_attempt = groupby(committables, key=lambda committable: committable.transaction.attempt)
        return [
            CommitWhole(GlobalCommit(batches.batch_checkpoint(AttemptId(attempt)), tuple(listed)))
            for attempt, listed in by_attempt
        ]

    def _carry_out(self, trace: Trace, committer: spi.Committer, steps: Sequence[Step]) -> None:
        retries = recovery_retries(SETTLE_TIMEOUT_S, waits_for_people=False)
        source = TimedSteps(PlannedSteps(steps, retries))
        for step, ended in settle(source, partial(_try_step, trace, committer)):
            if isinstance(ended, StepFailed):
                raise _make_error(step, ended)
            if isinstance(step, AbortOne) and isinstance(ended, Done):
                _log.info("sink %s: rolled back %s", self.target.sink_id, step)

    def _find_lost_rows(
        self,
        committer: spi.Committer,
        decided: Sequence[Committable],
        in_doubt: Sequence[Committable],
    ) -> Sequence[Committable]:
        if self.target.sink.committed_by is spi.CommittedBy.DRIVER:
            return ()
        return find_lost_rows(committer, decided, in_doubt)

    def _describe_lost_rows(self, claim: batches.BatchClaim, lost: Sequence[Committable]) -> str:
        sink, sink_id = self.target.sink, self.target.sink_id
        parts = sink.names(sink_id) if isinstance(sink, SinkGroup) else {sink_id: str(sink)}
        return describe_lost_rows(
            [decision for decision in claim.decisions if not decision.is_committed],
            lost,
            part_of=parts.__getitem__,
            owner=self.target.owner,
            can_give_up=self.decisions.can_give_up,
        )

    def _committer_for(self, attempt: AttemptId) -> spi.Committer:
        """Return the committer with its connection. It commits for any attempt of the sink id."""
        if self._committer is None:
            sink, context = self.target.sink, self.target.committer_context(attempt)
            self._committer = sink.committer(context)
        return self._committer

    @property
    def _traced_as(self) -> str:
        return f"batches of {self.target.sink_id} in {self.decisions}"

    def _trace(self, attempt: AttemptId) -> Trace:
        return Trace(self._traced_as, attempt)


def _names(committables: Iterable[Committable]) -> Iterator[TransactionId]:
    return (committable.transaction for committable in committables)


def _lower_version(
    target: BatchTarget, batch: batches.BatchId, refused: batches.RefuseLower
) -> str:
    message = (
        f"sink id {target.sink_id!r}, {target.owner}: txnVersion {batch.number} is below"
        f" {refused.last}, which is already written. Versions must rise from write to write."
        " Nothing was written"
    )
    anew = (
        "give the backfill a txnAppId of its own. Its versions begin anew, and must rise, too;"
        " several txnAppIds may write to one table"
    )
    if batch.number > refused.oldest:
        return f"{message}. It was not written earlier either. To write it, {anew}"
    return (
        f"{message}. onceflow has no record of writes before {refused.oldest} under this name:"
        " either there was none, or its record was deleted. Check whether the rows are in the"
        f" target. If they are not, {anew}"
    )


def _list_in_doubt(committer: spi.Committer) -> Sequence[Committable]:
    """Return the transactions in doubt after a decision. Wait for the target to answer.

    The batch is decided, so its write should not fail because the target restarts now.

    Raises:
        SinkError, StorageError: The target did not answer for `SETTLE_TIMEOUT_S`.
    """
    backoff: Backoff | None = None
    while True:
        try:
            return committer.in_doubt()
        except (errors.SinkError, errors.StorageError):
            # A refusal may also take long, so the time starts at the first refusal.
            backoff = backoff or Backoff(until=time.monotonic() + SETTLE_TIMEOUT_S)
            if not backoff.pause():
                raise


def _try_step(trace: Trace, committer: spi.Committer, step: Step) -> CommitOutcome | AbortOutcome:
    call, transactions = partial(carry_out, committer, step), _names(to_committables(step))
    if isinstance(step, AbortOne):
        return trace.record_rollback(transactions, call, by="batch")
    reach("commit")
    outcome = trace.record_commit(transactions, call, by="batch")
    reach("committed")
    return outcome


def _make_error(step: Step, failed: StepFailed) -> errors.SinkError:
    committable, outcome = to_committables(step)[0], failed.outcome
    if isinstance(step, AbortOne) and failed.kind != "committed":
        return errors.CommitFailed(f"{committable} could not be rolled back: {outcome}")
    match outcome:
        case Lost(reason):
            text = (
                f"{committable} is decided: {reason}. Its rows are missing in this target, but"
                " the source still has them. If this is another target than before, write to the"
                " former target again; or start a new query, which writes all rows into this"
                " target"
            )
        case Unknown(reason):
            text = f"{committable}: {reason}"
        case RetryLater(reason):
            text = (
                f"{committable} is decided, but could not be committed: {reason}. The next run"
                " commits it; `onceflow txn` commits or aborts it now"
            )
        case _:
            text = (
                f"{committable} is not decided, but its rows are in the target. Either these"
                " decisions are an older copy, or another query writes under this sink id, or a"
                " person has committed it. The batch would write its rows a second time, so"
                " nothing was written. Delete its rows from the target together with their"
                " proof, or continue from the newest copy; docs/operations.md says how"
            )
    return error_class(failed)(text)
