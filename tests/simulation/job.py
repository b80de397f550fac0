"""Simulated drivers of one job. Mirrors core/runtime: the same protocol objects, the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.channels import KEY_GROUPS
from tests.simulation.clock import Gone, Process, Steps, Violation
from tests.simulation.committer import DEADLINE_S, GlobalCommitter
from tests.simulation.log_owner import LogOwner
from tests.simulation.recovery import CheckpointsCleaner, SinkRecovery, sweep_files
from tests.simulation.requests import SavepointDesk
from tests.simulation.savepoints import begin_from, write
from tests.simulation.slots import SPLITS, Deployment, Slot, encode_split, parse_splits
from tests.simulation.stages import KEYED, RELAY
from tests.simulation.targets import Versioned
from tests.simulation.world import World

from onceflow.core import errors
from onceflow.core.commit.queue import CommitRetryPolicy
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import (
    AbortSavepoint,
    AppendDecision,
    Barrier,
    CheckpointKind,
    CountFailure,
    DiscardState,
    NotifyAbort,
    NotifyComplete,
    SavepointRequest,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef, committer_ref
from onceflow.core.protocol.loops import attempt_facts
from onceflow.core.protocol.loops.attempt import AttemptLoop
from onceflow.core.protocol.loops.slots import AttemptSettings
from onceflow.core.protocol.restart import GiveUp, RestartAfter
from onceflow.core.protocol.splits import Split, SplitOffers, assign_splits

NEVER_S = 1e9


class Driver(Process):
    """One driver process: one attempt after another until the job is done."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.clock)
        self.world, self.name = world, name
        self.attempt: Attempt | None = None
        self.pipeline = world.pipeline
        self._claimed: AttemptId | None = None
        """By this driver: it claims again only while nobody else has."""
        self._requests: list[attempt_facts.Request] = []
        """What no attempt has been told of yet."""
        self.savepoints = SavepointDesk(name, world.directories)
        self.is_cancelled = False
        self.last_savepoint: CompletedCheckpoint | None = None

    def start(self) -> None:
        self.begin(self._attempts())

    def kill(self, why: str) -> None:
        if self.alive:
            self.alive = False
            self.clock.say(f"driver {self.name} dies: {why}")
            self.savepoints.end_job(is_dead=True)
            if self.attempt is not None:
                # Its slots notice by the silence of the driver, each in its own time.
                self.attempt.release_slots("driver lost")

    def request(self, kind: CheckpointKind) -> None:
        """The user asks."""
        self.clock.say(f"{kind.value} is asked for")
        if kind.is_savepoint:
            self._take(self.savepoints.ask(kind))
        else:
            self._take(attempt_facts.CheckpointRequested(kind))

    def cancel(self) -> None:
        """The user asks to leave at once."""
        self.clock.say("the job is cancelled")
        self._take(attempt_facts.CancelRequested())
        self.is_cancelled = True

    def _take(self, request: attempt_facts.Request) -> None:
        self.pass_on(request)
        self.check_requests()

    def pass_on(self, request: attempt_facts.Request) -> None:
        """Tell the attempt, or keep the request while none listens."""
        if self.attempt is not None and self.attempt.listens:
            self.attempt.tell(request)
        elif request not in self._requests:
            self._requests.append(request)

    def take_requests(self) -> list[attempt_facts.Request]:
        """Return what no attempt has been told of, for the one that asks."""
        requests, self._requests = self._requests, []
        return sorted(requests, key=_order_of)

    def check_requests(self) -> None:
        """Raise Violation unless every request is answered, under way, or kept."""
        kept = self.attempt.unanswered if self.attempt is not None else ()
        self.savepoints.check_kept((*self._requests, *kept))

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
                yield from attempt.run(tracker.on_running)
                self.savepoints.end_job()
                return
            except attempt_facts.JobCancelled as error:
                self.kill(str(error))
                return
            except errors.PreparedTransactionLost as error:
                # An attempt that was overtaken asks for what the newer one has done and forgotten.
                overtaken = self.attempt is None or self.attempt.number < self.world.claimed
                self.world.lost = not overtaken
                self.kill(f"lost: {error}")
                return
            except errors.Fenced as error:
                self.kill(f"fenced: {error}")
                return
            except errors.ConfigError as error:
                # As the product does, which looks at its log before it judges what failed.
                if self._claimed is not None and self._claimed < self.world.claimed:
                    self.kill(f"fenced: {error}")
                    return
                if self.world.retirement is None:
                    raise Violation(
                        f"a start is refused, and no sink was removed: {error}"
                    ) from None
                self.world.hand_over()
                self.kill(f"refused: {error}")
                return
            except errors.OnceflowError as error:
                self.clock.say(f"driver {self.name}: attempt fails: {error}")
                mistake = str(error) if isinstance(error, errors.CheckpointError) else ""
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
                        kept = self.attempt.unanswered
                        self._requests += [one for one in kept if one not in self._requests]
                    self.savepoints.end_attempt()
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
        self._failure: errors.OnceflowError | None = None
        self._loop: AttemptLoop | None = None
        self._leaves = False
        self._is_finished: bool | None = None
        self._drains = False
        self._told: tuple[CheckpointId, dict[str, CheckpointId]] | None = None
        self._offers: tuple[str, ...] = ()
        self._discover_at = 0.0
        self._global: dict[str, GlobalCommitter] = {}
        world.clock.say(f"driver {driver.name} claims attempt {self.number}")

    def run(self, running: object) -> Steps[None]:
        """Run to the end of the job; raises OnceflowError when the attempt fails."""
        world = self.world
        self._running = running
        if self._crashes("after the claim"):
            yield 1.0
        restored = self._restored = yield from self._restore_point()
        try:
            sweep_files(world, self.log)
        except Gone:
            raise errors.StorageError("files cannot be swept") from None
        self._begin_loop(restored)
        self._turn()
        error: errors.OnceflowError | None = None
        try:
            yield from self._recovery.recover(restored)
        except errors.OnceflowError as caught:
            error = caught
        self.tell(attempt_facts.RecoveryEnded(self.number, error))
        self._turn()
        while not self._leaves:
            self._fail_if_told()
            self._turn()
            if self.coordinator is None:  # slots dial in, or restore
                yield 0.05
                continue
            if self._told is not None and world.shape.rates.loss:
                self._tell_complete(*self._told)  # again: the first word may be lost
            wake_s = self.coordinator.next_wake_s()
            yield 0.1 if wake_s is None else max(0.01, min(0.1, wake_s - world.now_s))
        yield from self._end()

    @property
    def listens(self) -> bool:
        return self._loop is not None and self._failure is None

    @property
    def unanswered(self) -> tuple[attempt_facts.Request, ...]:
        return self._loop.unanswered if self._loop is not None else ()

    def tell(self, fact: attempt_facts.AttemptFact) -> None:
        """Tell the loop, and carry out what it decides."""
        if self._loop is not None and self._failure is None and self.driver.alive:
            self._carry_out(self._loop.on(fact, self.world.now_s))

    def _tell_later(self, fact: attempt_facts.AttemptFact) -> None:
        """Tell what a slot says when it begins: at once, unless the slots of the world are slow."""
        if (late_s := self.world.asking.draw_start_s()) is None:
            self.tell(fact)
        else:
            self.world.clock.after(late_s, lambda: self.tell(fact))

    def _turn(self) -> None:
        assert self._loop is not None
        if self._failure is None:
            self._carry_out(self._loop.tick(self.world.now_s))
            self.driver.check_requests()

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

    def _begin_loop(self, restored: CompletedCheckpoint) -> None:
        """Begin to listen; the slots dial in at once."""
        parallelism = self._parallelism
        settings = AttemptSettings(
            job="job",
            attempt=self.number,
            parallelism=parallelism,
            versions={},
            storage="",
            storage_token="",
            one_machine=True,
            start_timeout_s=NEVER_S,
            heartbeat_interval_s=NEVER_S,
            heartbeat_timeout_s=NEVER_S,
            commit_deadline_s=NEVER_S,
            cancel_timeout_s=NEVER_S,
        )
        known = {uid: positions_of(restored, uid) for uid in self.world.sources}
        offers = {uid: SplitOffers(splits, parallelism) for uid, splits in known.items()}
        self._offers = tuple(offers)
        self._loop = self.world.variant.attempt_loop(settings, self._build_coordinator, offers)
        for request in self.driver.take_requests():
            self.driver.pass_on(request)  # a cancel among them ends the attempt
        for slot in range(parallelism):
            self._tell_later(messages.Hello(self.number, slot, slot, 0, "", "", {}))

    @property
    def _parallelism(self) -> int:
        parallelism = self.world.shape.parallelism
        return parallelism[self.number % len(parallelism)]

    def _deploy(self, restored: CompletedCheckpoint) -> None:
        world, parallelism = self.world, self._parallelism
        known = {uid: positions_of(restored, uid) for uid in world.sources}
        splits = {uid: _dealt(positions, parallelism) for uid, positions in known.items()}
        handles = tuple(h for _, o in restored.operator(KEYED) for h in o.keyed)
        raw = tuple(h for _, o in restored.operator(KEYED) for h in o.raw)
        in_flight = {chain: restored.in_flight(chain) for chain in (RELAY, KEYED)}
        sinks = [world.targets[sink_id] for sink_id in self.driver.pipeline.sinks]
        deployment = Deployment(
            self.number, parallelism, splits, handles, raw, in_flight, sinks, self._hear
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
        world.oracle.begins(self.number, self.driver.pipeline.sinks, restored)
        if world.lifetime_s is not None:
            victim = world.rng.choice(self.slots)
            world.clock.after(world.lifetime_s, lambda: victim.kill("its time is over"))

    def _build_coordinator(self, now_s: float) -> CheckpointCoordinator:
        world = self.world
        self.coordinator = world.variant.coordinator(
            world.shape.checkpoints,
            attempt=self.number,
            subtasks=frozenset(ref for slot in self.slots for ref in slot.subtasks),
            sources=frozenset(source.ref for slot in self.slots for source in slot.sources),
            parallelism=self._parallelism,
            max_parallelism=KEY_GROUPS,
            retained=self.log.view.completed,
            next_checkpoint=self.log.view.next_checkpoint,
            now_s=now_s,
            wall_ms=world.clock.wall_ms,
            committers=frozenset(map(committer_ref, self._global))
            if world.variant.waits_for_whole
            else frozenset(),
            makes_last_rows=world.makes_last_rows,
        )
        return self.coordinator

    def _global_committer(self, target: Versioned, restored: CheckpointId) -> GlobalCommitter:
        world, sink_id = self.world, target.sink_id

        def committed(through: CheckpointId) -> None:
            self.tell(attempt_facts.GlobalCommitEnded(self.number, sink_id, sink_id, through))

        def failed(error: errors.OnceflowError) -> None:
            self.tell(
                attempt_facts.GlobalCommitEnded(self.number, sink_id, sink_id, restored, error)
            )

        queue = world.variant.global_queue(
            sink_id, CommitRetryPolicy(deadline_s=DEADLINE_S), restored, target.interval
        )
        return GlobalCommitter(world, self.driver, queue, target, committed, failed)

    # --- the coordinator's facts and decisions ---------------------------------------------------

    def _hear(self, fact: attempt_facts.SlotMessageReceived | attempt_facts.SlotGone) -> None:
        """Tell whoever runs the job now: its loop takes nothing of another attempt (I7)."""
        current = self.driver.attempt
        if not self.driver.alive or current is None:
            return
        if (
            isinstance(fact, attempt_facts.SlotMessageReceived)
            and not self.world.variant.slot_checks_attempt
        ):
            fact = replace(fact, attempt=current.number)
        current.tell(fact)

    def _carry_out(self, decisions: Sequence[attempt_facts.AttemptDecision]) -> None:
        for decision in decisions:
            if not self.driver.alive or self._failure is not None:
                return
            self._do(decision)

    def _do(self, decision: attempt_facts.AttemptDecision) -> None:
        world = self.world
        match decision:
            case (
                attempt_facts.AdmitSlot()
                | attempt_facts.DismissSlot()
                | attempt_facts.ReleaseSlot()
                | attempt_facts.SendHeartbeats()
            ):
                pass  # slots of the model dial in and leave with their attempt
            case attempt_facts.LookAtRecovery():
                self.tell(attempt_facts.RecoveryStep("", world.now_s))
            case attempt_facts.DeploySlots():
                self._deploy(self._restored)
                for slot in self.slots:
                    self._tell_later(
                        attempt_facts.SlotMessageReceived(
                            self.number, slot.index, messages.Running()
                        )
                    )
            case attempt_facts.EnterRunning():
                self._running(world.clock.now_s)  # type: ignore[operator]
            case attempt_facts.AskBeside():
                self._discover()
            case attempt_facts.TakeDiscovered(_, offers):
                for index, offer in offers.items():
                    self._carry(self.slots[index], offer)
            case SavepointRequest():
                self.tell(
                    attempt_facts.SavepointBegun(decision, self.driver.savepoints.begin(decision))
                )
            case attempt_facts.SavepointWritten(request=request):
                self.driver.savepoints.answer(request)
            case AbortSavepoint(request, _, reason):
                self.driver.savepoints.answer(request, reason)
            case Barrier():
                self._drains = self._drains or decision.kind is CheckpointKind.SAVEPOINT_DRAIN
                self._send_all(decision)
            case AppendDecision(completed):
                if self.driver.is_cancelled:
                    raise Violation(f"a job that was cancelled decides {completed.checkpoint}")
                self._append(completed)
            case WriteSavepoint():
                self.driver.begin(self._write_savepoint(decision))
            case NotifyComplete(checkpoint, oldest):
                self._told = checkpoint, self._proofs_needed()
                if not world.variant.whole_before_decision:
                    self._commit_whole(self._last())
                self._tell_complete(*self._told)
                self._cleaner.completed(checkpoint, oldest, self._last())
            case NotifyAbort() | messages.GloballyCommitted():
                self._send_all(decision)
            case DiscardState(handles):
                self._cleaner.discard(handles)
            case CountFailure(checkpoint):
                world.oracle.given_up(self.number, checkpoint)
            case messages.Shutdown():
                self._leaves = True
            case attempt_facts.CloseAttempt(is_finished):
                self._is_finished = is_finished
            case attempt_facts.EndAttempt(error):
                assert isinstance(error, errors.OnceflowError)
                self._failure = error
            case _:
                _ignore(decision)

    def _send_all(self, message: messages.DriverMessage) -> None:
        for slot in self.slots:
            slot.told.send(lambda s=slot: s.hear(message))  # type: ignore[misc]

    def _carry(self, slot: Slot, message: messages.DriverMessage) -> None:
        slot.told.carry(lambda: slot.hear(message))

    def _append(self, completed: CompletedCheckpoint) -> None:
        if self._crashes("before append"):
            return
        if self.world.variant.whole_before_decision:
            self._commit_whole(completed)
        self.driver.begin(self._decide(completed))

    def _decide(self, completed: CompletedCheckpoint) -> Steps[None]:
        """Append beside everything else, and tell the coordinator how that ended."""
        error: errors.OnceflowError | None = None
        try:
            yield from self.log.append(completed)
        except errors.OnceflowError as caught:
            error = caught
        if self.driver.attempt is not self or self._failure is not None:
            return
        if error is None:
            if self._crashes("after append"):
                return
            self.world.oracle.first_decision(self.number, self._recovery.retired)
        elif isinstance(error, self.world.variant.taken_for_refused):
            error = errors.StorageError(str(error))
        self.tell(attempt_facts.AppendEnded(self.number, completed, 0.0, error))

    def _write_savepoint(self, decision: WriteSavepoint) -> Steps[None]:
        """Beside everything else; its files must be there until it is written."""
        yield self.world.rng.choice([0.02, 0.3])
        assert self.coordinator is not None
        checkpoint = decision.completed.checkpoint
        alive = self.driver.attempt is self and self.driver.alive and self._failure is None
        if alive:
            if checkpoint in self.coordinator.pending:
                write(self.world, decision, self.log.view)
                self.driver.last_savepoint = decision.completed
            self.tell(attempt_facts.SavepointWritten(self.number, checkpoint, decision.request, 0))

    def _commit_whole(self, completed: CompletedCheckpoint) -> None:
        for committer in self._global.values():
            committer.decided(completed)

    def _proofs_needed(self) -> dict[str, CheckpointId]:
        """Return the oldest checkpoint, by sink, whose proofs a start may ask for."""
        assert self.coordinator is not None
        retained, log = self.coordinator.completed, self.log.view
        oldest, savepoint = self.world.variant.retain_ledger_from, self.driver.last_savepoint
        return {
            sink_id: oldest(retained, log.list_committed_last(sink_id), savepoint)
            for sink_id in self.driver.pipeline.sinks
        }

    def _tell_complete(self, checkpoint: CheckpointId, needed: dict[str, CheckpointId]) -> None:
        self._send_all(messages.Complete(checkpoint, needed))

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
        for uid in self._offers:
            known = positions_of(self.coordinator.completed[-1], uid)
            now = [Split(p, encode_split(p, 0)) for p in self.world.sources[uid] if p not in known]
            self.tell(attempt_facts.DiscoveryAnswered(self.number, uid, tuple(now)))

    # --- the end -------------------------------------------------------------------------------

    def _end(self) -> Steps[None]:
        """Hear late acks, finish what runs beside, and leave."""
        self._told = None
        while any(slot.uploads.under_way for slot in self.slots if slot.alive):
            yield 0.05
        yield 1.0
        while self._cleaner.busy:
            yield 0.05
        self._cleaner.clean_at_end(self._last())
        while self._cleaner.busy:
            yield 0.05
        if self.number < self.world.claimed:
            raise errors.Fenced("a newer attempt goes on with the job")
        self.tell(attempt_facts.SlotsEnded(self.number, errors.SlotLost("all have returned")))
        assert self._is_finished is not None
        slot_died = not all(slot.alive for slot in self.slots)
        self.world.oracle.finished(
            self.number,
            self.log.view,
            slot_died=slot_died,
            swept=self._cleaner.swept,
            at_end=self._is_finished,
        )
        self.world.finished, self.world.finished_by = True, self.number
        self.world.stopped = self._drains or not self._is_finished
        self.world.clock.say(f"attempt {self.number} has finished the job")

    def _fail_if_told(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _crashes(self, where: str) -> bool:
        if self.driver.alive and self.world.draws_crash():
            self.driver.kill(where)
        return not self.driver.alive


def _ignore(announced: attempt_facts.Announced) -> None:
    """Publish nothing: the model has no people."""
    del announced


def _order_of(request: attempt_facts.Request) -> tuple[str, str]:
    match request:
        case attempt_facts.CheckpointRequested(kind):
            return kind.value, ""
        case SavepointRequest(name, kind):
            return kind.value, name
        case attempt_facts.CancelRequested():
            return "cancel", ""


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
