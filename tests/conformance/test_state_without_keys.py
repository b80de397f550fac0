"""State without a key, and bytes by key group, by random programs: who has what after a crash.

At whatever parallelism.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow import ProcessFunction, Record
from onceflow.core.plan.graph import Graph, Operator
from onceflow.core.plan.work import ProcessRecords
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.runtime.driver import restore
from onceflow.core.runtime.driver.restore import assign_state
from onceflow.core.state import ListStateDescriptor, MapStateDescriptor, RawKeyedState, key_group_of
from onceflow.core.state.states import operator_state
from onceflow.core.state.states.operator_state import BroadcastMap, OperatorList, OperatorStateStore

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "1"))
PROGRAMS = 60
STEPS = 150
UID = "unkeyed"
KEY_GROUPS = 128
KEPT = ListStateDescriptor[int]("kept", int)
BEGUN = ListStateDescriptor[str]("begun", str)
LIMITS = MapStateDescriptor[str, int]("limits", str, int)
GROUPS = sorted({key_group_of(str(key), KEY_GROUPS) for key in range(12)})
"""Of the keys that have bytes."""


class _Unused(ProcessFunction):
    """Stands for the operator; the program asks for its states itself."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, record: Record) -> None:
        raise NotImplementedError


GRAPH = Graph((Operator(UID, ProcessRecords(_Unused()), (), pa.schema([])),))


class Subtask:
    """The states of one subtask."""

    def __init__(self, store: OperatorStateStore) -> None:
        self.store = store
        self.kept = store.list_state(KEPT)
        self.begun = store.union_list_state(BEGUN)
        self.limits = store.broadcast_state(LIMITS)
        self.raw = store.raw_keyed_state("raw")
        assert store.finish_open() == ()


@dataclass
class Model:
    """A model of the elements of each subtask, and of all subtasks together."""

    kept: list[list[int]] = field(default_factory=list[list[int]])
    begun: list[list[str]] = field(default_factory=list[list[str]])
    limits: dict[str, int] = field(default_factory=dict[str, int])
    raw: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """By key group, whoever has it."""

    def check_restored(self, other: Model, seed: int) -> None:
        """Check that `other` is what this one must be after a restore."""
        lengths = [len(kept) for kept in other.kept]
        before, after = list(chain(*self.kept)), list(chain(*other.kept))
        assert sorted(after) == sorted(before), f"seed {seed}: {before} are dealt out as {after}"
        assert max(lengths) - min(lengths) <= 1, f"seed {seed}: {lengths} elements are not even"
        union = list(chain(*self.begun))
        assert all(begun == union for begun in other.begun), f"seed {seed}: {other.begun}, {union}"


class Program:
    """One random program; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self._rng = seed, random.Random(seed)
        self._storage = MemoryStorage()
        self._model = Model()
        self._subtasks: list[Subtask] = []
        self._checkpoint = self._added = 0
        self._waiting: list[Callable[[], None]] = []
        self._restorable: tuple[CompletedCheckpoint | None, Model] = (None, Model())

    def run(self) -> None:
        """Run to the end; raises AssertionError when a subtask has what it should not."""
        self._restore(None, Model())
        for _ in range(STEPS):
            chance = self._rng.random()
            if chance < 0.06:
                self._snapshot()
            elif chance < 0.12 and self._waiting:
                self._waiting.pop(0)()
            elif chance < 0.16:
                self._restore(*self._restorable)
            elif chance < 0.4:
                self._on_broadcast()
            elif chance < 0.5:
                self._put_bytes(self._rng.choice(GROUPS))
            else:
                self._on_record(self._rng.randrange(len(self._subtasks)))
            self._check()

    def _on_record(self, index: int) -> None:
        rng, subtask = self._rng, self._subtasks[index]
        self._added += 1
        kept, begun = self._model.kept[index], self._model.begun[index]
        match rng.choice(["add", "add", "update", "clear", "union", "union", "update union"]):
            case "add":
                kept.append(self._added)
                subtask.kept.add(self._added)
            case "update":
                kept[:] = [*kept[:2], self._added]
                subtask.kept.update(kept)
            case "clear":
                kept.clear()
                subtask.kept.clear()
            case "union":
                begun.append(str(self._added))
                subtask.begun.add_all([str(self._added)])
            case _:
                begun[:] = [str(self._added)]
                subtask.begun.update(begun)

    def _put_bytes(self, group: int) -> None:
        """Have the subtask of a key group keep bytes for it, or forget all that it has."""
        (subtask,) = [subtask for subtask in self._subtasks if group in subtask.raw.key_groups]
        if self._rng.random() < 0.1:
            subtask.raw.clear()
            for one in subtask.raw.key_groups:
                self._model.raw.pop(one, None)
            return
        self._added += 1
        self._model.raw[group] = b"%d" % self._added
        subtask.raw.put(group, self._model.raw[group])

    def _on_broadcast(self) -> None:
        """Every subtask gets the record."""
        rng, limits = self._rng, self._model.limits
        name, number, what = str(rng.randrange(6)), rng.randrange(100), rng.randrange(8)
        for subtask in self._subtasks:
            subtask.limits.may_change = True
            if what == 0:
                subtask.limits.clear()
            elif what < 3:
                subtask.limits.remove(name)
            else:
                subtask.limits.put(name, number)
            subtask.limits.may_change = False
        if what == 0:
            limits.clear()
        elif what < 3:
            limits.pop(name, None)
        else:
            limits[name] = number

    def _snapshot(self) -> None:
        """Freeze every subtask's state; it is uploaded some steps later, or lost in a crash."""
        self._checkpoint += 1
        checkpoint, parallelism = CheckpointId(self._checkpoint), len(self._subtasks)
        frozen = [subtask.store.freeze() for subtask in self._subtasks]
        model = copy.deepcopy(self._model)

        def finish() -> None:
            snapshots = tuple(
                SubtaskSnapshot(
                    SubtaskRef(UID, index),
                    (OperatorSnapshot(UID, raw=one.upload(self._storage)),),
                )
                for index, one in enumerate(frozen)
            )
            completed = CompletedCheckpoint(
                checkpoint, AttemptId(1), parallelism, KEY_GROUPS, snapshots, 0, 0
            )
            self._restorable = completed, model

        self._waiting.append(finish)

    def _restore(self, completed: CompletedCheckpoint | None, model: Model) -> None:
        self._waiting.clear()
        parallelism = self._rng.choice([1, 2, 3, 5])
        slots = assign_state(GRAPH, completed, parallelism) if completed else []
        self._subtasks = []
        for index in range(parallelism):
            store = OperatorStateStore(
                UID,
                subtask=index,
                parallelism=parallelism,
                key_groups=key_group_range(KEY_GROUPS, parallelism, index),
                max_parallelism=KEY_GROUPS,
                is_restored=completed is not None,
                handles=slots[index].operators[0].raw if slots else (),
                reader=self._storage,
            )
            self._subtasks.append(Subtask(store))
        now = Model(
            [subtask.kept.get() for subtask in self._subtasks],
            [subtask.begun.get() for subtask in self._subtasks],
            dict(model.limits),
            dict(model.raw),
        )
        model.check_restored(now, self.seed)
        self._model = now
        self._check()

    def _check(self) -> None:
        for index, subtask in enumerate(self._subtasks):
            read = subtask.kept.get(), subtask.begun.get(), dict(subtask.limits.items())
            says = self._model.kept[index], self._model.begun[index], self._model.limits
            assert read == says, f"seed {self.seed}, subtask {index}: {read} where {says} is right"
            raw = [(group, subtask.raw.get(group)) for group in subtask.raw.key_groups]
            right = [(group, self._model.raw.get(group)) for group in subtask.raw.key_groups]
            assert raw == right, f"seed {self.seed}, subtask {index}: {raw} where {right} is right"


