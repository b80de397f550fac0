"""The tools with which people list transactions in doubt and settle them.

A transaction in doubt is pre-committed, and neither committed nor rolled back. A running job
settles its own, and its next start settles the remaining ones. This module is for the time in
between: it lists transactions in doubt with the decision of the log, and settles by hand those that
cannot wait. An action that contradicts the log is refused unless it is forced.

    managers = [SinkResourceManager(sink, "payments.out")]
    with InDoubtTransactions(managers, storage.open("payments")) as found:
        for one in found.in_doubt():
            print(one.transaction, one.status.decision, one.status.reason)
            if found.refusal(Resolution.COMMIT, one) is None:
                found.commit(one)

Checkpoint storage shows only signs that the job is running, never a proof. It holds no heartbeat,
only the process that wrote the log last and the time. So every sign counts as "it may be running".
Only a final last decision, or a claim made by hand, means that it is not running.
"""

from __future__ import annotations

import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from itertools import pairwise
from types import TracebackType

from typing_extensions import Self, override

from onceflow.core.commit.logged_decisions import describe_lag, in_doubt_status, refusal
from onceflow.core.commit.loop import read_target_record
from onceflow.core.errors import ConfigError, OnceflowError, StateCorrupt, StorageError
from onceflow.core.protocol.checkpoints.snapshots import commit_order
from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.log.target_records import (
    InDoubtStatus,
    LogFacts,
    Resolution,
    TargetRecord,
)
from onceflow.core.spi import Committer, CommitterContext, Sink
from onceflow.core.spi.connector import ResourceManager
from onceflow.core.spi.staging import StagingArea, is_staged, make_staged_committable
from onceflow.core.storage import JobStorage

QUIET_S_MIN = 60.0
"""The minimum age of the log's last write. A more recently written log may be a running job's."""
QUIET_INTERVALS = 3
"""The number of decision intervals of quiet after which a log may count as left. With less quiet,
its job may be running."""

_BY_HAND = "txn "
_OWNER = re.compile(r"(.+):(\d+) [0-9a-f]+")


def read_log(storage: JobStorage) -> LogFacts:
    """Return the content of the job's log now, and the signs that its job is alive.

    Changes nothing.

    Raises:
        StorageError: Storage cannot be read.
        CheckpointCorrupt: The log is damaged.
    """
    log = storage.log
    view = log.read()
    if view.attempt == 0:
        # Reading the identity of a job that never ran would create one.
        return LogFacts(log.job, "", view)
    signs = tuple(
        filter(
            None, (_recently_written(view, log.find_last_write_time()), _owner_lives(view.owner))
        )
    )
    return LogFacts(log.job, storage.log_id, view, () if _has_ended(view) else signs)


def fence(storage: JobStorage) -> LogFacts:
    """Take the job over, as its next start does, so that no earlier attempt decides any more.

    An attempt that still runs ends itself at its next checkpoint. The job starts again as usual.

    Raises:
        CheckpointError: The claim failed or its outcome is unknown; repeat it.
    """
    claimed = storage.log.claim(f"{_BY_HAND}{socket.gethostname()}:{os.getpid()}")
    return LogFacts(storage.log.job, storage.log_id, claimed.view)


def attempt_of(log: LogFacts | None) -> AttemptId:
    """Return the newest attempt in `log`, under whose number a person commits by hand."""
    return AttemptId(max(1, log.view.attempt if log else 1))


def _has_ended(view: LogView) -> bool:
    if view.owner.startswith(_BY_HAND):
        return True  # an attempt that only fences and runs nothing
    last = view.decided[-1] if view.decided else None
    # A final decision ends the job only while it is the last record. A claim after it is a new
    # attempt.
    return last is not None and last.sequence == view.last_sequence and last.completed.final


def _recently_written(view: LogView, written_at: datetime | None) -> str:
    if written_at is None:
        return ""
    moments = [c.completed_at_ms / 1000 for c in view.completed if c.attempt == view.attempt]
    # A job that takes a checkpoint every ten minutes writes nothing for ten minutes and still runs.
    gaps_s = [later - earlier for earlier, later in pairwise(moments)]
    quiet_s = max(QUIET_S_MIN, QUIET_INTERVALS * max(gaps_s, default=0.0))
    age_s = (datetime.now(timezone.utc) - written_at).total_seconds()
    if age_s > quiet_s:
        return ""
    return (
        f"attempt {view.attempt} wrote its decision log {max(0.0, age_s):.0f} s ago; the job"
        f" counts as ended once nothing is written for {quiet_s:.0f} s"
    )


