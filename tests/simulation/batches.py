"""Batches under a seeded schedule of faults: drivers, their tasks, one target, one keeper.

Each process is a generator that stops before every step that others can see; the schedule chooses
who goes on, who is killed, and whose reply is lost. Only `protocol.batches` decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from onceflow.core.protocol import batches
from onceflow.core.protocol.batches import (
    BatchClaim,
    BatchDecision,
    BatchId,
    Overtaken,
    RefuseBatch,
    Settling,
    SkipBatch,
    Stands,
    task_checkpoint,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId

SINK, QUERY = "sink", "query"
STAGED = b"staged"
STEPS_MAX = 4_000
TASK_TRIES_MAX = 3
Steps: TypeAlias = Generator[str, None, None]


def is_staged(one: Committable) -> bool:
    return one.payload == STAGED


class Violated(Exception):
    """An invariant does not hold."""


class _Failed(Exception):
    """The query ends; it is started again."""


class _Refused(Exception):
    """The batch must not be written."""


@dataclass(frozen=True)
class Rules:
    """What a mutant replaces."""

    name: str = "as it is"
    judge: Callable[..., object] = batches.judge_batch
    settle: Callable[..., Settling] = batches.settle_claimed
    sweep: Callable[..., Sequence[Committable]] = batches.sweep_decided
    check: Callable[..., object] = batches.check_decision
    decision: Callable[..., BatchDecision] = batches.decision_of
    abort_claims: bool = True
    claim_first: bool = True
    settled_first: bool = False
    twin: Callable[..., Committable | None] = batches.prepared_twin
    around: Callable[..., tuple[Sequence[Committable], Sequence[Committable]]] = (
        batches.around_roll_backs
    )
    takes_twin_away: bool = False
    """Whether a task that is tried again rolls back what its twin has prepared."""


@dataclass
class Batch:
    """What Spark's log of offsets says."""

    rows: range
    fingerprint: str


@dataclass
class Outcome:
    """How a schedule ended."""

    seed: int
    violation: str = ""
    trace: tuple[str, ...] = ()
    attempts: int = 0
    decisions: int = 0
    kills: int = 0
    refused: bool = False


@dataclass
class _Task:
    """One try at a partition."""

    report: tuple[int, tuple[Committable, ...]] | None = None
    failed: bool = False


