"""What a clause works with: a sink under sink ids of its own, and an eye on the target."""

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
from onceflow.core.commit.committers import open_global_committer
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
"""How long a sink may answer "later" or "unknown" where nothing is in its way."""
SERVER_PATIENCE_S = 60.0
"""The same, where its server has been away or frozen, or the network has lost something."""

_IDS_A_CLAUSE_BITS = 14
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one writer has pre-committed for one checkpoint."""

    committable: Committable
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried where all cannot be."""

    seed: int = 1
    rounds: int = 8
    """Attempts of the long run that are killed; twice as many kills at single lines of the sink."""


class Harness:
    """One clause's own sink id, row ids, checkpoint storage and randomness. One thread."""

    def __init__(
        self, target: SinkTarget, processes: Processes, directory: Path, effort: Effort, clause: str
    ) -> None:
        self.target = target
        self.processes = processes
        self.directory = directory
        self.effort = effort
        # A seed for each clause: what one draws does not depend on which others have run.
        self.random = random.Random(f"{effort.seed} {clause}")  # noqa: S311 - of a schedule
        self.described = target.sink()
        """The sink as its author wrote it."""
        self.sink: Sink = self.described
        if self.described.committed_by is CommittedBy.DRIVER:
            self.sink = OneByOne(self.described)
        self.job = self.another_job(f"kit{secrets.token_hex(4)}")
        self._jobs = [self.job]
        # Not from the seed: a target that is used again still has the rows of the run before.
        self._ids = range(*_block(secrets.randbelow(1 << 38)))
        self._given = 0
        self._values: dict[int, int] = {}
        self.patience_s = PATIENCE_S

    # --- writing ------------------------------------------------------------------------------

    def ids(self, count: int = 3) -> tuple[int, ...]:
        """Return row ids that nobody else has."""
        ids = tuple(self._ids[self._given : self._given + count])
        self._given += count
        return ids

    def batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return the rows of `ids` as they are to be written and seen now."""
        # The id column is set to the row's own id, and all others come from the id that stands for
        # its values now. So a changed row keeps its key.
        first, *others = self.target.batch([self._values.get(one, one) for one in ids]).columns
        return pa.RecordBatch.from_arrays(
            [exact_array(ids, first.type), *others], schema=self.target.schema
        )

    def change(self, ids: Sequence[int]) -> bool:
        """Give the rows of `ids` other values from now on; return False when the sink cannot."""
        if tuple(self.sink.routing_key()) != (self.target.schema.names[0],):
            return False
        self._values.update(zip(ids, self.ids(len(ids)), strict=True))
        return True

    def another_job(self, sink_id: str, *, log: str = "log") -> SinkJob:
        """Return a job under another sink id, or with another decision log."""
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
        """Return what a writer has pre-committed: one of its own, closed after it, or `writer`."""
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
        """Commit it, asking again while nobody can tell; return how it ended.

        Raises:
            Violation: Nobody can tell for `patience_s`.
        """
        own = committer or self.job.committer(prepared.committable.transaction.attempt)
        return ask_until_known(lambda: own.commit(prepared.committable), self.patience_s)

    @contextmanager
    def global_committer(self, attempt: int = 1) -> Generator[GlobalCommitter, None, None]:
        """Lend a committer of whole checkpoints.

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
        """Commit all, in this order, each of which must succeed."""
        for one in prepared:
            outcome = self.commit(one)
            expect(
                isinstance(outcome, (Committed, AlreadyCommitted)),
                f"commit of {one.committable.transaction}, which is pre-committed: {outcome}",
            )

    def abort(self, prepared: Prepared, committer: Committer | None = None) -> AbortOutcome:
        """Abort it, asking again while nobody can tell; return how it ended.

        Raises:
            Violation: Nobody can tell for `patience_s`.
        """
        own = committer or self.job.committer(prepared.committable.transaction.attempt)
        return ask_until_known(lambda: own.abort(prepared.committable), self.patience_s)

    # --- looking ------------------------------------------------------------------------------

    def expect_seen(self, *seen: Iterable[int], when: str) -> None:
        """Raise Violation unless a reader sees exactly the rows `seen` of this clause, once each.

        Raises:
            Violation: It sees something else.
        """
        ids = sorted(one for some in seen for one in some)
        rows = self._rows()
        counts = Counter(one for one, _ in rows)
        doubled = sorted(one for one, count in counts.items() if count > 1)
        missing = sorted(set(ids) - set(counts))
        # Told first: a row that is seen too early explains doubled and missing ones.
        early = sorted(set(counts) - set(ids))
        expect(not early, f"{when}: {_some(early)} seen, and should not be")
        expect(not doubled, f"{when}: {_some(doubled)} seen more than once")
        expect(not missing, f"{when}: {_some(missing)} not seen")
        written = dict(zip(ids, self.batch(ids).to_pylist(), strict=True)) if ids else {}
        for one, row in rows:
            expect(row == written[one], f"{when}: written was {written[one]}, seen is {row}")

    def read_ids(self) -> list[int]:
        """Return the ids of this clause's rows that a reader sees, doubles kept."""
        return sorted(one for one, _ in self._rows())

    def expect_in_doubt(self, *prepared: Prepared, when: str) -> None:
        """Raise Violation unless exactly `prepared` are in doubt under the clause's sink id."""
        names = sorted(str(one.committable.transaction) for one in prepared)
        in_doubt = self.job.in_doubt()
        expect(in_doubt == names, f"{when}: in doubt are {in_doubt}, and should be {names}")

    def clean_up(self) -> None:
        """Leave nothing of this clause prepared or open."""
        self.processes.disarm()
        for job in self._jobs:
            job.clean_up()

    def _rows(self) -> list[tuple[int, dict[str, object]]]:
        """Return this clause's rows, by id, each with the columns that were written."""
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
            one = row[names[0]]
            # The target may hold rows of other clauses and of earlier runs.
            if isinstance(one, int) and one in self._ids:
                own.append((one, {name: row[name] for name in names}))
        return own


def ask_until_known(ask: Callable[[], _T], patience_s: float = PATIENCE_S) -> _T:
    """Return what `ask` says when it is neither "later" nor "unknown".

    Raises:
        Violation: It says nothing else for `patience_s`.
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
