"""Batches under a seeded schedule of faults: drivers, their tasks, targets, one keeper.

Each process is a generator that stops before every step that others can see; the schedule chooses
who goes on, who is killed, and whose reply is lost. Only `protocol.batches` decides.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import groupby

from tests.simulation import batch_world

from onceflow.core.protocol import batches
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, TransactionId

STEPS_MAX = 4_000
TASK_TRIES_MAX = 3
LONG = 40
"""How many batches, at the least, follow each other where more attempts than are remembered do."""


class Driver:
    """One driver of the query, from its start until the input is read or it fails."""

    def __init__(self, world: batch_world.World, name: str) -> None:
        self.world = world
        self.name = name
        self.refused = False

    def run(self) -> batch_world.Steps:
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
                    world.offsets[number] = self.planned(first, last)
                yield f"{self.name} plans {number}"
                yield from self.batch(number, world.offsets[number])
        except batch_world.Failed as error:
            world.note(f"{self.name} fails: {error}")
        except batch_world.Refused as error:
            world.note(f"{self.name} is refused: {error}")
            self.refused = True
        except batch_world.RowsLost as error:
            world.note(f"{self.name} reports rows as lost: {error}")
            world.lost = True

    def planned(self, first: int, last: int) -> batch_world.Batch:
        world = self.world
        # Who numbers batches vouches for what is in them.
        fingerprint = "" if world.numbered else f"file {world.written_offsets}"
        if world.is_complete:
            return batch_world.Batch(range(last), fingerprint, replaces=True)
        replaces = world.chance.random() < world.replace_rate if world.replace_rate else False
        return batch_world.Batch(range(first, last), fingerprint, replaces)

    def batch(self, number: int, batch: batch_world.Batch) -> batch_world.Steps:
        world = self.world
        if not world.rules.claim_first:
            yield from self.settle(replace(world.seen(), attempt=AttemptId(world.attempt + 1)))
        claim = world.claim()
        identity = batches.BatchId(batch_world.QUERY, number)
        if world.looks:
            identity = batches.BatchId("", claim.attempt)
        world.numbers[identity] = number
        yield "claimed"
        verdict = world.rules.judge(claim, identity, batch.fingerprint)
        if isinstance(verdict, batches.RefuseBatch):
            raise batch_world.Refused(verdict.reason)
        if isinstance(verdict, batches.RefuseLower):
            raise batch_world.Refused(f"{identity} is below {verdict.last}")
        if world.rules.claim_first:
            yield from self.settle(claim)
        # What an older attempt has decided shows once this one has claimed.
        looked = world.looks and number in world.written
        if not isinstance(verdict, batches.SkipBatch) and not looked:
            try:
                yield from self.write(claim.attempt, identity, batch)
            except batch_world.Failed:
                yield "aborts"
                yield from self.abort(claim.attempt)
                raise
        world.done.add(number)
        world.note(f"{self.name} logs {number}")
        yield "logged by Spark"

    def settle(self, claim: batches.BatchClaim) -> batch_world.Steps:
        world = self.world
        plan = world.rules.settle(claim, world.in_doubt(), sink_ids=self.sink_ids)
        world.looked_at = world.steps
        yield "listed"
        prepared, staged = self.around_roll_backs(plan.commit)
        yield from self.commit_all(prepared, claim.attempt)
        for one in plan.abort:
            world.abort(one)
            yield "rolled back"
        yield from self.commit_all(staged, claim.attempt)
        for decision in claim.decisions:
            if not decision.is_committed:
                world.settle(decision)

    @property
    def sink_ids(self) -> tuple[str, ...]:
        return self.world.sinks if self.world.rules.settles_group else (batch_world.SINK,)

    def around_roll_backs(
        self, decided: Sequence[Committable]
    ) -> tuple[Sequence[Committable], Sequence[Committable]]:
        if self.world.kind is batch_world.Kind.VERSIONS:
            return decided, ()
        return self.world.rules.around(decided, staged=batch_world.is_staged)

    def commit_all(self, decided: Sequence[Committable], attempt: AttemptId) -> batch_world.Steps:
        world = self.world
        if world.kind is batch_world.Kind.VERSIONS:
            for by, listed in groupby(decided, key=lambda one: one.transaction.attempt):
                version = world.rules.version(AttemptId(by), attempt)
                world.commit_version(version, tuple(listed))
                yield "committed"
            return
        for one in decided:
            world.commit(one)
            yield "committed"

    def abort(self, attempt: AttemptId) -> batch_world.Steps:
        world = self.world
        if world.rules.abort_claims and world.attempt != attempt:
            # The run that has claimed since has settled it.
            return
        claim = world.claim() if world.rules.abort_claims else world.seen()
        if not world.rules.abort_claims:
            claim = replace(claim, attempt=AttemptId(claim.attempt + 1))
        yield "claimed"
        yield from self.settle(claim)

    def write(
        self, attempt: AttemptId, identity: batches.BatchId, batch: batch_world.Batch
    ) -> batch_world.Steps:
        world, chance = self.world, self.world.chance
        partitions = chance.randint(1, 3)
        rows: list[list[int]] = [[] for _ in range(partitions)]
        for row in batch.rows:
            rows[chance.randrange(partitions)].append(row)
        counted: list[batch_world.Task] = []
        for partition in range(partitions):
            tasks: list[batch_world.Task] = []
            while not any(task.report for task in tasks):
                running = [task for task in tasks if not task.failed]
                twin = len(running) == 1 and chance.random() < 0.1 and len(tasks) < 9
                if not running or twin:
                    if sum(task.failed for task in tasks) >= TASK_TRIES_MAX:
                        raise batch_world.Failed("a task failed too often")
                    tasks.append(self.start(attempt, partition, len(tasks), batch, rows[partition]))
                yield "waits for tasks"
            counted.append(next(task for task in tasks if task.report))
        proposed = world.rules.decision(
            identity,
            attempt,
            [task.report for task in counted],
            fingerprint=batch.fingerprint,
            run=self.name,
        )
        if not proposed.committables and not (batch.replaces and world.rules.empty_replaces):
            return
        beside = any(task.beside for task in counted)
        decision = yield from self.decide(proposed, batch, with_rows=not beside)
        yield "decided"
        if world.rules.settled_first:
            world.settle(decision)
        prepared, staged = self.around_roll_backs(decision.committables)
        yield from self.commit_all(prepared, attempt)
        world.looked_at = world.steps
        for one in world.rules.sweep(decision, world.in_doubt(), sink_ids=self.sink_ids):
            world.abort(one)
            yield "swept"
        yield from self.commit_all(staged, attempt)
        world.settle(decision)
        if chance.random() < 0.3:
            yield "committed all"
            world.prune(world.rules.oldest_proof(decision))

    def decide(
        self, proposed: batches.BatchDecision, batch: batch_world.Batch, *, with_rows: bool
    ) -> Generator[str, None, batches.BatchDecision]:
        """Return what is decided, asked for again where the reply was lost."""
        world = self.world
        if batch.replaces and (world.rules.rows_first or world.rules.deletes_first):
            world.delete_rows()
            yield "deleted what is replaced"
        if world.rules.rows_first and with_rows and world.kind is batch_world.Kind.DATABASE:
            world.apply_staged(proposed, batch)
            yield "applied"
        decision = world.decide(proposed, batch, with_rows=with_rows)
        if world.faults and world.chance.random() < 0.05:
            raise batch_world.Failed("the reply to the decision was lost")
        while world.faults and world.chance.random() < 0.05:
            yield "asks again what is decided"
            decision = world.decide(proposed, batch, with_rows=with_rows)
        return decision

    def start(
        self,
        attempt: AttemptId,
        partition: int,
        tried: int,
        batch: batch_world.Batch,
        rows: list[int],
    ) -> batch_world.Task:
        task, world = batch_world.Task(), self.world
        world.task_ids += 1
        # Where the server has no room to prepare any more, rows are staged.
        full = world.kind is batch_world.Kind.DATABASE and world.chance.random() < 0.1
        stages = world.stages or batch.replaces or full
        steps = self.task(task, attempt, partition, tried, world.task_ids, rows, stages=stages)
        world.processes.append(batch_world.Process(f"task {partition}.{tried}", steps, task))
        return task

    def task(
        self,
        task: batch_world.Task,
        attempt: AttemptId,
        partition: int,
        tried: int,
        task_id: int,
        rows: list[int],
        *,
        stages: bool,
    ) -> batch_world.Steps:
        world = self.world
        yield "begins"
        if not rows:
            task.report = (partition, ())
            return
        checkpoint = world.rules.checkpoint(attempt, tried, task_id)
        names = [TransactionId(sink, attempt, checkpoint, partition) for sink in world.sinks]
        if world.attempt > attempt:
            world.note(f"{names[0]} is fenced")
            return
        twin = None
        if tried and world.kind is batch_world.Kind.DATABASE and len(names) == 1:
            twin = world.rules.twin(
                world.in_doubt(),
                sink_id=batch_world.SINK,
                attempt=attempt,
                partition=partition,
                staged=batch_world.is_staged,
            )
        if twin and world.rules.takes_twin_away:
            world.abort(twin)
            twin = None
        yield "wrote its ledger row"
        listed: list[Committable] = []
        for name in names:
            if twin or stages:
                world.stage(name, rows)
                listed.append(Committable(name, len(rows), batch_world.STAGED))
                beside = f" beside {twin}" if twin else ""
                world.note(f"stages {name}{beside}")
                yield "staged"
                continue
            known = name in world.prepared or name in world.committed
            if known or world.locked(name.sink_id, rows):
                return
            world.prepare(name, rows)
            listed.append(Committable(name, len(rows)))
            world.note(f"prepares {name}")
            yield "prepared"
        task.beside = twin is not None
        task.report = (partition, tuple(listed))


def run_batches(seed: int, rules: batch_world.Rules | None = None) -> batch_world.Outcome:
    """Return how the schedule of `seed` ends: the input in batches, with all that goes wrong."""
    chance = random.Random(seed)
    world = _drawn(
        seed, batch_world.World(chance, rules or batch_world.Rules(), source=chance.randint(3, 12))
    )
    outcome = batch_world.Outcome(seed)
    try:
        outcome.kills, outcome.refused = _with_faults(world)
        if not outcome.refused and not world.lost:
            _without_faults(world)
        if world.lost and not world.taken_away:
            raise batch_world.Violated("rows are reported as lost, and nobody has taken any away")
        _check_rows(world, all_there=not (outcome.refused or world.lost))
    except batch_world.Violated as error:
        outcome.violation = str(error)
    outcome.trace = tuple(world.trace)
    outcome.attempts, outcome.decisions = world.attempt, world.decided
    outcome.lost = world.lost
    return outcome


def _drawn(seed: int, world: batch_world.World) -> batch_world.World:
    """Return `world` with what is drawn apart, so that it changes nothing in other schedules."""
    rng = random.Random(f"batches {seed}")
    world.writes = rng.random() < 0.3
    world.forgetful = rng.choice([0.0, 0.0, 0.2])
    world.taken_rate = rng.choice([0.0] * 9 + [0.01])
    if rng.random() < 0.01:
        world.source, world.rows_max = LONG, 1
    world.numbered = world.writes and rng.random() < 0.4
    world.kind = rng.choice(
        [
            batch_world.Kind.DATABASE,
            batch_world.Kind.DATABASE,
            batch_world.Kind.TOPIC,
            batch_world.Kind.VERSIONS,
        ]
    )
    if world.kind is batch_world.Kind.DATABASE:
        world.keyed = seed % 2 == 0
        world.stages = rng.random() < 0.4
        _draw_replacing(rng, world)
    else:
        world.stages = world.kind is batch_world.Kind.TOPIC
        world.retained = rng.choice([1, 2, 16])
    return world


def _draw_replacing(rng: random.Random, world: batch_world.World) -> None:
    """Draw which batches replace all rows; else, perhaps, that they go to two sinks."""
    if rng.random() < 0.4:
        world.replace_rate = 0.4 if world.writes else 0.0
        world.is_complete = not world.writes
    elif rng.random() < 0.3:
        world.sinks = (batch_world.SINK, batch_world.OTHER)
        world.in_keeper = world.sinks if rng.random() < 0.5 else (batch_world.SINK,)


def _with_faults(world: batch_world.World) -> tuple[int, bool]:
    """Run until the input is read; return how much was killed, and whether a batch was refused."""
    chance, kills, drivers = world.chance, 0, list[tuple[Driver, batch_world.Process]]()
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
            process = batch_world.Process(driver.name, driver.run())
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
        elif chance.random() < 0.006 and len(running) == 1 and not world.looks:
            _restore_or_copy(world, running[0])
        else:
            _step(world, process)
    raise batch_world.Violated(f"the input is not read after {steps_max} steps")


def _without_faults(world: batch_world.World) -> None:
    """Write one more batch, the last; then nothing is in doubt that was prepared before it ended.

    What is left of tasks has ended before, or goes on beside it.
    """
    world.faults = False
    world.processes = [process for process in world.processes if process.task]
    if world.chance.random() < 0.5:
        _run_to_end(world)
    world.source += 2
    while not world.all_written:
        # A task of an older attempt may lock what this one writes: then it is started again.
        process = batch_world.Process("last driver", Driver(world, "last driver").run())
        world.processes.append(process)
        for _ in range(STEPS_MAX):
            if not process.alive:
                break
            _step(world, world.chance.choice(world.processes))
        if world.lost:
            return
        if world.steps > 20 * STEPS_MAX:
            raise batch_world.Violated("the last batch is not written")
    _run_to_end(world)
    left = [*world.prepared, *world.staged]
    if early := [str(one) for one in left if world.prepared_at[one] < world.looked_at]:
        raise batch_world.Violated(f"in doubt after the last batch, and for ever: {sorted(early)}")
    closing = Driver(world, "closing")
    for _ in closing.settle(world.claim()):
        pass
    if world.prepared | world.staged:
        raise batch_world.Violated(
            f"in doubt after the next batch: {sorted(map(str, world.prepared | world.staged))}"
        )


def _run_to_end(world: batch_world.World) -> None:
    for process in list(world.processes):
        while process.alive:
            _step(world, process)


def _check_rows(world: batch_world.World, *, all_there: bool) -> None:
    for sink in world.sinks:
        visible = world.visible(sink)
        if len(set(visible)) < len(visible):
            raise batch_world.Violated(f"rows of {sink} are doubled: {visible}")
        if all_there and visible != world.wanted:
            raise batch_world.Violated(f"rows of {sink} are lost: {visible} of {world.wanted}")


def _step(world: batch_world.World, process: batch_world.Process) -> None:
    world.steps += 1
    try:
        next(process.steps)
    except StopIteration:
        _ended(world, process)


def _kill(world: batch_world.World, process: batch_world.Process) -> None:
    """Kill a task, or a driver; a driver's tasks go on for as long as they please."""
    world.note(f"{process.name} is killed")
    process.steps.close()
    _ended(world, process)


def _ended(world: batch_world.World, process: batch_world.Process) -> None:
    process.alive = False
    world.processes.remove(process)
    if process.task is not None:
        process.task.failed = process.task.report is None


def _restore_or_copy(world: batch_world.World, driver: batch_world.Process) -> None:
    """Copy the checkpoint; or put an older copy of it back, with the driver stopped."""
    if world.copy is None:
        world.copy = dict(world.offsets), set(world.done)
        world.note("the checkpoint is copied")
        return
    _kill(world, driver)
    world.note("an older copy of the checkpoint is restored")
    if not world.numbered:
        world.offsets = dict(world.copy[0])
    world.done = set(world.copy[1])
    world.copy = None
