"""The decision log in a file system: the decided checkpoints, and the claims of drivers.

Each record is one file, created by `create_if_absent` and never changed. `protocol.log` has the
rules of the chain; this module reads, writes and deletes files. A driver may be suspended for an
hour while its next sequence number is used, pruned, and free again. Two rules of this module make
sure that its record does not count then:

    A created record counts only while its predecessor exists. Records are deleted lowest first,
    so if the predecessor exists, the number was never deleted and was created for the first time.
    The first record counts only while `pruned` does not exist. `pruned` is created before the
    first deletion.

`DecisionLog` is for readers and for drivers that want to own the log, `ClaimedLog` for its owner.
Sinks store the log's identity (`log_id`): if two logs write to one sink, they belong to two jobs.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial

import msgspec

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import CheckpointCorrupt, CheckpointError, Fenced, StorageError
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, committables_of
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log import rules
from onceflow.core.protocol.log.rules import claim_again, owner_of
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.protocol.savepoints.savepoint import Savepoint, seed_view, view_before
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.log.record_codec import decode_record, encode_record, seal, unseal
from onceflow.core.traces import Trace

FORMAT = 1

_REMEDY = "the file holds the identity by which sinks recognize this job: restore it from a backup"


class _Meta(msgspec.Struct, frozen=True):
    format: int
    log_id: str


def log_id(fs: filesystem.CreatesAtomically, paths: JobPaths, inherited: str = "") -> str:
    """Return the log's identity: a UUID that is created durably, once in a job's life.

    A job that starts from a savepoint in new storage passes the savepoint's identity as
    `inherited`.

    Raises:
        CheckpointCorrupt: The log has records, and its identity is missing or damaged.
    """
    data = fs.read(paths.meta)
    # Read the identity again after the listing: another driver may have created both in between.
    has_log = data is None and any(map(paths.is_of_log, fs.list(paths.log)))
    if has_log and fs.read(paths.meta) is None:
        raise CheckpointCorrupt(
            f"{fs.location(paths.meta)} is gone, but the decision log in the same directory"
            f" is not; {_REMEDY}"
        )
    data = data or fs.read(paths.meta) or _create(fs, paths, inherited)
    line, _ = unseal(data, fs.location(paths.meta), _REMEDY)
    return json_decoder(_Meta).decode(line).log_id


def _create(fs: filesystem.CreatesAtomically, paths: JobPaths, inherited: str) -> bytes:
    fs.make_directory(paths.job)
    data, _ = seal(msgspec.json.encode(_Meta(FORMAT, inherited or str(uuid.uuid4()))))
    outcome = fs.create_if_absent(paths.meta, data)
    return outcome.existing if isinstance(outcome, filesystem.AlreadyExists) else data


CLAIM_TRIES_MAX = 64
"""The number of claims after which a driver gives up: more lost races than drivers of one job that
anyone would start at once."""
READ_TRIES_MAX = 64
"""The number of times that a reader starts over because records were pruned while it read."""
UNKNOWN_TRIES_MAX = 3
"""The number of times that an append tries to create a record whose creation is unknown."""


_LISTS_LATE = (
    "either it was deleted, or the storage lists new files late and cannot hold a decision log:"
    " use storage with list-after-write"
)


class DecisionUnknown(CheckpointError):
    """Raised if it is unknown whether a record is in the log. The next attempt reads the log."""


class DecisionLog:
    """The log of one job, for readers and for drivers that want to own it.

    Any thread, any process. Reading changes nothing in storage, and works on a job that never ran.
    """

    def __init__(self, fs: filesystem.CreatesAtomically, paths: JobPaths) -> None:
        self._fs = fs
        self._paths = paths

    @classmethod
    def open(cls, fs: filesystem.CreatesAtomically, paths: JobPaths) -> DecisionLog:
        """Return the log of the job that `paths` names. Reads nothing yet."""
        return cls(fs, paths)

    def read(self) -> rules.LogView:
        """Return the log's content, with at least each record that was durable before the call.

        Raises:
            CheckpointCorrupt: A record is damaged, or the chain is broken; names the file.
            StateIncompatible: A later version of onceflow wrote a record.
        """
        for _ in range(READ_TRIES_MAX):
            sequences = self.sequences()
            # Newest first, because another process prunes from the oldest record on.
            newest_first = [self._entry(sequence) for sequence in reversed(sequences)]
            entries = tuple(entry for entry in reversed(newest_first) if entry is not None)
            # A record was pruned between listing and reading: the entries are not of one moment.
            if len(entries) < len(newest_first):
                continue
            try:
                view = self._replay(entries)
            except CheckpointCorrupt:
                # The chain is broken only if the listing is unchanged. Otherwise, it changed while
                # being read.
                if self.sequences() == sequences:
                    raise
                continue
            # A listing made while the last record is being replaced can show only orphans: list
            # again.
            highest = max(self.sequences(), default=0)
            if highest == view.last_sequence and not self._listing_missed_below(view):
                return view
        raise StorageError(
            f"{self._fs.location(self._paths.log)} changed {READ_TRIES_MAX} times while it was read"
        )

    def claim(
        self,
        owner: str,
        sinks: Iterable[str] = (),
        savepoint: Savepoint | None = None,
        check: Callable[[rules.LogView], None] = lambda _: None,
        *,
        drawn: str = "",
    ) -> ClaimedLog:
        """Claim the log: make the caller its only appender, and fence every earlier owner.

        Runs on the driver, once for its first attempt; `ClaimedLog.claim_again` claims for the next
        ones. A crash leaves at most an attempt number that is never used.

        Args:
            owner: Text for people, such as host and process.
            sinks: The sink ids under which the job may write from now on.
            savepoint: The savepoint that a new log takes its identity and its numbers from.
            check: Called with the log's current content, which another driver may just have
                changed. If it raises, nothing is claimed.
            drawn: Makes `owner` unique. A caller that claims again after `DecisionUnknown` passes
                the same value again, and recognizes its own claim by it.

        Raises:
            Fenced: Other drivers of the job keep claiming it.
            DecisionUnknown: The claim may or may not be in the log; claiming again is safe.
        """
        self._fs.make_directory(self._paths.log)
        # Before the claim: once the record exists, slots of the attempt may upload into this
        # directory.
        self._fs.make_directory(self._paths.shared)
        log_id(self._fs, self._paths, savepoint.log_id if savepoint else "")
        owner = f"{owner} {drawn or draw_owner()}"  # two containers can share host name and pid
        known = tuple(sinks)
        seed = None if savepoint is None else partial(seed_view, savepoint=savepoint)

        def claim(view: rules.LogView) -> rules.AttemptClaimed:
            check(view)
            return rules.next_claim(view, owner, known)

        return self.claim_by(claim, seed)

    # --- for the owner ------------------------------------------------------------------------

    def claim_by(
        self,
        claim: Callable[[rules.LogView], rules.AttemptClaimed],
        seed: Callable[[rules.LogView], rules.LogView] | None = None,
    ) -> ClaimedLog:
        """Append the record that `claim` returns for the log's content. Return the claimed log.

        `seed` replaces the view of a log without decisions.

        Raises:
            Fenced: Other drivers of the job keep claiming it, or `claim` raises it.
            DecisionUnknown: The claim may or may not be in the log.
        """
        for _ in range(CLAIM_TRIES_MAX):
            # Read again in each try: the driver that won the last race has added a record.
            view = self.read() if seed is None else seed(self.read())
            record = claim(view)
            digest, verdict = self.put(record)
            if isinstance(verdict, rules.AppendStands):
                claimed = ClaimedLog(self, rules.apply(view, rules.LogEntry(record, digest)))
                claimed.record_claim()
                return claimed
        raise Fenced(
            f"job {self._paths.job}: {CLAIM_TRIES_MAX} times another driver claimed the job first;"
            " stop all but one"
        )

    def put(self, record: rules.LogRecord) -> tuple[str, rules.AppendStands | rules.AppendFenced]:
        """Try to make `record` the log's last record. Return its digest and the outcome.

        Raises:
            StorageError: The record is not in the log and never will be.
            DecisionUnknown: It is unknown whether the record is in the log.
        """
        # First create, then check whether the chain leads to the record. This detects another
        # driver's record at this number and a newer claim, in whatever order the two drivers write.
        data, digest = encode_record(record)
        standing = self._create(record, data, digest)
        try:
            # Created below the chain's low end: the record is an orphan and never counts.
            if standing == digest and not self._predecessor_stands(record):
                standing = None
            highest = max(self.sequences(), default=0)
        except StorageError as error:
            raise self._unknown(record, error) from error
        verdict = rules.check_append(
            record, digest, standing_digest=standing, highest_sequence=highest
        )
        if isinstance(verdict, rules.AppendUnlisted):
            raise self._unknown(
                record, StorageError(f"{self} does not list the record; {_LISTS_LATE}")
            )
        return digest, verdict

    def find_last_write_time(self) -> datetime | None:
        """Return the time at which the last record was written, or None if it is unknown."""
        last = max(self.sequences(), default=0)
        return self._fs.find_modified_time(self._paths.record(last)) if last else None

    def remove(self, sequences: tuple[int, ...]) -> None:
        """Delete records `sequences`, in rising order. A crash leaves a shorter chain.

        Idempotent.
        """
        # Create the mark first: it distinguishes a log without its first record from an empty log.
        if 1 in sequences:
            self._fs.create_if_absent(self._paths.pruned, b"")
        for sequence in sequences:
            self._fs.delete(self._paths.record(sequence))

    def remove_older(self, view: rules.LogView) -> None:
        """Delete all records and unfinished files older than the chain of `view`. Idempotent.

        Needs a listing.
        """
        self.remove(
            tuple(sequence for sequence in self.sequences() if sequence < view.first_sequence)
        )
        for unfinished in self._fs.list_unfinished(self._paths.log):
            target = self._paths.sequence_of(unfinished.target)
            # Only below the chain: another driver may be writing a record above it now.
            if target is not None and target <= view.first_sequence:
                self._fs.delete(f"{self._paths.log}/{unfinished.name}")

    def sequences(self) -> tuple[int, ...]:
        """Return the sequence number of each record in storage, in rising order."""
        names = map(self._paths.sequence_of, self._fs.list(self._paths.log))
        return tuple(sorted(sequence for sequence in names if sequence is not None))

    def __str__(self) -> str:
        return self._fs.location(self._paths.log)

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._paths.job

    # --- steps --------------------------------------------------------------------------------

    def _replay(self, entries: tuple[rules.LogEntry, ...]) -> rules.LogView:
        if not entries and self._fs.read(self._paths.pruned) is not None:
            raise CheckpointCorrupt(
                f"every record in {self._fs.location(self._paths.log)} is gone, although there"
                " were records. Starting over would lose rows or write them twice: restore the"
                " directory"
            )
        try:
            return rules.replay(entries)
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(f"{self._fs.location(self._paths.log)}: {error}") from error

    def _listing_missed_below(self, view: rules.LogView) -> bool:
        """Return True if a record exists right below the chain that the listing did not show."""
        below = view.first_sequence - 1
        if not view.orphans or below in view.orphans:
            return False
        return self._fs.read(self._paths.record(below)) is not None

    def _entry(self, sequence: int) -> rules.LogEntry | None:
        path = self._paths.record(sequence)
        data = self._fs.read(path)
        if data is None:
            return None
        entry = decode_record(data, self._fs.location(path))
        if entry.record.sequence != sequence:
            raise CheckpointCorrupt(
                f"{self._fs.location(path)} holds record {entry.record.sequence}, so the file was"
                " renamed; give it its old name"
            )
        return entry

    def _create(self, record: rules.LogRecord, data: bytes, digest: str) -> str | None:
        """Try to create the record. Return the digest of the record at its number."""
        path = self._paths.record(record.sequence)
        unknown: StorageError | None = None
        for _ in range(UNKNOWN_TRIES_MAX):
            try:
                match self._fs.create_if_absent(path, data):
                    case filesystem.Created():
                        return digest
                    # The digest tells whose record it is: it may be ours, from an earlier try whose
                    # reply was lost.
                    case filesystem.AlreadyExists(existing):
                        return unseal(existing, self._fs.location(path))[1]
            except filesystem.CreationUnknown as error:
                unknown = error
            except StorageError as error:
                # A definite failure counts only if no earlier try may have succeeded.
                if unknown is None:
                    raise
                unknown = error
        assert unknown is not None
        raise self._unknown(record, unknown) from unknown

    def _predecessor_stands(self, record: rules.LogRecord) -> bool:
        if record.sequence == 1:
            return self._fs.read(self._paths.pruned) is None
        path = self._paths.record(record.sequence - 1)
        data = self._fs.read(path)
        if data is None:
            return False
        return unseal(data, self._fs.location(path))[1] == record.previous

    def _unknown(self, record: rules.LogRecord, error: StorageError) -> DecisionUnknown:
        return DecisionUnknown(
            f"job {self.job}: it is not known whether record {record.sequence} of attempt"
            f" {record.attempt} is in the decision log ({error}); the next attempt reads the log"
            " and continues from its last record"
        )


def draw_owner() -> str:
    """Return a random text that distinguishes this driver from all others."""
    return uuid.uuid4().hex[:12]


_STORAGE_GONE = (
    "checkpoint storage was deleted, moved, unmounted or replaced by an older copy under the"
    " running job"
)
_TWO_DRIVERS = "Two drivers ran one job: stop one of them"


class ClaimedLog:
    """The decision log of its owner. Call `append` from one thread; `prune` from any."""

    def __init__(self, log: DecisionLog, view: rules.LogView) -> None:
        self._log = log
        self._view = view
        self._settled: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._lost: CheckpointError | None = None
        self._is_tidy = False
        """True once the records that earlier owners left below the chain are deleted."""

    @property
    def attempt(self) -> AttemptId:
        """The attempt number under which the owner runs."""
        return self._view.attempt

    @property
    def view(self) -> rules.LogView:
        """The log as its owner knows it: as of the claim, plus its own appends and prunes since."""
        with self._lock:
            return self._view

    @property
    def trace(self) -> Trace:
        """The trace of the owner's attempt."""
        return Trace(str(self._log), self.attempt)

    def record_claim(self) -> None:
        """Add the claim to the trace, with the decisions that it has read."""
        view = self._view
        self.trace.record(
            "claimed",
            checkpoint=view.decided[-1].completed.checkpoint if view.decided else None,
            by=view.decided[-1].attempt if view.decided else None,
            listed=(c.transaction for done in view.completed for c in committables_of(done)),
            sinks=view.memory.sinks,
        )

    def claim_again(self) -> ClaimedLog:
        """Claim the log again for the same driver, after its own attempt has failed.

        Raises:
            Fenced: Another driver has claimed the job since.
            CheckpointCorrupt: The log lacks the driver's own claim.
            StorageError: The log cannot be read or written.
            DecisionUnknown: The claim may or may not be in the log; claiming again is safe.
        """
        return self._log.claim_by(self._next_claim)

    def claim_above(self, attempt: AttemptId) -> ClaimedLog:
        """Claim the log again for the same driver, with an attempt number above `attempt`.

        For a target that has seen `attempt` from another storage, so that it is not in this log.

        Raises:
            Fenced: Another driver has claimed the job since.
            CheckpointCorrupt: The log lacks the driver's own claim.
            StorageError: The log cannot be read or written.
            DecisionUnknown: The claim may or may not be in the log; claiming again is safe.
        """
        return self._log.claim_by(partial(self._next_claim, above=attempt))

    def check_owned(self) -> None:
        """Raise Fenced if another driver has claimed the job since. Changes nothing.

        Raises:
            Fenced: Another driver has claimed the job.
            CheckpointCorrupt: The log lacks the driver's own claim.
            StorageError: The log cannot be read.
        """
        self._next_claim(self._log.read())

    def append(self, completed: CompletedCheckpoint) -> None:
        """Make `completed` the log's last decision, durably: the commit point of the whole job.

        Idempotent for the same value: after `StorageError` or `DecisionUnknown` the call may be
        repeated. A crash leaves either the whole decision in the log, or none of it.

        Raises:
            Fenced: A newer attempt owns the job. The caller must commit nothing more. The newer
                attempt reads from the log whether this decision counts.
            CheckpointCorrupt: Someone has deleted the log while its owner runs.
            StorageError: The decision is not in the log and never will be.
            DecisionUnknown: It is unknown whether the decision is in the log; the attempt must end.
        """
        # A fenced owner stays fenced: if the newer records are deleted by hand, it must not
        # continue.
        if self._lost is not None:
            raise self._lost
        view = self.view
        # The call was repeated after a lost answer: the record is in the log.
        if view.decided and view.decided[-1].completed == completed:
            return
        record = rules.next_decision(view, completed)
        self.trace.record(
            "deciding",
            checkpoint=completed.checkpoint,
            listed=(c.transaction for c in committables_of(completed)),
            subtasks=(str(snapshot.subtask) for snapshot in completed.snapshots),
            sinks=record.memory.sinks,
        )
        digest, verdict = self._log.put(record)
        match verdict:
            case rules.AppendFenced(reason):
                self.trace.record("fenced", checkpoint=completed.checkpoint)
                self._lost = self._explain(record, reason)
                raise self._lost
            case rules.AppendStands():
                self.trace.record("decided", checkpoint=completed.checkpoint)
                with self._lock:
                    self._view = rules.apply(self._view, rules.LogEntry(record, digest))
                    self._forget_settled()  # the record may be older than the last `settle`

    def begins_from(
        self,
        savepoint: Savepoint,
        location: str,
        records: Iterable[TargetRecord] = (),
        *,
        lacks_own: bool = False,
    ) -> None:
        """Record from the next decision on that the job has started from `savepoint` at `location`.

        `records` are the records of the targets that store what they have committed. `lacks_own` is
        True if a target was restored to a state before the savepoint's own commits.
        """
        with self._lock:
            view = view_before(savepoint, self._view, records, lacks_own=lacks_own)
            memory = replace(view.memory, savepoint=f"{savepoint.id} {location}")
            self._view = replace(view, memory=memory)
        self.trace.record("rewound", checkpoint=savepoint.completed.checkpoint)

    def settle(self, sinks: Iterable[str]) -> None:
        """Forget `sinks`, which have no transactions in doubt, from the next decision on.

        Any thread.
        """
        with self._lock:
            self._settled |= frozenset(sinks)
            self._forget_settled()

    def _forget_settled(self) -> None:
        self._view = replace(self._view, memory=self._view.memory.without_sinks(self._settled))

    def prune(self, keep_from: CheckpointId) -> None:
        """Delete each record older than the decision of checkpoint `keep_from`. Idempotent.

        The last decision always stays. Delete the files of pruned checkpoints only afterwards: a
        crash in between leaves files that no record references, and `sweep` deletes them.

        Raises:
            StorageError: Some records still exist. The next call deletes them.
        """
        view = self.view
        if not view.decided:
            return
        kept = sum(record.completed.checkpoint >= keep_from for record in view.decided)
        retained = max(1, kept)
        first = view.decided[-retained].sequence
        # Without the lock, which `append` needs: deleting may take long.
        if self._is_tidy:
            self._log.remove(rules.prunable(view, retained))
        else:
            self._log.remove_older(replace(view, first_sequence=first))
            self._is_tidy = True
        with self._lock:
            self._view = replace(
                self._view,
                # Filter the current view: a decision may have been appended meanwhile.
                decided=tuple(r for r in self._view.decided if r.sequence >= first),
                first_sequence=first,
                orphans=(),
            )

    def _next_claim(
        self, view: rules.LogView, above: AttemptId = rules.NO_ATTEMPT
    ) -> rules.AttemptClaimed:
        mine = self.view
        # A driver that takes the job over claims a higher attempt. So this log has lost records.
        if view.attempt < mine.attempt:
            raise CheckpointCorrupt(
                f"job {self._log.job}: {self._log} lacks the claim of attempt {mine.attempt}, which"
                f" this driver wrote, and no other driver has claimed the job: {_STORAGE_GONE}."
                " Restore the directory, and start again"
            )
        try:
            return claim_again(view, owner=mine.owner, attempt=mine.attempt, above=above)
        except Fenced as error:
            raise Fenced(f"job {self._log.job}: {error}. {_TWO_DRIVERS}") from None

    def _explain(self, record: rules.CheckpointDecided, reason: str) -> CheckpointError:
        """Return the error that names the job's current owner.

        If the record is an orphan, delete it.
        """
        message = f"job {self._log.job}: attempt {record.attempt} is fenced: {reason}"
        try:
            view = self._log.read()
            if record.sequence in view.orphans:
                # The chain only grows upwards, so an orphan below it never counts and may be
                # deleted.
                self._log.remove((record.sequence,))
        except (StorageError, CheckpointCorrupt) as error:
            return Fenced(f"{message}. The owner of the job cannot be read: {error}")
        counts = record in view.decided
        if counts and view.attempt == record.attempt:
            return CheckpointCorrupt(
                f"job {self._log.job}: the records before {record.sequence} of {self._log} are"
                f" gone, and no other driver has claimed the job: {_STORAGE_GONE}. Nothing of"
                f" checkpoint {record.completed.checkpoint} is committed; restore the directory,"
                " and start again"
            )
        return Fenced(
            f"{message}. Attempt {view.attempt} ({owner_of(view)}) owns the job; its decision log"
            f" ends at record {view.last_sequence}, and this decision is"
            f" {'' if counts else 'not '}part of it. {_TWO_DRIVERS}"
        )
