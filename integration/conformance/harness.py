"""The harness of a clause: a sink under new sink ids, and the checks of the target."""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from onceflow.core.arrow.exact_arrays import exact_array
from onceflow.core.commit.loop import open_global_committer
from onceflow.core.protocol.committables import (
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import CommittedBy, Committer, GlobalCommitter, Sink, SinkWriter
from onceflow.core.storage import FileSystemStorage
from onceflow.integration.conformance.processes import Processes
from onceflow.integration.conformance.sink_job import JOB, OneByOne, SinkJob
from onceflow.integration.conformance.target import NotTestable, SinkTarget, Violation, expect

PATIENCE_S = 10.0
"""The time for which a sink may answer RetryLater or Unknown without any fault."""
SERVER_PATIENCE_S = 60.0
"""The time for which a sink may answer RetryLater or Unknown after a fault of server or network."""

_IDS_A_CLAUSE_BITS = 14
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A committable that a writer has pre-committed for a checkpoint, and the ids of its rows."""

    committable: Committable
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort of randomized tests."""

    seed: int = 1
    rounds: int = 8
    """The number of killed attempts in the long run. Single lines of the sink get twice as many
    kills."""


class Harness:
    """The sink ids, row ids, checkpoint storage and randomness of one clause. One thread."""

    def __init__(
        self, target: SinkTarget, processes: Processes, directory: Path, effort: Effort, clause: str
    ) -> None:
        self.target = target
        self.processes = processes
        self.directory = directory
        self.effort = effort
        # Each clause has its own seed, so its numbers do not depend on which other clauses have
        # run.
        self.random = random.Random(f"{effort.seed} {clause}")  # noqa: S311 - of a schedule
        self.described = target.sink()
        """The sink as its author built it."""
        self.sink: Sink = self.described
        if self.described.committed_by is CommittedBy.DRIVER:
            self.sink = OneByOne(self.described)
        self.job = self.another_job(f"kit{secrets.token_hex(4)}")
        self._jobs = [self.job]
        # Do not use the seed for ids: a reused target still has the rows of earlier runs.
        self._ids = range(*_block(secrets.randbelow(1 << 38)))
        self._given = 0
        self._values: dict[int, int] = {}
        self.patience_s = PATIENCE_S

    # --- writing ------------------------------------------------------------------------------

    def ids(self, count: int = 3) -> tuple[int, ...]:
        """Return new row ids."""
        ids = tuple(self._ids[self._given : self._given + count])
        self._given += count
        return ids

    def batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return the rows of `ids` with their current values."""
        # The id column has the row's own id. All other columns come from the id that stands for its
        # current values. So a changed row keeps its key.
        first, *others = self.target.batch(
            [self._values.get(row_id, row_id) for row_id in ids]
        ).columns
        return pa.RecordBatch.from_arrays(
            [exact_array(ids, first.type), *others], schema=self.target.schema
        )

    def change(self, ids: Sequence[int]) -> bool:
        """Change the values of the rows of `ids`. Return False if the sink cannot update rows."""
        if tuple(self.sink.routing_key()) != (self.target.schema.names[0],):
            return False
        self._values.update(zip(ids, self.ids(len(ids)), strict=True))
        return True

    def another_job(self, sink_id: str, *, log: str = "log") -> SinkJob:
        """Return a job under the given sink id and decision log."""
        storage = FileSystemStorage(str(self.directory / log)).open(JOB)
        job = SinkJob(self.sink, sink_id, storage, self.target.schema)
        self._jobs = [*getattr(self, "_jobs", []), job]
        return job

    def prepare(
        self,
        checkpoint: int,
        *,
        attempt: int = 1,
        subtask: int = 0,
        job: SinkJob | None = None,
        writer: SinkWriter | None = None,
        ids: Sequence[int] = (),
    ) -> Prepared:
        """Write and pre-commit rows with `writer`, or with a new writer that is then closed."""
        job = job or self.job
        row_ids = tuple(ids) or self.ids()
        own = writer or job.writer(attempt, subtask, first_checkpoint=checkpoint)
        own.write(self.batch(row_ids))
        committables = own.pre_commit(CheckpointId(checkpoint))
        if writer is None:
            own.close()
        if len(committables) != 1:
            raise Violation(
                f"pre_commit({checkpoint}) of {len(row_ids)} rows returned {committables}: the kit"
                " asks for rows that one transaction takes"
            )
        return Prepared(committables[0], row_ids)

    # --- deciding -----------------------------------------------------------------------------

    def commit(self, prepared: Prepared, committer: Committer | None = None) -> CommitOutcome:
        """Commit, and repeat while the outcome is unknown. Return the outcome.

        Raises:
            Violation: The outcome is still unknown after `patience_s`.
        """
        own = committer or self.job.committer(prepared.committable.transaction.attempt)
        return ask_until_known(lambda: own.commit(prepared.committable), self.patience_s)

    @contextmanager
    def global_committer(self, attempt: int = 1) -> Generator[GlobalCommitter, None, None]:
        """Yield a committer of whole checkpoints.

        Raises:
            NotTestable: The sink commits each transaction by itself.
        """
        if self.described.committed_by is CommittedBy.SLOTS:
            raise NotTestable("the sink commits each transaction by itself")
        self.job.begin(attempt)
        committer = open_global_committer(self.described, self.job.committer_context(attempt))
        try:
            yield committer
        finally:
            committer.close()

    def commit_all(self, *prepared: Prepared) -> None:
        """Commit all in the given order. Each commit must succeed."""
        for transaction in prepared:
            outcome = self.commit(transaction)
            expect(
                isinstance(outcome, (Committed, AlreadyCommitted)),
                f"commit of {transaction.committable.transaction}, which is pre-committed:"
                f" {outcome}",
            )

    def abort(self, prepared: Prepared, committer: Committer | None = None) -> AbortOutcome:
        """Abort, and repeat while the outcome is unknown. Return the outcome.

        Raises:
            Violation: The outcome is still unknown after `patience_s`.
        """
        own = committer or self.job.committer(prepared.committable.transaction.attempt)
        return ask_until_known(lambda: own.abort(prepared.committable), self.patience_s)

    # --- looking ------------------------------------------------------------------------------

    def expect_seen(self, *seen: Iterable[int], when: str) -> None:
        """Raise Violation if a reader does not see exactly the clause's rows `seen`, once each.

        Raises:
            Violation: The reader sees other rows.
        """
        ids = sorted(row_id for some in seen for row_id in some)
        rows = self._rows()
        counts = Counter(row_id for row_id, _ in rows)
        doubled = sorted(row_id for row_id, count in counts.items() if count > 1)
        missing = sorted(set(ids) - set(counts))
        # Report early rows first, because they explain doubled and missing rows.
        early = sorted(set(counts) - set(ids))
        expect(not early, f"{when}: {_some(early)} visible, but must not be")
        expect(not doubled, f"{when}: {_some(doubled)} visible more than once")
        expect(not missing, f"{when}: {_some(missing)} not visible")
        written = dict(zip(ids, self.batch(ids).to_pylist(), strict=True)) if ids else {}
        for row_id, row in rows:
            expect(row == written[row_id], f"{when}: written: {written[row_id]}, visible: {row}")

    def read_ids(self) -> list[int]:
        """Return the ids of this clause's rows that a reader sees, including duplicates."""
        return sorted(row_id for row_id, _ in self._rows())

    def expect_in_doubt(self, *prepared: Prepared, when: str) -> None:
        """Raise Violation if not exactly `prepared` are in doubt under the clause's sink id."""
        names = sorted(str(transaction.committable.transaction) for transaction in prepared)
        in_doubt = self.job.in_doubt()
        expect(in_doubt == names, f"{when}: in doubt are {in_doubt}, but should be {names}")

    def clean_up(self) -> None:
        """Abort all prepared transactions of this clause and close everything."""
        self.processes.disarm()
        for job in self._jobs:
            job.clean_up()

    def _rows(self) -> list[tuple[int, dict[str, object]]]:
        """Return this clause's rows with their ids, reduced to the written columns."""
        rows = self.target.rows()
        listed: Sequence[Mapping[str, object]]
        listed = rows.to_pylist() if isinstance(rows, pa.Table) else rows
        names = self.target.schema.names
        own: list[tuple[int, dict[str, object]]] = []
        for row in listed:
            missing = [name for name in names if name not in row]
            expect(
                not missing,
                f"rows() of the target returned {dict(row)}, which lacks {', '.join(missing)}:"
                f" return each row with its columns {', '.join(names)}",
            )
            row_id = row[names[0]]
            # The target may hold rows of other clauses and of earlier runs.
            if isinstance(row_id, int) and row_id in self._ids:
                own.append((row_id, {name: row[name] for name in names}))
        return own


def ask_until_known(ask: Callable[[], _T], patience_s: float = PATIENCE_S) -> _T:
    """Call `ask` until it returns neither RetryLater nor Unknown. Return the outcome.

    Raises:
        Violation: It still returns RetryLater or Unknown after `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    pause_s = 0.01
    while isinstance(outcome := ask(), (RetryLater, Unknown)):
        if time.monotonic() > deadline:
            raise Violation(f"asked for {patience_s:g} s, the sink kept answering {outcome}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.5)
    return outcome


def _block(number: int) -> tuple[int, int]:
    return number << _IDS_A_CLAUSE_BITS, (number + 1) << _IDS_A_CLAUSE_BITS


def _some(ids: Sequence[int]) -> str:
    return f"{len(ids)} rows ({', '.join(map(str, ids[:5]))}{', …' * (len(ids) > 5)})"
