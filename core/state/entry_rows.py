"""Entries of value, list and map states, to rows of the canonical form and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.errors import StateCorrupt
from onceflow.core.state.canonical import StateRows
from onceflow.core.state.cells import Cells
from onceflow.core.state.key_codec import (
    decode_key,
    encode_key,
    encode_python_keys,
    hash_python_keys,
    prefixed,
    split_prefixed,
)
from onceflow.core.state.key_groups import key_groups

KEYS_A_SLICE = 2048
"""Keys encoded before the interpreter is offered to the thread that processes: under 1 ms."""
_YIELD_S = 50e-6

_encode_list = msgspec.msgpack.Encoder().encode
_decode_list = msgspec.msgpack.Decoder(list[bytes]).decode


def pack_list(elements: Iterable[Any], cells: Cells) -> bytes:
    """Return a list state's stored elements as the bytes of one row's value."""
    return _encode_list([cells.to_bytes(element) for element in elements])


def unpack_list(data: bytes, cells: Cells) -> list[Any]:
    """Return the stored elements that `pack_list` made `data` of.

    Raises:
        StateCorrupt: The bytes are no list.
    """
    try:
        return [cells.from_bytes(element) for element in _decode_list(data)]
    except msgspec.DecodeError as error:
        raise StateCorrupt(f"a list of a snapshot cannot be read: {error}") from error


def map_row_key(key: Any, map_key: Any) -> bytes:
    """Return the row key of one entry of a map state."""
    return prefixed(encode_key(key)) + encode_key(map_key)


def split_map_row_key(data: bytes) -> tuple[Any, Any]:
    """Return the key and the map key that `map_row_key` made `data` of.

    Raises:
        StateCorrupt: The bytes are no such key.
    """
    try:
        key, end = split_prefixed(data)
    except ValueError as error:
        raise StateCorrupt(f"{data!r:.80} is no key of a map state: {error}") from error
    return decode_key(key), decode_key(data[end:])


class EntryRows:
    """How the entries of a value state become rows: one row an entry."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    def rows(self, entries: Mapping[Any, Any], max_parallelism: int) -> Iterator[StateRows]:
        """Yield the rows of all entries; lets other threads run every thousand keys or so."""
        keys, values = iter(entries), iter(entries.values())
        while piece := list(islice(keys, KEYS_A_SLICE)):
            counts, row_keys, row_values = self.encode(piece, list(islice(values, KEYS_A_SLICE)))
            groups = key_groups(hash_python_keys(piece), max_parallelism)
            packed = pa.array(row_values, pa.large_binary())
            yield StateRows(np.repeat(groups, counts), row_keys, packed)
            time.sleep(_YIELD_S)

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, Sequence[bytes]]:
        """Return how many rows each entry has, and the keys and values of all of them."""
        return 1, encode_python_keys(keys), self.cells.to_bytes_all(entries)

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Put the entries of `rows` into a dict of entries."""
        from_bytes = self.cells.from_bytes
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            into[decode_key(key)] = from_bytes(value)


class ListRows(EntryRows):
    """Entries that are lists of stored elements: one row a list."""

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, Sequence[bytes]]:
        """Return how many rows each entry has, and the keys and values of all of them."""
        return 1, encode_python_keys(keys), [pack_list(entry, self.cells) for entry in entries]

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Put the entries of `rows` into a dict of entries."""
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            into[decode_key(key)] = unpack_list(value, self.cells)


class MapRows(EntryRows):
    """Entries that are dicts: one row an item of the dict, none for an empty one."""

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, Sequence[bytes]]:
        """Return how many rows each entry has, and the keys and values of all of them."""
        row_keys: list[bytes] = []
        values: list[bytes] = []
        for key, entry in zip(keys, entries, strict=True):
            prefix = prefixed(encode_key(key))
            row_keys.extend(prefix + encode_key(map_key) for map_key in entry)
            values.extend(self.cells.to_bytes_all(list(entry.values())))
        return list(map(len, entries)), pa.array(row_keys, pa.large_binary()), values

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Put the entries of `rows` into a dict of entries."""
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            outer, inner = split_map_row_key(key)
            into.setdefault(outer, {})[inner] = self.cells.from_bytes(value)