def _owner_lives(owner: str) -> str:
    match = _OWNER.fullmatch(owner)
    if match is None or match[1] != socket.gethostname():
        return ""
    pid = int(match[2])
    if pid == os.getpid():
        return ""  # this process asks; the log's age shows whether its job still runs
    try:
        # Signal 0 only asks. If the number now belongs to another process, the answer is "lives",
        # too. That costs a person one --fence. A wrong "is gone" would let two processes commit.
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    # The process exists and belongs to another user.
    except PermissionError:
        pass
    return f"process {pid} on this machine, which claimed the newest attempt, still runs"


class ContradictsLog(OnceflowError):
    """The error for a request that contradicts the decision log; nothing was changed."""

    domain = "user"
    retry = "never"


class SinkNeeded(ConfigError):
    """The error for staged rows whose destination the given resource managers do not know."""


@dataclass(frozen=True)
class SinkResourceManager(ResourceManager):
    """The target of a sink, with the sink id under which its job writes."""

    sink: Sink
    sink_id: str

    @property
    @override
    def name(self) -> str:
        return type(self.sink).__name__

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        return (self.sink_id,)

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return self.sink.committer(context)

    @override
    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        return read_target_record(self.sink, context)


@dataclass(frozen=True)
class StagedResourceManager(ResourceManager):
    """The rows that a job's sinks have staged in its checkpoint storage, to view but not to settle.

    Only the sink can apply the rows, or find out whether they are applied already.
    """

    storage: JobStorage

    @property
    @override
    def name(self) -> str:
        return f"storage {self.storage}"

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        return self.storage.list_staged_sinks(log.sink_ids if log else ())

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return _StagedOnly(context)

    @override
    def read_claimant(self, sink_id: str) -> str | None:
        return self.storage.log_id if self.storage.log.sequences() else None


class InDoubtKind(Enum):
    """The place where the rows of a transaction wait."""

    PREPARED = "prepared"
    """The rows are prepared in the target."""
    STAGED = "staged"
    """The rows are staged in checkpoint storage."""


@dataclass(frozen=True, slots=True)
class InDoubtTransaction:
    """A transaction in doubt, as log and target showed it at one moment."""

    committable: Committable
    kind: InDoubtKind
    rows: int | None
    """The number of its rows, if it is known."""
    held_by: str
    """The name of the resource manager that holds it, for people."""
    held: bool
    """True if it is in doubt. False if the log lists it and the target holds it no longer."""
    prepared_at: datetime | None
    status: InDoubtStatus

    @property
    def transaction(self) -> TransactionId:
        """The id of the transaction."""
        return self.committable.transaction


@dataclass(slots=True)
class _Holder:
    """A resource manager and one of its sink ids, with the committer for both."""

    manager: ResourceManager
    committer: Committer
    context: CommitterContext
    claimed_by: str | None


