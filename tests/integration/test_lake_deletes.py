"""Deletes in lake tables by keys of each type: what remains is what was not deleted.

Each key of a cell is put by the first checkpoint. Later ones delete some keys and put others anew,
beside a column whose type is of the catalogue, too. Another reader than the sink's reads the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.integration.lake_sink_kit import DeltaJob, IcebergJob, LakeJob
from tests.support.edge_values import NESTED, SCALARS, EdgeColumn
from tests.support.exact_values import exact_values, same
from tests.support.lake_values import commit_rows, read_rows

from onceflow.core.arrow.nested_rows import take_rows
from onceflow.core.errors import ConfigError
from onceflow.core.spi import OnBadRow, SinkWriter

_each_format = pytest.mark.parametrize("kind", [IcebergJob, DeltaJob], ids=["iceberg", "delta"])
_EDGES = {edge.name: edge for edge in (*SCALARS, *NESTED)}
_PUT, _DELETE = "u", "d"
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "operation": {"operation_column": "op"},
    "tombstone": {"tombstones": True},
}


class _Cell:
    """A table whose key is column `k`, and the rows that it is to have."""

    def __init__(
        self, kind: type[LakeJob], directory: Path, keys: pa.Array, other: pa.Array, way: str
    ) -> None:
        """Make the table.

        Raises:
            ConfigError: The sink takes no such key or column; names it.
        """
        self.keys, self.other, self.way = keys, other, way
        fields = [pa.field("id", pa.int64()), pa.field("k", keys.type)]
        fields.append(pa.field("other", other.type))
        if way == "operation":
            fields.append(pa.field("op", pa.string()))
        settings = {"write_mode": "upsert", "primary_key": ("k",), **_WAYS[way]}
        self.job = kind(directory, pa.schema(fields), **settings).open()
        self.expected: dict[int, tuple[int, int]] = {}
        """The id of each key's row, and the row of `other` that it has; keys by their number."""
        self.refused: set[int] = set()
        self.checkpoint = 0

    def change(self, *batches: list[tuple[str, int]]) -> None:
        """Put and delete keys, told by their numbers, batch after batch, in one checkpoint."""
        self.checkpoint += 1
        writer = self.job.writer(on_bad_row=OnBadRow.DEAD_LETTER, first_checkpoint=self.checkpoint)
        for batch in batches:
            self._write(writer, batch)
        commit_rows(self.job, self.checkpoint, writer)

    def _write(self, writer: SinkWriter, batch: list[tuple[str, int]]) -> None:
        numbers = np.array([key for _, key in batch], np.int64)
        ids = [self.checkpoint * 1_000 + key if what == _PUT else None for what, key in batch]
        places = [(key + self.checkpoint) % len(self.other) for _, key in batch]
        other = take_rows(self.other, np.array(places, np.int64))
        if self.way == "tombstone":
            # A row that deletes is null beside its key.
            parts = [other.slice(at, 1) if what == _PUT else pa.nulls(1, other.type)
                     for at, (what, _) in enumerate(batch)]  # fmt: skip
            other = pa.concat_arrays(parts)
        columns = [pa.array(ids, pa.int64()), take_rows(self.keys, numbers), other]
        if self.way == "operation":
            columns.append(pa.array([what for what, _ in batch]))
        writer.write(pa.RecordBatch.from_arrays(columns, schema=self.job.schema))
        refused: set[object] = set()
        for rejected in writer.take_rejected():
            refused |= set(map(repr, exact_values(rejected.rows.column("k"))))
            assert all("column 'k'" in why or "column 'other'" in why for why in rejected.reasons)
        known = exact_values(self.keys)
        for (what, key), row_id, place in zip(batch, ids, places, strict=True):
            if repr(known[key]) in refused:
                self.refused.add(key)
            elif what == _DELETE:
                self.expected.pop(key, None)
            else:
                assert row_id is not None
                self.expected[key] = (row_id, place)

    def check(self) -> None:
        """Raise AssertionError unless the table has exactly the rows that remain."""
        read = read_rows(self.job)
        keys, other = exact_values(self.keys), exact_values(self.other)
        assert sorted(read) == sorted(row_id for row_id, _ in self.expected.values())
        for key, (row_id, place) in self.expected.items():
            row = read[row_id]
            assert same(row["k"], keys[key]), (row["k"], keys[key])
            assert same(row["other"], other[place]), (row["other"], other[place])


def _given(column: pa.Array) -> pa.Array:
    """Return `column` without its nulls: a key has none."""
    return take_rows(column, np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)))


def _make_cell(*arguments: Any) -> tuple[_Cell | None, str]:
    """Return the cell, or None and why the sink refuses its columns."""
    try:
        return _Cell(*arguments), ""
    except ConfigError as error:
        return None, str(error)


def _check_deletes(
    kind: type[LakeJob], directory: Path, edge: EdgeColumn, other: pa.Array, way: str
) -> None:
    directory.mkdir()
    keys = _given(edge.values)
    cell, refusal = _make_cell(kind, directory, keys, other, way)
    if cell is None:
        assert "'k'" in refusal or "'other'" in refusal
        return
    numbers = range(len(keys))
    cell.change([(_PUT, key) for key in numbers])
    kept = [key for key in numbers if key not in cell.refused]
    # Deletes and puts of other keys in one batch.
    cell.change(
        [(_DELETE if at % 3 == 0 else _PUT, key) for at, key in enumerate(kept) if at % 3 < 2]
    )
    cell.check()
    # Deletes of keys that have a row, that have none any more, and that get one in between.
    cell.change(
        [(_PUT, key) for key in kept],
        [(_DELETE, key) for key in kept],
        [(_PUT, key) for key in kept[::2]],
    )
    cell.check()
    cell.change([(_DELETE, key) for key in kept])
    cell.check()
    assert not cell.expected


_SHORT_KEYS = ("timestamp[us, tz=UTC]",)


@_each_format
def test_rows_remain_whose_keys_were_not_deleted(kind: type[LakeJob], tmp_path: Path) -> None:
    other = _EDGES["map to struct of int64"].values
    for name in _SHORT_KEYS:
        _check_deletes(kind, tmp_path / name.replace("/", "-"), _EDGES[name], other, "operation")


@pytest.mark.slow
@_each_format
@pytest.mark.parametrize("way", list(_WAYS))
def test_rows_remain_whose_keys_of_each_type_were_not_deleted(
    kind: type[LakeJob], way: str, tmp_path: Path
) -> None:
    others = ("string", "map to struct of int64", "list of decimal256(50, 4)", "uuid")
    for number, edge in enumerate(SCALARS):
        other = _given(_EDGES[others[number % len(others)]].values)
        _check_deletes(kind, tmp_path / str(number), edge, other, way)


@pytest.mark.slow
@_each_format
@pytest.mark.parametrize("way", list(_WAYS))
def test_a_delete_leaves_other_rows_whatever_their_columns_are(
    kind: type[LakeJob], way: str, tmp_path: Path
) -> None:
    for number, edge in enumerate((*SCALARS, *NESTED)):
        if edge.is_short or edge in SCALARS:
            other = edge.values if way == "operation" else _given(edge.values)
            if len(other):
                _check_deletes(kind, tmp_path / str(number), _EDGES["int8"], other, way)
