"""A whole job around one sink, small and real: a driver, subtasks that are processes, a log.

    driver      claims an attempt of the decision log, recovers the sink, and then a checkpoint:
                barrier -> acks -> append to the log -> complete, not waiting for the commits
    subtask     writes its share of the rows, pre-commits at the barrier, acks, and commits
                beside it by the engine's own `CommitWorker`

Row i is of subtask i % parallelism, so any parallelism can go on where any other stopped: the log
says how many rows are done. Any of these processes may be killed at any moment; the next attempt is
another driver with other subtasks. The driver forks its subtasks before it has opened anything.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Pipe, wait
from pathlib import Path

from onceflow.core.crash_points import VARIABLE, CrashPoint, reach
from onceflow.core.protocol.committables import AlreadyCommitted, Committable, Committed
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.log import LogView
from onceflow.core.protocol.recovery import committables_of, plan_recovery, retain_ledger_from
from onceflow.core.protocol.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.runtime.cluster.process_host import Link
from onceflow.core.spi import Committer, CommitterContext, WriterContext
from onceflow.core.storage import ClaimedLog, FileSystemStorage
from onceflow.integration.conformance.clause import told
from onceflow.integration.conformance.harness import SERVER_PATIENCE_S, settled
from onceflow.integration.conformance.mini_subtask import (
    ANSWER_S,
    Ack,
    Barrier,
    Complete,
    Failed,
    Start,
    Subtask,
    SubtaskPipe,
    Through,
    Work,
)
from onceflow.integration.conformance.sink_job import JOB, UID

MAX_PARALLELISM = 128
RETAINED = 2
_POSITION = "position"


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """What one attempt does besides its work."""

    parallelism: int
    crash: CrashPoint | None = None
    crash_at: int = 1
    """At which of this attempt's checkpoints the crash point is armed, from 1."""


@dataclass(frozen=True, slots=True)
class Started:
    """Every process of the attempt, the driver first."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """All rows are committed, and nothing of older attempts is left."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SubtaskDied:
    """A subtask is gone; the driver has killed the others."""

    index: int


class _SubtaskGone(Exception):
    def __init__(self, index: int) -> None:
        super().__init__(f"subtask {index} is gone")
        self.index = index


def run_attempt(link: Link, work: Work, plan: AttemptPlan) -> Finished | SubtaskDied:
    """Be the driver of one attempt; runs in a process of its own, which has opened nothing."""
    subtasks = [_forked(link, work, index) for index in range(plan.parallelism)]
    link.send(Started((os.getpid(), *(pid for pid, _ in subtasks))))
    driver = _Driver(work, plan, [pipe for _, pipe in subtasks])
    try:
        return Finished(driver.run())
    except _SubtaskGone as gone:
        return SubtaskDied(gone.index)
    finally:
        for pid, _ in subtasks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def decided_rows(view: LogView) -> int:
    """Return how many rows the log says are done."""
    return _position(view.completed[-1]) if view.decided else 0


