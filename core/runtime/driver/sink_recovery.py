"""Makes every sink agree with the decision log before an attempt's slots begin.

Runs on the driver, once for all subtasks. The owner of a transaction follows from the list in the
restored checkpoint, never from a subtask's index, so rescaling between attempts changes nothing.
`commit.planner` decides which transactions to commit and which to abort.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from onceflow.core import errors, spi
from onceflow.core.commit import loop
from onceflow.core.commit.loop import advise, open_global_committer
from onceflow.core.commit.planner import CommitPlan, plan_commits
from onceflow.core.commit.queue import Done, RetryAt, StepEnd, StepFailed, recovery_retries
from onceflow.core.commit.steps import (
    AbortOne,
    CommitOne,
    CommitWhole,
    PlannedSteps,
    Step,
    to_aborts,
    to_commits,
    to_committables,
)
from onceflow.core.commit.whole_checkpoints import (
    find_undecided,
    plan_global_recovery,
)
from onceflow.core.plan.graph import Graph
from onceflow.core.protocol import committables
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, committables_of
from onceflow.core.protocol.ids import GENESIS, TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord, require_not_behind
from onceflow.core.protocol.loops.attempt_facts import RecoveryStep
from onceflow.core.runtime.events.job_events import CommitRefused, RecoveredSink
from onceflow.core.storage import ClaimedLog, JobStorage

_log = logging.getLogger("onceflow.runtime.recovery")


def _tell_nobody(refused: CommitRefused) -> None:
    """Ignore the refusal."""


def _describe_refusal(step: Step, ended: StepEnd) -> str:
    """Return the description of a refused `step` that will be retried, or "" if it has ended."""
    if not isinstance(ended, RetryAt):
        return ""
    match step:
        case CommitOne(commit) | CommitWhole(commit):
            return loop.describe_refusal(commit, ended)
        case AbortOne(committable):
            return (
                f"the rollback of {step} of an older attempt failed: {ended.reason}."
                f" {advise(committable.transaction)}"
            )


@dataclass(frozen=True, slots=True)
class _Target:
    """A sink id, its sink, and the context of its committers."""

    sink: spi.Sink
    context: spi.CommitterContext
    schema: pa.Schema | None
    """The schema of the rows that are written; None if the sink is retired."""

    @property
    def commits_whole(self) -> bool:
        """True if the driver commits whole checkpoints of the sink."""
        return self.sink.committed_by is spi.CommittedBy.DRIVER


class SinkRecovery:
    """The driver's committers for one attempt, one per sink, which the later sweep uses again.

    `retired` are sinks that are no longer written to, by sink id. If the log knows their ids, their
    transactions are committed or aborted like those of other sinks. The log forgets these ids after
    the sweep. A retired sink of None leaves its transactions in doubt.
    """

    def __init__(
        self,
        graph: Graph,
        retired: Mapping[str, spi.Sink | None],
        job: str,
        log: ClaimedLog,
        storage: JobStorage,
        deadline_s: float,
        publish: Callable[[CommitRefused], None] | None = None,
    ) -> None:
        self._publish = publish or _tell_nobody
        self._log = log
        self._log_location = str(storage.log)
        self._deadline_s = deadline_s
        self.step = RecoveryStep("its turn", time.monotonic())
        # Only sinks that the log knows: a retired sink that an earlier start has finished may name
        # a database that is gone by now.
        self._retired = log.view.sinks & retired.keys()

        def target(sink: spi.Sink, uid: str, sink_id: str, schema: pa.Schema | None) -> _Target:
            context = spi.CommitterContext(
                job,
                uid,
                sink_id,
                log.attempt,
                log_id=storage.log_id,
                staging=storage.staging(sink_id),
            )
            return _Target(sink, context, schema)

        self._targets = [
            target(work.sink, operator.uid, work.sink_id, operator.schema)
            for operator, work in graph.sinks()
        ]
        for sink_id in sorted(self._retired):
            sink = retired[sink_id]
            if sink is not None:
                self._targets.append(target(sink, sink_id, sink_id, None))
        self._committers: dict[str, spi.Committer] = {}

    def ask_targets(self) -> tuple[TargetRecord, ...]:
        """Return the record that each target keeps of its sink id; leave out targets without one.

        Raises:
            ConfigError: Another job owns a sink id.
            SinkError: A target cannot be queried now.
        """
        records: list[TargetRecord] = []
        self._log.trace.record("asked")
        for target in self._targets:
            self._begin(f"what the target of sink {target.context.uid} has committed")
            record = self._read_record(target)
            if record is not None:
                records.append(record)
        return tuple(records)

    def list_in_doubt(self, sink_ids: Collection[str]) -> frozenset[TransactionId]:
        """Return the transactions in doubt in the targets of `sink_ids`, which earlier runs opened.

        A delivered whole checkpoint is not in doubt, even if the target was put back and its files
        look so.

        Raises:
            SinkError: A target cannot be queried now.
        """
        in_doubt: set[TransactionId] = set()
        for target in self._targets:
            if target.context.sink_id not in sink_ids:
                continue
            self._begin(f"what sink {target.context.uid} holds in doubt")
            committer, delivered = self._committer(target), GENESIS
            if target.commits_whole:
                delivered = self._log.view.completed[-1].delivered_through
            in_doubt.update(c.transaction for c in committer.in_doubt() if c.checkpoint > delivered)
        return frozenset(in_doubt)

    @property
    def target_count(self) -> int:
        """The number of sinks, including retired sinks."""
        return len(self._targets)

    def _read_record(self, target: _Target) -> TargetRecord | None:
        sink_id, view = target.context.sink_id, self._log.view
        record = target.sink.target_record(target.context)
        if record is not None or not target.commits_whole:
            return record
        if not (view.decided and sink_id in view.sinks):
            return None  # it may not have been opened yet: `recover` asks
        try:
            return TargetRecord(
                sink_id, through=self._global_committer(target).read_committed_through()
            )
        except errors.SinkError:
            return None

    def open(self) -> None:
        """Prepare every sink for writing: create tables and fence older attempts.

        All sinks are validated before the first sink changes anything.

        Raises:
            ConfigError: A sink cannot be written; the message says what to do.
            Fenced: A newer attempt, or another job, owns a sink id.
        """
        # Skip retired sinks: their tables may be gone, and must not be created.
        written = [(t, t.schema) for t in self._targets if t.schema is not None]
        for target, schema in written:
            self._begin(f"the validation of sink {target.context.uid}")
            target.sink.validate(target.context, schema)
        for target, schema in written:
            self._begin(f"the opening of sink {target.context.uid}")
            target.sink.open(target.context, schema)

    def recover(self, restored: CompletedCheckpoint) -> tuple[RecoveredSink, ...]:
        """Commit all transactions that the log decided, abort others of older attempts. Idempotent.

        If a committed transaction is in doubt again, the target has gone back to an older copy, and
        the transaction is committed again. A target that cannot prove the last commit of a sink
        has gone back to an older copy, too.

        Raises:
            PreparedTransactionLost: A decided transaction is gone without having been committed.
            CommitFailed: A sink did not answer in time; the next attempt tries again.
            DecisionForgotten: A transaction is in doubt that the log does not remember any more.
            StorageBehind: A target has committed what the log does not know.
        """
        # List before asking: a slot of a job in other storage may still commit what it prepared
        # before `open` fenced it. A transaction that it commits between the two answers is then in
        # one of them. In the other order it would be in neither, and its rows would be sent again.
        in_doubt = [self._list_left(target) for target in self._targets]
        require_not_behind(self._log.view, self.ask_targets(), self._log_location)
        recovered = tuple(
            self._settle(target, self._plan_recovery(target, restored, left))
            for target, left in zip(self._targets, in_doubt, strict=True)
        )
        self._log.trace.record("recovered")
        return recovered

    def sweep(self, completed: CompletedCheckpoint) -> tuple[RecoveredSink, ...]:
        """Abort transactions that a slot of an older attempt prepared after `recover` looked (I3).

        Also commits transactions that are in doubt again because the target has gone back to an
        older copy. Commits no others: the attempt's own slots commit the transactions that
        `completed` lists. From the next decision on, the log no longer contains the retired sinks.
        """
        self._log.trace.record("sweeping", checkpoint=completed.checkpoint)
        counts = [
            self._settle(target, self._plan_sweep(target, completed)) for target in self._targets
        ]
        self._log.trace.record("swept", checkpoint=completed.checkpoint)
        # Last, because the next attempt must ask again for what this attempt could not sweep.
        self._log.settle(self._retired)
        # The attempt's own slots count commits.
        return tuple(RecoveredSink(c.uid, c.sink_id, aborted=c.aborted) for c in counts)

    def list_written_sinks(self) -> Iterator[tuple[spi.Sink, spi.CommitterContext]]:
        """Yield every sink that is not retired, with the context of its committers."""
        for target in self._targets:
            if target.schema is not None:
                yield target.sink, target.context

    def global_committers(self) -> Iterator[tuple[str, str, spi.Sink, spi.GlobalCommitter]]:
        """Yield uid, sink id, sink and committer of each sink that commits whole checkpoints."""
        for target in self._targets:
            if target.commits_whole and target.schema is not None:
                committer = open_global_committer(target.sink, target.context)
                yield target.context.uid, target.context.sink_id, target.sink, committer

    def close(self) -> None:
        """Close every committer."""
        for committer in self._committers.values():
            committer.close()
        self._committers.clear()

    # --- plans ----------------------------------------------------------------------------------

    def _list_left(self, target: _Target) -> Sequence[committables.Committable]:
        self._begin(f"what sink {target.context.uid} holds in doubt")
        in_doubt = self._committer(target).in_doubt()
        self._log.trace.record(
            "listed",
            sink=target.context.sink_id,
            transactions=(committable.transaction for committable in in_doubt),
        )
        return in_doubt

    def _plan_recovery(
        self,
        target: _Target,
        restored: CompletedCheckpoint,
        in_doubt: Sequence[committables.Committable],
    ) -> Sequence[Step]:
        """Return the steps after which the sink agrees with `restored`.

        Commits come before aborts: if the target fails in between, the decided rows are visible.
        """
        if target.commits_whole:
            return self._plan_whole_recovery(target, restored, in_doubt)
        plan = self._plan_transactions(target, restored, in_doubt)
        return [*to_commits(plan.commit), *to_aborts(plan.abort)]

    def _plan_sweep(self, target: _Target, completed: CompletedCheckpoint) -> Sequence[Step]:
        """Return the steps that settle what older attempts have left, without new commits."""
        if not target.commits_whole:
            plan = self._plan_transactions(target, completed, self._list_left(target))
            return [*to_commits(plan.returned), *to_aborts(plan.abort)]
        # The global committers commit what `completed` decides.
        left = find_undecided(
            completed,
            self._list_left(target),
            sink_id=target.context.sink_id,
            attempt=self._log.attempt,
            memory=self._log.view.memory,
        )
        return to_aborts(left)

    def _plan_whole_recovery(
        self,
        target: _Target,
        restored: CompletedCheckpoint,
        in_doubt: Sequence[committables.Committable],
    ) -> Sequence[Step]:
        committer, context = self._global_committer(target), target.context
        self._begin(f"what sink {context.uid} has committed last")
        through = committer.read_committed_through()
        plan = plan_global_recovery(
            restored,
            in_doubt,
            sink_id=context.sink_id,
            attempt=self._log.attempt,
            committed_through=through,
            memory=self._log.view.memory,
            gathers=target.sink.gathering is not None,
        )
        if plan.ahead:
            raise errors.StorageBehind(
                f"{plan.ahead}. Either the log in {self._log_location} is an older copy, or the"
                " job has run in other storage since, or another job writes under this sink id."
                " Nothing was written. Start the job in the storage in which it ran last. If"
                " that storage is gone for good, see 'Storage that is behind its target' in"
                " docs/operations.md"
            )
        if plan.behind:
            raise errors.PreparedTransactionLost(
                f"{plan.behind}. docs/operations.md says what to do"
            )
        return [*map(CommitWhole, plan.commit), *to_aborts(plan.abort)]

    def _plan_transactions(
        self,
        target: _Target,
        checkpoint: CompletedCheckpoint,
        in_doubt: Sequence[committables.Committable],
    ) -> CommitPlan:
        sink_id = target.context.sink_id
        plan = plan_commits(
            committables_of(checkpoint),
            in_doubt,
            sink_ids=(sink_id,),
            attempt=self._log.attempt,
            memory=self._log.view.memory,
        )
        if plan.refuse:
            first = plan.refuse[0].transaction
            raise errors.DecisionForgotten(
                f"{len(plan.refuse)} transactions are in doubt, the first {first}, of attempts"
                " that the decision log no longer remembers. Either the target was set back to"
                " an older copy, or the transactions belong to another job. `onceflow txn show"
                f" {first}` prints the details. None is committed or rolled back until a person"
                " decides it with `onceflow txn … --force`"
            )
        if plan.returned:
            self._log.trace.record("returned", transactions=(c.transaction for c in plan.returned))
            _log.warning(
                "sink %s: %d committed transactions are in doubt again, the first %s: the target"
                " was set back to an older copy; they are committed again",
                sink_id,
                len(plan.returned),
                plan.returned[0].transaction,
            )
        return plan

    # --- committers and their calls ---------------------------------------------------------------

    def _committer(self, target: _Target) -> spi.Committer:
        sink_id = target.context.sink_id
        if sink_id not in self._committers:
            self._committers[sink_id] = (
                open_global_committer(target.sink, target.context)
                if target.commits_whole
                else target.sink.committer(target.context)
            )
        return self._committers[sink_id]

    def _global_committer(self, target: _Target) -> spi.GlobalCommitter:
        committer = self._committer(target)
        assert isinstance(committer, spi.GlobalCommitter), target
        return committer

    def _settle(self, target: _Target, steps: Sequence[Step]) -> RecoveredSink:
        """Carry out `steps`; return the counts. Commits count if these calls made them."""
        context, committer = target.context, self._committer(target)
        committed: list[committables.Committable] = []
        is_refused = False
        planned = loop.TimedSteps(PlannedSteps(steps, recovery_retries(self._deadline_s)))
        for step, ended in loop.settle(planned, partial(self._carry_out, committer)):
            if isinstance(ended, RetryAt) or is_refused:
                is_refused = isinstance(ended, RetryAt)
                is_stuck = isinstance(ended, RetryAt) and ended.is_stuck
                self._publish(CommitRefused(context.uid, _describe_refusal(step, ended), is_stuck))
            match ended:
                case StepFailed():
                    raise self._make_error(step, ended)
                case Done(already=False) if not isinstance(step, AbortOne):
                    committed += to_committables(step)
                case Done() | RetryAt():
                    pass
        return RecoveredSink(
            context.uid,
            context.sink_id,
            committed=len(committed),
            rows_committed=sum(committable.rows for committable in committed),
            aborted=sum(isinstance(step, AbortOne) for step in steps),
        )

    def _carry_out(
        self, committer: spi.Committer, step: Step
    ) -> committables.CommitOutcome | committables.AbortOutcome:
        begun = "rollback" if isinstance(step, AbortOne) else "commit"
        # A repeated try keeps the start time of the first, so that people see how long it takes.
        if self.step.text != f"the {begun} of {step}":
            self._begin(f"the {begun} of {step}")
        call = partial(loop.carry_out, committer, step)
        transactions = (committable.transaction for committable in to_committables(step))
        if isinstance(step, AbortOne):
            return self._log.trace.record_rollback(transactions, call, by="recovery")
        return self._log.trace.record_commit(transactions, call, by="recovery")

    def _make_error(self, step: Step, failed: StepFailed) -> errors.SinkError:
        if isinstance(step, AbortOne):
            if failed.kind != "committed":
                return errors.CommitFailed(
                    f"{step} of an older attempt could not be rolled back: {failed.outcome}"
                )
            return errors.CommitFailed(
                f"{step} is not decided by the log in {self._log_location}, and its rows are in"
                " the target. Either the log is an older copy, or the job has run in other"
                " storage since, or a person has committed the transaction. A start would write"
                " its rows a second time, so nothing was written. See 'Storage that is behind"
                " its target' in docs/operations.md"
            )
        advice = ""
        match failed.outcome:
            case committables.Lost(reason):
                text = f"{step}: {reason}"
                advice = (
                    ": see 'Another target' there if the sink now writes to another target, and"
                    " 'After a loss' if not"
                )
            case committables.Unknown(reason):
                text = f"{step}: {reason}"
            case committables.RetryLater(reason):
                text = f"{step} is decided, but could not be committed: {reason}"
            case outcome:
                text = f"{step} is decided, but could not be committed: {outcome}"
        transaction = to_committables(step)[0].transaction
        return loop.error_class(failed)(f"{text}. {advise(transaction)}{advice}")

    def _begin(self, text: str) -> None:
        self.step = RecoveryStep(text, time.monotonic())
