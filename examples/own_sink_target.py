"""The SQLite sink under the conformance kit: what its readers see, and what can go wrong with it.

pytest --onceflow-sink examples.own_sink_target:make_target
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from examples.own_sink import OwnSink

from onceflow.connectors import Sink
from onceflow.testing import SinkTarget


class OwnSinkTarget(SinkTarget):
    """A SQLite file in a directory of its own."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._path = f"{self._directory.name}/target.db"

    def sink(self) -> Sink:
        """Return the sink as a user would build it."""
        return OwnSink(self._path, table="rows", key="id")

    def rows(self) -> Sequence[dict[str, object]]:
        """Return every row that a reader of the file sees."""
        if not Path(self._path).exists():
            return []
        with closing(sqlite3.connect(self._path)) as db:
            db.row_factory = sqlite3.Row
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rows'").fetchone():
                return []
            return [dict(row) for row in db.execute("SELECT id, account, amount FROM rows")]

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return rows of which one has no key."""
        good = self.batch(ids)
        keys = pa.array([None, *ids[1:]], pa.int64())
        return pa.RecordBatch.from_arrays([keys, *good.columns[1:]], schema=good.schema)

    def close(self) -> None:
        """Delete the file."""
        self._directory.cleanup()


def make_target() -> SinkTarget:
    """Return a new target; the kit asks for one for each clause."""
    return OwnSinkTarget()