@dataclass
class World:
    """All that outlives processes."""

    chance: random.Random
    rules: Rules
    source: int = 0
    attempt: int = 0
    decisions: dict[BatchId, BatchDecision] = field(default_factory=dict[BatchId, BatchDecision])
    prepared: dict[TransactionId, list[int]] = field(default_factory=dict[TransactionId, list[int]])
    staged: dict[TransactionId, list[int]] = field(default_factory=dict[TransactionId, list[int]])
    committed: dict[TransactionId, list[int]] = field(
        default_factory=dict[TransactionId, list[int]]
    )
    keyed: bool = False
    """Whether rows have a unique key: one that is prepared locks it."""
    offsets: dict[int, Batch] = field(default_factory=dict[int, Batch])
    done: set[int] = field(default_factory=set[int])
    copy: tuple[dict[int, Batch], set[int]] | None = None
    processes: list[Process] = field(default_factory=list["Process"])
    task_ids: int = 0
    written_offsets: int = 0
    faults: bool = True
    trace: list[str] = field(default_factory=list[str])

    def note(self, text: str) -> None:
        self.trace.append(text)

    def visible(self) -> list[int]:
        return sorted(row for rows in self.committed.values() for row in rows)

    # --- the keeper ---------------------------------------------------------------------------

    def claim(self) -> BatchClaim:
        self.attempt += 1
        self.note(f"attempt {self.attempt} claims")
        return self.seen()

    def seen(self) -> BatchClaim:
        return BatchClaim(AttemptId(self.attempt), tuple(self.decisions.values()))

    def decide(self, proposed: BatchDecision) -> BatchDecision:
        existing = self.decisions.get(proposed.batch)
        verdict = self.rules.check(proposed, owner=AttemptId(self.attempt), existing=existing)
        if isinstance(verdict, Overtaken):
            raise _Failed(verdict.reason)
        if isinstance(verdict, Stands):
            return verdict.decision
        for one in proposed.committables:
            if one.transaction not in self.prepared | self.staged:
                raise Violated(f"{proposed.batch} decides {one}, which is rolled back or gone")
        self.decisions[proposed.batch] = proposed
        self.note(f"attempt {proposed.attempt} decides {proposed.batch.number}")
        return proposed

    # --- the target ---------------------------------------------------------------------------

    def in_doubt(self) -> list[Committable]:
        prepared = [Committable(one, len(rows)) for one, rows in self.prepared.items()]
        return prepared + [Committable(one, len(rows), STAGED) for one, rows in self.staged.items()]

    def locked(self, rows: Sequence[int]) -> bool:
        """Return whether one of `rows` cannot be written now."""
        others = self.prepared.values() if self.keyed else ()
        return any(row in other for other in others for row in rows)

    def listed(self, transaction: TransactionId) -> bool:
        return any(
            one.transaction == transaction
            for decision in self.decisions.values()
            for one in decision.committables
        )

    def commit(self, one: Committable) -> None:
        if not self.listed(one.transaction):
            raise Violated(f"{one} is committed and no decision names it")
        if is_staged(one) and self.locked(self.staged.get(one.transaction, [])):
            raise _Failed(f"{one} waits for a lock")
        where = self.staged if is_staged(one) else self.prepared
        rows = where.pop(one.transaction, None)
        if rows is not None:
            self.committed[one.transaction] = rows
            self.note(f"commits {one.transaction}")
        elif one.transaction not in self.committed:
            raise Violated(f"{one} is decided, and lost")

    def abort(self, one: Committable) -> None:
        if self.listed(one.transaction):
            raise Violated(f"{one} is decided, and rolled back")
        self.note(f"rolls back {one.transaction}")
        (self.staged if is_staged(one) else self.prepared).pop(one.transaction, None)


@dataclass
class Process:
    """Something that can be killed."""

    name: str
    steps: Steps
    task: _Task | None = None
    alive: bool = True
    stands_until: int = 0
    """The step of the schedule up to which it stands still."""


