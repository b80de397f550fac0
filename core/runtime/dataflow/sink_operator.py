"""The running operator of a sink: its counters, its calls to the target, and its writer's failures.

Rows go open -> prepared -> committed.

There is one operator per subtask, used only by the chain's thread. The rows of a sink are in doubt
until a checkpoint decides them.

Failures of the writer are classified: refused rows, or a target that is away.

onceflow's own errors say whether they are refusals. An error of another package counts as a refusal
unless the network, a disk or a lack of memory may have caused it. If equal refusals occur in a few
attempts without progress, the job stops, because further attempts would fail in the same way.

Used by the thread of the chain. `protocol.failures` decides which refusals are equal.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol, TypeAlias

from onceflow.core.crash_points import reach
from onceflow.core.errors import (
    ConfigError,
    InvariantViolation,
    OnceflowError,
    PreCommitFailed,
    SinkError,
    TargetRefused,
)
from onceflow.core.logged_counts import gains_digit
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.failures import make_fingerprint
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.protocol.messages import SinkMetrics, Wait
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.operators import PendingSnapshot, RunningOperator
from onceflow.core.spi import SinkWriter, WriterContext
from onceflow.core.spi.bad_rows import is_data_at_fault, may_pass
from onceflow.core.spi.dead_letters import letters_of_rows

SHOWN_AFTER_S = 3.0
"""The duration after which a call is reported: longer than most calls to a healthy target take, and
shorter than a deadline.
"""

OutsideCall: TypeAlias = Literal["write", "pre-commit", "commit"]


class OutsideCalls:
    """The current calls to one target. Any thread; at most one call of each kind at a time."""

    def __init__(self, uid: str, target: str) -> None:
        """Create for sink `uid`.

        `target` is the target's location, or "" if the sink does not say.
        """
        self._uid = uid
        self._target = target or f"the target of sink {uid}"
        self._began_at: dict[OutsideCall, float] = {}
        self._failed: set[OutsideCall] = set()

    @contextmanager
    def during(self, call: OutsideCall) -> Generator[None]:
        """Register `call` for the duration of the block."""
        self.begin(call)
        try:
            yield
        finally:
            self.end(call)

    def begin(self, call: OutsideCall) -> None:
        """Record that `call` has begun. A repeated call keeps the time of the first."""
        self._began_at.setdefault(call, time.monotonic())

    def fail(self, call: OutsideCall) -> None:
        """Record that `call` has failed and will be repeated: the target is away, or refuses."""
        self._failed.add(call)

    def end(self, call: OutsideCall) -> None:
        """Record that `call` is done."""
        self._began_at.pop(call, None)
        self._failed.discard(call)

    def list_waits(self) -> tuple[Wait, ...]:
        """Return the calls that have lasted longer than SHOWN_AFTER_S."""
        now = time.monotonic()
        return tuple(
            self._describe_wait(call, round(now - began_at, 3))
            for call, began_at in sorted([*self._began_at.items()])
            if now - began_at > SHOWN_AFTER_S
        )

    def _describe_wait(self, call: OutsideCall, waited_s: float) -> Wait:
        if call in self._failed:
            return Wait(self._uid, f"{self._target} (to {call})", waited_s)
        return Wait(self._uid, self._target, waited_s, call)


_TRACE_LENGTH_MAX = 4000
_ADVICE = (
    "No row is lost: all rows since the last checkpoint will be read again. If the error"
    " repeats, change the rows before the sink, the sink, or its target, and start the job again"
)


class SinkRefusals:
    """The failures of one writer in one attempt."""

    def __init__(self, uid: str, attempt: int) -> None:
        """Start without any decided rows."""
        self._uid = uid
        self._attempt = attempt
        self._pre_committed: list[CheckpointId] = []
        self._has_got_on = False

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> None:
        """Record a pre-commit of the writer."""
        if committables and not self._has_got_on:
            self._pre_committed.append(checkpoint)

    def record_decision(self, checkpoint: CheckpointId) -> None:
        """Record that `checkpoint` is decided. If it contains rows, the sink has made progress."""
        self._has_got_on |= any(
            pre_committed <= checkpoint for pre_committed in self._pre_committed
        )

    @contextmanager
    def name_refusal(self, doing: str) -> Generator[None, None, None]:
        """Raise refusals with their fingerprint, and other failures unchanged.

        Raises:
            TargetRefused: The target could not handle a value; contains the traceback.
            PreCommitFailed: The sink raised another error of its own; contains the traceback.
        """
        try:
            yield
        except InvariantViolation:
            raise
        except OnceflowError as error:
            if error.retry == "job" and self._is_refusal(error):
                error.fingerprint = self._make_fingerprint(error)
            raise
        except Exception as error:
            if may_pass(error):
                raise
            kind = type(error).__name__
            trace = "".join(traceback.format_exception(error))[-_TRACE_LENGTH_MAX:].rstrip()
            error_class = TargetRefused if is_data_at_fault(error) else PreCommitFailed
            raise error_class(
                f"sink {self._uid!r}: {doing}: {kind}: {error}. {_ADVICE}\n{trace}",
                fingerprint=self._make_fingerprint(error),
            ) from error

    def _is_refusal(self, error: OnceflowError) -> bool:
        if isinstance(error, TargetRefused):
            return True
        return isinstance(error, SinkError) and is_data_at_fault(error)

    def _make_fingerprint(self, error: Exception) -> str:
        only_in = self._attempt if self._has_got_on else None
        return make_fingerprint(self._uid, type(error).__name__, str(error), only_in=only_in)


_logger = logging.getLogger("onceflow.runtime")


class SinkMetricGroup:
    """The counters of a sink. The writing and the committing thread update, the heartbeat reads."""

    def __init__(self, uid: str, sink_id: str, subtask: int, target: str = "") -> None:
        self._uid = uid
        self.sink_id = sink_id
        self.calls = OutsideCalls(uid, target)
        self._subtask = subtask
        self._lock = threading.Lock()
        self._open = False
        self._prepared_at: dict[TransactionId, float] = {}
        self._decided_at: dict[TransactionId, float] = {}
        self._committed = 0
        self._retried = 0
        self._rows = 0
        self._rejected = 0
        self._commit_ms = 0.0
        self._refusal = ""
        self._is_stuck = False

    def note_written(self) -> None:
        """Record that the writer has rows that no pre-commit contains yet."""
        self._open = True

    def note_rejected(self, rows: int) -> None:
        """Count `rows` bad rows that the writer left out."""
        self._rejected += rows

    def pre_committed(self, committables: Sequence[Committable]) -> None:
        """Record that all written rows are prepared, as `committables`."""
        with self._lock:
            self._open = False
            for committable in committables:
                self._prepared_at[committable.transaction] = time.monotonic()

    def note_decided(self, checkpoint: CheckpointId) -> None:
        """Record that transactions up to `checkpoint` are decided. Idempotent."""
        now = time.monotonic()
        with self._lock:
            for transaction in self._prepared_at:
                if transaction.checkpoint <= checkpoint:
                    # Keep the first decision: later checkpoints list pending transactions again.
                    self._decided_at.setdefault(transaction, now)

    def note_committed(self, committable: Committable) -> None:
        """Record that the target has committed `committable`: its rows are visible."""
        now = time.monotonic()
        with self._lock:
            self._prepared_at.pop(committable.transaction, None)
            decided_at = self._decided_at.pop(committable.transaction, now)
            self._commit_ms = round((now - decided_at) * 1000, 3)
            self._committed += 1
            self._rows += committable.rows
            self._refusal, self._is_stuck = "", False

    def note_retry(self, refusal: str, *, is_stuck: bool) -> None:
        """Count a failed commit that will be retried; `refusal` is the reason, for people."""
        with self._lock:
            self._retried += 1
            self._refusal, self._is_stuck = refusal, is_stuck

    def read(self) -> SinkMetrics:
        """Return the current counts."""
        with self._lock:
            oldest = min(self._prepared_at.values(), default=None)
            return SinkMetrics(
                uid=self._uid,
                sink_id=self.sink_id,
                subtask=self._subtask,
                open=int(self._open),
                prepared=len(self._prepared_at),
                committed=self._committed,
                retried=self._retried,
                rows_committed=self._rows,
                rows_rejected=self._rejected,
                oldest_prepared_s=(0.0 if oldest is None else round(time.monotonic() - oldest, 3)),
                last_commit_ms=self._commit_ms,
                commit_refusal=self._refusal,
                commit_stuck=self._is_stuck,
            )


class CommitsOfSink(Protocol):
    """The commit queue of a sink, as the sink's operator uses it."""

    metrics: SinkMetricGroup

    def await_commits(self) -> None:
        """Wait, before a pre-commit, while too many earlier transactions are not committed."""
        ...

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> tuple[Committable, ...]:
        """Record a pre-commit; return all committables that the ack of `checkpoint` must list."""
        ...

    def record_abort(self, checkpoint: CheckpointId) -> None:
        """Record that `checkpoint` was aborted. A later checkpoint lists its transactions."""
        ...


