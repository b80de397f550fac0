"""A flipped bit at the head of a state file is refused by name, or changes nothing that is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.errors import CheckpointCorrupt, StateIncompatible
from onceflow.core.state import StateContext, StateHandle
from onceflow.core.state.snapshots.canonical import StateRows, read_metas, write_canonical
from onceflow.core.state.snapshots.state_meta import StateMeta

METAS = [StateMeta("balance", "value", "int64"), StateMeta("by day", "map", "str -> int64")]


def list_rows() -> Iterator[StateRows]:
    key, value = (pa.array([data], pa.large_binary()) for data in (b"key", b"value"))
    yield StateRows(np.zeros(1, np.uint16), key, value)


class DamagedFile(MemoryStorage):
    """A storage whose head is not verified, as in a directory or bucket."""

    def head(self, handle: StateHandle) -> bytes:
        return self.files[handle.path]


def test_a_flipped_bit_changes_no_description_of_a_state(tmp_path: Path) -> None:
    context = StateContext("op", 0, range(128), 128, tmp_path)
    storage = DamagedFile()
    (handle,) = write_canonical(storage, context, [(meta, list_rows()) for meta in METAS])
    assert read_metas(storage, handle, context) == METAS
    data = storage.files[handle.path]
    refused = 0
    # The second message, which holds the rows, begins with the same mark as the first.
    for position in range(data.index(data[:4], 4)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            storage.files[handle.path] = bytes(damaged)
            try:
                assert read_metas(storage, handle, context) == METAS, (position, bit)
            except (CheckpointCorrupt, StateIncompatible):
                refused += 1
    assert refused > 1_000
    storage.files[handle.path] = data[:100]
    with pytest.raises(CheckpointCorrupt):
        read_metas(storage, handle, context)