class TransactionSettler(ABC):
    """A tool that lists transactions in doubt and settles them by hand as decisions allow.

    Used by one thread.
    """

    @abstractmethod
    def in_doubt(self) -> tuple[InDoubtTransaction, ...]:
        """Return all transactions in doubt, in the order in which they would be committed."""

    @abstractmethod
    def find(self, transaction: TransactionId) -> InDoubtTransaction | None:
        """Return `transaction` if it is in doubt, or if a remembered decision lists it."""

    @abstractmethod
    def refusal(self, resolution: Resolution, in_doubt: InDoubtTransaction) -> str | None:
        """Return the reason why the decisions, as of now, forbid `resolution`, or None."""

    def commit(self, in_doubt: InDoubtTransaction) -> CommitOutcome:
        """Make its rows visible, if they are decided; return the outcome.

        Raises:
            ContradictsLog: The rows are not decided, or another process may settle them now.
                Nothing is changed.
            SinkError, StorageError, CheckpointCorrupt: As `in_doubt`.
        """
        self._require(Resolution.COMMIT, in_doubt)
        return self.force_commit(in_doubt)

    def abort(self, in_doubt: InDoubtTransaction) -> AbortOutcome:
        """Roll its rows back, if they are not decided and never will be; return the outcome.

        Raises:
            ContradictsLog: The rows are or may be decided, or another process may settle them now.
                Nothing is changed.
            SinkError, StorageError, CheckpointCorrupt: As `in_doubt`.
        """
        self._require(Resolution.ABORT, in_doubt)
        return self.force_abort(in_doubt)

    @abstractmethod
    def force_commit(self, in_doubt: InDoubtTransaction) -> CommitOutcome:
        """Make its rows visible regardless of decisions. Doubles them unless they are decided."""

    @abstractmethod
    def force_abort(self, in_doubt: InDoubtTransaction) -> AbortOutcome:
        """Roll its rows back regardless of decisions. Loses them if they are decided."""

    @abstractmethod
    def fence(self) -> None:
        """Prevent every earlier attempt from deciding anything more."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect. May be called twice."""

    def __enter__(self) -> Self:
        """Return the settler. Connections are opened only on first use."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _require(self, resolution: Resolution, in_doubt: InDoubtTransaction) -> None:
        reason = self.refusal(resolution, in_doubt)
        if reason is not None:
            raise ContradictsLog(
                f"cannot {resolution.value} transaction {in_doubt.transaction}: {reason}"
            )


@dataclass
class InDoubtTransactions(TransactionSettler):
    """The transactions that `resource_managers` hold in doubt, with the log in `storage`.

    Used by one thread. Reading changes nothing, neither in the targets nor in storage.
    """

    resource_managers: Sequence[ResourceManager]
    storage: JobStorage | None = None
    _holders: dict[tuple[int, str], _Holder] = field(default_factory=dict[tuple[int, str], _Holder])

    def in_doubt(self) -> tuple[InDoubtTransaction, ...]:
        """Return all transactions in doubt, in the order in which a job would commit them.

        Raises:
            SinkError: A resource manager cannot be asked now.
            StorageError: The decision log cannot be read.
            CheckpointCorrupt: The decision log is damaged.
        """
        log = self._read_log()
        transactions = [
            in_doubt
            for index, manager in enumerate(self.resource_managers)
            for sink_id in manager.sink_ids(log)
            for in_doubt in self._list_held(self._holder(index, sink_id, log), log)
        ]
        unique: dict[tuple[TransactionId, InDoubtKind], InDoubtTransaction] = {}
        for in_doubt in transactions:  # managers that can settle precede those that only list
            unique.setdefault((in_doubt.transaction, in_doubt.kind), in_doubt)
        return tuple(
            sorted(unique.values(), key=lambda in_doubt: commit_order(in_doubt.committable))
        )

    def find(self, transaction: TransactionId) -> InDoubtTransaction | None:
        """Return `transaction` if it is in doubt, or if the log decided it last.

        Raises:
            SinkError, StorageError, CheckpointCorrupt: As `in_doubt`.
        """
        for in_doubt in self.in_doubt():
            if in_doubt.transaction == transaction:
                return in_doubt
        log = self._read_log()
        decided = log.decided.get(transaction) if log else None
        if decided is None:
            return None
        index = next(
            (
                n
                for n, manager in enumerate(self.resource_managers)
                if not isinstance(manager, StagedResourceManager)
            ),
            0,
        )
        # No resource manager holds the transaction, so its target is unknown. Ask the first real
        # target: storage could not prove a commit.
        holder = self._holder(index, transaction.sink_id, log)
        return self._describe(decided, holder, log, held=False, lag=self._explain_lag(holder))

    def refusal(self, resolution: Resolution, in_doubt: InDoubtTransaction) -> str | None:
        """Return the reason why log and job forbid `resolution` now, or None.

        Asks both the log and the target.

        Raises:
            SinkError, StorageError, CheckpointCorrupt: As `in_doubt`.
        """
        log = self._with_sessions(self._read_log(), in_doubt.transaction.sink_id)
        holder = self._find_holder(in_doubt, log)
        status = _status(in_doubt.committable, log, holder, self._explain_lag(holder))
        return refusal(resolution, status, log)

    def force_commit(self, in_doubt: InDoubtTransaction) -> CommitOutcome:
        """Make its rows visible regardless of the log. Doubles them unless the log decided them."""
        return self._find_holder(in_doubt, self._read_log()).committer.commit(in_doubt.committable)

    def force_abort(self, in_doubt: InDoubtTransaction) -> AbortOutcome:
        """Roll its rows back regardless of the log. Loses them if the log decided them."""
        return self._find_holder(in_doubt, self._read_log()).committer.abort(in_doubt.committable)

    def fence(self) -> None:
        """Take the job over, so that no earlier attempt decides anything more; see `fence`.

        Raises:
            ConfigError: The storage contains no job to take over.
            CheckpointError: The claim failed or its outcome is unknown; repeat it.
        """
        if self.storage is None or not self.storage.log.sequences():
            raise ConfigError(
                "the job cannot be fenced, because no decision log was named or it is empty: give"
                " the checkpoint storage and the name of the job"
            )
        fence(self.storage)

    def close(self) -> None:
        """Disconnect from every resource manager. May be called twice."""
        for holder in self._holders.values():
            holder.committer.close()
        self._holders.clear()
        for manager in self.resource_managers:
            manager.close()

    # --- steps --------------------------------------------------------------------------------

    def _read_log(self) -> LogFacts | None:
        return read_log(self.storage) if self.storage is not None else None

    def _with_sessions(self, log: LogFacts | None, sink_id: str) -> LogFacts | None:
        if log is None:
            return None
        sessions = [
            session for manager in self.resource_managers for session in manager.sessions(sink_id)
        ]
        return replace(log, liveness=(*log.liveness, *sessions))

    def _list_held(self, holder: _Holder, log: LogFacts | None) -> list[InDoubtTransaction]:
        log = self._with_sessions(log, holder.context.sink_id)
        held = holder.committer.in_doubt()
        lag = self._explain_lag(holder) if held else ""
        return [self._describe(_as_listed(c, log), holder, log, held=True, lag=lag) for c in held]

    def _explain_lag(self, holder: _Holder) -> str:
        """Return why the log is behind the target; empty if it is not, or if this is unknown."""
        if self.storage is None:
            return ""
        try:
            record = holder.manager.target_record(holder.context)
        except ConfigError as error:
            return str(error)
        # Read the log again after the target: the job may have decided and committed in between.
        log = read_log(self.storage)
        return describe_lag(log, record) if record and log.view.attempt else ""

    def _describe(
        self,
        committable: Committable,
        holder: _Holder,
        log: LogFacts | None,
        *,
        held: bool,
        lag: str,
    ) -> InDoubtTransaction:
        transaction, staging = committable.transaction, holder.context.staging
        prepared_at: datetime | None = None
        if is_staged(committable):
            prepared_at = staging.find_seal_time(transaction) if staging else None
        elif held:
            prepared_at = holder.committer.find_prepare_time(committable)
            prepared_at = prepared_at or holder.manager.find_prepare_time(transaction)
        return InDoubtTransaction(
            committable=committable,
            kind=InDoubtKind.STAGED if is_staged(committable) else InDoubtKind.PREPARED,
            rows=committable.rows or (holder.manager.rows(transaction) if held else None),
            held_by=holder.manager.name,
            held=held,
            prepared_at=prepared_at,
            status=_status(committable, log, holder, lag),
        )

    def _find_holder(self, in_doubt: InDoubtTransaction, log: LogFacts | None) -> _Holder:
        index = next(
            (
                n
                for n, manager in enumerate(self.resource_managers)
                if manager.name == in_doubt.held_by
            ),
            0,
        )
        return self._holder(index, in_doubt.transaction.sink_id, log)

    def _holder(self, index: int, sink_id: str, log: LogFacts | None) -> _Holder:
        holder = self._holders.get((index, sink_id))
        if holder is None:
            manager = self.resource_managers[index]
            context = CommitterContext(
                job=log.job if log else "unknown",
                uid=sink_id,
                sink_id=sink_id,
                attempt=attempt_of(log),
                log_id=log.log_id if log else "",
                staging=self.storage.staging(sink_id) if self.storage is not None else None,
            )
            holder = _Holder(
                manager, manager.committer(context), context, manager.read_claimant(sink_id)
            )
            self._holders[index, sink_id] = holder
        return holder


def _status(
    committable: Committable, log: LogFacts | None, holder: _Holder, lag: str
) -> InDoubtStatus:
    """Return the status of a transaction in the log.

    A job owns all rows staged in its storage, under any sink id.
    """
    own = log is not None and is_staged(committable)
    return in_doubt_status(
        committable, log, claimed_by=log.log_id if log and own else holder.claimed_by, lag=lag
    )


def _as_listed(committable: Committable, log: LogFacts | None) -> Committable:
    """Return `committable` as the log lists it, with its row count and the sink's data."""
    listed = log.decided.get(committable.transaction) if log else None
    alike = listed is not None and is_staged(listed) == is_staged(committable)
    return listed if listed is not None and alike else committable


