"""Keys to entries: exact for any hash, however bad."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from onceflow.core.errors import StateCorrupt
from onceflow.core.state.keys.key_columns import Ints, KeyColumn, Mask, equal_keys, read_key_columns
from onceflow.core.state.keys.key_groups import Hashes, hash_key_columns
from onceflow.core.state.keys.key_index import (
    KeyIndex,
    decode_keys,
    encode_keys,
    number_keys,
    to_key_array,
)

LONG = "long key " * 16


def random_key(rng: random.Random) -> str:
    return rng.choice(["", "a", "b", "x" * 7, "x" * 8, "x" * 9, LONG, LONG + "!"]) + str(
        rng.randrange(4)
    ) * rng.randrange(3)


def spoil_hashes(hashes: Hashes, spread: str) -> None:
    match spread:
        case "four hashes":
            hashes &= np.uint64(3)
        case "one hash":
            hashes[:] = 7
        case "top bits only":
            hashes &= np.uint64(0xF000000000000000)
        case _:
            pass


SPREADS = ["good hashes", "four hashes", "one hash", "top bits only"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", SPREADS)
def test_equal_keys_share_a_entry_and_different_keys_never_do(seed: int, spread: str) -> None:
    rng = random.Random(seed)
    entries: dict[tuple[str, int], int] = {}
    empty = read_key_columns([pa.array([], pa.string()), pa.array([], pa.int64())])
    index = KeyIndex(empty)
    for size in (5, 0, 60, 1, 40):
        rows = [(random_key(rng), rng.randrange(3)) for _ in range(size)]
        columns = read_key_columns(
            [
                pa.array([a for a, _ in rows], pa.string()),
                pa.array([b for _, b in rows], pa.int64()),
            ]
        )
        hashes = hash_key_columns(columns)
        spoil_hashes(hashes, spread)
        known = set(entries)
        found, leaders = index.resolve(columns, hashes)
        for row, entry in zip(rows, found.tolist(), strict=True):
            assert entries.setdefault(row, entry) == entry
        assert len(set(entries.values())) == len(entries) == len(index)
        assert {rows[leader] for leader in leaders.tolist()} == set(rows) - known
        assert len(leaders) == len(set(rows) - known)
    assert sorted(entries.values()) == list(range(1, len(entries) + 1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", SPREADS)
def test_equal_keys_have_one_number_and_different_keys_never_do(seed: int, spread: str) -> None:
    rng = random.Random(seed)
    for size in (0, 1, 5, 60):
        rows = [(random_key(rng), rng.randrange(3)) for _ in range(size)]
        columns = read_key_columns(
            [
                pa.array([a for a, _ in rows], pa.string()),
                pa.array([b for _, b in rows], pa.int64()),
            ]
        )
        hashes = hash_key_columns(columns)
        spoil_hashes(hashes, spread)

        def equal(firsts: Ints, others: Ints, columns: tuple[KeyColumn, ...] = columns) -> Mask:
            assert (firsts < others).all()
            return equal_keys(*([column.take(of) for column in columns] for of in (firsts, others)))

        numbers, leaders = number_keys(hashes, equal)
        of_rows = dict(zip(rows, numbers.tolist(), strict=True))
        assert [of_rows[row] for row in rows] == numbers.tolist()
        assert sorted(of_rows.values()) == list(range(len(of_rows)))
        assert leaders.tolist() == [rows.index(row) for row in sorted(of_rows, key=of_rows.get)]  # type: ignore[arg-type]


def test_growth_past_many_doublings_keeps_every_entry() -> None:
    index = KeyIndex(read_key_columns([pa.array([], pa.int64())]))
    columns = read_key_columns([pa.array(np.arange(300_000) * 7)])
    hashes = hash_key_columns(columns)
    first, _ = index.resolve(columns, hashes)
    again, new = index.resolve(columns, hashes)
    assert np.array_equal(first, again)
    assert len(new) == 0
    assert len(index) == 300_000


def test_keys_and_hashes_read_for_a_snapshot_do_not_change_while_the_index_grows() -> None:
    index = KeyIndex(read_key_columns([pa.array([], pa.string())]))
    before = [f"k{number}" for number in range(5000)]
    columns = read_key_columns([pa.array(before)])
    entries, _ = index.resolve(columns, hash_key_columns(columns))
    keys, hashes = index.view_keys(), index.view_hashes()
    copied = hashes.copy()
    more = read_key_columns([pa.array([f"other {number}" for number in range(50_000)])])
    index.resolve(more, hash_key_columns(more))
    assert np.array_equal(hashes, copied)
    in_entries = encode_keys(keys).to_pylist()
    assert [in_entries[entry] for entry in entries.tolist()] == [key.encode() for key in before]


@pytest.mark.parametrize("more", [0, 3, 3000], ids=["full", "few", "many"])
def test_keys_of_entries_are_taken_as_arrays_while_the_index_grows(more: int) -> None:
    kinds = [pa.string(), pa.int64()]
    index = KeyIndex(read_key_columns([pa.array([], kind) for kind in kinds]))
    # There is room for 1,024 starts at first: entry 0 has one, and so has the end of the last key.
    rows = [(LONG[: number % 40] + str(number), number) for number in range(1_022 + more)]
    for part in (rows[:1_022], rows[1_022:], rows[::7]):
        texts, numbers = [text for text, _ in part], [number for _, number in part]
        columns = read_key_columns([pa.array(texts, kinds[0]), pa.array(numbers, kinds[1])])
        entries, _ = index.resolve(columns, hash_key_columns(columns))
        taken = [to_key_array(index.take_keys(at, entries), kinds[at]) for at in range(2)]
        assert [one.type for one in taken] == kinds
        assert [one.to_pylist() for one in taken] == [texts, numbers]


def test_a_copy_of_some_entries_has_their_keys_and_no_other() -> None:
    index = KeyIndex(read_key_columns([pa.array([], pa.string())]))
    columns = read_key_columns([pa.array([f"k{number}" for number in range(100)])])
    hashes = hash_key_columns(columns)
    entries, _ = index.resolve(columns, hashes)
    copy = index.copy_some(entries[10:20])
    found, new = copy.resolve(columns, hashes)
    assert found[10:20].tolist() == list(range(1, 11))
    assert len(new) == 90


@pytest.mark.parametrize(
    "arrays",
    [
        [pa.array(["", "a", "käse", LONG])],
        [pa.array([b"", b"\x00", b"\xff" * 300], pa.large_binary())],
        [pa.array([1, -1, 2**63 - 1])],
        [pa.array(["a", "", "b"]), pa.array([1, 2, -3]), pa.array(["", "", LONG])],
        [pa.array([7], pa.uint8()), pa.array([True])],
        [pa.array([], pa.string()), pa.array([], pa.int32())],
    ],
    ids=lambda arrays: "+".join(str(array.type) for array in arrays),
)
def test_encoded_key_columns_decode_to_equal_columns(arrays: list[Any]) -> None:
    columns = read_key_columns(arrays)
    encoded = encode_keys(columns)
    assert len(set(encoded.to_pylist())) == len(set(zip(*(a.to_pylist() for a in arrays))))  # noqa: B905
    decoded = decode_keys(encoded, columns)
    assert encode_keys(decoded).equals(encoded)
    assert np.array_equal(hash_key_columns(decoded), hash_key_columns(columns))


@pytest.mark.parametrize("data", [b"", b"\x00\x00\x00\x09ab", b"\x00\x00\x00\x01a123456789"])
def test_bytes_that_are_no_keys_are_refused(data: bytes) -> None:
    shape = read_key_columns([pa.array([], pa.string()), pa.array([], pa.int64())])
    with pytest.raises(StateCorrupt):
        decode_keys(pa.array([data], pa.large_binary()), shape)
