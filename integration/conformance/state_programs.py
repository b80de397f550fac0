"""Random programs of state operations, compared with a model of plain dicts.

A program runs on some subtasks, as an operator does: it changes and reads states of random keys,
takes snapshots that are uploaded, discarded or lost, crashes and is restored at another parallelism
and, by a savepoint, in another backend. After every step what a key reads is what the model says.
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
    ValueStateDescriptor,
    key_group_of,
)
from onceflow.core.storage import FileSystemStorage

MAX_PARALLELISM = 16
KEYS = ["a", "b", "", "é", *(f"key-{number}" for number in range(12))]
WINDOWS = [(0, 10), (10, 20), (20, 30)]
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
    """What the states of one key, or of one key and namespace, hold."""

    value: int = 0
    elements: list[str] = field(default_factory=list[str])
    mapped: dict[str, int] = field(default_factory=dict[str, int])
    reduced: int | None = None
    added: list[int] = field(default_factory=list[int])


class KeyStates:
    """One state of each kind, as a function asks for them."""

    def __init__(self, states: Any, prefix: str) -> None:
        self.value = states.value_state(ValueStateDescriptor[int](f"{prefix}value", int, default=0))
        self.elements = states.list_state(ListStateDescriptor[str](f"{prefix}list", str))
        self.mapped = states.map_state(MapStateDescriptor[str, int](f"{prefix}map", str, int))
        self.reduced = states.reducing_state(ReducingStateDescriptor[int](f"{prefix}max", max, int))
        self.added = states.aggregating_state(
            AggregatingStateDescriptor(f"{prefix}mean", Mean(), tuple[int, int])
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

    def __init__(self, store: KeyedStateStore) -> None:
        self.store = store
        states = KeyedStates(store)
        self.states = KeyStates(states, "")
        self.windows = states.namespace(tuple[int, int])
        self.windowed = KeyStates(self.windows, "window ")
        store.opened()

    def at(self, key: str, window: Any) -> KeyStates:
        """Return the states, with key and namespace set."""
        self.store.set_current_key(key)
        if window is None:
            return self.states
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
        self._attempt = 0
        self._checkpoint = 0
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
        else:
            key = self._rng.choice(KEYS)
            self._change(key, self._rng.choice([None, *WINDOWS]))

    def _change(self, key: str, window: Any) -> None:
        rng = self._rng
        model = self._models.setdefault((key, window), KeyModel())
        states = self._subtask_of(key).at(key, window)
        number, text = rng.randrange(1000), str(rng.randrange(5))
        match rng.choice(
            ["set", "add", "update", "put", "put_all", "remove", "reduce", "aggregate", "clear"]
        ):
            case "set":
                model.value = number
                states.value.set(number)
            case "add":
                model.elements = [*model.elements, text]
                states.elements.add(text)
            case "update":
                model.elements = [str(n) for n in range(rng.randrange(3))]
                states.elements.update(model.elements)
            case "put":
                model.mapped = {**model.mapped, text: number}
                states.mapped.put(text, number)
            case "put_all":
                model.mapped = {**model.mapped, text: number, "x": 1}
                states.mapped.put_all({text: number, "x": 1})
            case "remove":
                model.mapped = {name: n for name, n in model.mapped.items() if name != text}
                states.mapped.remove(text)
            case "reduce":
                model.reduced = number if model.reduced is None else max(model.reduced, number)
                states.reduced.add(number)
            case "aggregate":
                model.added = [*model.added, number]
                states.added.add(number)
            case _:
                self._clear(states, model, rng.randrange(5))
        self._check(key, window)

    def _clear(self, states: KeyStates, model: KeyModel, which: int) -> None:
        empty = KeyModel()
        name = ("value", "elements", "mapped", "reduced", "added")[which]
        setattr(model, name, getattr(empty, name))
        getattr(states, name).clear()

    def _check(self, key: str, window: Any) -> None:
        read = self._subtask_of(key).at(key, window).read()
        says = expected(self._models.get((key, window), KeyModel()))
        assert read == says, (
            f"program of seed {self._seed}: key {key!r}, namespace {window}: {read} where {says} is"
            " right"
        )

    def _check_all(self) -> None:
        for key in KEYS:
            for window in (None, *WINDOWS):
                self._check(key, window)

    def _prefetch(self) -> None:
        for index, subtask in enumerate(self._subtasks):
            keys = [key for key in KEYS if self._owner(key) == index]
            subtask.store.prefetch(keys * 2)

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
            self._subtasks.append(Subtask(store))
        self._check_all()

    def _owner(self, key: str) -> int:
        group = key_group_of(key, MAX_PARALLELISM)
        return group * len(self._subtasks) // MAX_PARALLELISM

    def _subtask_of(self, key: str) -> Subtask:
        return self._subtasks[self._owner(key)]
