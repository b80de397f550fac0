"""Windows of two streams as earlier versions kept them, and sessions still are: record by record.

Checkpoints and savepoints of such versions are read at the start; their records are kept as rows
from then on. Each key has a list of its open windows, its timers, and a map of its records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from onceflow.core.api.functions import Record, StateAccess
from onceflow.core.api.window_functions import (
    OPEN_WINDOWS,
    CoGroupFunction,
    KeptRecords,
    OpenWindow,
)
from onceflow.core.arrow.exact_arrays import exact_array
from onceflow.core.state import KeyedStateStore
from onceflow.core.state.api.timers import TIME_DOMAINS, describe_timers
from onceflow.core.state.keys.key_columns import Ints

RECORDS_AT_ONCE = 8_192
"""Records that are moved together; bounds the memory that moving needs."""
Keep: TypeAlias = Callable[[int, pa.RecordBatch, Ints], None]
"""Takes the number of a stream, rows, and where the window of each begins, in milliseconds."""


def move_windows(
    store: KeyedStateStore,
    access: StateAccess,
    records: KeptRecords[CoGroupFunction],
    keys: tuple[Sequence[str], Sequence[str]],
    keep: Keep,
) -> None:
    """Pass the records of all open windows to `keep`, and remove them and their timers.

    Called while the operator opens, on the subtask's thread. A store that was not restored from
    such a version is left as it is.
    """
    if OPEN_WINDOWS.name not in store.list_restored_names():
        return
    moved = [_Moved(schema, key) for schema, key in zip(records.schemas, keys, strict=True)]
    records.open_records(access)
    open_windows = store.value_state(OPEN_WINDOWS)
    timers = [store.value_state(describe_timers(domain)) for domain in TIME_DOMAINS]
    for key in [key for key, _ in store.entries(OPEN_WINDOWS)]:
        store.set_current_key(key)
        windows: list[OpenWindow] = open_windows.get()
        for start, _, parts in windows:
            for side, of_window in enumerate(records.list_records(parts)):
                moved[side].add(key, start, of_window)
            records.forget(parts)
        for state in (open_windows, *timers):
            state.clear()
        for side, one in enumerate(moved):
            if len(one) >= RECORDS_AT_ONCE:
                keep(side, *one.take())
    for side, one in enumerate(moved):
        if len(one):
            keep(side, *one.take())


class _Moved:
    """Records of one stream, on their way."""

    def __init__(self, schema: pa.Schema, key: Sequence[str]) -> None:
        self._schema = schema
        self._key = key
        self._records: list[Record] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: Any, start: int, records: Sequence[Record]) -> None:
        # The names of key columns may be others than when the record was kept.
        values = key if len(self._key) > 1 else (key,)
        of_key = dict(zip(self._key, values, strict=True))
        self._records += [record | of_key for record in records]
        self._starts += [start] * len(records)

    def take(self) -> tuple[pa.RecordBatch, Ints]:
        """Return the rows and where their windows begin, and keep nothing of them."""
        arrays = [
            # A column may be newer than a record: it is null then.
            exact_array([record.get(field.name) for record in self._records], field.type)
            for field in self._schema
        ]
        starts = np.array(self._starts, np.int64)
        self._records.clear()
        self._starts.clear()
        return pa.record_batch(arrays, schema=self._schema), starts
