"""The pytest tests that every state backend must pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from onceflow.core import state
from onceflow.core.errors import BadStateValue, ConfigError, StateIncompatible
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.storage import FileSystemStorage
from onceflow.integration.conformance.state_programs import MAX_PARALLELISM, StateProgram

PROGRAMS = 2
STEPS = 250
BALANCE = state.ValueStateDescriptor[Any]("balance", int)

OpenStore: TypeAlias = Callable[..., state.KeyedStateStore]


class StateBackendConformance:
    """The tests of a backend: `class TestMyBackend(StateBackendConformance)` with `make_backend`.

    `--onceflow-seed` selects the random programs.
    """

    def make_backend(self) -> state.StateBackend:
        """Return the backend under test."""
        raise NotImplementedError(f"{type(self).__name__} needs make_backend()")

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Any:
        """A checkpoint storage in a directory."""
        return FileSystemStorage(str(tmp_path / "storage")).open("conformance")

    @pytest.fixture
    def open_store(self, tmp_path: Path, storage: Any) -> Iterator[OpenStore]:
        """A function that opens a store from handles. The store is closed after the test."""
        opened: list[state.KeyedStateStore] = []

        def open_store(
            handles: tuple[state.StateHandle, ...] = (), max_parallelism: int = MAX_PARALLELISM
        ) -> state.KeyedStateStore:
            scratch = tmp_path / f"scratch-{len(opened)}"
            groups = range(max_parallelism)
            context = state.StateContext("conformance", 0, groups, max_parallelism, scratch)
            opened.append(self.make_backend().open(context, handles, storage.reader()))
            return opened[-1]

        yield open_store
        for store in opened:
            store.close()

    @pytest.fixture
    def balances(self, open_store: OpenStore, storage: Any) -> tuple[state.StateHandle, ...]:
        """A snapshot of a store in which key "a" has balance 7."""
        store = open_store()
        balance = store.value_state(BALANCE)
        store.set_current_key("a")
        balance.set(7)
        return _upload(store, storage)

    @pytest.mark.parametrize("number", range(PROGRAMS))
    def test_random_programs_read_what_the_model_says(
        self, number: int, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        """Random programs equal the model, through snapshots, crashes, rescales and savepoints."""
        seed = int(str(request.config.getoption("--onceflow-seed")))
        backends = [self.make_backend(), state.HeapBackend()]
        program = StateProgram(backends, tmp_path, seed * PROGRAMS + number)
        try:
            program.run(STEPS)
        finally:
            program.close()

    def test_a_snapshot_holds_the_state_as_of_its_barrier(
        self, open_store: OpenStore, storage: Any
    ) -> None:
        """Changes between snapshot and upload are not part of the snapshot."""
        store = open_store()
        balance = store.value_state(BALANCE)
        recent = store.list_state(state.ListStateDescriptor[str]("recent", str))
        for key in "ab":
            store.set_current_key(key)
            balance.set(1)
            recent.add("before")
        pending = store.snapshot(CheckpointId(1))
        store.set_current_key("a")
        balance.clear()
        recent.add("after")
        writer = storage.writer(AttemptId(1), CheckpointId(1), "conformance", 0)
        restored = open_store(pending.upload(writer))
        again = restored.value_state(BALANCE)
        recent_again = restored.list_state(state.ListStateDescriptor[str]("recent", str))
        for key in "ab":
            restored.set_current_key(key)
            assert (again.get(), recent_again.get()) == (1, ["before"])
        assert (balance.get(), recent.get()) == (None, ["before", "after"])

    def test_what_is_handed_in_or_out_may_be_changed(self, open_store: OpenStore) -> None:
        """Changing a value after `set` or `get` does not change the state."""
        store = open_store()
        value = store.value_state(state.ValueStateDescriptor[list[int]]("value", list[int]))
        store.set_current_key("a")
        mine = [1]
        value.set(mine)
        mine.append(2)
        value.get().append(3)
        assert value.get() == [1]

    def test_values_of_another_type_are_refused_and_change_nothing(
        self, open_store: OpenStore
    ) -> None:
        """A value of a wrong type is refused at the change, not at the restore."""
        store = open_store()
        balance = store.value_state(BALANCE)
        recent = store.list_state(state.ListStateDescriptor[Any]("recent", str))
        mapped = store.map_state(state.MapStateDescriptor[Any, Any]("map", str, int))
        store.set_current_key("a")
        for change in (
            partial(balance.set, "seven"),
            partial(recent.update, ["fits", 7]),
            partial(mapped.put, None, 7),
            partial(mapped.put, "fits", "seven"),
        ):
            with pytest.raises(BadStateValue, match=r"'balance'|'recent'|'map'"):
                change()
        assert (balance.get(), recent.get(), mapped.is_empty()) == (None, [], True)

    def test_another_type_or_max_parallelism_is_refused_by_name(
        self, open_store: OpenStore, balances: tuple[state.StateHandle, ...]
    ) -> None:
        """The restore fails before a value is read."""
        with pytest.raises(StateIncompatible, match=rf"{MAX_PARALLELISM}.*32"):
            open_store(balances, 32)
        with pytest.raises(StateIncompatible, match=r"'balance'.*int.*str"):
            open_store(balances).value_state(state.ValueStateDescriptor[str]("balance", str))

    def test_states_are_asked_for_before_the_first_record(
        self, open_store: OpenStore, balances: tuple[state.StateHandle, ...]
    ) -> None:
        """A restored state that is not opened is refused by name, like a state opened later."""
        with pytest.raises(StateIncompatible, match="'balance'"):
            open_store(balances).finish_open()
        store = open_store()
        store.finish_open()
        with pytest.raises(ConfigError, match="'balance'"):
            store.value_state(BALANCE)

    def test_closing_twice_is_safe(self, open_store: OpenStore) -> None:
        """A slot that shuts down may close a store that has already failed."""
        store = open_store()
        store.close()
        store.close()


def _upload(store: state.KeyedStateStore, storage: Any) -> tuple[state.StateHandle, ...]:
    writer = storage.writer(AttemptId(1), CheckpointId(1), "conformance", 0)
    handles = store.snapshot(CheckpointId(1)).upload(writer)
    store.notify_completed(CheckpointId(1))
    return handles