class Driver:
    """One driver of the query, from its start until the input is read or it fails."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.refused = False

    def run(self) -> Steps:
        world = self.world
        try:
            while True:
                number = max(world.done, default=-1) + 1
                if number not in world.offsets:
                    first = max((b.rows.stop for b in world.offsets.values()), default=0)
                    if first >= world.source:
                        return
                    world.written_offsets += 1
                    # Some have no rows, and so no decision: a watermark moved, say.
                    empty = world.faults and world.chance.random() < 0.2
                    last = first if empty else world.chance.randint(first + 1, world.source)
                    world.offsets[number] = Batch(
                        range(first, last), f"file {world.written_offsets}"
                    )
                yield f"{self.name} plans {number}"
                yield from self.batch(number, world.offsets[number])
        except _Failed as error:
            world.note(f"{self.name} fails: {error}")
        except _Refused as error:
            world.note(f"{self.name} is refused: {error}")
            self.refused = True

    def batch(self, number: int, batch: Batch) -> Steps:
        world = self.world
        identity = BatchId(QUERY, number)
        if not world.rules.claim_first:
            yield from self.settle(replace(world.seen(), attempt=AttemptId(world.attempt + 1)))
        claim = world.claim()
        yield "claimed"
        verdict = world.rules.judge(claim, identity, batch.fingerprint)
        if isinstance(verdict, RefuseBatch):
            raise _Refused(verdict.reason)
        if world.rules.claim_first:
            yield from self.settle(claim)
        if not isinstance(verdict, SkipBatch):
            try:
                yield from self.write(claim.attempt, identity, batch)
            except _Failed:
                yield "aborts"
                yield from self.abort()
                raise
        world.done.add(number)
        world.note(f"{self.name} logs {number}")
        yield "logged by Spark"

    def settle(self, claim: BatchClaim) -> Steps:
        world = self.world
        plan = world.rules.settle(claim, world.in_doubt(), sink_ids=(SINK,))
        yield "listed"
        prepared, staged = world.rules.around(plan.commit, staged=is_staged)
        for one in prepared:
            world.commit(one)
            yield "committed"
        for one in plan.abort:
            world.abort(one)
            yield "rolled back"
        for one in staged:
            world.commit(one)
            yield "applied"
        for decision in claim.decisions:
            self.settled(decision)

    def abort(self) -> Steps:
        world = self.world
        claim = world.claim() if world.rules.abort_claims else world.seen()
        if not world.rules.abort_claims:
            claim = replace(claim, attempt=AttemptId(claim.attempt + 1))
        yield "claimed"
        yield from self.settle(claim)

    def settled(self, decision: BatchDecision) -> None:
        if decision.batch in self.world.decisions:
            self.world.decisions[decision.batch] = replace(
                self.world.decisions[decision.batch], settled=True
            )

    def write(self, attempt: AttemptId, identity: BatchId, batch: Batch) -> Steps:
        world, chance = self.world, self.world.chance
        partitions = chance.randint(1, 3)
        rows: list[list[int]] = [[] for _ in range(partitions)]
        for row in batch.rows:
            rows[chance.randrange(partitions)].append(row)
        reports: list[tuple[int, tuple[Committable, ...]]] = []
        for partition in range(partitions):
            tasks: list[_Task] = []
            while not any(task.report for task in tasks):
                running = [task for task in tasks if not task.failed]
                twin = len(running) == 1 and chance.random() < 0.1 and len(tasks) < 9
                if not running or twin:
                    if sum(task.failed for task in tasks) >= TASK_TRIES_MAX:
                        raise _Failed("a task failed too often")
                    tasks.append(self.start(attempt, partition, len(tasks), rows[partition]))
                yield "waits for tasks"
            reports.append(next(task.report for task in tasks if task.report))
        proposed = world.rules.decision(
            identity, attempt, reports, fingerprint=batch.fingerprint, run=self.name
        )
        if not proposed.committables:
            return
        decision = world.decide(proposed)
        if world.faults and chance.random() < 0.05:
            raise _Failed("the reply to the decision was lost")
        yield "decided"
        if world.rules.settled_first:
            self.settled(decision)
        prepared, staged = world.rules.around(decision.committables, staged=is_staged)
        for one in prepared:
            world.commit(one)
            yield "committed"
        for one in world.rules.sweep(decision, world.in_doubt(), sink_ids=(SINK,)):
            world.abort(one)
            yield "swept"
        for one in staged:
            world.commit(one)
            yield "applied"
        self.settled(decision)

    def start(self, attempt: AttemptId, partition: int, tried: int, rows: list[int]) -> _Task:
        task, world = _Task(), self.world
        world.task_ids += 1
        steps = self.task(task, attempt, partition, tried, world.task_ids, rows)
        world.processes.append(Process(f"task {partition}.{tried}", steps, task))
        return task

    def task(
        self,
        task: _Task,
        attempt: AttemptId,
        partition: int,
        tried: int,
        task_id: int,
        rows: list[int],
    ) -> Steps:
        world = self.world
        yield "begins"
        if not rows:
            task.report = (partition, ())
            return
        checkpoint = task_checkpoint(attempt, tried, task_id)
        transaction = TransactionId(SINK, attempt, checkpoint, partition)
        if world.attempt > attempt:
            world.note(f"{transaction} is fenced")
            return
        twin = tried and world.rules.twin(
            world.in_doubt(), sink_id=SINK, attempt=attempt, partition=partition, staged=is_staged
        )
        if twin and world.rules.takes_twin_away:
            world.abort(twin)
        yield "wrote its ledger row"
        if twin and not world.rules.takes_twin_away:
            world.staged[transaction] = rows
            world.note(f"stages {transaction} beside {twin}")
            yield "staged"
            task.report = (partition, (Committable(transaction, len(rows), STAGED),))
            return
        if transaction in world.prepared or transaction in world.committed or world.locked(rows):
            return
        world.prepared[transaction] = rows
        world.note(f"prepares {transaction}")
        yield "prepared"
        task.report = (partition, (Committable(transaction, len(rows)),))


def run_batches(seed: int, rules: Rules | None = None) -> Outcome:
    """Return how the schedule of `seed` ends: the input in batches, with all that goes wrong."""
    chance = random.Random(seed)
    world = World(chance, rules or Rules(), source=chance.randint(3, 12))
    world.keyed = seed % 2 == 0
    outcome = Outcome(seed)
    try:
        outcome.kills, outcome.refused = _with_faults(world)
        if not outcome.refused:
            _without_faults(world)
        _check_rows(world, all_there=not outcome.refused)
    except Violated as error:
        outcome.violation = str(error)
    outcome.trace = tuple(world.trace)
    outcome.attempts, outcome.decisions = world.attempt, len(world.decisions)
    return outcome


def _with_faults(world: World) -> tuple[int, bool]:
    """Run until the input is read; return how much was killed, and whether a batch was refused."""
    chance, kills, drivers = world.chance, 0, list[tuple[Driver, Process]]()
    for step in range(STEPS_MAX):
        if any(driver.refused for driver, _ in drivers):
            return kills, True
        running = [process for _, process in drivers if process.alive]
        if not running or (len(running) == 1 and chance.random() < 0.03):
            unread = max((b.rows.stop for b in world.offsets.values()), default=0) < world.source
            if not running and not unread and max(world.offsets) in world.done:
                return kills, False
            driver = Driver(world, f"driver {step}")
            process = Process(driver.name, driver.run())
            drivers.append((driver, process))
            world.processes.append(process)
        process = chance.choice(world.processes)
        if process.stands_until > step:
            continue
        if chance.random() < 0.02:
            process.stands_until = step + chance.randint(10, 80)
        elif chance.random() < 0.04:
            kills += 1
            _kill(world, process)
        elif chance.random() < 0.006 and len(running) == 1:
            _restore_or_copy(world, running[0])
        else:
            _step(world, process)
    raise Violated(f"the input is not read after {STEPS_MAX} steps")


def _without_faults(world: World) -> None:
    """Let what is left of tasks end, then one more batch: nothing is in doubt after it."""
    world.faults = False
    for process in [one for one in world.processes if one.task]:
        while process.alive:
            _step(world, process)
    world.source += 2
    process = Process("last driver", Driver(world, "last driver").run())
    world.processes = [process]
    for _ in range(STEPS_MAX):
        if not process.alive:
            break
        _step(world, world.chance.choice(world.processes))
    for left in list(world.processes):
        while left.alive:
            _step(world, left)
    closing = Driver(world, "closing")
    for _ in closing.settle(world.claim()):
        pass
    if world.prepared | world.staged:
        raise Violated(
            f"in doubt after the next batch: {sorted(map(str, world.prepared | world.staged))}"
        )


def _check_rows(world: World, *, all_there: bool) -> None:
    visible = world.visible()
    if len(set(visible)) < len(visible):
        raise Violated(f"rows are doubled: {visible}")
    if all_there and visible != list(range(world.source)):
        raise Violated(f"rows are lost: {visible} of {world.source}")


def _step(world: World, process: Process) -> None:
    try:
        next(process.steps)
    except StopIteration:
        _ended(world, process)


def _kill(world: World, process: Process) -> None:
    """Kill a task, or a driver; a driver's tasks go on for as long as they please."""
    world.note(f"{process.name} is killed")
    process.steps.close()
    _ended(world, process)


def _ended(world: World, process: Process) -> None:
    process.alive = False
    world.processes.remove(process)
    if process.task is not None:
        process.task.failed = process.task.report is None


def _restore_or_copy(world: World, driver: Process) -> None:
    """Copy the checkpoint; or put an older copy of it back, with the driver stopped."""
    if world.copy is None:
        world.copy = dict(world.offsets), set(world.done)
        world.note("the checkpoint is copied")
        return
    _kill(world, driver)
    world.note("an older copy of the checkpoint is restored")
    world.offsets, world.done = dict(world.copy[0]), set(world.copy[1])
    world.copy = None