def test_every_element_has_its_subtasks_through_crashes_and_rescaling() -> None:
    for seed in range(SEED, SEED + PROGRAMS):
        Program(seed).run()


@pytest.mark.slow
def test_every_element_has_its_subtasks_in_thousands_of_programs() -> None:
    for seed in range(SEED, SEED + 50 * PROGRAMS):
        Program(seed).run()


def _to_all(parts: list[list[Any]], parallelism: int) -> list[list[Any]]:
    return [list(chain(*parts)) for _ in range(parallelism)]


def _without_the_rest(parts: list[list[Any]], parallelism: int) -> list[list[Any]]:
    items = list(chain(*parts))
    share = len(items) // parallelism
    return [items[index * share : (index + 1) * share] for index in range(parallelism)]


def _to_the_first(parts: list[list[Any]], parallelism: int) -> list[list[Any]]:
    return [*_to_all(parts, 1), *([] for _ in range(parallelism - 1))]


def _to_whom_it_was(old: list[OperatorSnapshot], parallelism: int) -> list[Any]:
    return [old[slot].raw if slot < len(old) else () for slot in range(parallelism)]


def _itself(state: Any) -> Any:
    return state


def _nothing(old: Any) -> list[Any]:
    return []


_restore_bytes = RawKeyedState.restore


def _groups_of_others_too(state: RawKeyedState, elements: list[bytes]) -> None:
    mine, state.key_groups = state.key_groups, range(KEY_GROUPS)
    _restore_bytes(state, elements)
    state.key_groups = mine


BROKEN: tuple[tuple[str, ModuleType | type[Any], str, Callable[..., Any]], ...] = (
    ("deals every element out to all", operator_state, "redistribute_list", _to_all),
    ("loses what cannot be dealt evenly", operator_state, "redistribute_list", _without_the_rest),
    ("gives all to the first subtask", operator_state, "redistribute_list", _to_the_first),
    ("gives state to whom it was of", restore, "_without_key", _to_whom_it_was),
    ("freezes no list", OperatorList, "freeze", _itself),
    ("freezes no broadcast state", BroadcastMap, "freeze", _itself),
    ("loses bytes by key group", restore, "_raw_keyed", _nothing),
    ("freezes no bytes by key group", RawKeyedState, "freeze", _itself),
    ("keeps bytes of key groups that went", RawKeyedState, "restore", _groups_of_others_too),
)


@pytest.mark.parametrize(("name", "of", "what", "by"), BROKEN, ids=[one[0] for one in BROKEN])
def test_a_broken_rule_of_state_without_a_key_is_caught(
    name: str,
    of: ModuleType | type[Any],
    what: str,
    by: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(of, what, by)
    for seed in range(SEED, SEED + PROGRAMS):
        try:
            Program(seed).run()
        except AssertionError:
            return
    pytest.fail(f"{name}: survived {PROGRAMS} programs")
