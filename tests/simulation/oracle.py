"""The invariants of docs/ARCHITECTURE.md, checked in a schedule and at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation import stages
from tests.simulation.channels import KEY_GROUPS
from tests.simulation.clock import Violation
from tests.simulation.slots import RULE, SPLITS, Deployment, parse_splits
from tests.simulation.storage import handles_in
from tests.simulation.targets import Target, Versioned, names

from onceflow.core.commit.whole_checkpoints import GlobalCommit
from onceflow.core.protocol.checkpoints.alignment import AlignmentMode
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    committables_of,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.rules import CheckpointDecided, LogRecord, LogView, replay

if TYPE_CHECKING:
    from tests.simulation.world import World


Record = tuple[str, int]
"""(partition, offset)"""


class Oracle:
    """Sees everything, and raises `Violation` as soon as something is wrong."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.decided: list[CheckpointDecided] = []
        """Every decision that stood when it was appended."""
        self._names: set[TransactionId] = set()
        self._partitions: set[str] = set()
        """Every partition that a decision holds."""
        self._last_commit: dict[tuple[str, int, int], int] = {}
        self._versions: dict[str, int] = {}
        self._left_behind: set[CheckpointId] = set()
        """Decisions after the savepoint by which the job moved: its new log has none of them. Or
        the job has gone back behind them."""
        self._lacking: dict[str, set[CheckpointId]] = {}
        """By sink: decisions that a table with versions has no more, since it was put back."""
        self._rewinds: dict[tuple[AttemptId, CheckpointId], CompletedCheckpoint] = {}
        """By attempt and number of the decision that begins from it: the savepoint."""
        self._ends: list[dict[str, int]] = []
        """Where the sources stood each time that functions made their last rows."""
        self._drained: dict[str, int] | None = None
        """Where they stood when a savepoint had functions do so; None: it is decided."""
        self._given_up: dict[tuple[int, int], float] = {}
        self._attempt = 0
        self._left: dict[str, set[TransactionId]] = {}
        """By sink: what older attempts had in doubt at the attempt's first decision."""
        self._left_files: set[str] = set()
        self._faults_before: int = 0
        self._before: dict[str, set[Record]] = {}
        """By sink: what had passed before it was written, or while it was removed."""
        self._until: dict[str, set[Record]] = {}
        """By sink: what had passed when it was removed."""
        self._owed: dict[str, set[TransactionId]] = {}
        """By retired sink: what older attempts had in doubt when it was settled."""

    # --- while it runs -------------------------------------------------------------------------

    def check_durable(self, attempt: int, sinks: Sequence[OperatorSnapshot]) -> None:
        """I4, for the newest attempt: what an older one prepared is aborted under its hands."""
        world = self._world
        if attempt < world.claimed:
            return
        for sink in sinks:
            listed = {committable.transaction for committable in sink.committables}
            own = {(c.attempt, c.subtask) for c in listed}
            for one in world.targets[sink.uid].in_doubt:
                mine = (one.attempt, one.subtask) in own and one.checkpoint < max(listed).checkpoint
                if mine and one not in listed:
                    raise Violation(f"I2 {one} is in doubt, and the ack leaves it out")
            for committable in sink.committables:
                transaction, target = committable.transaction, world.targets[sink.uid]
                known = target.knows(transaction) or transaction in target.pruned
                if not known and transaction not in world.rolled_back:
                    raise Violation(f"I4 {transaction} is acked and not prepared")

    def given_up(self, attempt: int, checkpoint: CheckpointId) -> None:
        self._given_up[attempt, checkpoint] = self._world.now_s

    def check_snapshot(self, attempt: int, checkpoint: CheckpointId) -> None:
        """I9: where no word is lost, nobody takes part in what was given up a second ago."""
        since_s = self._given_up.get((attempt, checkpoint), self._world.now_s)
        if self._world.now_s - since_s > 1.0 and not self._world.shape.rates.loss:
            raise Violation(f"I9 a snapshot of {checkpoint}, given up a second before")

    def check_asked(self, attempt: int, target: Target, committable: Committable) -> None:
        """I2: whoever commits finds what proves how an earlier try ended."""
        if attempt >= self._world.claimed and committable.transaction in target.pruned:
            raise Violation(f"I2 the proof of {committable.transaction} is asked for and pruned")

    def check_read(self, partition: str, deployment: Deployment) -> None:
        """Nobody reads what no decision holds: a crash would have to find it again.

        Nor what would be in flight besides all that was: with each restart that would be more.
        """
        if partition not in self._partitions:
            raise Violation(f"I6 {partition} is read, and no decision holds it")
        for slot in deployment.peers:
            for stage in slot.stages:
                if stage.inputs.replaying:
                    raise Violation(f"{partition} is read while {stage.ref} replays")

    def check_recovered(self, attempt: int, target: Target, aborted: Sequence[Committable]) -> None:
        """I3: what recovery was to roll back is gone."""
        left = {committable.transaction for committable in aborted}.intersection(target.in_doubt)
        if attempt >= self._world.claimed and left:
            raise Violation(f"I3 recovery is over, and {names(list(left))} are in doubt")

    def appended(self, record: LogRecord) -> None:
        if not isinstance(record, CheckpointDecided):
            return
        completed = record.completed
        if record.attempt < self._attempt:
            raise Violation(f"I5 attempt {record.attempt} decides after {self._attempt}")
        self._attempt = record.attempt
        last = self.decided[-1].completed.checkpoint if self.decided else -1
        if completed.checkpoint <= last:
            raise Violation(f"I5 checkpoint {completed.checkpoint} decided after {last}")
        if taken := self._rewinds.get((record.attempt, completed.checkpoint)):
            self.moved(taken)
        self.decided.append(record)
        self._names.update(c.transaction for c in committables_of(completed))
        self._partitions |= positions_in(completed).keys()
        if completed.checkpoint > GENESIS:
            self.check_state(completed)
            self._check_last_rows(completed)

    def stays_decided(self, transaction: TransactionId) -> bool:
        """Return whether a decision lists `transaction` that no rewind has taken back.

        A sink whose target does not tell what it has committed keeps its decisions at a rewind.
        """
        is_kept = transaction.sink_id in self._world.silent
        return any(
            transaction in {c.transaction for c in committables_of(record.completed)}
            for record in self.decided
            if is_kept or record.completed.checkpoint not in self._left_behind
        )

    def check_fenced(self, attempt: int) -> None:
        """I5: nobody is fenced by its own record, whose creation it was not told of."""
        if attempt >= self._world.claimed:
            raise Violation(f"I5 attempt {attempt} is fenced, and nobody has claimed the job since")

    def check_state(
        self, completed: CompletedCheckpoint, read: Callable[[str], Any] | None = None
    ) -> None:
        """I6: positions, state and rows are those of exactly the records before the barrier.

        `read` returns the content of a file. None: files are in the job's storage.
        """
        world = self._world
        read = read or world.files.read
        expected = Counter(
            world.key_of(partition, offset)
            for partition, at in positions_in(completed).items()
            for offset in range(at)
        )
        state: dict[int, int] = {}
        for _, operator in completed.operator(stages.KEYED):
            merged: dict[int, int] = {}
            for handle in operator.keyed:
                content = read(handle.path).items()
                merged |= {k: n for k, n in content if stages.holds_group(handle, k % KEY_GROUPS)}
            if overlap := merged.keys() & state.keys():
                raise Violation(f"I6 keys {overlap} are in two subtasks' state")
            state |= merged
            for handle in operator.raw:
                seen, at = read(handle.path)[stages.RULES_SEEN], rules_in(completed)
                if seen != at and world.alignment_mode is AlignmentMode.ALIGNED:
                    raise Violation(
                        f"I6 broadcast state has {seen} rules, before the barrier: {at}"
                    )
        flying = [
            row
            for snapshot in completed.snapshots
            for one in snapshot.in_flight
            for row in read(one.handle.path)
        ]
        for key in (stages.CLOCK_KEY, *stages.LAST_KEYS):
            state.pop(key, None)
        found = Counter({key: count for key, count in state.items() if count})
        found.update(key for _, _, key, _ in flying)
        exact = world.alignment_mode is AlignmentMode.ALIGNED or world.variant.mode is not None
        if expected - found or (exact and found != expected):
            raise Violation(
                f"I6 checkpoint {completed.checkpoint}: state {state}, in flight {flying}, records"
                f" say {dict(expected)}"
            )

    def _check_last_rows(self, completed: CompletedCheckpoint) -> None:
        """Functions make their last rows in every subtask, once wherever the input has ended."""
        if not self._world.makes_last_rows:
            return
        state = self._without_records(completed)
        made = {state.get(key, 0) for key in stages.LAST_KEYS}
        exact = self._world.alignment_mode is AlignmentMode.ALIGNED
        if len(made) > 1 and (exact or self._world.variant.mode is not None):
            raise Violation(f"I6 checkpoint {completed.checkpoint}: last rows of some subtasks")
        # Without alignment a checkpoint may have some of a drain that came while it was under way.
        count = min(made)
        if count < len(self._ends) and not self._world.begins_from_savepoint:
            raise Violation(f"I6 checkpoint {completed.checkpoint}: last rows are forgotten")
        self._ends = self._ends[:count]
        positions = _read(completed)
        for _ in range(count - len(self._ends)):
            if positions in self._ends[-1:] and positions != self._drained:
                raise Violation(f"I6 last rows are made again, and nothing was read: {positions}")
            self._ends.append(positions)
            self._drained = None

    def drained(self, savepoint: CompletedCheckpoint) -> None:
        """Functions have made last rows because the user has asked for that, also once more."""
        self._drained = _read(savepoint)

    def committed(self, transaction: TransactionId) -> None:
        """I1 and I8, at the moment when its rows become visible."""
        if transaction not in self._names:
            raise Violation(f"I1 {transaction} becomes visible and no decision lists it")
        place = (transaction.sink_id, transaction.attempt, transaction.subtask)
        if self._last_commit.get(place, 0) > transaction.checkpoint:
            before = self._last_commit[place]
            raise Violation(f"I8 {transaction} is committed after checkpoint {before}")
        self._last_commit[place] = transaction.checkpoint

    def version(self, commit: GlobalCommit) -> None:
        """I1: a version is one decision's, of all that came since the one before, and rises.

        Of a target that gathers, the one before is its own highest version.
        """
        sink_id, number = commit.transaction.sink_id, commit.checkpoint
        target = self._world.targets[sink_id]
        decisions = [record.completed for record in self.decided]
        own = {d.checkpoint for d in decisions} - self._left_behind
        own -= self._lacking.get(sink_id, set())
        before = max((one for one in own if one < number), default=GENESIS)
        if isinstance(target, Versioned) and target.interval:
            before = target.highest
        found = [d for d in decisions if d.checkpoint == number]
        expected = [
            c.transaction
            for completed in found
            for c in committables_of(completed)
            if c.transaction.sink_id == sink_id and c.checkpoint > before
        ]
        if [c.transaction for c in commit.committables] != expected:
            raise Violation(
                f"I1 version {number} of {sink_id} is made of"
                f" {names([c.transaction for c in commit.committables])}, and its decision of"
                f" {names(expected)}"
            )
        if self._versions.get(sink_id, 0) >= number:
            raise Violation(f"I8 version {number} of {sink_id} after {self._versions[sink_id]}")
        self._lacking.get(sink_id, set()).discard(number)
        self._versions[sink_id] = number

    def moved(self, taken: CompletedCheckpoint) -> None:
        """Expect the new log to decide the checkpoints after `taken` by itself."""
        numbers = (record.completed.checkpoint for record in self.decided)
        self._left_behind.update(number for number in numbers if number > taken.checkpoint)

    def expect_rewind(self, decision: CompletedCheckpoint, taken: CompletedCheckpoint) -> None:
        """Take in that `decision`, if it is made, takes back what was decided after `taken`."""
        self._rewinds[decision.attempt, decision.checkpoint] = taken

    def swept(self) -> None:
        """I3: what older attempts had left by the first decision is gone."""
        for sink_id, left in self._left.items():
            target = self._world.targets[sink_id]
            if still := left.intersection(target.in_doubt) - self._unseen(target):
                raise Violation(f"I3 sinks are swept and hold {names(list(still))}")

    def _unseen(self, target: Target) -> set[TransactionId]:
        """Return what a table holds of attempts that the log has forgotten: files nobody sees."""
        memory = self.decided[-1].memory
        if not isinstance(target, Versioned):
            return set()
        return {one for one in target.in_doubt if one.attempt < memory.since}

    def went_back(self, sink_id: str) -> None:
        """Forget the commits of this sink: its target is an older copy that has none of them."""
        self._last_commit = {p: n for p, n in self._last_commit.items() if p[0] != sink_id}
        self._versions.pop(sink_id, None)

    def put_back(self, target: Target) -> None:
        """The same, and the job begins again from a savepoint: it decides anew what is lacking."""
        self.went_back(target.sink_id)
        if isinstance(target, Versioned):
            numbers = (record.completed.checkpoint for record in self.decided)
            self._lacking[target.sink_id] = {
                number for number in numbers if number > target.highest
            }

    # --- at the end of an attempt that finishes the job ------------------------------------------

    def begins(self, attempt: int, sinks: Sequence[str], restored: CompletedCheckpoint) -> None:
        """Note what has failed before the attempt's first checkpoint, and who writes from here."""
        if attempt < self._world.claimed:
            return
        passed = self._passed(restored)
        for sink_id in sinks:
            before = self._before.setdefault(sink_id, passed)
            # A driver that was started before the sink was removed may be the one that claims last:
            # then it is written to again, and what went by meanwhile is not in it.
            if sink_id in self._until:
                self._before[sink_id] = before | (passed - self._until.pop(sink_id))
        for sink_id in self._before.keys() - set(sinks):
            self._until.setdefault(sink_id, passed)
        self._faults_before = self._world.files.faults
        self._left = {}

    def first_decision(self, attempt: int, retired: Collection[str]) -> None:
        """Note what older attempts have left by then: it must go before the job is finished."""
        world = self._world
        if self._left:
            return
        for sink_id in (*world.pipeline.sinks, *retired):
            target = world.targets[sink_id]
            older = {one for one in target.in_doubt if one.attempt < attempt}
            listed = {c.transaction for c in committables_of(self.decided[-1].completed)}
            self._left[sink_id] = older - listed
            if sink_id in retired:
                self._owed.setdefault(sink_id, set()).update(self._left[sink_id])
        named = {h.path for kept in replay(world.log.entries()).completed for h in handles_in(kept)}
        self._left_files = {
            path for path in world.files.content if _attempt_of(path) < attempt
        } - named

    def finished(
        self, attempt: int, view: LogView, *, slot_died: bool, swept: bool, at_end: bool
    ) -> None:
        """Everything decided is committed, and nothing of aborted checkpoints is left.

        `at_end`: all input has ended, or was ended. Where acks get lost, a slot dies, or files
        could not be deleted, files may be left.
        """
        world = self._world
        last = view.completed[-1]
        if at_end and world.makes_last_rows and self._ends[-1:] != [_read(last)]:
            raise Violation("I2 the input has ended, and functions have made no last rows")
        if world.alignment_mode is AlignmentMode.ALIGNED:
            for target in world.targets.values():
                self._check_rows(target, last)
        if swept:
            self.swept()
        kept = view.completed[-world.shape.checkpoints.retained :]
        for path in {handle.path for completed in kept for handle in handles_in(completed)}:
            world.files.read(path)
        if world.shape.rates.loss or world.files.faults != self._faults_before or slot_died:
            return
        named = {handle.path for kept in view.completed for handle in handles_in(kept)}
        own = {path for path in world.files.content if _attempt_of(path) == attempt}
        older = self._left_files & world.files.content.keys()
        if extra := (own | older) - named:
            raise Violation(f"I9 the attempt is over and leaves files {sorted(extra)}")

    def _check_rows(self, target: Target, last: CompletedCheckpoint) -> None:
        passed = {(p, o) for p, at in positions_in(last).items() for o in range(at)}
        wanted = self._wanted(target, passed | self._made(last))
        seen = Counter((partition, offset) for partition, offset, _, _ in target.rows)
        doubled = sorted(row for row, times in seen.items() if times > 1)
        if doubled and not self._may_double(target):
            raise Violation(f"I2 {target.sink_id}: rows {doubled} are there twice")
        if missing := wanted - seen.keys():
            raise Violation(f"I2 {target.sink_id}: rows {sorted(missing)} are decided and missing")
        early = seen.keys() - wanted
        if early and not self._may_double(target):
            raise Violation(f"I1 {target.sink_id}: rows {sorted(early)} are of no checkpoint")

    # --- at the end of the schedule --------------------------------------------------------------

    def ended(self) -> None:
        """Faults have stopped, the job is done and was started once more."""
        world = self._world
        whole = world.alignment_mode is AlignmentMode.ALIGNED or world.variant.mode is not None
        everything = {
            (partition, offset)
            for partitions in world.sources.values()
            for partition in partitions
            if partition != RULE
            for offset in range(world.records)
        } | self._made(self.decided[-1].completed)
        for target in world.targets.values():
            exact = whole and not self._may_double(target)
            wanted = self._wanted(target, everything)
            seen = Counter((partition, offset) for partition, offset, _, _ in target.rows)
            if missing := wanted - seen.keys():
                raise Violation(f"I2 {target.sink_id}: rows {sorted(missing)} are missing")
            doubled = sorted(row for row, times in seen.items() if times > 1)
            if doubled and exact:
                raise Violation(f"I2 {target.sink_id}: rows {doubled} are there twice")
            counts = Counter((key, n) for _, _, key, n in target.rows)
            if exact and any(times > 1 for times in counts.values()):
                raise Violation("I6 a key has counted to one number twice")
            if exact:
                _check_order(target)
            # A request that was under way all the time is for the next attempt to undo.
            late = {one for one in target.in_doubt if one.attempt < self._attempt}
            late -= self._left.get(target.sink_id, late)
            if target.sink_id not in world.pipeline.sinks:
                # What an overtaken driver's slots prepare after the sweep nobody looks for.
                late = set(target.in_doubt) - self._owed.get(target.sink_id, set(target.in_doubt))
            if still := set(target.in_doubt) - late - self._unseen(target):
                raise Violation(f"I3 still in doubt: {names(list(still))}")
        kept = replay(world.log.entries()).completed[-world.shape.checkpoints.retained :]
        named = {handle.path for completed in kept for handle in handles_in(completed)}
        # So is a file that a slot of an older attempt wrote after the sweep had looked.
        extra = world.files.content.keys() - named
        older = {path for path in extra if _attempt_of(path) < self._attempt} - self._left_files
        if extra - older:
            raise Violation(f"I9 files {sorted(extra - older)} are left and nothing names them")
        world.directories.check()

    # --- who is to have what ---------------------------------------------------------------------

    def _passed(self, completed: CompletedCheckpoint) -> set[Record]:
        """Return what sinks had been given by then: rows in flight had not reached them."""
        read = {(p, o) for p, at in positions_in(completed).items() for o in range(at)}
        flying = {
            (partition, offset)
            for snapshot in completed.snapshots
            for one in snapshot.in_flight
            for partition, offset, _, _ in self._world.files.read(one.handle.path)
        }
        return read - flying | self._made(completed)

    def _made(self, completed: CompletedCheckpoint) -> set[Record]:
        """Return the rows that its state says have been made without any record."""
        state = self._without_records(completed)
        by_clock = {(stages.CLOCK, number) for number in range(state.get(stages.CLOCK_KEY, 0))}
        last = {
            (stages.LAST, time * KEY_GROUPS + group)
            for group, key in enumerate(stages.LAST_KEYS)
            for time in range(state.get(key, 0))
        }
        return by_clock | last

    def _without_records(self, completed: CompletedCheckpoint) -> dict[int, int]:
        """Return what its state holds under keys of which there are no records."""
        if not (self._world.works_by_clock or self._world.makes_last_rows):
            return {}
        found: dict[int, int] = {}
        for handle in (
            h for _, operator in completed.operator(stages.KEYED) for h in operator.keyed
        ):
            for key, count in self._world.files.read(handle.path).items():
                if key < 0 and stages.holds_group(handle, key % KEY_GROUPS):
                    found[key] = max(count, found.get(key, 0))
        return found

    def _may_double(self, target: Target) -> bool:
        """Return whether the job has gone back, and the target has not."""
        return self._world.has_gone_back and target.sink_id in self._world.silent

    def _wanted(self, target: Target, passed: set[Record]) -> set[Record]:
        """Return which of `passed` went by while the pipeline wrote to `target`."""
        until = self._until.get(target.sink_id, passed)
        return until - self._before.get(target.sink_id, until)


