"""The rules of the decision log: who may append which record, and what a list of records means.

Each sequence number has one record, which is created only if the number is free. Each record
contains the digest of the one before it. So the log is a chain, and if two drivers append after the
same record, one of them wins:

    AttemptClaimed(1) <- CheckpointDecided(2, genesis) <- CheckpointDecided(3) <- AttemptClaimed(4)

Invariants of a chain:
    record[s + 1].previous == digest(record[s])
    AttemptClaimed.attempt > attempt before;  CheckpointDecided.attempt == attempt before
    CheckpointDecided.completed.checkpoint rises strictly, over all attempts

Old records are pruned, lowest first. So a late appender may find its number free again and create
an *orphan* below the chain. Hence two more rules: an appender owns the log only if its record is
the highest (`check_append`), and a reader accepts only the chain that ends in the highest record
(`replay`). Storage does the reading, writing, digests and encoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from onceflow.core.errors import CheckpointCorrupt, Fenced
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, committables_of
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId
from onceflow.core.protocol.log.memory import NOTHING_REMEMBERED, LogMemory


@dataclass(frozen=True, slots=True)
class AttemptClaimed:
    """A record after which only `attempt` appends; every lower attempt is fenced."""

    sequence: int
    attempt: AttemptId
    owner: str
    """The driver that claimed: host, process and a random part, so that no two drivers share it."""
    previous: str
    sinks: tuple[str, ...] = ()
    """The sink ids under which the attempt may write."""


@dataclass(frozen=True, slots=True)
class CheckpointDecided:
    """A record that everything before the barrier of `completed` is done for good."""

    sequence: int
    attempt: AttemptId
    completed: CompletedCheckpoint
    previous: str
    memory: LogMemory = NOTHING_REMEMBERED
    """The facts about pruned records, as of this record."""


LogRecord: TypeAlias = AttemptClaimed | CheckpointDecided

NO_ATTEMPT = AttemptId(0)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A record as it is in storage, with the digest of its bytes."""

    record: LogRecord
    digest: str


@dataclass(frozen=True, slots=True)
class LogView:
    """The content of the chain. The empty view is that of a job that never ran."""

    last_sequence: int = 0
    last_digest: str = ""
    attempt: AttemptId = NO_ATTEMPT
    owner: str = field(default="", compare=False)
    """The driver that claimed `attempt`. Empty for a reader if that record is pruned."""
    decided: tuple[CheckpointDecided, ...] = ()
    """Every decision still in the log, oldest first."""
    first_sequence: int = 1
    """The number of the oldest record still in the chain. Lower ones are pruned."""
    orphans: tuple[int, ...] = ()
    """Sequence numbers of records that are not in the chain: leftovers to delete."""
    memory: LogMemory = NOTHING_REMEMBERED
    """The facts about pruned records, as of the last record."""
    starts_over: bool = field(default=False, compare=False)
    """True if the next decision must not count the last decision's transactions as committed. No
    later start asks targets for them."""

    @property
    def completed(self) -> tuple[CompletedCheckpoint, ...]:
        """Every completed checkpoint still in the log, oldest first; empty before genesis."""
        return tuple(record.completed for record in self.decided)

    @property
    def sinks(self) -> frozenset[str]:
        """The sink ids under which a transaction may be in doubt."""
        last = committables_of(self.decided[-1].completed) if self.decided else ()
        return frozenset({*self.memory.sinks, *(c.transaction.sink_id for c in last)})

    def list_committed_last(self, sink_id: str) -> tuple[Committable, ...]:
        """Return the last commits of `sink_id`, as of each decision still in the log.

        A start from any of these decisions asks for the proof of its commits.
        """
        return tuple(
            committable for record in self.decided for committable in record.memory.of_sink(sink_id)
        )

    def memory_at(self, taken: CompletedCheckpoint) -> LogMemory:
        """Return the memory as of `taken`, a savepoint, which the log never decides.

        The savepoint's job may decide more checkpoints before the savepoint is written. Their
        commits come after its barrier, and a start from the savepoint must not treat them as known.
        A transaction that the previous decision lists and the savepoint does not list is committed:
        the savepoint's attempt knew so.
        """
        memory = self.memory.until(taken.attempt, taken.checkpoint)
        before = [
            record for record in self.decided if record.completed.checkpoint < taken.checkpoint
        ]
        if not before:
            return memory
        committed = before[-1].memory.committed
        return replace(memory, committed=committed).with_committed(
            listed_before=committables_of(before[-1].completed), listed=committables_of(taken)
        )

    @property
    def next_checkpoint(self) -> CheckpointId:
        """The number of the next barrier: one past the last decision, and at least 1.

        A number that an earlier attempt triggered and never completed is used again. Therefore
        names that contain a checkpoint's number also contain the attempt's.
        """
        last = self.decided[-1].completed.checkpoint if self.decided else GENESIS
        return CheckpointId(last + 1)


