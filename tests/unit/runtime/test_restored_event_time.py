"""Event time never goes back over a restore, at whatever parallelism the job begins again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from onceflow.core.protocol.watermarks import NO_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.restored_event_time import NOTHING_RESTORED, RestoredEventTime
from onceflow.core.state import hash_keys
from onceflow.core.state.keys.key_groups import key_groups

_MAX_PARALLELISM = 8
_KEYS = list(range(40))


def _restore(elements: Sequence[bytes], owned: range) -> RestoredEventTime:
    return RestoredEventTime(elements, owned, _MAX_PARALLELISM)


def _encode(*elements: tuple[int, int, int]) -> tuple[bytes, ...]:
    return tuple(map(msgspec.msgpack.encode, elements))


def _decode(elements: Sequence[bytes]) -> list[tuple[int, int, int]]:
    return [msgspec.msgpack.decode(element, type=tuple[int, int, int]) for element in elements]


def _list_by_group(elements: Sequence[bytes], owned: range = range(8)) -> list[int]:
    restored = _restore(elements, owned)
    by_group: list[int] = restored.watermarks_of(np.array(owned, np.uint16)).tolist()
    return by_group


@pytest.fixture
def batch() -> Batch:
    return Batch(pa.record_batch({"key": pa.array(_KEYS, pa.int64())}))


def test_each_key_group_keeps_its_event_time_at_another_parallelism() -> None:
    two = (_restore((), range(4)).elements(100), _restore((), range(4, 8)).elements(70))
    elements = (*two[0], *two[1])
    assert _list_by_group(elements) == [100] * 4 + [70] * 4
    assert _list_by_group(elements, range(3, 6)) == [100, 70, 70]
    assert _list_by_group(elements, range(6, 8)) == [70, 70]
    assert _list_by_group(elements[:1]) == [100] * 4 + [NO_WATERMARK] * 4


def test_least_and_most_are_the_limits_of_the_owned_groups() -> None:
    elements = _encode((0, 2, 100), (3, 7, 70))
    for owned, limits in ((range(8), (70, 100)), (range(3), (100, 100)), (range(3, 8), (70, 70))):
        restored = _restore(elements, owned)
        assert (restored.least, restored.most) == limits
    for nothing in (_restore(elements, range(0)), NOTHING_RESTORED):
        assert (nothing.least, nothing.most) == (NO_WATERMARK, NO_WATERMARK)
        assert nothing.elements(100) == ()


def test_event_time_is_stored_once_for_neighbouring_groups() -> None:
    restored = _restore(_encode((0, 1, 90), (2, 2, 100), (3, 7, 70)), range(1, 6))
    assert _decode(restored.elements(0)) == [(1, 1, 90), (2, 2, 100), (3, 5, 70)]
    assert _decode(restored.elements(95)) == [(1, 1, 95), (2, 2, 100), (3, 5, 95)]
    assert _decode(restored.elements(100)) == [(1, 5, 100)]


@pytest.mark.parametrize("is_hashed", [False, True])
def test_rows_are_parted_by_the_event_time_of_their_keys(batch: Batch, is_hashed: bool) -> None:
    hashes = hash_keys([batch.rows.column("key")])
    groups = key_groups(hashes, _MAX_PARALLELISM).tolist()
    restored = _restore(_encode((0, 2, 100), (3, 7, 70)), range(8))
    whole = Batch(batch.rows, hashes) if is_hashed else batch
    parts = list(restored.parts_of(whole, ["key"], 80))
    ahead = [key for key, group in zip(_KEYS, groups, strict=True) if group <= 2]
    assert {now: rows.column("key").to_pylist() for rows, _, now in parts} == {
        80: [key for key in _KEYS if key not in ahead],
        100: ahead,
    }
    for rows, of_rows, _ in parts:
        assert of_rows is not None
        assert of_rows.tolist() == hash_keys([rows.column("key")]).tolist()
    assert [restored.watermark_of_key(key) for key in _KEYS] == [
        100 if key in ahead else 70 for key in _KEYS
    ]


def test_rows_stay_in_one_part_once_event_time_has_reached_all_groups(batch: Batch) -> None:
    restored = _restore(_encode((0, 2, 100), (3, 7, 70)), range(8))
    for watermark in (100, 101):
        ((rows, _, now),) = restored.parts_of(batch, ["key"], watermark)
        assert (rows, now) == (batch.rows, watermark)


def test_a_subtask_finds_the_event_time_of_keys_whose_groups_do_not_begin_at_0(
    batch: Batch,
) -> None:
    owned = range(4, 8)
    restored = _restore(_encode((0, 5, 100), (6, 7, 70)), owned)
    groups = key_groups(hash_keys([batch.rows.column("key")]), _MAX_PARALLELISM).tolist()
    mine = [(key, group) for key, group in zip(_KEYS, groups, strict=True) if group in owned]
    assert mine
    for key, group in mine:
        assert restored.watermark_of_key(key) == (100 if group <= 5 else 70)
