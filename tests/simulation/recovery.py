"""The driver's recovery of sinks and files. Mirrors SinkRecovery and CheckpointsCleaner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from tests.simulation.clock import Gone, Process, Steps, Violation
from tests.simulation.log_owner import LogOwner
from tests.simulation.older_copies import records_of
from tests.simulation.storage import handles_in
from tests.simulation.targets import Target, Versioned

from onceflow.core.commit.planner import CommitPlan
from onceflow.core.commit.queue import StepFailed, WaitUntil, recovery_retries
from onceflow.core.commit.steps import (
    AbortOne,
    CommitOne,
    CommitWhole,
    PlannedSteps,
    Step,
    to_aborts,
    to_commits,
)
from onceflow.core.commit.whole_checkpoints import find_undecided
from onceflow.core.errors import CommitFailed, DecisionForgotten, Fenced, PreparedTransactionLost
from onceflow.core.protocol import committables
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    StateHandle,
    committables_of,
)
from onceflow.core.protocol.ids import GENESIS, CheckpointId, TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord

if TYPE_CHECKING:
    from tests.simulation.job import Driver
    from tests.simulation.world import World

DEADLINE_S = 0.03

Sweep = Callable[[CompletedCheckpoint], Steps[None]]


class SinkRecovery:
    """Makes every sink agree with the log."""

    def __init__(self, world: World, driver: Driver, log: LogOwner) -> None:
        self.world, self.process, self.log = world, driver, log
        self._attempt = log.attempt
        pipeline = driver.pipeline
        self.retired = log.view.sinks & pipeline.retired
        asked = sorted(self.retired) if world.variant.asks_retired else []
        self._targets = [world.targets[sink_id] for sink_id in (*pipeline.sinks, *asked)]

    def list_in_doubt(self, sink_ids: Collection[str]) -> frozenset[TransactionId]:
        """Return what the targets of `sink_ids` hold in doubt, at one moment."""
        in_doubt: set[TransactionId] = set()
        for target in self._targets:
            whole = isinstance(target, Versioned)
            last = self.log.view.completed[-1:]
            delivered = last[0].delivered_through if whole and last else GENESIS
            if target.sink_id in sink_ids:
                in_doubt.update(one for one in target.in_doubt if one.checkpoint > delivered)
        return frozenset(in_doubt)

    @property
    def target_count(self) -> int:
        return len(self._targets)

    def ask_targets(self) -> tuple[TargetRecord, ...]:
        """Return what each target records of its sink id; none of one that does not tell."""
        view = self.log.view
        whole = (
            TargetRecord(target.sink_id, through=target.highest)
            for target in self._targets
            if isinstance(target, Versioned) and view.decided and target.sink_id in view.sinks
        )
        silent = self.world.silent
        return (*records_of(t for t in self._targets if t.sink_id not in silent), *whole)

    def recover(self, restored: CompletedCheckpoint) -> Steps[None]:
        """Commit what `restored` lists, abort what older attempts left; raises OnceflowError."""
        # Its own log knows all that it has committed, however often it was stopped and moved.
        self.world.variant.require_not_behind(
            self.log.view, self.ask_targets(), "the job's own log"
        )
        for target in self._targets:
            if isinstance(target, Versioned):
                target.claim(self._attempt)
                yield from self._recover_whole(target, restored)
                continue
            plan = yield from self._plan(target, restored)
            steps = [*to_commits(plan.commit), *to_aborts(plan.abort)]
            yield from self._settle(target, steps)
            self.world.oracle.check_recovered(self._attempt, target, plan.abort)
        if self.world.variant.settles_early:
            self.log.settle(self.retired)

    def sweep(self, completed: CompletedCheckpoint) -> Steps[None]:
        """Abort what a slot of an older attempt prepared after `recover` had looked."""
        if not self.world.variant.sweep:
            return
        for target in self._targets:
            if isinstance(target, Versioned):
                in_doubt = yield from self._in_doubt(target)
                own = {"sink_id": target.sink_id, "attempt": self._attempt}
                left = find_undecided(completed, in_doubt, **own, memory=self.log.view.memory)  # type: ignore[arg-type]
                yield from self._settle(target, to_aborts(left))
                continue
            plan = yield from self._plan(target, completed)
            steps = [*to_commits(plan.returned), *to_aborts(plan.abort)]
            yield from self._settle(target, steps)
        self.log.settle(self.retired)

    def _recover_whole(self, target: Versioned, restored: CompletedCheckpoint) -> Steps[None]:
        try:
            through = yield from target.committed_through()
        except Gone:
            raise CommitFailed(f"{target.sink_id} does not say what it has committed") from None
        in_doubt = yield from self._in_doubt(target)
        plan = self.world.variant.global_plan(
            restored,
            in_doubt,
            sink_id=target.sink_id,
            attempt=self._attempt,
            committed_through=through,
            memory=self.log.view.memory,
            gathers=target.interval is not None,
        )
        if plan.ahead:
            if self._attempt >= self.world.claimed:
                raise Violation(f"I5 {plan.ahead}")
            raise Fenced(plan.ahead)
        if plan.behind:
            raise PreparedTransactionLost(plan.behind)
        steps = [*map(CommitWhole, plan.commit), *to_aborts(plan.abort)]
        yield from self._settle(target, steps)
        self.world.oracle.check_recovered(self._attempt, target, plan.abort)

    def _in_doubt(self, target: Target) -> Steps[list[committables.Committable]]:
        try:
            return (yield from target.list_in_doubt())
        except Gone:
            if self.world.variant.failed_listing_is_empty:
                return []
            raise CommitFailed(f"{target.sink_id} does not list what is in doubt") from None

    def _plan(self, target: Target, completed: CompletedCheckpoint) -> Steps[CommitPlan]:
        in_doubt = yield from self._in_doubt(target)
        variant = self.world.variant
        retired = target.sink_id in self.retired
        plan = ((retired and variant.retired_plan) or variant.plan)(
            committables_of(completed),
            in_doubt,
            sink_ids=(target.sink_id,),
            attempt=self._attempt,
            memory=self.log.view.memory,
        )
        if plan.refuse:
            if self._attempt >= self.world.claimed:
                self.world.decide_by_hand(target, plan.refuse)
            raise DecisionForgotten(f"of attempts that are forgotten: {plan.refuse}")
        return plan

    def _settle(self, target: Target, steps: Sequence[Step]) -> Steps[None]:
        """Carry out `steps`, as `commit.loop` does."""
        variant, clock = self.world.variant, self.world.clock
        planned = PlannedSteps(steps, recovery_retries(DEADLINE_S))
        while (step := planned.next_commit(clock.now_s)) is not None:
            if isinstance(step, WaitUntil):
                yield max(1e-9, step.at_s - clock.now_s)
                continue
            if self.process.alive and self.world.draws_crash():
                self.process.kill("in recovery")
            outcome = yield from self._carry_out(target, step)
            if variant.lost_is_committed and isinstance(outcome, committables.Lost):
                outcome = committables.Committed()
            ended = planned.outcome(step, outcome, clock.now_s)
            if not isinstance(ended, StepFailed):
                continue
            if isinstance(step, AbortOne):
                if not variant.failed_abort_is_done:
                    raise CommitFailed(f"{step} is not rolled back: {outcome}")
                planned.outcome(step, committables.Aborted(), clock.now_s)
            elif ended.kind == "lost":
                raise PreparedTransactionLost(f"{step}: {outcome}")
            elif not variant.unknown_is_committed:
                raise CommitFailed(f"{step}: {outcome}")
            else:
                planned.outcome(step, committables.Committed(), clock.now_s)

    def _carry_out(
        self, target: Target, step: Step
    ) -> Steps[committables.CommitOutcome | committables.AbortOutcome]:
        match step:
            case AbortOne(committable):
                return (yield from target.abort(committable))
            case CommitOne(committable):
                self.world.oracle.check_asked(self._attempt, target, committable)
                return (yield from target.commit(committable))
            case CommitWhole(commit):
                assert isinstance(target, Versioned)
                return (yield from target.commit_whole(commit))


class CheckpointsCleaner:
    """Asked by the attempt, done on a thread beside it, in order."""

    def __init__(self, world: World, process: Process, log: LogOwner, sinks: SinkRecovery) -> None:
        self.world, self.process, self.log, self._sinks = world, process, log, sinks
        self._asked: deque[Callable[[], Steps[None]]] = deque()
        self._undeleted: list[StateHandle] = []
        self._left_by_older: list[Sweep] = [self._sweep_sinks, self._sweep_storage]
        self._sweeping = self.busy = False
        self._restored_files = _files_of(log)

    @property
    def swept(self) -> bool:
        """True if sinks are said to hold nothing of older attempts."""
        return self._sweep_sinks not in self._left_by_older

    def discard(self, handles: Sequence[StateHandle]) -> None:
        self._do(lambda: self._discard(handles))

    def completed(
        self, checkpoint: CheckpointId, oldest: CheckpointId, newest: CompletedCheckpoint
    ) -> None:
        self._do(lambda: self._prune(oldest))
        if self._undeleted:
            self.discard(())
        if self._left_by_older and not self._sweeping and checkpoint > GENESIS:
            self._sweeping = True
            self._do(lambda: self._sweep(newest))

    def clean_at_end(self, newest: CompletedCheckpoint) -> None:
        """Try once more what failed: no other checkpoint follows."""
        if self._left_by_older:
            self._do(lambda: self._sweep(newest))
        if self._undeleted:
            self.discard(())

    def _do(self, work: Callable[[], Steps[None]]) -> None:
        self._asked.append(work)
        if not self.busy:
            self.busy = True
            self.process.begin(self._work())

    def _work(self) -> Steps[None]:
        while self._asked:
            yield 0.005
            yield from self._asked.popleft()()
        self.busy = False

    def _prune(self, oldest: CheckpointId) -> Steps[None]:
        yield 0.001
        self.log.prune(oldest)

    def _sweep(self, newest: CompletedCheckpoint) -> Steps[None]:
        left: list[Sweep] = []
        for sweep in self._left_by_older:
            try:
                yield from sweep(newest)
            except (CommitFailed, DecisionForgotten, Gone) as failed:
                self.world.clock.say(f"the sweep is to be tried again: {failed!r}")
                left.append(sweep)
        self._left_by_older = left
        self._sweeping = False

    def _sweep_sinks(self, newest: CompletedCheckpoint) -> Steps[None]:
        yield from self._sinks.sweep(newest)

    def _sweep_storage(self, newest: CompletedCheckpoint) -> Steps[None]:
        del newest
        yield 0.001
        sweep_files(self.world, self.log, spared=self._restored_files)

    def _discard(self, handles: Sequence[StateHandle]) -> Steps[None]:
        handles, self._undeleted = (*self._undeleted, *handles), []
        files = self.world.files
        try:
            yield files.ask(lambda: files.delete(handle.path for handle in handles))
        except Gone:
            self._undeleted = list(handles)


def sweep_files(world: World, log: LogOwner, *, spared: frozenset[str] = frozenset()) -> None:
    """Delete files of older attempts that no decision in the log names; raises Gone."""
    named = spared | _files_of(log)
    world.files.delete(
        path
        for path in list(world.files.content)
        if int(path[1:].split("/")[0]) < log.attempt and path not in named
    )


def _files_of(log: LogOwner) -> frozenset[str]:
    return frozenset(handle.path for kept in log.view.completed for handle in handles_in(kept))