def replay(entries: Iterable[LogEntry]) -> LogView:
    """Return the view of the chain that ends in the highest of `entries` (in any order).

    Lower records that are not linked to it are orphans. A directory listing that is not atomic can
    miss a record below the highest. So if there are `orphans`, the reader asks for the record just
    below the chain by name, and lists again if that record exists.

    Raises:
        CheckpointCorrupt: Two records have one number, a link breaks the rules, or the log was
            cut below its last decision.
    """
    by_sequence: dict[int, LogEntry] = {}
    for entry in entries:
        # A number is created only if absent, so two records of one number mean that the storage
        # broke its guarantee.
        if by_sequence.setdefault(entry.record.sequence, entry) is not entry:
            raise CheckpointCorrupt(
                f"decision log: two records have the number {entry.record.sequence}"
            )
    if not by_sequence:
        return LogView()
    chain = _follow_chain(by_sequence)
    view = _before(chain[0].record)
    for entry in chain:
        view = apply(view, entry)
    # Pruning never removes the last decision, so something else has deleted it.
    if not view.decided and chain[0].record.sequence > 1:
        raise CheckpointCorrupt(
            f"decision log: the records before {chain[0].record.sequence} are gone, and no"
            " remaining record is a decision. Starting over would lose rows or write them twice."
            " Restore the directory."
        )
    orphans = sorted(by_sequence.keys() - {entry.record.sequence for entry in chain})
    return replace(view, orphans=tuple(orphans))


def apply(view: LogView, entry: LogEntry) -> LogView:
    """Return `view` with one more record at its end.

    Raises:
        CheckpointCorrupt: The record does not follow `view` by the rules of a chain.
    """
    record = entry.record
    if (record.sequence, record.previous) != (view.last_sequence + 1, view.last_digest):
        raise CheckpointCorrupt(
            f"decision log: record {record.sequence} follows {record.previous or 'nothing'}, "
            f"but record {view.last_sequence} is {view.last_digest or 'nothing'}"
        )
    decided, owner = view.decided, view.owner
    if isinstance(record, AttemptClaimed):
        # The attempt is higher than the next number if a target has seen attempts that this log
        # does not contain.
        attempt_expected, owner = max(view.attempt + 1, record.attempt), record.owner
        memory = view.memory.with_sinks(record.sinks)
    else:
        attempt_expected = view.attempt
        # Checkpoint 0 is the empty start, so -1 is below every checkpoint.
        last = decided[-1].completed.checkpoint if decided else -1
        if record.completed.checkpoint <= last or record.completed.attempt != record.attempt:
            raise CheckpointCorrupt(
                f"decision log: record {record.sequence} of attempt {record.attempt} decides "
                f"checkpoint {record.completed.checkpoint} of attempt {record.completed.attempt} "
                f"after checkpoint {last}"
            )
        # The record's own memory also covers records that are pruned by now.
        memory = record.memory
        decided = (*decided, record)
    if record.attempt != attempt_expected or record.attempt < 1:
        raise CheckpointCorrupt(
            f"decision log: record {record.sequence} belongs to attempt {record.attempt},"
            f" expected attempt {attempt_expected}"
        )
    return replace(
        view,
        last_sequence=record.sequence,
        last_digest=entry.digest,
        attempt=record.attempt,
        owner=owner,
        decided=decided,
        memory=memory,
        starts_over=view.starts_over and isinstance(record, AttemptClaimed),
    )


def next_claim(
    view: LogView, owner: str, sinks: Iterable[str] = (), *, above: AttemptId = NO_ATTEMPT
) -> AttemptClaimed:
    """Return the record that makes `owner` the next attempt, if the record can be created.

    It takes the job over from any other driver; a driver uses it for its first claim. From then on
    the attempt may write under `sinks`. Its number is higher than `above`, an attempt that a target
    has seen.
    """
    return AttemptClaimed(
        sequence=view.last_sequence + 1,
        attempt=AttemptId(max(view.attempt, above) + 1),
        owner=owner,
        previous=view.last_digest,
        sinks=tuple(sorted(sinks)),
    )


def claim_again(
    view: LogView, *, owner: str, attempt: AttemptId, above: AttemptId = NO_ATTEMPT
) -> AttemptClaimed:
    """Return the record that makes `owner`, which claimed `attempt`, the next attempt as well.

    A driver whose attempt has failed may claim again only while no other driver has claimed since:
    of two drivers, the one started last goes on. A claim by the same driver, whose outcome it did
    not learn, may be above `attempt`. `owner` differs from that of every other driver.

    Raises:
        Fenced: Another driver has claimed the job since.
    """
    # Compare the owner, too: if the answer to an earlier claim was lost, that claim has a higher
    # number and is still ours.
    if view.attempt == attempt or view.owner == owner:
        return next_claim(view, owner, above=above)
    raise Fenced(
        f"attempt {attempt} is fenced: attempt {view.attempt} ({owner_of(view)}) has claimed the"
        " job since"
    )


