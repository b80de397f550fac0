"""Simulated drivers of one job. Mirrors core/runtime: the same protocol objects, the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tests.simulation.channels import KEY_GROUPS
from tests.simulation.clock import Gone, Process, Steps
from tests.simulation.committer import DEADLINE_S, GlobalCommitter
from tests.simulation.log_owner import LogOwner
from tests.simulation.recovery import CheckpointsCleaner, SinkRecovery, sweep_files
from tests.simulation.savepoints import begin_from, write
from tests.simulation.slots import (
    SPLITS,
    Deployment,
    Fact,
    Slot,
    SlotFailed,
    encode_split,
    parse_splits,
)
from tests.simulation.stages import KEYED, RELAY
from tests.simulation.targets import Versioned
from tests.simulation.world import World

from onceflow.core.commit.queue import CommitRetryPolicy
from onceflow.core.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    OnceflowError,
    PreparedTransactionLost,
    SlotLost,
    StorageError,
)
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.decisions import (
    AppendDecision,
    CheckpointKind,
    CountFailure,
    DiscardState,
    FailAttempt,
    FinishJob,
    NotifyAbort,
    NotifyComplete,
    SavepointRequest,
    TriggerCheckpoint,
    WriteSavepoint,
)
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.restart import GiveUp, RestartAfter
from onceflow.core.protocol.snapshots import CompletedCheckpoint, OperatorSnapshot, SubtaskSnapshot
from onceflow.core.protocol.splits import Split, SplitOffers, assign_splits


class Driver(Process):
    """One driver process: one attempt after another until the job is done."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.clock)
        self.world, self.name = world, name
        self.attempt: Attempt | None = None
        self.pipeline = world.pipeline
        self._claimed: AttemptId | None = None
        """By this driver: it claims again only while nobody else has."""
        self._requests: set[CheckpointKind] = set()
        self.last_savepoint: CompletedCheckpoint | None = None

    def start(self) -> None:
        self.begin(self._attempts())

    def kill(self, why: str) -> None:
        if self.alive:
            self.alive = False
            self.clock.say(f"driver {self.name} dies: {why}")
            if self.attempt is not None:
                # Its slots notice by the silence of the driver, each in its own time.
                self.attempt.release_slots("driver lost")

    def request(self, kind: CheckpointKind) -> None:
        """The user asks."""
        self.clock.say(f"{kind.value} is asked for")
        if self.attempt is not None and self.attempt.coordinates:
            self.attempt.request(kind)
        else:
            self._requests.add(kind)

    def _attempts(self) -> Steps[None]:
        tracker = self.world.shape.restart.tracker(self.world.rng)
        while True:
            try:
                yield 0.02
                log = yield from LogOwner.claims(
                    self.world, self.name, self._claimed, self.pipeline
                )
                self._claimed = log.attempt
                self.attempt = attempt = Attempt(self.world, self, log)
                yield from attempt.run(self._requests, tracker.on_running)
                return
            except PreparedTransactionLost as error:
                # An attempt that was overtaken asks for what the newer one has done and forgotten.
                overtaken = self.attempt is None or self.attempt.number < self.world.claimed
                self.world.lost = not overtaken
                self.kill(f"lost: {error}")
                return
            except Fenced as error:
                self.kill(f"fenced: {error}")
                return
            except ConfigError as error:
                self.world.hand_over()
                self.kill(f"refused: {error}")
                return
            except OnceflowError as error:
                self.clock.say(f"driver {self.name}: attempt fails: {error}")
                mistake = str(error) if isinstance(error, CheckpointError) else ""
                match tracker.on_failure(self.clock.now_s, mistake):
                    case GiveUp(reason):
                        self.kill(f"no further attempt: {reason}")
                        return
                    case RestartAfter(delay_s):
                        yield delay_s
            finally:
                if self.attempt is not None:
                    self.attempt.release_slots("cancelled")
                    if self.world.variant.requests_survive:
                        self._requests |= self.attempt.unfulfilled()
                self.attempt = None