class _StagedOnly(Committer):
    def __init__(self, context: CommitterContext) -> None:
        self._context = context

    @override
    def commit(self, committable: Committable) -> CommitOutcome:
        raise self._needs_sink(committable)

    @override
    def abort(self, committable: Committable) -> AbortOutcome:
        raise self._needs_sink(committable)

    @override
    def in_doubt(self) -> Sequence[Committable]:
        staging = self._context.staging
        if staging is None:
            return []
        counted = [
            (transaction, _rows_staged(staging, transaction))
            for transaction in staging.transactions()
        ]
        # An entry without rows is a sink's own mark and is not in doubt.
        return [
            make_staged_committable(transaction, rows or 0)
            for transaction, rows in counted
            if rows != 0
        ]

    @override
    def close(self) -> None:
        pass

    def _needs_sink(self, committable: Committable) -> SinkNeeded:
        return SinkNeeded(
            f"the rows of transaction {committable.transaction} are staged in checkpoint storage."
            " Only their sink knows their target and whether they are committed: name the sink"
            f" (--sink module:name --sink-id {self._context.sink_id}), or start the job"
        )


def _rows_staged(staging: StagingArea, transaction: TransactionId) -> int | None:
    """Return the number of rows staged under `transaction`, or None if they cannot be read."""
    try:
        return sum(batch.num_rows for _, batch in staging.read(transaction) or ())
    except (StateCorrupt, StorageError):
        # The sink reports what is wrong with the rows. They are in doubt all the same.
        return None
