"""Key groups, splits and list state over rescales: S60, S62, S68."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.core.protocol import splits

shapes = st.integers(1, 400).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most)))


@given(shape=shapes)
def test_every_key_group_is_in_the_range_of_its_owner_and_in_no_other(
    shape: tuple[int, int],
) -> None:
    """S60 testCreateKeyGroupPartitions; ranges are contiguous, in order and none is empty."""
    max_parallelism, parallelism = shape
    ranges = [splits.key_group_range(max_parallelism, parallelism, i) for i in range(parallelism)]
    assert [g for owned in ranges for g in owned] == list(range(max_parallelism))
    for index, owned in enumerate(ranges):
        assert len(owned) > 0
        assert all(splits.owner_of(g, max_parallelism, parallelism) == index for g in owned)
    sizes = [len(owned) for owned in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (2, 2), (15, 77), (77, 15)])
def test_state_of_every_key_group_moves_to_exactly_one_new_subtask(old: int, new: int) -> None:
    """S62: scale up, down, not at all, uneven, of 128."""
    state = {g: index for index in range(old) for g in splits.key_group_range(128, old, index)}
    moved = [
        g for index in range(new) for g in splits.key_group_range(128, new, index) if g in state
    ]
    assert sorted(moved) == sorted(state) == list(range(128))


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [(1, 128), (85, 128), (86, 256), (128, 256), (171, 512), (20_000, 32_768), (32_768, 32_768)],
)
def test_default_max_parallelism_leaves_room_to_grow(parallelism: int, expected: int) -> None:
    """Flink's rule: the power of two at or above 1.5 x parallelism, 128..32768."""
    assert splits.default_max_parallelism(parallelism) == expected


@given(
    ids=st.lists(st.text("ab0123456789-", min_size=1, max_size=6), unique=True, max_size=60),
    parallelism=st.integers(1, 20),
)
def test_splits_are_read_once_each_and_evenly_and_everybody_agrees(
    ids: list[str], parallelism: int
) -> None:
    """S60: no split lost, loads within one, the same whatever order they were listed in."""
    assigned = splits.assign_splits(ids, parallelism)
    assert sorted(split for part in assigned for split in part) == sorted(ids)
    assert len(assigned) == parallelism
    loads = [len(part) for part in assigned]
    assert max(loads) - min(loads) <= 1
    assert splits.assign_splits(ids[::-1], parallelism) == assigned


def test_split_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="payments-1"):
        splits.assign_splits(["payments-0", "payments-1", "payments-1"], 2)


@given(
    parts=st.lists(st.lists(st.integers()), max_size=8),
    rescales=st.lists(st.integers(1, 12), min_size=1, max_size=5),
)
def test_list_state_loses_nothing_over_any_rescales(
    parts: list[list[int]], rescales: list[int]
) -> None:
    """S60 testPartitionableStateRepartitioning, S68."""
    expected = sorted(item for part in parts for item in part)
    current: tuple[tuple[int, ...], ...] = tuple(map(tuple, parts))
    for parallelism in rescales:
        current = splits.redistribute_list(current, parallelism)
        assert len(current) == parallelism
        assert sorted(item for part in current for item in part) == expected
        loads = [len(part) for part in current]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: splits.key_group_range(128, 0, 0),
        lambda: splits.key_group_range(128, 129, 0),
        lambda: splits.key_group_range(40_000, 2, 0),
        lambda: splits.key_group_range(128, 2, 2),
        lambda: splits.key_group_range(128, 2, -1),
        lambda: splits.owner_of(128, 128, 2),
        lambda: splits.owner_of(-1, 128, 2),
        lambda: splits.default_max_parallelism(0),
        lambda: splits.redistribute_list([[1]], 0),
    ],
)
def test_shapes_out_of_range_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r"\d"):
        call()
