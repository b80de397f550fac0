"""The targets of sinks: a database that prepares, one whose rows wait in checkpoint storage, and
a table with versions, one for each checkpoint.

Each is asked as a committer asks it, in steps between which everybody else goes on. `Staged` takes
the steps of `onceflow.sinks.base.staged`, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from tests.simulation.clock import Clock, Gone, Request, Server, Steps, Violation

from onceflow.core.commit.whole_checkpoints import GlobalCommit
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import Decided

Row = tuple[str, int, int, int]
"""(partition, offset, key, count of the key up to this record)"""

OnCommit = Callable[[TransactionId], None]


class Target(Server, ABC):
    """One sink's target: the rows that everybody sees, and proofs of how they came there."""

    def __init__(self, clock: Clock, sink_id: str, on_commit: OnCommit) -> None:
        super().__init__(clock)
        self.sink_id = sink_id
        self.overtaken_rate = 0.0
        """How often a committer with rows in its hands is overtaken by another one."""
        self.rows: list[Row] = []
        self.proofs: set[TransactionId] = set()
        self.pruned: set[TransactionId] = set()
        """Proofs that were deleted because nobody would ask for them any more."""
        self._on_commit = on_commit
        self._backup: tuple[Any, ...] | None = None
        self._copies = 0
        """How often an older copy took its place: what was sent to one does not reach another."""

    @abstractmethod
    def pre_commit(self, transaction: TransactionId, rows: list[Row]) -> Steps[None]:
        """Make the rows durable and invisible; raises Gone."""

    @abstractmethod
    def commit(self, committable: committables.Committable) -> Steps[committables.CommitOutcome]:
        """Make them visible."""

    @abstractmethod
    def abort(self, committable: committables.Committable) -> Steps[committables.AbortOutcome]:
        """Drop them."""

    @abstractmethod
    def list_in_doubt(self) -> Steps[list[committables.Committable]]:
        """Return what is pre-committed and neither committed nor aborted; raises Gone."""

    @abstractmethod
    def prune(self, before: CheckpointId) -> Steps[None]:
        """Forget proofs of checkpoints before `before`; raises Gone."""

    @property
    @abstractmethod
    def in_doubt(self) -> list[TransactionId]:
        """The truth, for the oracle."""

    @abstractmethod
    def roll_back_by_hand(self, transaction: TransactionId) -> None:
        """Drop what is in doubt, behind everybody's back."""

    @abstractmethod
    def finish_by_hand(self, transaction: TransactionId, *, decided: bool) -> None:
        """Commit what is in doubt, or drop it, as a person has found out."""

    @abstractmethod
    def _state(self) -> tuple[Any, ...]: ...

    @abstractmethod
    def _set(self, state: tuple[Any, ...]) -> None: ...

    def back_up(self) -> None:
        self._backup = self._state()

    def go_back(self) -> bool:
        """Become as it was when it was backed up; return whether that loses anything."""
        if self._backup is None:
            return False
        self._copies += 1
        rows_before, known_before, backup = len(self.rows), self._known(), self._backup
        self._backup = None
        self._set(backup)
        return len(self.rows) < rows_before or not known_before <= self._known()

    def copy_state(self) -> tuple[Any, ...]:
        """Return a copy of what is in the target; rows that wait in storage are not."""
        return deepcopy(self._state())

    def become(self, state: tuple[Any, ...]) -> None:
        """Become such a copy: what was sent before does not arrive."""
        self._copies += 1
        self._set(state)

    def _known(self) -> set[TransactionId]:
        return {*self.in_doubt, *self.proofs, *self.pruned}

    def ask(self, effect: Callable[[], Any]) -> Request:
        """Return the request: what is under way to one copy does not reach another."""
        copy = self._copies

        def arrive() -> Any:
            if copy != self._copies:
                raise Gone
            return effect()

        return super().ask(arrive)

    def knows(self, transaction: TransactionId) -> bool:
        return transaction in self.proofs or transaction in self.in_doubt

    def _take(self, transaction: TransactionId, rows: list[Row]) -> None:
        self._on_commit(transaction)
        self.proofs.add(transaction)
        self.rows.extend(rows)

    def _forget(self, before: CheckpointId) -> None:
        old = {proof for proof in self.proofs if proof.checkpoint < before}
        self.proofs -= old
        self.pruned |= old


