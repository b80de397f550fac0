"""State that is not kept by key: dealt out anew at every parallelism, and refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, make_dataclass
from typing import Any, cast

import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.errors import BadStateValue, ConfigError, StateIncompatible
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.state import ListStateDescriptor, MapStateDescriptor, StateTtlConfig
from onceflow.core.state.states.operator_state import OperatorStateStore

GROUPS = 16
NUMBERS = ListStateDescriptor[int]("numbers", int)


def stores(
    storage: MemoryStorage, handles: Sequence[StateHandle], parallelism: int, *, drop: bool = False
) -> Iterator[OperatorStateStore]:
    """Open the store of each subtask, over what all had before."""
    for subtask in range(parallelism):
        yield OperatorStateStore(
            "own",
            subtask=subtask,
            parallelism=parallelism,
            key_groups=key_group_range(GROUPS, parallelism, subtask),
            max_parallelism=GROUPS,
            is_restored=bool(handles),
            handles=handles,
            reader=storage,
            allow_non_restored_state=drop,
        )


def test_bytes_go_with_their_key_groups_and_elements_are_dealt_out_at_any_parallelism() -> None:
    storage = MemoryStorage()
    handles: list[StateHandle] = []
    for parallelism in (1, 3, 16, 2):
        found: dict[int, bytes | None] = {}
        numbers: list[int] = []
        written: list[StateHandle] = []
        for store in stores(storage, handles, parallelism):
            raw, dealt = store.raw_keyed_state("index"), store.list_state(NUMBERS)
            store.finish_open()
            assert store.is_restored == bool(handles)
            for group in raw.key_groups:
                found[group] = raw.get(group)
                raw.put(group, b"of %d" % group)
            numbers += dealt.get()
            if not handles:
                dealt.update(range(40))
            frozen = store.freeze()
            # What changes after the barrier is not in the snapshot.
            raw.clear()
            dealt.clear()
            written += frozen.upload(storage)
        assert sorted(found) == list(range(GROUPS))
        before = [b"of %d" % group if handles else None for group in range(GROUPS)]
        assert [found[group] for group in range(GROUPS)] == before
        assert sorted(numbers) == (list(range(40)) if handles else [])
        handles = written


def test_what_a_store_cannot_hold_is_refused_by_name() -> None:
    _, store = stores(MemoryStorage(), (), 2)
    raw = store.raw_keyed_state("index")
    with pytest.raises(
        BadStateValue, match="'index' was put for key group 0, but .* has only 8 to 15"
    ):
        raw.put(0, b"")
    with pytest.raises(BadStateValue, match="'index' holds bytes, so it cannot hold 'text'"):
        raw.put(8, cast("bytes", "text"))
    with pytest.raises(ConfigError, match="declares raw-keyed state 'index' twice"):
        store.raw_keyed_state("index")
    with pytest.raises(ConfigError, match="'numbers' of operator 'own' has a time to live"):
        store.list_state(ListStateDescriptor[int]("numbers", int, ttl=StateTtlConfig(1)))
    store.finish_open()
    with pytest.raises(ConfigError, match=r"'own' declares split state 'numbers' after open\(\)"):
        store.list_state(NUMBERS)
    assert all(raw.get(group) is None for group in raw.key_groups)


def test_bytes_that_nobody_asks_for_are_refused_by_name_or_dropped_where_allowed() -> None:
    storage = MemoryStorage()
    (store,) = stores(storage, (), 1)
    store.raw_keyed_state("index").put(3, b"x")
    handles = store.freeze().upload(storage)
    (again,) = stores(storage, handles, 1)
    with pytest.raises(StateIncompatible, match="'own' declares no state 'index', but its"):
        again.finish_open()
    (dropping,) = stores(storage, handles, 1, drop=True)
    assert dropping.finish_open() == ("state 'index' of operator 'own'",)


def test_elements_and_broadcast_entries_of_a_wider_type_are_kept_and_never_rounded() -> None:
    def account(kind: Any, *others: Any) -> Any:
        return make_dataclass("Account", [("sizes", kind), *others])

    def states_of(store: OperatorStateStore, kind: Any) -> tuple[Any, Any]:
        return (
            store.list_state(ListStateDescriptor[Any]("elements", kind)),
            store.broadcast_state(MapStateDescriptor[str, Any]("entries", str, kind)),
        )

    def kept(value: Any, kind: Any) -> tuple[MemoryStorage, Sequence[StateHandle]]:
        storage = MemoryStorage()
        (store,) = stores(storage, (), 1)
        elements, entries = states_of(store, kind)
        elements.add(value)
        entries.may_change = True
        entries.put("it", value)
        return storage, store.freeze().upload(storage)

    old = account(list[int])
    storage, handles = kept(old([2**60]), old)
    wider = account(list[float], ("name", str, field(default="new")))
    (store,) = stores(storage, handles, 1)
    elements, entries = states_of(store, wider)
    assert elements.get() == [entries.get("it")] == [wider([2.0**60], "new")]
    (store,) = stores(storage, handles, 1)
    with pytest.raises(StateIncompatible, match=r"was list\[int\] and is set\[int\]"):
        states_of(store, account(set[int]))
    storage, handles = kept(old([2**53 + 1]), old)
    (store,) = stores(storage, handles, 1)
    with pytest.raises(StateIncompatible, match=f"'elements' .*{2**53 + 1} cannot be a float"):
        store.list_state(ListStateDescriptor[Any]("elements", wider))
    with pytest.raises(StateIncompatible, match=f"'entries' .*{2**53 + 1} cannot be a float"):
        store.broadcast_state(MapStateDescriptor[str, Any]("entries", str, wider))
