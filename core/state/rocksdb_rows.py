"""Rows of a RocksDB store: their keys, and sorted pairs of key and value.

Row key (checkpoint format): key group, 2 bytes big-endian; length of the state's name, 1 byte; the
name; the row's key as in the canonical form. So a range of key groups is a range of row keys.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.state.canonical import Groups, StateRows
from onceflow.core.state.key_arena import fixed_binary

Pair: TypeAlias = tuple[bytes, "bytes | None"]
"""A row key and its value, None to delete it."""

T = TypeVar("T")

_pack_group = struct.Struct(">H").pack


def group_prefix(group: int) -> bytes:
    """Return what the row keys of key group `group` begin with."""
    return _pack_group(group)


def state_prefix(name: str) -> bytes:
    """Return what follows the key group in the row keys of state `name`."""
    encoded = name.encode()
    return bytes([len(encoded)]) + encoded


def split_row_key(data: bytes) -> tuple[int, str, bytes]:
    """Return key group, state name and the rest of a row key."""
    end = 3 + data[2]
    return int.from_bytes(data[:2], "big"), data[3:end].decode(), data[end:]


def after(prefix: bytes) -> bytes:
    """Return the smallest key above all that begin with `prefix`, which is not all FF."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def pairs_of(rows: StateRows, name: str) -> list[Pair]:
    """Return rows as sorted pairs; a null value deletes."""
    return sorted_pairs(rows.groups, name, rows.keys, rows.values.to_pylist())


def sorted_pairs(
    groups: Groups, name: str, keys: pa.Array, values: Sequence[T]
) -> list[tuple[bytes, T]]:
    """Return row key and value of rows of state `name`, sorted by row key."""
    if not len(groups):
        return []
    kind = pa.large_binary()
    row_keys = pc.binary_join_element_wise(
        fixed_binary(groups.astype(">u2")),
        pa.scalar(state_prefix(name), kind),
        keys.cast(kind),
        pa.scalar(b"", kind),
    )
    order = pc.array_sort_indices(row_keys)
    ordered = map(values.__getitem__, order.to_pylist())
    return list(zip(row_keys.take(order).to_pylist(), ordered, strict=True))


def merged(sources: Iterable[Callable[[], list[Pair]]]) -> list[Pair]:
    """Return the pairs of every source, sorted; no two sources have a key in common."""
    lists = [pairs for source in sources if (pairs := source())]
    if len(lists) == 1:
        return lists[0]
    pairs = [pair for part in lists for pair in part]
    pairs.sort()
    return pairs