class TwoPhase(Target):
    """Prepared transactions, and a ledger row in each: atomic, as Postgres is."""

    def __init__(self, clock: Clock, sink_id: str, on_commit: OnCommit) -> None:
        super().__init__(clock, sink_id, on_commit)
        self.prepared: dict[TransactionId, list[Row]] = {}

    @property
    def in_doubt(self) -> list[TransactionId]:
        return list(self.prepared)

    def pre_commit(self, transaction: TransactionId, rows: list[Row]) -> Steps[None]:
        yield self.ask(lambda: self._prepare(transaction, rows))

    def commit(self, committable: committables.Committable) -> Steps[committables.CommitOutcome]:
        try:
            outcome: committables.CommitOutcome = yield self.ask(
                lambda: self._commit(committable.transaction)
            )
        except Gone:
            return committables.Unknown("the connection broke")
        return outcome

    def abort(self, committable: committables.Committable) -> Steps[committables.AbortOutcome]:
        def roll_back() -> committables.AbortOutcome:
            self.prepared.pop(committable.transaction, None)
            known = committable.transaction in self.proofs
            return committables.AlreadyCommitted() if known else committables.Aborted()

        try:
            outcome: committables.AbortOutcome = yield self.ask(roll_back)
        except Gone:
            return committables.Unknown("the connection broke")
        return outcome

    def list_in_doubt(self) -> Steps[list[committables.Committable]]:
        found: list[TransactionId] = yield self.ask(lambda: list(self.prepared))
        return [committables.Committable(one) for one in found]

    def prune(self, before: CheckpointId) -> Steps[None]:
        yield self.ask(lambda: self._forget(before))

    def roll_back_by_hand(self, transaction: TransactionId) -> None:
        del self.prepared[transaction]

    def finish_by_hand(self, transaction: TransactionId, *, decided: bool) -> None:
        rows = self.prepared.pop(transaction, None)
        if decided and rows is not None:
            self._take(transaction, rows)

    def _prepare(self, transaction: TransactionId, rows: list[Row]) -> None:
        if transaction in self.prepared or transaction in self.proofs:
            raise Violation(f"I7 transaction {transaction} exists already: its name is used twice")
        self.prepared[transaction] = rows

    def _commit(self, transaction: TransactionId) -> committables.CommitOutcome:
        rows = self.prepared.pop(transaction, None)
        if rows is not None:
            self._take(transaction, rows)
            return committables.Committed()
        if transaction in self.proofs:
            return committables.AlreadyCommitted()
        return committables.Lost("neither prepared nor proved")

    def _state(self) -> tuple[Any, ...]:
        return dict(self.prepared), list(self.rows), set(self.proofs), set(self.pruned)

    def _set(self, state: tuple[Any, ...]) -> None:
        self.prepared, self.rows, self.proofs, self.pruned = state


