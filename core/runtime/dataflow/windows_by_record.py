"""The record-by-record state of windows of two streams, which earlier versions and sessions use.

A start from a checkpoint or savepoint of such a version reads this state; the records are kept as
rows from then on. Each key has a list of its open windows, its timers, and a map of its records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from onceflow.core.arrow.exact_arrays import exact_array
from onceflow.core.plan import window_functions
from onceflow.core.plan.functions import Record, StateAccess
from onceflow.core.state import KeyedStateStore
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.states.timers import TIME_DOMAINS, describe_timers

RECORDS_AT_ONCE = 8_192
"""The number of records that are moved together, which limits the memory for moving."""
Keep: TypeAlias = Callable[[int, pa.RecordBatch, Ints], None]
"""A callback with the number of a stream, rows, and the start of each row's window in
milliseconds."""


def move_windows(
    store: KeyedStateStore,
    access: StateAccess,
    records: window_functions.KeptRecords[window_functions.CoGroupFunction],
    keys: tuple[Sequence[str], Sequence[str]],
    keep: Keep,
) -> None:
    """Pass the records of all open windows to `keep`, and remove them and their timers.

    Called while the operator opens, on the subtask's thread. Does nothing for a store that was not
    restored from such a version.
    """
    if window_functions.OPEN_WINDOWS.name not in store.list_restored_names():
        return
    moved = [_Moved(schema, key) for schema, key in zip(records.schemas, keys, strict=True)]
    records.open_records(access)
    open_windows = store.value_state(window_functions.OPEN_WINDOWS)
    timers = [store.value_state(describe_timers(domain)) for domain in TIME_DOMAINS]
    for key in [key for key, _ in store.entries(window_functions.OPEN_WINDOWS)]:
        store.set_current_key(key)
        windows: list[window_functions.OpenWindow] = open_windows.get()
        for start, _, parts in windows:
            for side, of_window in enumerate(records.list_records(parts)):
                moved[side].add(key, start, of_window)
            records.forget(parts)
        for state in (open_windows, *timers):
            state.clear()
        for side, moved_side in enumerate(moved):
            if len(moved_side) >= RECORDS_AT_ONCE:
                keep(side, *moved_side.take())
    for side, moved_side in enumerate(moved):
        if len(moved_side):
            keep(side, *moved_side.take())


class _Moved:
    """The records of one stream that are being moved."""

    def __init__(self, schema: pa.Schema, key: Sequence[str]) -> None:
        self._schema = schema
        self._key = key
        self._records: list[Record] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: Any, start: int, records: Sequence[Record]) -> None:
        # The key columns may have had other names when the record was kept.
        values = key if len(self._key) > 1 else (key,)
        of_key = dict(zip(self._key, values, strict=True))
        self._records += [record | of_key for record in records]
        self._starts += [start] * len(records)

    def take(self) -> tuple[pa.RecordBatch, Ints]:
        """Return the rows and the starts of their windows, and clear the buffer."""
        arrays = [
            # A column may have been added after the record was kept: it is null then.
            exact_array([record.get(field.name) for record in self._records], field.type)
            for field in self._schema
        ]
        starts = np.array(self._starts, np.int64)
        self._records.clear()
        self._starts.clear()
        return pa.record_batch(arrays, schema=self._schema), starts