def _check_order(target: Target) -> None:
    """I6: records of one key and partition are counted in the order in which they were read."""
    last: dict[tuple[str, int], int] = {}
    for partition, _, key, count in sorted(target.rows, key=lambda row: (row[0], row[1])):
        if count <= last.get((partition, key), 0):
            raise Violation(f"I6 {target.sink_id}: {partition} is out of order for key {key}")
        last[partition, key] = count


def positions_in(completed: CompletedCheckpoint) -> dict[str, int]:
    """Return where every partition of every source stands whose records are written."""
    return {p: at for p, at in _positions(completed).items() if p != RULE}


def _read(completed: CompletedCheckpoint) -> dict[str, int]:
    """Return where every partition stands, also of what is broadcast, of which any is read."""
    return {p: at for p, at in _positions(completed).items() if at}


def rules_in(completed: CompletedCheckpoint) -> int:
    """Return how many records have been broadcast."""
    return _positions(completed).get(RULE, 0)


def _positions(completed: CompletedCheckpoint) -> dict[str, int]:
    operators = [operator for snapshot in completed.snapshots for operator in snapshot.operators]
    return parse_splits([e for operator in operators for e in operator.lists.get(SPLITS, ())])


def _attempt_of(path: str) -> int:
    return int(path[1:].split("/")[0])