def owner_of(view: LogView) -> str:
    """Return the owner of the newest attempt, for people to read."""
    return view.owner or "owner pruned"


def next_decision(view: LogView, completed: CompletedCheckpoint) -> CheckpointDecided:
    """Return the record that decides `completed`, if the record can be created.

    Raises:
        Fenced: `view` already shows a newer attempt.
        CheckpointCorrupt: The log holds this checkpoint or a later one.
    """
    if completed.attempt != view.attempt:
        raise Fenced(
            f"attempt {completed.attempt} cannot decide checkpoint {completed.checkpoint}: "
            f"attempt {view.attempt} owns the job"
        )
    record = CheckpointDecided(
        sequence=view.last_sequence + 1,
        attempt=completed.attempt,
        completed=completed,
        previous=view.last_digest,
        memory=_memory_after(view, completed),
    )
    # Check the record by the rules for readers, so that no record is written that a reader would
    # refuse.
    apply(view, LogEntry(record, digest="not yet known"))
    return record


@dataclass(frozen=True, slots=True)
class AppendStands:
    """The verdict that the record is in the log and its appender still owns the job."""


@dataclass(frozen=True, slots=True)
class AppendFenced:
    """The verdict that the appender has lost the job.

    The newer attempt finds out whether the record counts when it reads the log.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class AppendUnlisted:
    """The verdict that the record exists but the listing lacks it.

    So the listing may also lack the claim of a newer attempt.
    """


AppendVerdict: TypeAlias = AppendStands | AppendFenced | AppendUnlisted


def check_append(
    record: LogRecord, digest: str, *, standing_digest: str | None, highest_sequence: int
) -> AppendVerdict:
    """Return the verdict about an append, from a look at the log *after* the create.

    `standing_digest` is the digest of the record now at that number, or None if there is none. So a
    create whose reply was lost is judged like one that succeeded. An owner runs one append at a
    time, so a record above this one belongs to another process. Either the number was pruned and
    this record is an orphan, or a newer attempt has claimed since. Both fence the appender.
    """
    # Compare digests before numbers: a foreign record at our number fences us, no matter which
    # records are above it.
    if standing_digest != digest:
        return AppendFenced(
            f"attempt {record.attempt} lost sequence number {record.sequence} of the decision log: "
            + ("it was pruned" if standing_digest is None else f"{standing_digest} stands there")
        )
    if highest_sequence < record.sequence:
        return AppendUnlisted()
    if highest_sequence > record.sequence:
        return AppendFenced(
            f"attempt {record.attempt} wrote record {record.sequence} of the decision log, which"
            f" already ends at record {highest_sequence}: a newer attempt owns the job"
        )
    return AppendStands()


def prunable(view: LogView, retained: int) -> tuple[int, ...]:
    """Return the sequence numbers to delete, lowest first, so that `retained` decisions stay.

    Delete in this order, and delete records before the files that they name. A crash in between
    then leaves a shorter chain, or files that no record names.
    """
    if retained < 1:
        raise ValueError(f"retained={retained} must be 1 or more")
    if not view.decided:
        return view.orphans
    # Claims above the oldest kept decision stay as well. Otherwise the chain would have a gap.
    oldest_kept = view.decided[-retained:][0].sequence
    return (*view.orphans, *range(view.first_sequence, oldest_kept))


def _follow_chain(by_sequence: dict[int, LogEntry]) -> list[LogEntry]:
    chain = [by_sequence[max(by_sequence)]]
    # Follow digests from the highest record down. A record that is not linked to the highest was
    # overtaken before it could count.
    while True:
        above = chain[-1].record
        below = by_sequence.get(above.sequence - 1)
        if below is None or below.digest != above.previous:
            return chain[::-1]
        chain.append(below)


def _before(first: LogRecord) -> LogView:
    """Return the view that must have preceded the oldest record of a chain; its past is pruned."""
    # A claim is the first record of its attempt, and a decision is not.
    claims = isinstance(first, AttemptClaimed)
    attempt = AttemptId(first.attempt - 1) if claims else first.attempt
    memory = LogMemory(since=first.attempt)
    return LogView(
        first.sequence - 1, first.previous, attempt, first_sequence=first.sequence, memory=memory
    )


def _memory_after(view: LogView, completed: CompletedCheckpoint) -> LogMemory:
    last = view.decided[-1].completed if view.decided and not view.starts_over else None
    return view.memory.with_decision(
        completed.attempt,
        completed.checkpoint,
        listed_before=committables_of(last) if last else (),
        listed=committables_of(completed),
    )
