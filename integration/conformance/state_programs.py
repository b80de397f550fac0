"""Random programs of state operations, which are compared with a model of plain dicts.

A program runs on some subtasks, like an operator. It changes and reads states of random keys, takes
snapshots that are uploaded, discarded or lost, crashes, and is restored at another parallelism, or
from a savepoint in another backend. After every step, the values of a key must equal the model.

Some states expire. The clocks of two processes differ and jump. Within one process, an expired item
must not be returned again.

Timers in event time and processing time are registered and deleted, also by timers that fire. Event
time does not advance in some subtasks. Each registered timer must fire once, in order, with its key
as the current key.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from typing_extensions import assert_never

from onceflow.core import state
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.states.timers import TIME_DOMAINS, TimeDomain
from onceflow.core.storage import FileSystemStorage
from onceflow.integration.conformance.state_models import TTL_MS, KeyModel, Mean, Reading

MAX_PARALLELISM = 16
KEYS = ["a", "b", "", "é", *(f"key-{number}" for number in range(12))]
GROUPS = {key: state.key_group_of(key, MAX_PARALLELISM) for key in KEYS}
WINDOWS = [(0, 10), (10, 20), (20, 30)]
EXPIRING, USED_BY_READING = "expiring", "used by reading"
"""The pseudo-namespaces of the states that expire."""
PLACES = (None, *WINDOWS, EXPIRING, USED_BY_READING)
KINDS = ("value", "elements", "mapped", "reduced", "added")
OPERATIONS = (
    "set", "add", "update", "put", "put_all", "remove", "reduce", "aggregate", "clear",
)  # fmt: skip
MACHINES_BEHIND_S = (0.0, 0.0, 0.7, 5.0)
JUMPS_S = (0.1, 0.1, 0.3, 0.3, 0.6, 0.9, -0.5, -0.5, -100.0, 100.0)
AHEAD_MS = (-50, 0, 1, 9, 10, 11, 101, 250)
"""The distances from event time at which timers are registered."""
TIMER_ACTIONS: tuple[Literal["nothing", "register", "delete", "set"], ...] = (
    "nothing",
    "register",
    "delete",
    "set",
)


class KeyStates:
    """The states of a function, one of each kind."""

    def __init__(self, states: Any, prefix: str, ttl: state.StateTtlConfig | None = None) -> None:
        self.value = states.value_state(
            state.ValueStateDescriptor[int](f"{prefix}value", int, default=0, ttl=ttl)
        )
        self.elements = states.list_state(state.ListStateDescriptor[str](f"{prefix}list", str, ttl))
        self.mapped = states.map_state(
            state.MapStateDescriptor[str, int](f"{prefix}map", str, int, ttl)
        )
        self.reduced = states.reducing_state(
            state.ReducingStateDescriptor[int](f"{prefix}max", max, int, ttl)
        )
        self.added = states.aggregating_state(
            state.AggregatingStateDescriptor(f"{prefix}mean", Mean(), tuple[int, int], ttl)
        )

    def read(self) -> Reading:
        """Return the values of the current key."""
        return (
            self.value.get(),
            self.elements.get(),
            dict(self.mapped.items()),
            self.reduced.get(),
            self.added.get(),
        )


Models: TypeAlias = dict[tuple[str, Any], KeyModel]
"""The models by key and namespace; the namespace may be None."""


class StateSubtask:
    """A subtask of the program: its store of state, its states, and the clock of its machine."""

    def __init__(self, store: state.KeyedStateStore, clock: StateClock) -> None:
        self.store = store
        states = state.KeyedStates(store, clock)
        self.states = KeyStates(states, "")
        ttl_s = TTL_MS / 1000
        self.expiring = {
            EXPIRING: KeyStates(states, "expiring ", state.StateTtlConfig(ttl_s)),
            USED_BY_READING: KeyStates(
                states, "read ", state.StateTtlConfig(ttl_s, update="on_read_and_write")
            ),
        }
        self.clock = clock
        self.timers = states.timers()
        self.windows = states.namespace(tuple[int, int])
        self.windowed = KeyStates(self.windows, "window ")
        store.finish_open()

    def at(self, key: str, window: Any) -> KeyStates:
        """Set key and namespace, and return their states."""
        self.store.set_current_key(key)
        if window is None:
            return self.states
        if window in self.expiring:
            return self.expiring[window]
        self.windows.set(window)
        return self.windowed


class StateProgram:
    """A random program, which is determined by its seed."""

    def __init__(self, backends: Sequence[state.StateBackend], directory: Path, seed: int) -> None:
        self._backends = backends
        self._backend = backends[0]
        self._seed = seed
        self._directory = directory
        self._rng = random.Random(seed)  # noqa: S311 - not for secrets
        self._storage = FileSystemStorage(str(directory / "storage")).open("program")
        self._wall_s = 1_700_000_000.0
        self._event_ms = 0
        self._attempt = 0
        self._checkpoint = 0
        self._added = 0
        self._models: Models = {}
        self._subtasks: list[StateSubtask] = []
        self._restorable: tuple[tuple[state.StateHandle, ...], Models] = ((), {})
        self._waiting: list[Callable[[], None]] = []

    def run(self, steps: int) -> None:
        """Run `steps` random steps.

        Raises:
            AssertionError: The values of a key differ from the model.
        """
        self._restore((), {})
        for _ in range(steps):
            self._step()
        self._crash()
        self._end_all_time()
        self.close()

    def close(self) -> None:
        """Close every store."""
        for subtask in self._subtasks:
            subtask.store.close()
        self._subtasks = []

    def _step(self) -> None:
        steps = {
            self._on_record: 66,
            self._jump: 8,
            self._clean: 4,
            self._advance_event_time: 5,
            self._on_time: 5,
            self._prefetch: 3,
            self._snapshot: 3,
            self._finish_a_snapshot: 3,
            self._crash: 1,
            self._switch_backend: 0.5,
        }
        self._rng.choices([*steps], [*steps.values()])[0]()

    def _jump(self) -> None:
        """Advance the time, or adjust the clocks of all machines."""
        self._wall_s += self._rng.choice(JUMPS_S)

    def _clean(self) -> None:
        for subtask in self._subtasks:
            subtask.store.clean(self._rng.randrange(30))

    def _finish_a_snapshot(self) -> None:
        if self._waiting:
            self._waiting.pop(0)()

    def _on_record(self) -> None:
        """Change a state or a timer of a key, like a function that processes a record."""
        key = self._rng.choice(KEYS)
        subtask = self._find_subtask(key)
        if self._rng.random() < 0.2:
            subtask.store.set_current_key(key)
            self._change_timers(subtask, self._models.setdefault((key, None), KeyModel()))
        else:
            self._change(key, self._rng.choice(PLACES))
        # Timers that were registered for a past time fire after the current records.
        self._fire(subtask, "event", subtask.timers.current_watermark())

    def _change(self, key: str, window: Any) -> None:
        rng = self._rng
        model = self._models.setdefault((key, window), KeyModel())
        subtask = self._find_subtask(key)
        states, now_ms = subtask.at(key, window), None
        if window in subtask.expiring:
            now_ms = subtask.clock.now_ms()
            model.expire(now_ms)
        number, text = rng.randrange(1000), str(rng.randrange(5))
        match rng.choice(OPERATIONS):
            case "set":
                model.use("value", number, now_ms)
                states.value.set(number)
            case "add":
                states.elements.add(self._extend(model, now_ms))
            case "update":
                model.clear("elements")
                states.elements.update(
                    [self._extend(model, now_ms) for _ in range(rng.randrange(3))]
                )
            case "put":
                model.use(f"mapped {text}", number, now_ms)
                states.mapped.put(text, number)
            case "put_all":
                model.use(f"mapped {text}", number, now_ms)
                model.use("mapped x", 1, now_ms)
                states.mapped.put_all({text: number, "x": 1})
            case "remove":
                model.drop(lambda name: name == f"mapped {text}")
                states.mapped.remove(text)
            case "reduce":
                model.use("reduced", max(number, model.get("reduced") or 0), now_ms)
                states.reduced.add(number)
            case "aggregate":
                model.use("added", [*(model.get("added") or ()), number], now_ms)
                states.added.add(number)
            case _:
                kind = rng.choice(KINDS)
                model.clear(kind)
                getattr(states, kind).clear()
        self._check(key, window)

    def _extend(self, model: KeyModel, now_ms: int | None) -> str:
        self._added += 1
        model.use(f"elements {self._added}", str(self._added), now_ms)
        return str(self._added)

    def _check(self, key: str, window: Any) -> None:
        model = self._models.get((key, window), KeyModel())
        subtask = self._find_subtask(key)
        read = subtask.at(key, window).read()
        now_ms = subtask.clock.now_ms()
        model.expire(now_ms)
        model.settle(read, now_ms)
        self._require(read == model.says(), f"key {key!r}, namespace {window}: {read}", model.says)
        if window == USED_BY_READING:
            model.was_read(now_ms)

    def _require(self, holds: bool, actual: str, right: Callable[[], Any]) -> None:
        assert holds, f"program of seed {self._seed}: {actual} where {right()} is right"

    # --- timers ----------------------------------------------------------------------------------

    def _change_timers(self, subtask: StateSubtask, model: KeyModel) -> None:
        """Register a timer of the current key, or delete a timer that may exist."""
        rng, timers = self._rng, subtask.timers
        domain = rng.choice(TIME_DOMAINS)
        known = sorted(at_ms for of, at_ms in model.timers if of == domain)
        if rng.random() < 0.3:
            at_ms = rng.choice(known) if known and rng.random() < 0.7 else rng.randrange(500)
            model.timers.discard((domain, at_ms))
            delete = {
                "event": timers.delete_event_time_timer,
                "processing": timers.delete_processing_time_timer,
            }
            delete[domain](at_ms)
            return
        if domain == "event":
            at_ms = self._event_ms + rng.choice(AHEAD_MS)
            timers.register_event_time_timer(at_ms)
        else:
            at_ms = timers.current_processing_time() + rng.choice([-500, 100, 1_000, 50_000])
            timers.register_processing_time_timer(at_ms)
        model.timers.add((domain, at_ms))

    def _on_time(self) -> None:
        for subtask in self._subtasks:
            self._fire(subtask, "processing", subtask.timers.current_processing_time())

    def _advance_event_time(self) -> None:
        """Advance the watermark in some subtasks. In the others it does not change."""
        self._event_ms += self._rng.choice([0, 10, 100])
        for subtask in self._subtasks:
            if self._rng.random() < 0.7:
                self._advance(subtask, self._event_ms)

    def _advance(self, subtask: StateSubtask, watermark: int) -> None:
        subtask.timers.advance(watermark)
        self._fire(subtask, "event", watermark)

    def _fire(self, subtask: StateSubtask, domain: TimeDomain, until_ms: int) -> None:
        """Fire the timers up to `until_ms`, like an operator."""
        before = {(at_ms, key) for at_ms, key in self._due(subtask, domain, until_ms)}
        timers = subtask.timers.event if domain == "event" else subtask.timers.processing
        latest_ms = NO_WATERMARK
        for timer in timers.fire_due(until_ms):
            model = self._models.get((timer.key, None), KeyModel())
            registered = timer.domain == domain and (domain, timer.at_ms) in model.timers
            self._require(
                registered and timer.at_ms <= until_ms,
                f"{timer} fires at {until_ms}",
                lambda m=model: m.timers,  # type: ignore[misc]
            )
            if (timer.at_ms, timer.key) in before:
                before.discard((timer.at_ms, timer.key))
                self._require(
                    timer.at_ms >= latest_ms, f"{timer} fires after {latest_ms}", lambda: "order"
                )
                latest_ms = timer.at_ms
            model.timers.discard((domain, timer.at_ms))
            self._on_timer(subtask, timer, model)
        left = self._due(subtask, domain, until_ms)
        if until_ms == MAX_WATERMARK:  # timers registered during the final firing may remain
            left = [due for due in left if due in before]
        self._require(
            not left, f"{left} have not fired in {domain} time {until_ms}", lambda: "none"
        )

    def _due(
        self, subtask: StateSubtask, domain: TimeDomain, until_ms: int
    ) -> list[tuple[int, str]]:
        """Return (time, key) of the timers that must fire by the model."""
        return [
            (at_ms, key)
            for (key, window), model in self._models.items()
            if window is None and self._find_subtask(key) is subtask
            for of, at_ms in model.timers
            if of == domain and at_ms <= until_ms
        ]

    def _on_timer(self, subtask: StateSubtask, timer: state.Timer, model: KeyModel) -> None:
        """Act like a function when a timer fires. The timer's key is the current key."""
        action = self._rng.choice(TIMER_ACTIONS)
        match action:
            case "register":
                at_ms = timer.at_ms + self._rng.choice([-5, 0, 10, 100])
                if timer.domain == "event":
                    subtask.timers.register_event_time_timer(at_ms)
                else:
                    subtask.timers.register_processing_time_timer(at_ms)
                model.timers.add((timer.domain, at_ms))
            case "delete":
                self._change_timers(subtask, model)
            case "set":
                number = self._rng.randrange(1000)
                model.use("value", number, None)
                subtask.states.value.set(number)
            case "nothing":
                pass
            case _:
                assert_never(action)

    def _end_all_time(self) -> None:
        """Fire all timers, and check that no timer is left or lost."""
        self._wall_s += 1e9
        for subtask in self._subtasks:
            self._advance(subtask, MAX_WATERMARK)
            self._fire(subtask, "processing", subtask.clock.now_ms())
        self._check_all()

    # --- what happens to the job -----------------------------------------------------------------

    def _check_all(self) -> None:
        for key in KEYS:
            for window in PLACES:
                self._check(key, window)

    def _prefetch(self) -> None:
        for index, subtask in enumerate(self._subtasks):
            keys = [key for key in KEYS if self._owner(key) == index]
            subtask.store.prefetch(keys * 2)
        self._check_all()

    def _snapshot(self) -> None:
        """Snapshot every subtask's state. It is uploaded or discarded some steps later."""
        self._checkpoint += 1
        checkpoint, attempt = CheckpointId(self._checkpoint), AttemptId(self._attempt)
        stores = [subtask.store for subtask in self._subtasks]
        pending = [store.snapshot(checkpoint) for store in stores]
        models = copy.deepcopy(self._models)
        discarded = self._rng.random() < 0.2

        def finish() -> None:
            handles: list[state.StateHandle] = []
            for index, (store, snapshot) in enumerate(zip(stores, pending, strict=True)):
                if discarded:
                    snapshot.discard()
                    store.notify_aborted(checkpoint)
                    continue
                writer = self._storage.writer(attempt, checkpoint, "program", index)
                handles += snapshot.upload(writer)
                store.notify_completed(checkpoint)
            if not discarded:
                self._expire(models)  # these may be missing from the snapshot
                self._restorable = tuple(handles), models

        self._waiting.append(finish)

    def _crash(self) -> None:
        """Restore the last completed snapshot."""
        self._waiting.clear()
        self.close()
        self._restore(*self._restorable)

    def _switch_backend(self) -> None:
        """Continue from a savepoint in a random backend."""
        self._waiting.clear()
        self._checkpoint += 1
        checkpoint, handles = CheckpointId(self._checkpoint), list[state.StateHandle]()
        for index, subtask in enumerate(self._subtasks):
            writer = self._storage.writer(AttemptId(self._attempt), checkpoint, "program", index)
            handles += subtask.store.savepoint(checkpoint).upload(writer)
        self._expire(self._models)
        for model in self._models.values():
            model.expired.clear()  # a savepoint omits expired items
        self.close()
        self._backend = self._rng.choice(self._backends)
        self._restore(tuple(handles), self._models)

    def _restore(self, handles: tuple[state.StateHandle, ...], models: Models) -> None:
        self._restorable = handles, copy.deepcopy(models)
        self._models = copy.deepcopy(models)
        for model in self._models.values():
            model.move()
        self._attempt += 1
        parallelism = self._rng.choice([1, 2, 3])
        for index in range(parallelism):
            groups = key_group_range(MAX_PARALLELISM, parallelism, index)
            scratch = self._directory / f"scratch-{self._attempt}-{index}"
            context = state.StateContext("program", index, groups, MAX_PARALLELISM, scratch)
            mine = [
                handle
                for handle in handles
                if handle.key_group_first < groups.stop and handle.key_group_last >= groups.start
            ]
            store = self._backend.open(context, mine, self._storage.reader())
            self._subtasks.append(StateSubtask(store, self._clock_of_a_machine()))
        self._check_all()

    def _clock_of_a_machine(self) -> StateClock:
        behind_s = self._rng.choice(MACHINES_BEHIND_S)
        return StateClock(lambda: self._wall_s - behind_s)

    def _expire(self, models: Models) -> None:
        for (key, window), model in models.items():
            if window in (EXPIRING, USED_BY_READING):
                model.expire(self._find_subtask(key).clock.now_ms())

    def _owner(self, key: str) -> int:
        return GROUPS[key] * len(self._subtasks) // MAX_PARALLELISM

    def _find_subtask(self, key: str) -> StateSubtask:
        return self._subtasks[self._owner(key)]
