"""Joins with a table that changes: rows are looked up by key and kept for a limited time.

The rows are no state. A restarted attempt looks its records up again, and may find newer rows; what
is committed stays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from onceflow.core.arrow.kinds import cast_batch
from onceflow.core.plan.work import JoinLookup
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.lookup_join import (
    LookupIndex,
    TableJoiner,
    one_batch,
    whole_keys,
)
from onceflow.core.runtime.dataflow.user_functions import call_user, mistake
from onceflow.core.spi.lookups import LookupReader

_KEYS_AT_ONCE = 1_000
"""The number of keys of one question to the table."""


class LookupCache:
    """The rows of keys, each read at most `ttl_s` seconds ago.

    It has the rows of `keys_max` keys, and of one batch.
    """

    def __init__(
        self,
        read: Callable[[pa.RecordBatch], pa.RecordBatch],
        schema: pa.Schema,
        ttl_s: float,
        keys_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_rows = read
        self._schema = schema
        self._ttl_s = ttl_s
        self._keys_max = keys_max
        self._clock = clock
        self._pages: deque[_Page] = deque()
        """The answers that were read, the oldest first."""
        self._page_by_key: dict[tuple[Any, ...], _Page] = {}

    def find(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of the table with these keys: different ones, without nulls."""
        self._forget(self._clock() - self._ttl_s)
        values = _key_values(keys)
        missing = [at for at, value in enumerate(values) if value not in self._page_by_key]
        for begin in range(0, len(missing), _KEYS_AT_ONCE):
            asked = missing[begin : begin + _KEYS_AT_ONCE]
            self._read(keys.take(pa.array(asked)), [values[at] for at in asked])
        rows_by_page: dict[_Page, list[int]] = {}
        for value in values:
            page = self._page_by_key[value]
            rows_by_page.setdefault(page, []).extend(page.rows_by_key[value])
        taken = [page.rows.take(pa.array(rows)) for page, rows in rows_by_page.items() if rows]
        # Only now: the keys of one batch may be more than are kept.
        while len(self._page_by_key) > self._keys_max:
            self._drop_oldest()
        return one_batch(pa.Table.from_batches(taken, self._schema))

    def _read(self, keys: pa.RecordBatch, values: Sequence[tuple[Any, ...]]) -> None:
        read_at = self._clock()
        rows = self._read_rows(keys)
        page = _Page(read_at, rows, values, keys.schema.names)
        self._pages.append(page)
        self._page_by_key.update(dict.fromkeys(values, page))

    def _forget(self, read_before: float) -> None:
        while self._pages and self._pages[0].read_at <= read_before:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        for value in self._pages.popleft().rows_by_key:
            del self._page_by_key[value]


class _Page:
    """The answer to one question."""

    def __init__(
        self,
        read_at: float,
        rows: pa.RecordBatch,
        keys: Sequence[tuple[Any, ...]],
        names: Sequence[str],
    ) -> None:
        self.read_at = read_at
        self.rows = rows
        self.rows_by_key: dict[tuple[Any, ...], list[int]] = {key: [] for key in keys}
        for row, key in enumerate(_key_values(rows.select(names))):
            if (rows_of_key := self.rows_by_key.get(key)) is not None:
                rows_of_key.append(row)


class CachedLookupJoiner(TableJoiner):
    """An operator that adds the columns of a table that changes to each record."""

    def __init__(self, uid: str, work: JoinLookup, schema: pa.Schema, name: str) -> None:
        super().__init__(uid, work.columns, schema)
        self._columns = work.columns
        self._reader: LookupReader = call_user(uid, work.source.open, work.columns.on, name)
        self._cache = LookupCache(self._read, work.columns.schema, work.ttl_s, work.keys_max)

    def process(self, batch: Batch) -> None:
        """Look up the keys that are not known, and emit the joined rows in the batch's order."""
        on = list(self._columns.on)
        keys = batch.rows.select(on)
        keys = keys.filter(pa.array(whole_keys(keys, on)))
        distinct = pa.Table.from_batches([keys]).group_by(on).aggregate([])
        rows = self._cache.find(one_batch(distinct.select(on)))
        self.join(batch.rows, LookupIndex(rows, on))

    def close(self) -> None:
        """Close the reader."""
        call_user(self.uid, self._reader.close)

    def _read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """Return the reader's rows in the table's schema.

        Raises:
            UserFunctionError: The reader failed, or returned other columns than `describe`.
        """
        rows: object = call_user(self.uid, self._reader.read, keys)
        schema = self._columns.schema
        returned = rows.schema.names if isinstance(rows, pa.RecordBatch) else type(rows).__name__
        if returned != schema.names:
            raise mistake(
                self.uid,
                f"the lookup reader of operator {self.uid!r} returned {returned}, but read() must"
                f" return a pyarrow.RecordBatch with the columns of describe(): {schema.names}",
            )
        cast: pa.RecordBatch = call_user(self.uid, cast_batch, rows, schema)
        return cast


def _key_values(keys: pa.RecordBatch) -> list[tuple[Any, ...]]:
    return list(zip(*map(_exact_values, keys.columns), strict=True))


def _exact_values(column: pa.Array) -> list[Any]:
    """Return a value for each row; two values are equal if and only if Arrow's values are."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _exact_values(column.dictionary_decode())
    if pa.types.is_temporal(kind):
        # As integers: Python has not each instant, and its datetimes are equal for the two instants
        # that a clock shows twice in autumn.
        return column.view(f"int{kind.bit_width}").to_pylist()
    return column.to_pylist()
