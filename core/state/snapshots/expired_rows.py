"""The filter of expired rows for snapshots, and the first time stamps of rows without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.decoding import msgpack_decoder
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.snapshots.state_meta import StateKind
from onceflow.core.state.types.serializers import ExpiringSerializer, Serializer

_decode_list = msgpack_decoder(list[bytes]).decode
_encode_list = msgspec.msgpack.Encoder().encode


def filter_expired(
    chunks: Iterable[StateRows], kind: StateKind, serializer: Serializer[Any]
) -> Iterable[StateRows]:
    """Return the rows for a full snapshot: all, or only those that have not expired."""
    if isinstance(serializer, ExpiringSerializer) and serializer.cleans_snapshots:
        return _AliveRows(chunks, kind, serializer)
    return chunks


class _AliveRows:
    """The rows that have not expired at the time at which they are written."""

    def __init__(
        self, chunks: Iterable[StateRows], kind: StateKind, serializer: ExpiringSerializer
    ) -> None:
        self._chunks = chunks
        self._kind = kind
        self._serializer = serializer

    def __iter__(self) -> Iterator[StateRows]:
        for rows in self._chunks:
            values = [self._alive(value) for value in rows.values.to_pylist()]
            alive = np.array([value is not None for value in values], np.bool_)
            mask = pa.array(alive)
            kept = pa.array([value for value in values if value is not None], pa.large_binary())
            yield StateRows(rows.groups[alive], rows.keys.filter(mask), kept)

    def _alive(self, value: bytes) -> bytes | None:
        """Return the part of a row's value that has not expired, or None if all of it has."""
        expired = self._serializer.are_bytes_expired
        if self._kind != "list":
            return None if expired(value) else value
        elements = _decode_list(value)
        alive = [element for element in elements if not expired(element)]
        if len(alive) == len(elements):
            return value
        return _encode_list(alive) if alive else None


def stamp_value(value: bytes, kind: StateKind, serializer: Serializer[Any]) -> bytes:
    """Return a value that was stored without a time, with now as the time of its last use."""
    if not isinstance(serializer, ExpiringSerializer):
        return value
    if kind != "list":
        return serializer.stamp(value)
    return _encode_list([serializer.stamp(element) for element in _decode_list(value)])
