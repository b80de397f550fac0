"""The SQLite sink keeps every clause of the contract, with inserts and with changes by key."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.reference_sink import obstruct, remove_obstacle

from onceflow.core.spi import Sink
from onceflow.integration.conformance import SinkConformance, SinkTarget
from onceflow.sinks import SQLiteSink


class SQLiteTarget(SinkTarget):
    """The table `kept_rows` of a file in a directory of its own."""

    def __init__(self, **settings: Any) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._path = f"{self._directory.name}/target.db"
        self._settings: Mapping[str, Any] = settings

    def sink(self) -> Sink:
        return SQLiteSink(
            f"sqlite:///{self._path}",
            table="kept_rows",
            create=True,
            primary_key=("id",),
            **self._settings,
        )

    def rows(self) -> Sequence[dict[str, object]]:
        if not Path(self._path).exists():
            return []
        with closing(sqlite3.connect(self._path)) as db:
            db.row_factory = sqlite3.Row
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'kept_rows'").fetchone():
                return []
            return [dict(row) for row in db.execute("SELECT id, account, amount FROM kept_rows")]

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return rows of which one has no key."""
        good = self.batch(ids)
        keys = pa.array([None, *ids[1:]], pa.int64())
        return pa.RecordBatch.from_arrays([keys, *good.columns[1:]], schema=good.schema)

    def obstruct(self, ids: Sequence[int]) -> None:
        with closing(sqlite3.connect(self._path)) as db, db:
            obstruct(db, "kept_rows", ids)

    def remove_obstacle(self) -> None:
        with closing(sqlite3.connect(self._path)) as db, db:
            remove_obstacle(db)

    def close(self) -> None:
        self._directory.cleanup()


class TestSQLiteInserts(SinkConformance):
    @pytest.fixture
    def sink_target(self) -> Iterator[SinkTarget]:
        target = SQLiteTarget()
        yield target
        target.close()


class TestSQLiteUpserts(SinkConformance):
    @pytest.fixture
    def sink_target(self) -> Iterator[SinkTarget]:
        target = SQLiteTarget(write_mode="upsert")
        yield target
        target.close()
