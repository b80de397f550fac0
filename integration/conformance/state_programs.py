"""Random programs of state operations, compared with a model of plain dicts.

A program runs on some subtasks, as an operator does: it changes and reads states of random keys,
takes snapshots that are uploaded, discarded or lost, crashes and is restored at another parallelism
and, by a savepoint, in another backend. Some states expire, by a clock that jumps. After every step
what a key reads is what the model says.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.state import (
    AggregateFunction,
    AggregatingStateDescriptor,
    KeyedStates,
    KeyedStateStore,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateBackend,
    StateContext,
    StateHandle,
    StateTtlConfig,
    ValueStateDescriptor,
    key_group_of,
)
from onceflow.core.state.clock import StateClock
from onceflow.core.storage import FileSystemStorage

MAX_PARALLELISM = 16
KEYS = ["a", "b", "", "é", *(f"key-{number}" for number in range(12))]
WINDOWS = [(0, 10), (10, 20), (20, 30)]
EXPIRING = "expiring"
"""Stands among the namespaces for the states that expire."""
PLACES = (None, *WINDOWS, EXPIRING)
TTL_MS = 1000
OPERATIONS = (
    "set", "add", "update", "put", "put_all", "remove", "reduce", "aggregate", "clear",
)  # fmt: skip


class Mean(AggregateFunction[int, "tuple[int, int]", float]):
    """The mean of all numbers added."""

    def create_accumulator(self) -> tuple[int, int]:
        """Return the accumulator of no numbers."""
        return 0, 0

    def add(self, value: int, accumulator: tuple[int, int]) -> tuple[int, int]:
        """Return count and sum with `value`."""
        count, total = accumulator
        return count + 1, total + value

    def get_result(self, accumulator: tuple[int, int]) -> float:
        """Return the mean."""
        count, total = accumulator
        return total / count


@dataclass
class KeyModel:
    """What the states of one key, or of one key and namespace, hold.

    Where they expire, it is dropped here when it has, and `used_ms` says when each was written.
    """

    value: int = 0
    elements: list[str] = field(default_factory=list[str])
    mapped: dict[str, int] = field(default_factory=dict[str, int])
    reduced: int | None = None
    added: list[int] = field(default_factory=list[int])
    used_ms: dict[str, int] = field(default_factory=dict[str, int])

    def expire(self, now_ms: int) -> None:
        """Drop what was written `TTL_MS` ago."""
        gone = [name for name, used_ms in self.used_ms.items() if used_ms + TTL_MS <= now_ms]
        for name in gone:
            del self.used_ms[name]
            kind, _, place = name.partition(" ")
            if kind == "mapped":
                self.mapped = {key: n for key, n in self.mapped.items() if key != place}
            elif kind == "elements":
                self.elements = self.elements[1:]
            else:
                setattr(self, kind, getattr(KeyModel(), kind))


class KeyStates:
    """One state of each kind, as a function asks for them."""

    def __init__(self, states: Any, prefix: str, ttl: StateTtlConfig | None = None) -> None:
        self.value = states.value_state(
            ValueStateDescriptor[int](f"{prefix}value", int, default=0, ttl=ttl)
        )
        self.elements = states.list_state(ListStateDescriptor[str](f"{prefix}list", str, ttl))
        self.mapped = states.map_state(MapStateDescriptor[str, int](f"{prefix}map", str, int, ttl))
        self.reduced = states.reducing_state(
            ReducingStateDescriptor[int](f"{prefix}max", max, int, ttl)
        )
        self.added = states.aggregating_state(
            AggregatingStateDescriptor(f"{prefix}mean", Mean(), tuple[int, int], ttl)
        )

    def read(self) -> tuple[Any, ...]:
        """Return what the current key reads."""
        return (
            self.value.get(),
            self.elements.get(),
            dict(self.mapped.items()),
            self.reduced.get(),
            self.added.get(),
        )


def expected(model: KeyModel) -> tuple[Any, ...]:
    """Return what `KeyStates.read` must return."""
    mean = sum(model.added) / len(model.added) if model.added else None
    return model.value, model.elements, model.mapped, model.reduced, mean


Models: TypeAlias = dict[tuple[str, Any], KeyModel]
"""By key, and namespace or None."""


class Subtask:
    """One store and the states asked for in it."""

    def __init__(self, store: KeyedStateStore, clock: StateClock) -> None:
        self.store = store
        states = KeyedStates(store, clock)
        self.states = KeyStates(states, "")
        self.expiring = KeyStates(states, "expiring ", StateTtlConfig(TTL_MS / 1000))
        self.windows = states.namespace(tuple[int, int])
        self.windowed = KeyStates(self.windows, "window ")
        store.opened()

    def at(self, key: str, window: Any) -> KeyStates:
        """Return the states, with key and namespace set."""
        self.store.set_current_key(key)
        if window is None:
            return self.states
        if window == EXPIRING:
            return self.expiring
        self.windows.set(window)
        return self.windowed


class StateProgram:
    """One random program; the same for the same seed."""

    def __init__(self, backends: Sequence[StateBackend], directory: Path, seed: int) -> None:
        self._backends = backends
        self._backend = backends[0]
        self._seed = seed
        self._directory = directory
        self._rng = random.Random(seed)  # noqa: S311 - not for secrets
        self._storage = FileSystemStorage(str(directory / "storage")).open("program")
        self._wall_s = 1_700_000_000.0
        self._clock = StateClock(lambda: self._wall_s)
        self._attempt = 0
        self._checkpoint = 0
        self._added = 0
        self._models: Models = {}
        self._subtasks: list[Subtask] = []
        self._restorable: tuple[tuple[StateHandle, ...], Models] = ((), {})
        self._waiting: list[Callable[[], None]] = []

    def run(self, steps: int) -> None:
        """Run so many steps.

        Raises:
            AssertionError: A key reads what the model does not say.
        """
        self._restore((), {})
        for _ in range(steps):
            self._step()
        self._crash()
        self.close()

    def close(self) -> None:
        """Close every store."""
        for subtask in self._subtasks:
            subtask.store.close()
        self._subtasks = []

    def _step(self) -> None:
        chance = self._rng.random()
        if chance < 0.03:
            self._snapshot()
        elif chance < 0.06 and self._waiting:
            self._waiting.pop(0)()
        elif chance < 0.07:
            self._crash()
        elif chance < 0.075:
            self._switch_backend()
        elif chance < 0.10:
            self._prefetch()
        elif chance < 0.20:
            self._wall_s += self._rng.choice([0.1, 0.3, 0.9, -0.5, -100.0, 100.0])
        elif chance < 0.25:
            for subtask in self._subtasks:
                subtask.store.clean(self._rng.randrange(30))
        else:
            key = self._rng.choice(KEYS)
            self._change(key, self._rng.choice(PLACES))

    def _change(self, key: str, window: Any) -> None:
        rng = self._rng
        model = self._models.setdefault((key, window), KeyModel())
        states = self._subtask_of(key).at(key, window)
        self._expire(model, window)
        number, text = rng.randrange(1000), str(rng.randrange(5))
        match rng.choice(
            ["set", "add", "update", "put", "put_all", "remove", "reduce", "aggregate", "clear"]
        ):
            case "set":
                model.value = number
                self._used(model, window, "value")
                states.value.set(number)
            case "add":
                self._extend(model, window, [text])
                states.elements.add(text)
            case "update":
                self._clear_model(model, "elements")
                self._extend(model, window, [str(n) for n in range(rng.randrange(3))])
                states.elements.update(model.elements)
            case "put":
                model.mapped = {**model.mapped, text: number}
                self._used(model, window, f"mapped {text}")
                states.mapped.put(text, number)
            case "put_all":
                model.mapped = {**model.mapped, text: number, "x": 1}
                self._used(model, window, f"mapped {text}", "mapped x")
                states.mapped.put_all({text: number, "x": 1})
            case "remove":
                model.mapped = {name: n for name, n in model.mapped.items() if name != text}
                model.used_ms.pop(f"mapped {text}", None)
                states.mapped.remove(text)
            case "reduce":
                model.reduced = number if model.reduced is None else max(model.reduced, number)
                self._used(model, window, "reduced")
                states.reduced.add(number)
            case "aggregate":
                model.added = [*model.added, number]
                self._used(model, window, "added")
                states.added.add(number)
            case _:
                self._clear(states, model, rng.randrange(5))
        self._check(key, window)

    def _clear(self, states: KeyStates, model: KeyModel, which: int) -> None:
        name = ("value", "elements", "mapped", "reduced", "added")[which]
        self._clear_model(model, name)
        getattr(states, name).clear()

    def _clear_model(self, model: KeyModel, name: str) -> None:
        setattr(model, name, getattr(KeyModel(), name))
        kept = {of: used for of, used in model.used_ms.items() if of.partition(" ")[0] != name}
        model.used_ms = kept

    def _extend(self, model: KeyModel, window: Any, texts: list[str]) -> None:
        for text in texts:
            model.elements = [*model.elements, text]
            self._added += 1
            self._used(model, window, f"elements {self._added}")

    def _used(self, model: KeyModel, window: Any, *names: str) -> None:
        if window == EXPIRING:
            model.used_ms.update(dict.fromkeys(names, self._clock.now_ms()))

    def _expire(self, model: KeyModel, window: Any) -> None:
        if window == EXPIRING:
            model.expire(self._clock.now_ms())

    def _check(self, key: str, window: Any) -> None:
        self._expire(self._models.get((key, window), KeyModel()), window)
        read = self._subtask_of(key).at(key, window).read()
        says = expected(self._models.get((key, window), KeyModel()))
        assert read == says, (
            f"program of seed {self._seed}: key {key!r}, namespace {window}: {read} where {says} is"
            " right"
        )

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
        """Freeze every subtask's state; it is uploaded or discarded some steps later."""
        self._checkpoint += 1
        checkpoint, attempt = CheckpointId(self._checkpoint), AttemptId(self._attempt)
        stores = [subtask.store for subtask in self._subtasks]
        pending = [store.snapshot(checkpoint) for store in stores]
        models = copy.deepcopy(self._models)
        discarded = self._rng.random() < 0.2

        def finish() -> None:
            handles: list[StateHandle] = []
            for index, (store, snapshot) in enumerate(zip(stores, pending, strict=True)):
                if discarded:
                    snapshot.discard()
                    store.notify_aborted(checkpoint)
                    continue
                writer = self._storage.writer(attempt, checkpoint, "program", index)
                handles += snapshot.upload(writer)
                store.notify_completed(checkpoint)
            if not discarded:
                self._restorable = tuple(handles), models

        self._waiting.append(finish)

    def _crash(self) -> None:
        """Go back to the last snapshot that was completed."""
        self._waiting.clear()
        self.close()
        self._restore(*self._restorable)

    def _switch_backend(self) -> None:
        """Go on from a savepoint, in any of the backends."""
        self._waiting.clear()
        self._checkpoint += 1
        checkpoint, handles = CheckpointId(self._checkpoint), list[StateHandle]()
        for index, subtask in enumerate(self._subtasks):
            writer = self._storage.writer(AttemptId(self._attempt), checkpoint, "program", index)
            handles += subtask.store.savepoint(checkpoint).upload(writer)
        self.close()
        self._backend = self._rng.choice(self._backends)
        self._restore(tuple(handles), self._models)

    def _restore(self, handles: tuple[StateHandle, ...], models: Models) -> None:
        self._restorable = handles, copy.deepcopy(models)
        self._models = copy.deepcopy(models)
        self._attempt += 1
        parallelism = self._rng.choice([1, 2, 3])
        for index in range(parallelism):
            groups = key_group_range(MAX_PARALLELISM, parallelism, index)
            scratch = self._directory / f"scratch-{self._attempt}-{index}"
            context = StateContext("program", index, groups, MAX_PARALLELISM, scratch)
            mine = [
                handle
                for handle in handles
                if handle.key_group_first < groups.stop and handle.key_group_last >= groups.start
            ]
            store = self._backend.open(context, mine, self._storage.reader())
            self._subtasks.append(Subtask(store, self._clock))
        self._check_all()

    def _owner(self, key: str) -> int:
        group = key_group_of(key, MAX_PARALLELISM)
        return group * len(self._subtasks) // MAX_PARALLELISM

    def _subtask_of(self, key: str) -> Subtask:
        return self._subtasks[self._owner(key)]