class Attempt:
    """Runs one attempt from its claim to its end."""

    def __init__(self, world: World, driver: Driver, log: LogOwner) -> None:
        self.world, self.driver, self.log = world, driver, log
        self.number = self.log.attempt
        self.coordinator: CheckpointCoordinator | None = None
        self.slots: list[Slot] = []
        self._recovery = SinkRecovery(world, driver, self.log)
        self._cleaner = CheckpointsCleaner(world, driver, self.log, self._recovery)
        self._failure: OnceflowError | None = None
        self._finished: CheckpointId | None = None
        self._stopping: set[CheckpointId] = set()
        self._drains = False
        self._told: tuple[CheckpointId, dict[str, CheckpointId]] | None = None
        self._appending = False
        self._deferred: deque[tuple[CheckpointKind | None, Fact]] = deque()
        """What the coordinator is told when the append has ended; with what is asked for."""
        self._offers: dict[str, SplitOffers] = {}
        self._discover_at = 0.0
        self._global: dict[str, GlobalCommitter] = {}
        world.clock.say(f"driver {driver.name} claims attempt {self.number}")

    def run(self, requests: set[CheckpointKind], running: object) -> Steps[None]:
        """Run to the end of the job; raises OnceflowError when the attempt fails."""
        world = self.world
        if self._crashes("after the claim"):
            yield 1.0
        restored = yield from self._restore_point()
        try:
            sweep_files(world, self.log)
        except Gone:
            raise StorageError("files cannot be swept") from None
        yield from self._recovery.recover(restored)
        self._deploy(restored)
        running(world.clock.now_s)  # type: ignore[operator]
        for kind in sorted(requests, key=lambda one: one.value):
            requests.remove(kind)
            self.request(kind)
        while self._finished is None:
            self._fail_if_told()
            assert self.coordinator is not None
            if not self._appending:
                self._carry_out(self.coordinator.tick(world.clock.now_s))
            self._discover()
            if self._told is not None and world.shape.loss:
                self._tell_complete(*self._told)  # again: the first word may be lost
            wake_s = self.coordinator.next_wake_s()
            yield 0.1 if wake_s is None else max(0.01, min(0.1, wake_s - world.now_s))
        yield from self._end()

    @property
    def coordinates(self) -> bool:
        return self.coordinator is not None and self._failure is None

    def unfulfilled(self) -> frozenset[CheckpointKind]:
        asked = frozenset(kind for kind, _ in self._deferred if kind)
        return asked | self.coordinator.requested if self.coordinator else asked

    def request(self, kind: CheckpointKind) -> None:
        if kind.is_savepoint:
            request = SavepointRequest(f"{self.number}", kind)
            self._tell(lambda c, now_s: c.request_savepoint(request, now_s), kind)
        else:
            self._tell(lambda c, now_s: c.request(kind, now_s), kind)

    def release_slots(self, why: str) -> None:
        """A slot whose attempt is over may not hear of it for a while, and goes on: a zombie."""
        for slot in self.slots:
            self.world.clock.after(
                self.world.rng.expovariate(1 / 0.2),
                lambda s=slot: s.kill(why),  # type: ignore[misc]
            )
        self.slots = []
        for committer in self._global.values():
            committer.close()

    # --- the beginning -------------------------------------------------------------------------

    def _restore_point(self) -> Steps[CompletedCheckpoint]:
        """Decide checkpoint 0 if need be, or one that takes in what is new since the last."""
        yield from begin_from(self.world, self.log, self._recovery)
        if not self.log.view.completed:
            yield from self.log.append(genesis_of(self.world, self.log))
        restored = self.log.view.completed[-1]
        lists: dict[str, tuple[bytes, ...]] = {}
        for uid, partitions in self.world.sources.items():
            known = positions_of(restored, uid)
            if new := set(partitions) - known.keys():
                now = known | dict.fromkeys(sorted(new), 0)
                lists[uid] = tuple(encode_split(p, at) for p, at in now.items())
        if lists:
            now_ms = self.world.clock.wall_ms()
            grown = self.world.variant.with_lists(
                restored, SPLITS, lists, attempt=self.number, now_ms=now_ms
            )
            yield from self.log.append(grown)
        return self.log.view.completed[-1]

    def _deploy(self, restored: CompletedCheckpoint) -> None:
        world, shape = self.world, self.world.shape
        parallelism = shape.parallelism[self.number % len(shape.parallelism)]
        known = {uid: positions_of(restored, uid) for uid in world.sources}
        splits = {uid: _dealt(positions, parallelism) for uid, positions in known.items()}
        self._offers = {uid: SplitOffers(splits, parallelism) for uid, splits in known.items()}
        handles = tuple(h for _, o in restored.operator(KEYED) for h in o.keyed)
        raw = tuple(h for _, o in restored.operator(KEYED) for h in o.raw)
        in_flight = {chain: restored.in_flight(chain) for chain in (RELAY, KEYED)}
        sinks = [world.targets[sink_id] for sink_id in self.driver.pipeline.sinks]
        deployment = Deployment(
            self.number, parallelism, splits, handles, raw, in_flight, sinks, self._heard
        )
        self.slots = [Slot(world, deployment, index) for index in range(parallelism)]
        deployment.peers = self.slots
        self._global = {
            target.sink_id: self._global_committer(target, restored.checkpoint)
            for target in sinks
            if isinstance(target, Versioned)
        }
        world.slots.extend(self.slots)
        for slot in self.slots:
            slot.start()
        self.coordinator = world.variant.coordinator(
            shape.checkpoints,
            attempt=self.number,
            subtasks=frozenset(ref for slot in self.slots for ref in slot.subtasks),
            sources=frozenset(source.ref for slot in self.slots for source in slot.sources),
            parallelism=parallelism,
            max_parallelism=KEY_GROUPS,
            retained=self.log.view.completed,
            next_checkpoint=self.log.view.next_checkpoint,
            now_s=world.now_s,
            wall_ms=world.clock.wall_ms,
            committers=frozenset(map(_committer_ref, self._global))
            if world.variant.waits_for_whole
            else frozenset(),
            makes_last_rows=world.makes_last_rows,
        )
        world.oracle.begins(self.number, self.driver.pipeline.sinks, restored)
        if world.lifetime_s is not None:
            victim = world.rng.choice(self.slots)
            world.clock.after(world.lifetime_s, lambda: victim.kill("its time is over"))

    def _global_committer(self, target: Versioned, restored: CheckpointId) -> GlobalCommitter:
        world, sink_id = self.world, target.sink_id

        def committed(through: CheckpointId) -> None:
            for slot in self.slots:
                slot.told.send(
                    lambda s=slot: s.globally_committed(sink_id, through)  # type: ignore[misc]
                )
            who = _committer_ref(sink_id)
            self._tell(lambda c, now_s: c.committed(who, through, now_s))

        def failed(error: OnceflowError) -> None:
            self._failure = self._failure or error

        queue = world.variant.global_queue(
            sink_id, CommitRetryPolicy(deadline_s=DEADLINE_S), restored
        )
        return GlobalCommitter(world, self.driver, queue, target, committed, failed)

    # --- the coordinator's facts and decisions ---------------------------------------------------

    def _heard(self, slot: int, said: Fact | SlotFailed) -> None:
        current = self.driver.attempt
        if not self.driver.alive or current is None or current.coordinator is None:
            return
        if current is not self and self.world.variant.slot_checks_attempt:
            return  # I7
        if isinstance(said, SlotFailed):
            if current is self and self._failure is None:
                lost = PreparedTransactionLost if said.for_good else SlotLost
                self._failure = lost(f"slot {slot} is gone: {said.reason}")
        elif current._failure is None:
            current._tell(said)

    def _tell(self, fact: Fact, asks: CheckpointKind | None = None) -> None:
        """Tell the coordinator, or as soon as it listens; nothing once the attempt has failed."""
        if self._failure is not None:
            return
        if self._appending:
            self._deferred.append((asks, fact))
        else:
            assert self.coordinator is not None
            self._carry_out(fact(self.coordinator, self.world.now_s))

    def _carry_out(self, decisions: Sequence[object]) -> None:
        world = self.world
        for decision in decisions:
            if not self.driver.alive or self._failure is not None:
                return
            match decision:
                case TriggerCheckpoint(checkpoint, kind, at_ms, after_s):
                    if kind is CheckpointKind.STOP:
                        self._stopping.add(checkpoint)
                    self._drains = self._drains or kind is CheckpointKind.SAVEPOINT_DRAIN
                    barrier = Barrier(checkpoint, kind, at_ms, after_s)
                    for slot in self.slots:
                        slot.told.send(lambda s=slot, b=barrier: s.trigger(b))  # type: ignore[misc]
                case AppendDecision(completed):
                    self._append(completed)
                case WriteSavepoint():
                    self.driver.begin(self._write_savepoint(decision))
                case NotifyComplete(checkpoint, oldest):
                    self._told = checkpoint, self._proofs_needed()
                    if not world.variant.whole_before_decision:
                        self._commit_whole(self._last())
                    self._tell_complete(*self._told)
                    self._cleaner.completed(checkpoint, oldest, self._last())
                case NotifyAbort(checkpoint):
                    for slot in self.slots:
                        slot.told.send(lambda s=slot, n=checkpoint: s.abort(n))  # type: ignore[misc]
                case DiscardState(handles):
                    self._cleaner.discard(handles)
                case CountFailure(checkpoint):
                    world.oracle.given_up(self.number, checkpoint)
                case FailAttempt(reason):
                    self._failure = CheckpointError(reason)
                case FinishJob(checkpoint):
                    self._finished = checkpoint
                case _:
                    pass

    def _append(self, completed: CompletedCheckpoint) -> None:
        if self._crashes("before append"):
            return
        if self.world.variant.whole_before_decision:
            self._commit_whole(completed)
        self._appending = True
        self.driver.begin(self._decide(completed))

    def _decide(self, completed: CompletedCheckpoint) -> Steps[None]:
        """Append beside everything else, and tell the coordinator how that ended."""
        checkpoint, error = completed.checkpoint, None
        try:
            yield from self.log.append(completed)
        except OnceflowError as caught:
            error = caught
        if self.driver.attempt is not self or self._failure is not None:
            return
        assert self.coordinator is not None
        self._appending = False
        match error:
            case None:
                if self._crashes("after append"):
                    return
                self.world.oracle.first_decision(self.number, self._recovery.retired)
                self._carry_out(self.coordinator.logged(checkpoint, self.world.now_s))
            case StorageError() | self.world.variant.taken_for_refused():
                now_s = self.world.now_s
                self._carry_out(self.coordinator.append_failed(checkpoint, str(error), now_s))
            case _:
                self._failure = error
        while self._deferred and not self._appending and self.coordinates and self.driver.alive:
            self._tell(self._deferred.popleft()[1])

    def _write_savepoint(self, decision: WriteSavepoint) -> Steps[None]:
        """Beside everything else; its files must be there until it is written."""
        yield self.world.rng.choice([0.02, 0.3])
        assert self.coordinator is not None
        checkpoint = decision.completed.checkpoint
        alive = self.driver.attempt is self and self.driver.alive and self._failure is None
        if alive and checkpoint in self.coordinator.pending:
            write(self.world, decision, self.log.view)
            self.driver.last_savepoint = decision.completed
            self._tell(lambda c, now_s: c.savepoint_ended(checkpoint, now_s))

    def _commit_whole(self, completed: CompletedCheckpoint) -> None:
        for committer in self._global.values():
            committer.decided(completed)

    def _proofs_needed(self) -> dict[str, CheckpointId]:
        """Return the oldest checkpoint, by sink, whose proofs a start may ask for."""
        assert self.coordinator is not None
        retained, log = self.coordinator.completed, self.log.view
        oldest, savepoint = self.world.variant.retain_ledger_from, self.driver.last_savepoint
        return {
            sink_id: oldest(retained, log.committed_last(sink_id), savepoint)
            for sink_id in self.driver.pipeline.sinks
        }

    def _tell_complete(self, checkpoint: CheckpointId, needed: dict[str, CheckpointId]) -> None:
        for slot in self.slots:
            slot.told.send(
                lambda s=slot: s.complete(checkpoint, needed)  # type: ignore[misc]
            )

    def _last(self) -> CompletedCheckpoint:
        assert self.coordinator is not None
        return self.coordinator.completed[-1]

    def _discover(self) -> None:
        """Offer what has appeared, now and then; it is read once a checkpoint holds it."""
        assert self.coordinator is not None
        if self.world.now_s < self._discover_at or self._failure is not None:
            return
        if self.world.makes_last_rows and self.world.input_ends:
            return  # input that ends is looked for at the start of an attempt alone
        self._discover_at = self.world.now_s + 0.3
        for uid, offers in self._offers.items():
            known = positions_of(self.coordinator.completed[-1], uid)
            now = [Split(p, encode_split(p, 0)) for p in self.world.sources[uid] if p not in known]
            found = offers.offer(now)
            for slot, splits in found.items():
                task = next(one for one in self.slots[slot].sources if one.uid == uid)
                self.slots[slot].told.carry(
                    lambda t=task, s=splits: t.mail.append(lambda: t.offered(s)),  # type: ignore[misc]
                )
            if found:
                self.request(CheckpointKind.MANUAL)

    # --- the end -------------------------------------------------------------------------------

    def _end(self) -> Steps[None]:
        """Hear late acks, finish what runs beside, and leave."""
        assert self._finished is not None
        self._told = None
        while any(slot.uploads.under_way for slot in self.slots if slot.alive):
            yield 0.05
        yield 1.0
        while self._cleaner.busy:
            yield 0.05
        if self.number < self.world.claimed:
            raise Fenced("a newer attempt goes on with the job")
        slot_died = not all(slot.alive for slot in self.slots)
        self.world.oracle.finished(
            self.number,
            self.log.view,
            slot_died=slot_died,
            swept=self._cleaner.swept,
            at_end=self._finished not in self._stopping,
        )
        self.world.finished, self.world.finished_by = True, self.number
        self.world.stopped = self._drains or self._finished in self._stopping
        self.world.clock.say(f"attempt {self.number} has finished the job")

    def _fail_if_told(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _crashes(self, where: str) -> bool:
        if self.driver.alive and self.world.draws_crash():
            self.driver.kill(where)
        return not self.driver.alive


def _committer_ref(sink_id: str) -> SubtaskRef:
    return SubtaskRef(sink_id, -1)


def genesis_of(world: World, log: LogOwner) -> CompletedCheckpoint:
    snapshots = tuple(
        SubtaskSnapshot(
            SubtaskRef(uid, 0),
            (OperatorSnapshot(uid, lists={SPLITS: tuple(encode_split(p, 0) for p in partitions)}),),
        )
        for uid, partitions in world.sources.items()
    )
    now_ms = world.clock.wall_ms()
    return CompletedCheckpoint(GENESIS, log.attempt, 1, KEY_GROUPS, snapshots, now_ms, now_ms)


def positions_of(completed: CompletedCheckpoint, uid: str) -> dict[str, int]:
    """Return partition -> next offset of source `uid`; empty when `completed` knows none."""
    return parse_splits([e for _, o in completed.operator(uid) for e in o.lists[SPLITS]])


def _dealt(positions: dict[str, int], parallelism: int) -> list[dict[str, int]]:
    dealt = assign_splits(sorted(positions), parallelism)
    return [{partition: positions[partition] for partition in mine} for mine in dealt]
