"""Entries in memory over RocksDB: how many there are, and that they are the newest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceflow.core.state.rocksdb import entries as rocksdb_entries
from onceflow.core.state.rocksdb.database import (
    Database,
    DatabaseOptions,
    PendingWrites,
    WriteQueue,
)
from onceflow.core.state.rocksdb.entries import RocksEntries, RowFormat
from onceflow.core.state.stores.entries import ABSENT, Cells, CurrentKey
from onceflow.core.state.types.serializers import serializer_of

CAPACITY = 64


class Table(RocksEntries):
    """Entries of numbers, and the snapshots that are taken of them."""

    def __init__(self, directory: Path) -> None:
        database = Database(directory, DatabaseOptions(1 << 20, 1 << 20))
        self.writes = WriteQueue(database)
        cells = Cells(serializer_of(int), "number")
        super().__init__(
            CurrentKey(), "number", RowFormat(cells), self.writes, database, CAPACITY, 128, True
        )
        self._copy = directory / "copy"

    @property
    def in_memory(self) -> int:
        return len(self.fresh) + self._taken_count + len(self._clean)

    def snapshot(self) -> None:
        """Take one that is written later, at the latest before the next one; leave out its copy."""
        pending = PendingWrites(self.freeze(), self._copy)
        pending.wanted = False
        self.writes.submit(pending)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path / "database")
    yield made
    made.writes.close()


def test_memory_is_bounded_where_each_snapshot_finds_few_changes(table: Table) -> None:
    for first in range(0, 10 * CAPACITY, CAPACITY // 4):
        keys = range(first, first + CAPACITY // 4)
        table.prefetch(list(keys))
        for key in keys:
            table.put(key, key)
        table.snapshot()
        table.writes.flush()
        table.join(len(keys))
        assert table.in_memory <= 2 * CAPACITY
    assert [table.find(key) for key in range(10 * CAPACITY)] == list(range(10 * CAPACITY))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_newest_entry_is_found_while_those_that_snapshots_took_join_the_others(
    table: Table, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(rocksdb_entries, "JOINING_MIN", 1)
    rng = random.Random(seed)
    model: dict[int, int] = {}
    for step in range(600):
        key = rng.randrange(3 * CAPACITY)
        match rng.choices(["put", "delete", "batch", "snapshot", "settle"], [8, 3, 2, 1, 1])[0]:
            case "put":
                table.put(key, step)
                model[key] = step
            case "delete":
                table.delete(key)
                model.pop(key, None)
            case "batch":
                table.join(rng.randrange(8))
                table.prefetch(rng.sample(range(3 * CAPACITY), rng.randrange(1, 20)))
            case "snapshot":
                table.snapshot()
            case _:
                table.writes.flush()
        assert table.find(key) == model.get(key, ABSENT), f"seed {seed}, step {step}"
    assert dict(table.all(range(128))) == model
