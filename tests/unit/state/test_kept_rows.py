"""Rows that joins keep: they are found until they are removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.unit.state.state_storage_doubles import MemoryStorage

from onceflow.core.state import HeapBackend, StateContext
from onceflow.core.state.keys.key_columns import read_key_columns
from onceflow.core.state.keys.key_groups import hash_key_columns
from onceflow.core.state.states.kept_rows import KeptRows

_SCHEMA = pa.schema([("key", pa.int64()), ("value", pa.int64())])


@pytest.mark.parametrize("later", [1, 63, 65, 130])
def test_rows_are_found_when_the_rows_of_an_earlier_moment_are_gone(
    tmp_path: Path, later: int
) -> None:
    """Moments 0, 65 and 130 share a bit of the filter."""
    context = StateContext("join", 0, range(8), 8, tmp_path)
    store = HeapBackend().open(context, (), MemoryStorage())
    kept = KeptRows(store, "left", _SCHEMA, ("key",), outer=False)
    rows = pa.record_batch([[7, 7], [1, 2]], schema=_SCHEMA)
    keys = read_key_columns([rows.column("key")])
    moments = np.array([0, later])
    hashes, alone = hash_key_columns(keys), np.ones(2, np.bool_)
    kept.finish(kept.add(keys, hashes, rows, moments, moments, alone))
    kept.remove(kept.find_due(0), 0)
    ((_, entries),) = kept.find_near(keys, hashes, moments[[1, 1]], moments[[1, 1]])
    assert kept.rows(entries).column("value").to_pylist() == [2, 2]
    store.close()
