"""Where the decisions of batches are kept: the contract; `protocol.batches` has the rules.

Two keepers: a table beside the ledger, for databases (`sinks.sql.batch_table`), and a decision
log in storage, for targets without tables (`core.storage.log.batch_log`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from onceflow.core.errors import Fenced
from onceflow.core.protocol.batches import BatchClaim, BatchDecision
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.spi import Sink


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who has made the newest claim of a sink id."""

    attempt: AttemptId
    name: str = ""
    """The application, its process and host; empty where the target does not tell."""
    since: str = ""

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.name or 'another run'}, since {self.since}"


class BatchDecisions(ABC):
    """The decisions of one sink id, for one owner. Used by one thread; any number of processes.

    Claims and decisions of one sink id are in one order, the same for everybody: a decision that a
    claim does not see is refused later.
    """

    @abstractmethod
    def claim(
        self, open_sink: Callable[[AttemptId], None], *, after: AttemptId | None = None
    ) -> BatchClaim:
        """Return a new attempt, which fences all older ones, with all that was decided before.

        `open_sink` opens the sink for the attempt that it is given, and is called at least once.
        With `after`, nothing is claimed unless that attempt is the newest. A crash leaves at most
        an attempt that nobody uses.

        Raises:
            ConfigError: The sink id belongs to somebody else, or the sink cannot be opened.
            Fenced: Others keep claiming it, or one has claimed it since `after`.
            SinkError: The target cannot be asked now.
            StorageError: The log cannot be read or written.
        """

    @abstractmethod
    def read_claim(self) -> BatchClaim:
        """Return the newest attempt, 0 before the first, and what is decided; changes nothing.

        Raises:
            ConfigError: The sink id belongs to somebody else.
            SinkError, StorageError: The target or the log cannot be read now.
        """

    @abstractmethod
    def claimant(self) -> Claimant:
        """Return who has made the newest claim; attempt 0 before the first. Changes nothing.

        Raises:
            SinkError, StorageError: The target or the log cannot be read now.
        """

    def check_newest(self, attempt: AttemptId) -> None:
        """Raise Fenced, which names the newest claimant, unless that is still `attempt`."""
        newest = self.claimant()
        if newest.attempt != attempt:
            fenced = f"attempt {attempt}" if attempt else "this run"
            raise Fenced(
                f"{fenced} is fenced: another run of the same job has claimed the sink id,"
                f" {newest}. That one goes on. Wait for it to end; then repeat this one: it finds"
                " what is written, if the batch is numbered, and does not write it again"
            )

    @abstractmethod
    def fence(self) -> None:
        """Claim an attempt that writes nothing: no one before decides anything from then on.

        Raises:
            Fenced: Another run claims it at this moment, or nobody ever did.
            ConfigError, SinkError, StorageError: As `claim`.
        """

    def claim_next(self, after: AttemptId) -> BatchClaim | None:
        """Return what `claim` does, without opening the sink again, while `after` is the newest.

        None when it is not, or the sink must be opened for each attempt.
        """
        del after
        return None

    def with_committables(self, claim: BatchClaim) -> BatchClaim:
        """Return `claim` with what its decisions list, which may be left out of settled ones."""
        return claim

    @abstractmethod
    def decide(self, decision: BatchDecision) -> BatchDecision:
        """Return what is decided for the batch: durably, and the same for everybody from then on.

        Usually `decision` itself. Called again with it, it returns the same: an answer that was
        lost does no harm.

        Raises:
            Fenced: A newer attempt has claimed the sink id.
            CommitOutcomeUnknown: Nobody can tell now whether it is decided.
            SinkError: It is not decided.
            StorageError: It is not decided.
        """

    def decide_with_rows(self, decision: BatchDecision) -> BatchDecision:
        """Return what `decide` does, with staged rows visible at once where the keeper can do that.

        Only while no try of a task that is staged is prepared: its locks would be waited for in
        vain.
        Whatever is visible already, all that the decision lists is to be committed as ever.

        Raises:
            BadRow: The target refuses a row; it is not decided.
            Fenced, CommitOutcomeUnknown, SinkError, StorageError: As `decide`.
        """
        return self.decide(decision)

    @abstractmethod
    def mark_committed(self, decision: BatchDecision) -> None:
        """Remember that all of `decision` is committed, and forget what nobody asks for any more.

        Only hastens things: what fails is logged, and a loss does no harm.
        """

    @property
    def can_give_up(self) -> bool:
        """Whether `give_up` takes something out of a decision."""
        return False

    def give_up(self, transaction: TransactionId) -> None:
        """Take `transaction`, which was rolled back by hand, out of the decision that lists it.

        A decision that lists nothing more is forgotten, so its batch may be written again. A log of
        decisions cannot be changed: there nothing happens, and the next batch calls the rows lost.

        Raises:
            SinkError: The target cannot be asked now.
        """
        del transaction

    def task_sink(self, sink: Sink) -> Sink:
        """Return `sink` as the tasks need it, now that it is open."""
        return sink

    @abstractmethod
    def close(self) -> None:
        """Release everything. Safe to call twice."""