class Staged(Target):
    """Rows wait in checkpoint storage; the target takes them with a proof, or not at all."""

    def __init__(self, clock: Clock, sink_id: str, on_commit: OnCommit) -> None:
        super().__init__(clock, sink_id, on_commit)
        self.staged: dict[TransactionId, list[Row]] = {}
        self.floor = CheckpointId(0)
        self.keeps_floor = True

    @property
    def in_doubt(self) -> list[TransactionId]:
        return [one for one in self.staged if one not in self.proofs]

    def pre_commit(self, transaction: TransactionId, rows: list[Row]) -> Steps[None]:
        if transaction in self.staged or transaction in self.proofs:
            raise Violation(f"I7 transaction {transaction} exists already: its name is used twice")
        self.staged[transaction] = rows
        yield 0.001

    def commit(self, committable: committables.Committable) -> Steps[committables.CommitOutcome]:
        transaction = committable.transaction
        try:
            # A target that takes all in one request: what is asked before spares the rows only.
            if (yield self.ask(lambda: self._refuses(transaction))):
                return (yield from self._not_applied(transaction))
            rows = self.staged.get(transaction)
            if rows is None:
                applied = yield self.ask(lambda: transaction in self.proofs)
                return (
                    committables.AlreadyCommitted()
                    if applied
                    else committables.Lost("neither staged nor proved")
                )
            self._leave_behind(transaction, rows)
            if not (yield self.ask(lambda: self._apply(transaction, rows))):
                return (yield from self._not_applied(transaction))
            self.staged.pop(transaction, None)
        except Gone:
            return committables.RetryLater("the connection broke")
        return committables.Committed()

    def abort(self, committable: committables.Committable) -> Steps[committables.AbortOutcome]:
        transaction = committable.transaction
        try:
            applied = yield self.ask(lambda: transaction in self.proofs)
        except Gone:
            return committables.RetryLater("the connection broke")
        self.staged.pop(transaction, None)
        return committables.AlreadyCommitted() if applied else committables.Aborted()

    def list_in_doubt(self) -> Steps[list[committables.Committable]]:
        found: list[committables.Committable] = []
        for transaction in sorted(self.staged):
            if not (yield self.ask(lambda one=transaction: one in self.proofs)):  # type: ignore[misc]
                found.append(committables.Committable(transaction))  # noqa: PERF401 - each may take a while
        return found

    def prune(self, before: CheckpointId) -> Steps[None]:
        for transaction in sorted(self.staged, key=lambda one: one.checkpoint):
            if transaction.checkpoint >= before:
                continue
            if (yield self.ask(lambda one=transaction: one in self.proofs)):  # type: ignore[misc]
                self.staged.pop(transaction, None)
            else:
                before = CheckpointId(transaction.checkpoint)
        yield self.ask(lambda: self._raise_floor(before))

    def roll_back_by_hand(self, transaction: TransactionId) -> None:
        del self.staged[transaction]

    def finish_by_hand(self, transaction: TransactionId, *, decided: bool) -> None:
        rows = self.staged.pop(transaction, None)
        if decided and rows is not None and transaction not in self.proofs:
            self._take(transaction, rows)

    def _refuses(self, transaction: TransactionId) -> bool:
        below = self.keeps_floor and transaction.checkpoint < self.floor
        return below or transaction in self.proofs

    def _apply(self, transaction: TransactionId, rows: list[Row]) -> bool:
        if self._refuses(transaction):
            return False
        self._take(transaction, rows)
        return True

    def _leave_behind(self, transaction: TransactionId, rows: list[Row]) -> None:
        """Sometimes another committer has come as far, is held up, and goes on much later."""

        copy = self._copies

        def go_on() -> None:
            if copy == self._copies:
                self._apply(transaction, rows)

        rng = self.clock.rng
        if rng.random() < self.overtaken_rate:
            self.clock.after(rng.uniform(0.2, 4.0), go_on)

    def _raise_floor(self, before: CheckpointId) -> None:
        self.floor = max(self.floor, before)
        self._forget(before)

    def _not_applied(self, transaction: TransactionId) -> Steps[committables.CommitOutcome]:
        if (yield self.ask(lambda: transaction in self.proofs)):
            self.staged.pop(transaction, None)
            return committables.AlreadyCommitted()
        if transaction in self.staged:
            return committables.RetryLater("below the floor")
        return committables.AlreadyCommitted()

    def _state(self) -> tuple[Any, ...]:
        return list(self.rows), set(self.proofs), set(self.pruned), self.floor

    def _set(self, state: tuple[Any, ...]) -> None:
        self.rows, self.proofs, self.pruned, self.floor = state


