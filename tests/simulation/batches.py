"""Batches under a seeded schedule of faults: drivers, their tasks, one target, one keeper.

Each process is a generator that stops before every step that others can see; the schedule chooses
who goes on, who is killed, and whose reply is lost. Only `protocol.batches` decides.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.batch_world import (
    QUERY,
    SINK,
    STAGED,
    Batch,
    Failed,
    Outcome,
    Process,
    Refused,
    RowsLost,
    Rules,
    Steps,
    Task,
    Violated,
    World,
    is_staged,
)

from onceflow.core.protocol.batches import (
    BatchClaim,
    BatchId,
    RefuseBatch,
    SkipBatch,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId

STEPS_MAX = 4_000
TASK_TRIES_MAX = 3
LONG = 40
"""How many batches, at the least, follow each other where more attempts than are remembered do."""


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
                    most = min(world.source, first + world.rows_max)
                    last = first if empty else world.chance.randint(first + 1, most)
                    world.offsets[number] = Batch(
                        range(first, last), f"file {world.written_offsets}"
                    )
                yield f"{self.name} plans {number}"
                yield from self.batch(number, world.offsets[number])
        except Failed as error:
            world.note(f"{self.name} fails: {error}")
        except Refused as error:
            world.note(f"{self.name} is refused: {error}")
            self.refused = True
        except RowsLost as error:
            world.note(f"{self.name} reports rows as lost: {error}")
            world.lost = True

    def batch(self, number: int, batch: Batch) -> Steps:
        world = self.world
        if not world.rules.claim_first:
            yield from self.settle(replace(world.seen(), attempt=AttemptId(world.attempt + 1)))
        claim = world.claim()
        identity = BatchId("", claim.attempt) if world.writes else BatchId(QUERY, number)
        world.numbers[identity] = number
        yield "claimed"
        verdict = world.rules.judge(claim, identity, batch.fingerprint)
        if isinstance(verdict, RefuseBatch):
            raise Refused(verdict.reason)
        if world.rules.claim_first:
            yield from self.settle(claim)
        # What an older attempt has decided shows once this one has claimed.
        if not isinstance(verdict, SkipBatch) and not (world.writes and number in world.written):
            try:
                yield from self.write(claim.attempt, identity, batch)
            except Failed:
                yield "aborts"
                yield from self.abort(claim.attempt)
                raise
        world.done.add(number)
        world.note(f"{self.name} logs {number}")
        yield "logged by Spark"

    def settle(self, claim: BatchClaim) -> Steps:
        world = self.world
        plan = world.rules.settle(claim, world.in_doubt(), sink_ids=(SINK,))
        world.looked_at = world.steps
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
            if not decision.settled:
                world.settle(decision)

    def abort(self, attempt: AttemptId) -> Steps:
        world = self.world
        if world.rules.abort_claims and world.attempt != attempt:
            # The run that has claimed since has settled it.
            return
        claim = world.claim() if world.rules.abort_claims else world.seen()
        if not world.rules.abort_claims:
            claim = replace(claim, attempt=AttemptId(claim.attempt + 1))
        yield "claimed"
        yield from self.settle(claim)

    def write(self, attempt: AttemptId, identity: BatchId, batch: Batch) -> Steps:
        world, chance = self.world, self.world.chance
        partitions = chance.randint(1, 3)
        rows: list[list[int]] = [[] for _ in range(partitions)]
        for row in batch.rows:
            rows[chance.randrange(partitions)].append(row)
        reports: list[tuple[int, tuple[Committable, ...]]] = []
        for partition in range(partitions):
            tasks: list[Task] = []
            while not any(task.report for task in tasks):
                running = [task for task in tasks if not task.failed]
                twin = len(running) == 1 and chance.random() < 0.1 and len(tasks) < 9
                if not running or twin:
                    if sum(task.failed for task in tasks) >= TASK_TRIES_MAX:
                        raise Failed("a task failed too often")
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
            raise Failed("the reply to the decision was lost")
        yield "decided"
        if world.rules.settled_first:
            world.settle(decision)
        prepared, staged = world.rules.around(decision.committables, staged=is_staged)
        for one in prepared:
            world.commit(one)
            yield "committed"
        world.looked_at = world.steps
        for one in world.rules.sweep(decision, world.in_doubt(), sink_ids=(SINK,)):
            world.abort(one)
            yield "swept"
        for one in staged:
            world.commit(one)
            yield "applied"
        world.settle(decision)
        if chance.random() < 0.3:
            yield "committed all"
            world.prune(world.rules.oldest_proof(decision))

    def start(self, attempt: AttemptId, partition: int, tried: int, rows: list[int]) -> Task:
        task, world = Task(), self.world
        world.task_ids += 1
        steps = self.task(task, attempt, partition, tried, world.task_ids, rows)
        world.processes.append(Process(f"task {partition}.{tried}", steps, task))
        return task

    def task(
        self,
        task: Task,
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
        checkpoint = world.rules.checkpoint(attempt, tried, task_id)
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
            world.stage(transaction, rows)
            world.note(f"stages {transaction} beside {twin}")
            yield "staged"
            task.report = (partition, (Committable(transaction, len(rows), STAGED),))
            return
        if transaction in world.prepared or transaction in world.committed or world.locked(rows):
            return
        world.prepare(transaction, rows)
        world.note(f"prepares {transaction}")
        yield "prepared"
        task.report = (partition, (Committable(transaction, len(rows)),))


def run_batches(seed: int, rules: Rules | None = None) -> Outcome:
    """Return how the schedule of `seed` ends: the input in batches, with all that goes wrong."""
    chance = random.Random(seed)
    world = _drawn(seed, World(chance, rules or Rules(), source=chance.randint(3, 12)))
    outcome = Outcome(seed)
    try:
        outcome.kills, outcome.refused = _with_faults(world)
        if not outcome.refused and not world.lost:
            _without_faults(world)
        if world.lost and not world.taken_away:
            raise Violated("rows are reported as lost, and nobody has taken any away")
        _check_rows(world, all_there=not (outcome.refused or world.lost))
    except Violated as error:
        outcome.violation = str(error)
    outcome.trace = tuple(world.trace)
    outcome.attempts, outcome.decisions = world.attempt, world.decided
    outcome.lost = world.lost
    return outcome


def _drawn(seed: int, world: World) -> World:
    """Return `world` with what is drawn apart, so that it changes nothing in other schedules."""
    rng = random.Random(f"batches {seed}")
    world.keyed = seed % 2 == 0
    world.writes = rng.random() < 0.3
    world.forgetful = rng.choice([0.0, 0.0, 0.2])
    world.taken_rate = rng.choice([0.0] * 9 + [0.01])
    if rng.random() < 0.01:
        world.source, world.rows_max = LONG, 1
    return world


def _with_faults(world: World) -> tuple[int, bool]:
    """Run until the input is read; return how much was killed, and whether a batch was refused."""
    chance, kills, drivers = world.chance, 0, list[tuple[Driver, Process]]()
    steps_max = STEPS_MAX * (10 if world.rows_max == 1 else 1)
    for step in range(steps_max):
        world.steps += 1
        if any(driver.refused for driver, _ in drivers):
            return kills, True
        if world.lost:
            return kills, False
        running = [process for _, process in drivers if process.alive]
        if not running or (len(running) == 1 and chance.random() < 0.03):
            if not running and world.all_written:
                return kills, False
            driver = Driver(world, f"driver {step}")
            process = Process(driver.name, driver.run())
            drivers.append((driver, process))
            world.processes.append(process)
        if world.taken_rate and chance.random() < world.taken_rate:
            world.take_away()
        process = chance.choice(world.processes)
        if process.stands_until > step:
            continue
        if chance.random() < 0.02:
            process.stands_until = step + chance.randint(10, 80)
        elif chance.random() < 0.04:
            kills += 1
            _kill(world, process)
        elif chance.random() < 0.006 and len(running) == 1 and not world.writes:
            _restore_or_copy(world, running[0])
        else:
            _step(world, process)
    raise Violated(f"the input is not read after {steps_max} steps")


def _without_faults(world: World) -> None:
    """Write one more batch, the last; then nothing is in doubt that was prepared before it ended.

    What is left of tasks has ended before, or goes on beside it.
    """
    world.faults = False
    world.processes = [one for one in world.processes if one.task]
    if world.chance.random() < 0.5:
        _run_to_end(world)
    world.source += 2
    while not world.all_written:
        # A task of an older attempt may lock what this one writes: then it is started again.
        process = Process("last driver", Driver(world, "last driver").run())
        world.processes.append(process)
        for _ in range(STEPS_MAX):
            if not process.alive:
                break
            _step(world, world.chance.choice(world.processes))
        if world.lost:
            return
        if world.steps > 20 * STEPS_MAX:
            raise Violated("the last batch is not written")
    _run_to_end(world)
    left = [*world.prepared, *world.staged]
    if early := [str(one) for one in left if world.prepared_at[one] < world.looked_at]:
        raise Violated(f"in doubt after the last batch, and for ever: {sorted(early)}")
    closing = Driver(world, "closing")
    for _ in closing.settle(world.claim()):
        pass
    if world.prepared | world.staged:
        raise Violated(
            f"in doubt after the next batch: {sorted(map(str, world.prepared | world.staged))}"
        )


def _run_to_end(world: World) -> None:
    for process in list(world.processes):
        while process.alive:
            _step(world, process)


def _check_rows(world: World, *, all_there: bool) -> None:
    visible = world.visible()
    if len(set(visible)) < len(visible):
        raise Violated(f"rows are doubled: {visible}")
    if all_there and visible != list(range(world.source)):
        raise Violated(f"rows are lost: {visible} of {world.source}")


def _step(world: World, process: Process) -> None:
    world.steps += 1
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
