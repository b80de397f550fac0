"""Simulated drivers of one job. Mirrors core/runtime: the same protocol objects, the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.model import (
    digest_of,
)
from tests.simulation.slots import KEY_GROUPS, SINK, Deployment, Fact, Slot, parse_splits
from tests.simulation.world import World

from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.protocol.assignment import assign_splits
from onceflow.core.protocol.committables import Lost, Unknown
from onceflow.core.protocol.coordinator import CheckpointSettings
from onceflow.core.protocol.decisions import (
    AppendDecision,
    DiscardState,
    FailAttempt,
    FinishJob,
    NotifyAbort,
    NotifyComplete,
    TriggerCheckpoint,
)
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.log import (
    AppendStands,
    LogEntry,
    LogRecord,
    extend,
    fold,
    judge_append,
    next_claim,
    next_decision,
    prunable,
)
from onceflow.core.protocol.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)


class Driver:
    """One driver process: claims, recovers, deploys, coordinates; restarts after a failure."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.attempt = AttemptId(0)
        self.slots: list[Slot] = []

    def start(self) -> None:
        self._later(self._attempt)

    def kill(self, why: str) -> None:
        if self.alive:
            self.alive = False
            self.world.clock.say(f"driver {self.name} dies: {why}")

    # --- an attempt ---------------------------------------------------------------------------

    def _attempt(self) -> None:
        world = self.world
        self.view = fold(world.log.entries())
        claim = next_claim(self.view, self.name)
        if not self._append(claim):
            self._later(self._attempt, 0.1)
            return
        self.attempt = claim.attempt
        world.claimed = max(world.claimed, claim.attempt)
        world.clock.say(f"driver {self.name} claims attempt {self.attempt}")
        if self._crashed("after claim"):
            return
        if not self.view.completed:
            splits = tuple(f"{p}:0".encode() for p in range(world.shape.partitions))
            source = OperatorSnapshot("source", lists={"splits": splits})
            genesis = CompletedCheckpoint(
                GENESIS, self.attempt, 1, KEY_GROUPS,
                (SubtaskSnapshot(SubtaskRef("source", 0), (source,)),), 0, 0,
            )  # fmt: skip
            if not self._decide(genesis):
                return
        self._later(self._recover)

    def _recover(self) -> None:
        world = self.world
        self.restored = self.view.completed[-1]
        self._sweep_files()
        decided = [c for _, o in self.restored.operator("keyed") for c in o.committables]
        plan = world.variant.plan(
            decided, world.database.in_doubt(), sink_id=SINK, attempt=self.attempt
        )
        for committable in plan.commit:
            if self._crashed("in recovery"):
                return
            outcome = world.database.commit(committable)
            if isinstance(outcome, Lost) and not world.variant.lost_is_committed:
                world.lost = True
                world.clock.say(f"{committable.transaction} is lost, and the job says so")
                return
            if isinstance(outcome, Unknown):
                self._fail("the database is gone in recovery")
                return
        for committable in plan.abort:
            world.database.abort(committable)
        self._later(self._deploy)

    def _deploy(self) -> None:
        world, shape = self.world, self.world.shape
        parallelism = shape.parallelism[self.attempt % len(shape.parallelism)]
        elements = [e for _, o in self.restored.operator("source") for e in o.lists["splits"]]
        positions = parse_splits(tuple(elements))
        ids = assign_splits([str(p) for p in sorted(positions)], parallelism)
        splits = [{int(p): positions[int(p)] for p in mine} for mine in ids]
        handles = tuple(h for _, o in self.restored.operator("keyed") for h in o.keyed)
        attempt = self.attempt

        def report(slot: int, said: Fact | str) -> None:
            if self.alive:
                self._heard(attempt, slot, said)

        deployment = Deployment(attempt, parallelism, splits, handles, report)
        self.slots = [Slot(world, deployment, index) for index in range(parallelism)]
        deployment.peers = self.slots
        world.slots.extend(self.slots)
        for slot in self.slots:
            slot.start()
        everyone = [ref for slot in self.slots for ref in (slot.source, slot.keyed)]
        self.coordinator = world.variant.coordinator(
            CheckpointSettings(
                interval_s=0.15, timeout_s=1.0, max_concurrent=shape.concurrent,
                tolerable_failures=shape.tolerable, retained=shape.retained,
            ),
            attempt=attempt,
            subtasks=frozenset(everyone),
            sources=frozenset(slot.source for slot in self.slots),
            parallelism=parallelism,
            max_parallelism=KEY_GROUPS,
            retained=self.view.completed,
            next_checkpoint=self.view.next_checkpoint,
            now_s=world.clock.now_s,
            wall_ms=lambda: int(world.clock.now_s * 1000),
        )  # fmt: skip
        self.swept = False
        self.last_complete: CheckpointId | None = None
        self._tick(attempt)

    def _tick(self, attempt: AttemptId) -> None:
        if attempt != self.attempt or not self.slots:
            return
        self._carry_out(self.coordinator.tick(self.world.clock.now_s))
        if self.last_complete is not None:
            self._tell_complete(self.last_complete)  # again: the first word may be lost
        self._later(lambda: self._tick(attempt), 0.1)

    def _heard(self, attempt: AttemptId, slot: int, said: Fact | str) -> None:
        if not self.slots:
            return
        if self.world.variant.slot_checks_attempt and attempt != self.attempt:
            return  # I7
        if isinstance(said, str):
            self._fail(f"slot {slot} is gone: {said}")
        else:
            self._carry_out(said(self.coordinator, self.world.clock.now_s))

    def _carry_out(self, decisions: Sequence[object]) -> None:
        world = self.world
        for decision in decisions:
            if not self.alive or not self.slots:
                return
            match decision:
                case TriggerCheckpoint(checkpoint, kind, at_ms):
                    barrier = Barrier(checkpoint, kind, at_ms)
                    for slot in self.slots:
                        world.network.send(lambda s=slot, b=barrier: s.trigger(b))  # type: ignore[misc]
                case AppendDecision(completed):
                    self._append_decision(completed)
                case NotifyComplete(checkpoint, oldest):
                    self.last_complete = checkpoint
                    self._tell_complete(checkpoint)
                    self._prune(oldest)
                    self._sweep()
                case NotifyAbort(checkpoint):
                    for slot in self.slots:
                        world.network.send(lambda s=slot, n=checkpoint: s.alive and s.abort(n))  # type: ignore[misc]
                case DiscardState(handles):
                    for handle in handles:
                        world.files.content.pop(handle.path, None)
                case FailAttempt(reason):
                    self._fail(reason)
                case FinishJob():
                    world.finished = True
                    world.clock.say(f"attempt {self.attempt} has finished the job")
                    self._cancel_slots()
                case _:
                    pass

    def _append_decision(self, completed: CompletedCheckpoint) -> None:
        if self._crashed("before append") or not self._decide(completed):
            return
        if not self._crashed("after append"):
            self._carry_out(self.coordinator.logged(completed.checkpoint, self.world.clock.now_s))

    def _tell_complete(self, checkpoint: CheckpointId) -> None:
        for slot in self.slots:
            self.world.network.send(lambda s=slot: s.complete(checkpoint))  # type: ignore[misc]

    def _sweep(self) -> None:
        if self.swept or not self.world.variant.sweep:
            return
        self.swept = True
        latest = self.coordinator.completed[-1]
        decided = [c for _, o in latest.operator("keyed") for c in o.committables]
        plan = self.world.variant.plan(
            decided, self.world.database.in_doubt(), sink_id=SINK, attempt=self.attempt
        )
        for committable in plan.abort:
            self.world.database.abort(committable)
        self._sweep_files()

    def _sweep_files(self) -> None:
        """Files of older attempts that no decision in the log names."""
        named = {
            handle.path
            for completed in self.view.completed
            for _, operator in completed.operator("keyed")
            for handle in operator.keyed
        }
        for path in list(self.world.files.content):
            if int(path[1:].split("/")[0]) < self.attempt and path not in named:
                del self.world.files.content[path]

    # --- the log ------------------------------------------------------------------------------

    def _append(self, record: LogRecord) -> bool:
        """Create the record; the view goes on with it when it stands."""
        world, log = self.world, self.world.log
        if world.variant.fenced:
            digest = log.create(record)
        else:
            digest = digest_of(record)
            log.records[record.sequence] = LogEntry(record, digest)
        verdict = judge_append(
            record,
            digest,
            standing_digest=log.standing(record.sequence),
            highest_sequence=max(log.records),
        )
        stands = isinstance(verdict, AppendStands)
        if not world.variant.judged:
            stands = log.standing(record.sequence) == digest
        if stands:
            self.view = extend(self.view, LogEntry(record, digest))
        return stands

    def _decide(self, completed: CompletedCheckpoint) -> bool:
        try:
            record = next_decision(self.view, completed)
        except OnceflowError:
            self.kill("fenced")
            return False
        if not self._append(record):
            # Fenced: whether the record counts is for the newer attempt to read.
            self.kill(f"fenced at record {record.sequence}")
            self._cancel_slots()
            return False
        self.world.decided(record)
        self.world.clock.say(f"attempt {completed.attempt} decides {completed.checkpoint}")
        return True

    def _prune(self, oldest: CheckpointId) -> None:
        kept = max(1, sum(c.checkpoint >= oldest for c in self.view.completed))
        first = self.view.decided[-kept].sequence
        for sequence in prunable(self.view, kept):
            self.world.log.records.pop(sequence, None)
        self.view = replace(
            self.view,
            decided=self.view.decided[-kept:],
            first_sequence=max(first, self.view.first_sequence),
            ghosts=(),
        )

    # --- failures -----------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        self.world.clock.say(f"attempt {self.attempt} fails: {reason}")
        self._cancel_slots()
        if not self.world.lost:
            self._later(self._attempt, 0.2)

    def _cancel_slots(self) -> None:
        """A cancelled slot may not hear of it for a while, and goes on: a zombie."""
        for slot in self.slots:
            self.world.clock.after(
                self.world.rng.expovariate(1 / 0.2),
                lambda s=slot: s.kill("cancelled"),  # type: ignore[misc]
            )
        self.slots = []

    def _crashed(self, where: str) -> bool:
        if self.alive and self.world.draws_crash():
            self.kill(where)
        return not self.alive

    def _later(self, step: object, delay_s: float = 0.02) -> None:
        def event() -> None:
            if self.alive:
                step()  # type: ignore[operator]

        self.world.clock.after(delay_s * self.world.rng.uniform(0.5, 2.0), event)