class Versioned(Target):
    """Files that nobody sees until a version names them; a version has the number of a decision."""

    def __init__(self, clock: Clock, sink_id: str, on_commit: OnCommit) -> None:
        super().__init__(clock, sink_id, on_commit)
        self.files: dict[TransactionId, list[Row]] = {}
        self.highest = CheckpointId(0)
        self.claims: list[Decided] = []
        """The highest version when an attempt claimed the sink id, by rising attempt."""
        self.on_version: Callable[[GlobalCommit], None] = lambda _: None
        self.keeps_order = True
        self.interval: committables.CommitInterval | None = None

    def claim(self, attempt: AttemptId) -> None:
        """Remember what is committed, unless a newer attempt has claimed."""
        if not self.claims or self.claims[-1].attempt < attempt:
            self.claims.append(Decided(attempt, self.highest))

    @property
    def in_doubt(self) -> list[TransactionId]:
        return [file for file in self.files if file not in self.proofs]

    def pre_commit(self, transaction: TransactionId, rows: list[Row]) -> Steps[None]:
        if transaction in self.files:
            raise Violation(f"I7 transaction {transaction} exists already: its name is used twice")
        self.files[transaction] = rows
        yield 0.001

    def commit(self, committable: committables.Committable) -> Steps[committables.CommitOutcome]:
        return (yield from self.commit_whole(GlobalCommit(committable.checkpoint, (committable,))))

    def commit_whole(self, commit: GlobalCommit) -> Steps[committables.CommitOutcome]:
        copy, rng = self._copies, self.clock.rng

        def go_on() -> None:
            if copy == self._copies:
                self._apply(commit)

        if rng.random() < self.overtaken_rate:
            # Another driver has come as far, is held up, and its request arrives much later.
            self.clock.after(rng.uniform(0.2, 4.0), go_on)
        try:
            outcome: committables.CommitOutcome = yield self.ask(lambda: self._apply(commit))
        except Gone:
            return committables.Unknown("the connection broke")
        return outcome

    def committed_through(self) -> Steps[CheckpointId]:
        highest: CheckpointId = yield self.ask(lambda: self.highest)
        return highest

    def abort(self, committable: committables.Committable) -> Steps[committables.AbortOutcome]:
        def delete() -> committables.AbortOutcome:
            if committable.transaction in self.proofs:
                return committables.AlreadyCommitted()
            self.files.pop(committable.transaction, None)
            return committables.Aborted()

        try:
            outcome: committables.AbortOutcome = yield self.ask(delete)
        except Gone:
            return committables.Unknown("the connection broke")
        return outcome

    def list_in_doubt(self) -> Steps[list[committables.Committable]]:
        found: list[TransactionId] = yield self.ask(lambda: self.in_doubt)
        return [committables.Committable(one) for one in found]

    def prune(self, before: CheckpointId) -> Steps[None]:
        del before
        yield 0.001

    def roll_back_by_hand(self, transaction: TransactionId) -> None:
        del self.files[transaction]

    def finish_by_hand(self, transaction: TransactionId, *, decided: bool) -> None:
        raise Violation(f"a version has {transaction}, which nobody remembers, decided: {decided}")

    def _apply(self, commit: GlobalCommit) -> committables.CommitOutcome:
        if self.keeps_order and commit.checkpoint <= self.highest:
            return committables.AlreadyCommitted()
        if self.interval:
            # Another driver may have gathered others.
            left = tuple(c for c in commit.committables if c.checkpoint > self.highest)
            if not left:
                return committables.AlreadyCommitted()
            commit = replace(commit, committables=left)
        transactions = [committable.transaction for committable in commit.committables]
        if not self.files.keys() >= set(transactions):
            return committables.Lost("a file is not there")
        self.on_version(commit)
        for transaction in transactions:
            self._take(transaction, self.files[transaction])
        self.highest = max(self.highest, commit.checkpoint)
        return committables.Committed()

    def _state(self) -> tuple[Any, ...]:
        return list(self.rows), set(self.proofs), set(self.pruned), self.highest, list(self.claims)

    def _set(self, state: tuple[Any, ...]) -> None:
        self.rows, self.proofs, self.pruned, self.highest, self.claims = state


def names(transactions: Sequence[TransactionId]) -> str:
    return ", ".join(map(str, sorted(transactions)))
