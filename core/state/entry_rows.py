"""Entries of value, list and map states, to rows of the canonical form and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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
    hash_python_keys,
    prefixed,
    split_prefixed,
)
from onceflow.core.state.key_groups import key_groups

ROWS_A_CHUNK = 32_768
KEYS_A_SLICE = 1024
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
    """How the entries of one kind of state become rows."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    def rows(self, items: Iterable[tuple[Any, Any]], max_parallelism: int) -> Iterator[StateRows]:
        """Yield rows for (key, entry) pairs; lets other threads run every thousand keys or so."""
        source = iter(items)
        groups: list[np.ndarray[Any, np.dtype[np.uint16]]] = []
        keys: list[bytes] = []
        values: list[bytes] = []
        while piece := list(islice(source, KEYS_A_SLICE)):
            hashed = key_groups(hash_python_keys([key for key, _ in piece]), max_parallelism)
            counts = [self._add(key, entry, keys, values) for key, entry in piece]
            groups.append(np.repeat(hashed, counts))
            if len(keys) >= ROWS_A_CHUNK:
                yield _rows(groups, keys, values)
                groups, keys, values = [], [], []
            time.sleep(_YIELD_S)
        if keys:
            yield _rows(groups, keys, values)

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Put the entries of `rows` into a dict of entries."""
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            self._load(key, value, into)

    def _add(self, key: Any, entry: Any, keys: list[bytes], values: list[bytes]) -> int:
        """Append the rows of one entry; return how many."""
        keys.append(encode_key(key))
        values.append(self.cells.to_bytes(entry))
        return 1

    def _load(self, key: bytes, value: bytes, into: dict[Any, Any]) -> None:
        into[decode_key(key)] = self.cells.from_bytes(value)


class ListRows(EntryRows):
    """Entries that are lists of stored elements: one row a list."""

    def _add(self, key: Any, entry: Any, keys: list[bytes], values: list[bytes]) -> int:
        keys.append(encode_key(key))
        values.append(pack_list(entry, self.cells))
        return 1

    def _load(self, key: bytes, value: bytes, into: dict[Any, Any]) -> None:
        into[decode_key(key)] = unpack_list(value, self.cells)


class MapRows(EntryRows):
    """Entries that are dicts: one row an entry of the dict, none for an empty one."""

    def _add(self, key: Any, entry: Any, keys: list[bytes], values: list[bytes]) -> int:
        prefix = prefixed(encode_key(key))
        keys.extend(prefix + encode_key(map_key) for map_key in entry)
        values.extend(map(self.cells.to_bytes, entry.values()))
        return len(entry)

    def _load(self, key: bytes, value: bytes, into: dict[Any, Any]) -> None:
        outer, inner = split_map_row_key(key)
        into.setdefault(outer, {})[inner] = self.cells.from_bytes(value)


def _rows(
    groups: list[np.ndarray[Any, np.dtype[np.uint16]]], keys: list[bytes], values: list[bytes]
) -> StateRows:
    kind = pa.large_binary()
    return StateRows(np.concatenate(groups), pa.array(keys, kind), pa.array(values, kind))