def _forked(link: Link, work: Work, index: int) -> tuple[int, SubtaskPipe]:
    """Return pid and pipe of a new subtask. It keeps the link open: its end means all are gone."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        with suppress(EOFError, OSError):
            try:
                Subtask(work, theirs).run()
            except BaseException as error:
                theirs.send(Failed(told(error)))
        os._exit(0)
    theirs.close()
    return pid, ours


class _Driver:
    """Decides; one thread."""

    def __init__(self, work: Work, plan: AttemptPlan, pipes: Sequence[SubtaskPipe]) -> None:
        self._work = work
        self._plan = plan
        self._pipes = pipes
        self._through = [CheckpointId(0)] * len(pipes)
        self._storage = FileSystemStorage(work.storage).open(JOB)

    def run(self) -> int:
        """Run until all rows are committed; return the attempt's number."""
        log = self._storage.log.claim("conformance")
        context = CommitterContext(
            JOB,
            UID,
            self._work.sink_id,
            log.attempt,
            log_id=self._storage.log_id,
            staging=self._storage.staging(self._work.sink_id),
        )
        self._work.sink.open(context, self._work.rows.schema)
        committer = self._work.sink.committer(context)
        position = 0
        if log.view.decided:
            restored = log.view.completed[-1]
            _recover(committer, context, committables_of(restored))
            position = _position(restored)
        else:
            _recover(committer, context, ())
        self._start(context, log.view.next_checkpoint)
        last = self._checkpoints(log, committer, context, position)
        self._await(lambda: all(through >= last for through in self._through))
        committer.close()
        return log.attempt

    def _start(self, context: CommitterContext, first: CheckpointId) -> None:
        for index, pipe in enumerate(self._pipes):
            writer = WriterContext(
                job=JOB,
                uid=UID,
                sink_id=context.sink_id,
                subtask=index,
                parallelism=len(self._pipes),
                attempt=context.attempt,
                first_checkpoint=first,
                schema=self._work.rows.schema,
                staging=context.staging,
            )
            pipe.send(Start(writer, context))

    def _checkpoints(
        self, log: ClaimedLog, committer: Committer, context: CommitterContext, position: int
    ) -> CheckpointId:
        """Take checkpoints until all rows are decided; return the last one taken, 0 for none."""
        checkpoint, taken = CheckpointId(log.view.next_checkpoint - 1), 0
        while position < self._work.rows.num_rows:
            checkpoint, taken = CheckpointId(checkpoint + 1), taken + 1
            if self._plan.crash is not None and taken == self._plan.crash_at:
                (Path(os.environ[VARIABLE]) / self._plan.crash).touch()
            end = min(position + self._work.rows_a_checkpoint, self._work.rows.num_rows)
            acks = self._acks(Barrier(checkpoint, position, end))
            completed = _completed(checkpoint, context.attempt, acks, end)
            log.append(completed)
            reach("logged")
            position = end
            retained = log.view.completed[-RETAINED:]
            for pipe in self._pipes:
                self._send(pipe, Complete(checkpoint, retain_ledger_from(retained)))
            log.prune(retained[0].checkpoint)
            if taken == 1:
                # What a slot of an older attempt had prepared after the recovery had looked.
                _recover(committer, context, (), spare=committables_of(completed))
        # Without one, recovery has committed all that there was.
        return checkpoint if taken else CheckpointId(0)

    def _acks(self, barrier: Barrier) -> list[Ack]:
        acks: dict[int, Ack] = {}
        for pipe in self._pipes:
            self._send(pipe, barrier)
        self._await(lambda: len(acks) == len(self._pipes), acks)
        return [acks[index] for index in range(len(self._pipes))]

    def _send(self, pipe: SubtaskPipe, message: object) -> None:
        try:
            pipe.send(message)
        except OSError:
            raise _SubtaskGone(self._pipes.index(pipe)) from None

    def _await(self, done: Callable[[], bool], acks: dict[int, Ack] | None = None) -> None:
        """Take in what subtasks say until `done`."""
        deadline = time.monotonic() + ANSWER_S
        while not done():
            ready = wait(list(self._pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"subtasks say nothing for {ANSWER_S} s")
            for pipe in ready:
                index = next(i for i, one in enumerate(self._pipes) if one is pipe)
                try:
                    message = self._pipes[index].recv()
                except (EOFError, OSError):
                    raise _SubtaskGone(index) from None
                match message:
                    case Ack():
                        if acks is not None:
                            acks[index] = message
                    case Through(checkpoint):
                        self._through[index] = checkpoint
                    case Failed(text):
                        raise RuntimeError(f"subtask {index} failed: {text}")
                    case _:
                        raise TypeError(f"subtask {index} says {message}")


def _recover(
    committer: Committer,
    context: CommitterContext,
    decided: Sequence[Committable],
    spare: Sequence[Committable] = (),
) -> None:
    """Commit `decided`; abort what older attempts left besides, but not `spare`."""
    plan = plan_recovery(
        [*decided, *spare],
        committer.in_doubt(),
        sink_id=context.sink_id,
        attempt=context.attempt,
    )
    for committable in plan.commit:
        if committable in spare:
            continue
        outcome = settled(partial(committer.commit, committable), SERVER_PATIENCE_S)
        if not isinstance(outcome, (Committed, AlreadyCommitted)):
            raise RuntimeError(f"{committable.transaction} is decided, and commit says {outcome}")
    for committable in plan.abort:
        aborted = settled(partial(committer.abort, committable), SERVER_PATIENCE_S)
        if isinstance(aborted, AlreadyCommitted):
            raise RuntimeError(f"{committable.transaction} is not decided, and was committed")


def _completed(
    checkpoint: CheckpointId, attempt: AttemptId, acks: Sequence[Ack], position: int
) -> CompletedCheckpoint:
    now_ms = int(time.time() * 1000)
    snapshots = tuple(
        SubtaskSnapshot(
            SubtaskRef(UID, index),
            (
                OperatorSnapshot(
                    UID,
                    lists={_POSITION: (str(position).encode(),)} if index == 0 else {},
                    committables=ack.pending,
                ),
            ),
        )
        for index, ack in enumerate(acks)
    )
    return CompletedCheckpoint(
        checkpoint, attempt, len(acks), MAX_PARALLELISM, snapshots, now_ms, now_ms
    )


def _position(completed: CompletedCheckpoint) -> int:
    return int(completed.operator(UID)[0][1].lists[_POSITION][0])