class SinkOperator(RunningOperator):
    """An operator that writes to a sink's writer, and pre-commits at each barrier."""

    def __init__(
        self,
        uid: str,
        work: WriteTo,
        writer: SinkWriter,
        commits: CommitsOfSink,
        context: WriterContext,
    ) -> None:
        super().__init__(uid)
        self._context = context
        self._metrics = commits.metrics
        self._refusals = SinkRefusals(uid, context.attempt)
        self.takes_dead_letters = work.takes_dead_letters
        self._writer = writer
        self._commits = commits
        self._on_bad_row = work.on_bad_row

    def list_waits(self) -> tuple[Wait, ...]:
        """Return the calls to the target that last long, including commits."""
        return self._metrics.calls.list_waits()

    def process(self, batch: Batch) -> None:
        """Pass the rows to the writer."""
        self._metrics.note_written()
        taking = self._metrics.calls.during("write")
        with taking, self._refusals.name_refusal("rows were not written"):
            self._writer.write(batch.rows)
        self._take_rejected()
        reach("write")

    def snapshot(self, checkpoint: CheckpointId) -> PendingSnapshot:
        """Pre-commit. The ack will list all pending committables, including this checkpoint's."""
        self._commits.await_commits()
        # After the pre-commit the rows survive a crash; they stay invisible until the decision.
        refusal = self._refusals.name_refusal(f"checkpoint {checkpoint} was not pre-committed")
        with self._metrics.calls.during("pre-commit"), refusal:
            committables = self._writer.pre_commit(checkpoint)
        self._require_own_names(committables)
        # Before the sink of dead letters, which is later in the chain, takes its own snapshot.
        self._take_rejected()
        reach("prepared")
        self._refusals.record_pre_commit(checkpoint, committables)
        snapshot = OperatorSnapshot(
            self.uid, committables=self._commits.record_pre_commit(checkpoint, committables)
        )
        return PendingSnapshot(self.uid, lambda _: snapshot)

    def on_completed(self, checkpoint: CheckpointId) -> None:
        """Record that the rows up to `checkpoint` are decided."""
        self._refusals.record_decision(checkpoint)

    def _require_own_names(self, committables: Sequence[Committable]) -> None:
        """Raise ConfigError unless each of `committables` is named for this subtask.

        A transaction with the name of another sink id or subtask would be committed now, but no
        recovery would find it: after a crash its rows would be lost.
        """
        for committable in committables:
            named = committable.transaction
            own = self._context.transaction(CheckpointId(named.checkpoint), named.sequence)
            if named != own:
                raise ConfigError(
                    f"sink {self.uid!r}: pre_commit of {type(self._writer).__name__} returned"
                    f" transaction {named}, but a transaction of this subtask must be named"
                    f" {own}. Take each name from WriterContext.transaction or TransactionNamer."
                    " Nothing of this checkpoint is committed"
                )

    def on_aborted(self, checkpoint: CheckpointId) -> None:
        """Notify the committer, which may have begun a commit."""
        self._commits.record_abort(checkpoint)

    def close(self) -> None:
        """Roll back the open transaction."""
        self._writer.close()

    def _take_rejected(self) -> None:
        for rejected in self._writer.take_rejected():
            before = self.rejected
            letters = letters_of_rows(rejected.rows, rejected.reasons)
            self.reject(letters)
            self._metrics.note_rejected(len(letters))
            if gains_digit(before, self.rejected):
                _logger.warning(
                    "sink %s has dropped bad rows (%s), %d so far; one of them: %s",
                    self.uid,
                    self._on_bad_row.value,
                    self.rejected,
                    letters[0].reason,
                )
