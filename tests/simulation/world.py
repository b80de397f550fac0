"""What one schedule runs in, and the oracle: what must always hold in it, and at the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.model import (
    Clock,
    Database,
    Files,
    Network,
    Row,
    SharedLog,
    Violation,
)
from tests.simulation.slots import Slot, parse_splits
from tests.simulation.variant import Variant

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, TransactionId
from onceflow.core.protocol.log import (
    CheckpointDecided,
    fold,
)
from onceflow.core.protocol.snapshots import (
    CompletedCheckpoint,
    StateHandle,
)


@dataclass(frozen=True)
class Shape:
    """How big and how nasty one schedule is; drawn from its seed."""

    partitions: int
    records: int
    keys: int
    parallelism: Sequence[int]
    """Of attempt 1, 2, … in turn: rescaling between attempts."""
    concurrent: int
    tolerable: int
    retained: int
    crash_rate: float
    loss: float
    doubling: float
    database_faults: float
    two_drivers: bool
    rolled_back_by_somebody: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Shape:
        return cls(
            partitions=rng.randint(1, 3),
            records=rng.randint(4, 25),
            keys=rng.randint(1, 6),
            parallelism=[rng.randint(1, 3) for _ in range(3)],
            concurrent=rng.choice([1, 1, 2]),
            tolerable=rng.choice([0, 2]),
            retained=rng.choice([1, 1, 2]),
            crash_rate=rng.choice([0.0, 0.005, 0.02, 0.05]),
            loss=rng.choice([0.0, 0.02, 0.1]),
            doubling=rng.choice([0.0, 0.1]),
            database_faults=rng.choice([0.0, 0.03]),
            two_drivers=rng.random() < 0.3,
            rolled_back_by_somebody=rng.random() < 0.03,
        )


class World:
    """Everything that one schedule runs in, and what must always hold in it."""

    def __init__(self, seed: int, variant: Variant, calm_after_s: float = 6.0) -> None:
        self.rng = random.Random(seed)
        self.shape = Shape.draw(self.rng)
        self.variant = variant
        self.records = self.shape.records
        self.clock = Clock(self.rng)
        self.log = SharedLog()
        self.database = Database(self.rng, on_commit=self._check_commit)
        self.database.fault_rate = self.shape.database_faults
        self.files = Files()
        self.network = Network(self.clock, self.shape.loss, self.shape.doubling)
        self.slots: list[Slot] = []
        self.finished = False
        self.lost = False
        self.claimed = 0
        self.rolled_back: set[str] = set()
        """What somebody else has rolled back."""
        self._calm_at = self.clock.now_s + calm_after_s
        self._decided_names: set[str] = set()
        self._last_commit: dict[tuple[int, int], int] = {}
        self._top_attempt = 0

    @property
    def calm(self) -> bool:
        """Faults have stopped: from now on everything must come right."""
        return self.clock.now_s >= self._calm_at

    def draws_crash(self) -> bool:
        return not self.calm and self.rng.random() < self.shape.crash_rate

    def key_of(self, partition: int, offset: int) -> int:
        return (partition * 7 + offset * 3) % self.shape.keys

    # --- the oracle ---------------------------------------------------------------------------

    def check_durable(
        self, attempt: int, pending: Sequence[Committable], handles: Sequence[StateHandle]
    ) -> None:
        """I4, for the newest attempt: what an older one prepared is aborted under its hands."""
        if attempt < self.claimed:
            return
        for committable in pending:
            name = str(committable.transaction)
            known = name in self.database.prepared or name in self.database.ledger
            if not known and name not in self.rolled_back:
                raise Violation(f"I4 {name} is acked and not prepared")

    def decided(self, record: CheckpointDecided) -> None:
        completed = record.completed
        if record.attempt < self._top_attempt:
            raise Violation(f"I5 attempt {record.attempt} decides after {self._top_attempt}")
        self._top_attempt = record.attempt
        last = self.log.decided[-1].completed.checkpoint if self.log.decided else -1
        if completed.checkpoint <= last:
            raise Violation(f"I5 checkpoint {completed.checkpoint} decided after {last}")
        self.log.decided.append(record)
        names = [c.transaction for _, o in completed.operator("keyed") for c in o.committables]
        self._decided_names.update(map(str, names))
        if completed.checkpoint > GENESIS:
            self._check_state(completed)

    def _check_state(self, completed: CompletedCheckpoint) -> None:
        """I6: positions, state and rows are those of exactly the records before the barrier."""
        sources = [e for _, o in completed.operator("source") for e in o.lists["splits"]]
        positions = parse_splits(tuple(sources))
        expected = Counter(
            self.key_of(p, offset) for p, at in positions.items() for offset in range(at)
        )
        state: dict[int, int] = {}
        for _, operator in completed.operator("keyed"):
            merged: dict[int, int] = {}
            for handle in operator.keyed:
                for key, count in self.files.read(handle.path).items():
                    merged[int(key)] = count
            overlap = {key for key in merged if key in state}
            if overlap:
                raise Violation(f"I6 keys {overlap} are in two subtasks' state")
            state |= merged
        if {k: n for k, n in state.items() if n} != dict(expected):
            raise Violation(
                f"I6 checkpoint {completed.checkpoint}: state {state}, records say {dict(expected)}"
            )

    def _check_commit(self, transaction: TransactionId, rows: list[Row]) -> None:
        name = str(transaction)
        if name not in self._decided_names:
            raise Violation(f"I1 {name} becomes visible and no decision lists it")
        place = (transaction.attempt, transaction.subtask)
        if self._last_commit.get(place, 0) > transaction.checkpoint:
            raise Violation(f"I8 {name} is committed after checkpoint {self._last_commit[place]}")
        self._last_commit[place] = transaction.checkpoint

    def check_end(self) -> None:
        """Faults have stopped, the job is done and was started once more."""
        seen = Counter((p, o) for p, o, _, _ in self.database.rows)
        wanted = {(p, o) for p in range(self.shape.partitions) for o in range(self.records)}
        if doubled := [row for row, times in seen.items() if times > 1]:
            raise Violation(f"I2 rows {doubled} are there twice")
        if missing := wanted - seen.keys():
            raise Violation(f"I2 rows {sorted(missing)} are missing")
        counts = Counter((key, n) for _, _, key, n in self.database.rows)
        if any(times > 1 for times in counts.values()):
            raise Violation("I6 a key has counted to one number twice")
        if self.database.prepared:
            raise Violation(f"I3 still in doubt: {sorted(self.database.prepared)}")
        view = fold(self.log.entries())
        named = {
            handle.path
            for completed in view.completed[-self.shape.retained :]
            for _, operator in completed.operator("keyed")
            for handle in operator.keyed
        }
        if extra := self.files.content.keys() - named:
            raise Violation(f"I9 files {sorted(extra)} are left and nothing names them")
