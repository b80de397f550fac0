"""Transactions in doubt: pre-committed, and neither committed nor rolled back. For people.

A running job settles its own, and its next start settles what is left. This is for the time in
between: to see what is in doubt and what the decision log says about it, and to settle by hand what
cannot wait. What contradicts the log is refused unless it is forced.

    with InDoubtTransactions([SinkPlace(sink, "payments.out")], storage.open("payments")) as found:
        for one in found.in_doubt():
            print(one.transaction, one.judgement.verdict, one.judgement.reason)
            if found.objection(Action.COMMIT, one) is None:
                found.commit(one)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from types import TracebackType

from typing_extensions import Self

from onceflow.core.errors import ConfigError, OnceflowError
from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Committable
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import Action, Judgement, LogFacts, judge, objection
from onceflow.core.protocol.recovery import commit_order
from onceflow.core.signs_of_life import attempt_of, fence, read_log
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.staging import is_staged
from onceflow.core.storage import JobStorage
from onceflow.core.transaction_places import Place, StagedPlace


class ContradictsLog(OnceflowError):
    """Raised when what was asked for is not what the decision log says; nothing was changed."""

    domain = "user"
    retry = "never"


class Kind(Enum):
    """Where the rows of a transaction wait."""

    PREPARED = "prepared"
    """In the target."""
    STAGED = "staged"
    """In checkpoint storage."""


@dataclass(frozen=True, slots=True)
class InDoubtTransaction:
    """One transaction, as of one look at log and target."""

    committable: Committable
    kind: Kind
    rows: int | None
    """How many it has, when anybody knows."""
    place: str
    """What holds it, for people."""
    held: bool
    """Whether it is in doubt; else the log lists it, and the target has it no longer."""
    prepared_at: datetime | None
    judgement: Judgement

    @property
    def transaction(self) -> TransactionId:
        """Its name."""
        return self.committable.transaction


@dataclass(slots=True)
class _Holder:
    """One sink id in one place, with its committer."""

    place: Place
    committer: Committer
    context: CommitterContext
    claimed_by: str | None


@dataclass
class InDoubtTransactions:
    """All that is in doubt in `places`, judged by the decision log in `storage`. One thread.

    Looking changes nothing, neither in the places nor in storage.
    """

    places: Sequence[Place]
    storage: JobStorage | None = None
    _holders: dict[tuple[int, str], _Holder] = field(default_factory=dict[tuple[int, str], _Holder])

    def in_doubt(self) -> tuple[InDoubtTransaction, ...]:
        """Return everything in doubt, in the order in which a job would commit it.

        Raises:
            SinkError: A place cannot be asked now.
            StorageError: The decision log cannot be read.
            CheckpointCorrupt: It is damaged.
        """
        log = self._read_log()
        found = [
            one
            for index, place in enumerate(self.places)
            for sink_id in place.sink_ids(log)
            for one in self._held_by(self._holder(index, sink_id, log), log)
        ]
        unique = {(one.transaction, one.kind): one for one in found}
        return tuple(sorted(unique.values(), key=lambda one: commit_order(one.committable)))

    def find(self, transaction: TransactionId) -> InDoubtTransaction | None:
        """Return `transaction` if it is in doubt, or if the log decided it last.

        Raises:
            SinkError, StorageError, CheckpointCorrupt: As `in_doubt`.
        """
        for one in self.in_doubt():
            if one.transaction == transaction:
                return one
        log = self._read_log()
        decided = log.decided.get(transaction) if log else None
        if decided is None:
            return None
        index = next(
            (n for n, place in enumerate(self.places) if not isinstance(place, StagedPlace)), 0
        )
        holder = self._holder(index, transaction.sink_id, log)
        return self._described(decided, holder, log, held=False)

    def objection(self, action: Action, one: InDoubtTransaction) -> str | None:
        """Return why log and job forbid `action` now, or None. Reads the log, and asks the target.

        Raises:
            SinkError, StorageError, CheckpointCorrupt: As `in_doubt`.
        """
        log = self._with_sessions(self._read_log(), one.transaction.sink_id)
        holder = self._holder_of(one, log)
        judgement = _judged(one.committable, log, holder)
        return objection(action, judgement, log)

    def commit(self, one: InDoubtTransaction) -> CommitOutcome:
        """Make its rows visible, if the log decided so; return how it ended.

        Raises:
            ContradictsLog: The log does not say so, or the job seems to run; nothing is changed.
            SinkError, StorageError, CheckpointCorrupt: As `in_doubt`.
        """
        self._require(Action.COMMIT, one)
        return self.force_commit(one)

    def abort(self, one: InDoubtTransaction) -> AbortOutcome:
        """Make its rows gone, if the log did not decide them; return how it ended.

        Raises:
            ContradictsLog: The log does not say so, or the job seems to run; nothing is changed.
            SinkError, StorageError, CheckpointCorrupt: As `in_doubt`.
        """
        self._require(Action.ABORT, one)
        return self.force_abort(one)

    def force_commit(self, one: InDoubtTransaction) -> CommitOutcome:
        """Make its rows visible whatever the log says. Doubles them unless it says so, too."""
        return self._holder_of(one, self._read_log()).committer.commit(one.committable)

    def force_abort(self, one: InDoubtTransaction) -> AbortOutcome:
        """Make its rows gone whatever the log says. Loses them if the log decided them."""
        return self._holder_of(one, self._read_log()).committer.abort(one.committable)

    def fence(self) -> None:
        """Take the job over, so that no attempt before decides anything more; see `fence`.

        Raises:
            ConfigError: There is no job in the storage to take over.
            CheckpointError: The claim failed or nobody knows; repeat it.
        """
        if self.storage is None or not self.storage.log.sequences():
            raise ConfigError("there is no decision log to claim: name its storage and its job")
        fence(self.storage)

    def close(self) -> None:
        """Disconnect from every place. Safe to call twice."""
        for holder in self._holders.values():
            holder.committer.close()
        self._holders.clear()
        for place in self.places:
            place.close()

    def __enter__(self) -> Self:
        """Nothing is opened before it is asked for."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # --- steps --------------------------------------------------------------------------------

    def _require(self, action: Action, one: InDoubtTransaction) -> None:
        reason = self.objection(action, one)
        if reason is not None:
            raise ContradictsLog(f"{action.value} of transaction {one.transaction}: {reason}")

    def _read_log(self) -> LogFacts | None:
        return read_log(self.storage) if self.storage is not None else None

    def _with_sessions(self, log: LogFacts | None, sink_id: str) -> LogFacts | None:
        if log is None:
            return None
        sessions = [session for place in self.places for session in place.sessions(sink_id)]
        return replace(log, signs_of_life=(*log.signs_of_life, *sessions))

    def _held_by(self, holder: _Holder, log: LogFacts | None) -> list[InDoubtTransaction]:
        log = self._with_sessions(log, holder.context.sink_id)
        return [
            self._described(_as_listed(c, log), holder, log, held=True)
            for c in holder.committer.in_doubt()
        ]

    def _described(
        self, committable: Committable, holder: _Holder, log: LogFacts | None, *, held: bool
    ) -> InDoubtTransaction:
        transaction, staging = committable.transaction, holder.context.staging
        prepared_at: datetime | None = None
        if is_staged(committable):
            prepared_at = staging.sealed_at(transaction) if staging else None
        elif held:
            prepared_at = holder.committer.prepared_at(committable)
            prepared_at = prepared_at or holder.place.prepared_at(transaction)
        return InDoubtTransaction(
            committable=committable,
            kind=Kind.STAGED if is_staged(committable) else Kind.PREPARED,
            rows=committable.rows or (holder.place.rows(transaction) if held else None),
            place=holder.place.name,
            held=held,
            prepared_at=prepared_at,
            judgement=_judged(committable, log, holder),
        )

    def _holder_of(self, one: InDoubtTransaction, log: LogFacts | None) -> _Holder:
        index = next((n for n, place in enumerate(self.places) if place.name == one.place), 0)
        return self._holder(index, one.transaction.sink_id, log)

    def _holder(self, index: int, sink_id: str, log: LogFacts | None) -> _Holder:
        holder = self._holders.get((index, sink_id))
        if holder is None:
            place = self.places[index]
            context = CommitterContext(
                job=log.job if log else "unknown",
                uid=sink_id,
                sink_id=sink_id,
                attempt=attempt_of(log),
                log_id=log.log_id if log else "",
                staging=self.storage.staging(sink_id) if self.storage is not None else None,
            )
            holder = _Holder(place, place.committer(context), context, place.claimed_by(sink_id))
            self._holders[index, sink_id] = holder
        return holder


def _judged(committable: Committable, log: LogFacts | None, holder: _Holder) -> Judgement:
    """Return the verdict. What lies in a job's own storage is its own, whatever it is called."""
    own = log is not None and is_staged(committable)
    return judge(committable, log, claimed_by=log.log_id if log and own else holder.claimed_by)


def _as_listed(committable: Committable, log: LogFacts | None) -> Committable:
    """Return `committable` as the log has it: with its rows, and what else the sink noted."""
    listed = log.decided.get(committable.transaction) if log else None
    alike = listed is not None and is_staged(listed) == is_staged(committable)
    return listed if listed is not None and alike else committable
