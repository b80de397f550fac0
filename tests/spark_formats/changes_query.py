"""A query on Postgres changes that calls the reader as Spark does, and dies at a given step."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from pyspark.sql.types import StructType

from onceflow.clients.postgres.replication import parse_lsn
from onceflow.connectors.spark.formats import PostgresChangesFormat
from onceflow.connectors.spark.readers.postgres_changes import ChangesStreamReader

STEPS = ("planned", "logged", "acknowledged", "read", "written", "committed")
"""The steps of a batch after which the driver may die."""


class Crashed(Exception):
    """Raised at the step at which the driver of `Query` dies."""


class Query:
    """A query as Spark runs it: a log of ends, a log of commits, and a sink that is exactly once.

    Both logs and the sink survive a crash; the reader does not.
    """

    def __init__(self, url: str, directory: Path, **options: str) -> None:
        self.options = {
            "url": url,
            "table": "t",
            "slot": "s",
            "changesLocation": str(directory / "changes"),
            **options,
        }
        self.ends: list[str] = []
        self.commits: set[int] = set()
        self.written: dict[int, list[dict[str, Any]]] = {}
        self.dies_at = ""
        self.frame: StructType | None = None
        """The schema of a DataFrame that was made before; None if each driver makes one."""
        self.reader: ChangesStreamReader | None = None

    def start(self) -> ChangesStreamReader:
        """Return the reader of this driver, which is made if there is none."""
        if self.reader is None:
            source = PostgresChangesFormat(self.options)
            reader = source.streamReader(self.frame or source.schema())
            assert isinstance(reader, ChangesStreamReader)
            self.reader = reader
        return self.reader

    def crash(self) -> None:
        if self.reader is not None:
            self.reader.stop()
        self.reader, self.dies_at = None, ""

    def run_batch(self, *, dies_at: str = "") -> bool:
        """Run the batch that was logged and not committed, or the next one; False without one."""
        self.dies_at = dies_at
        reader, number = self.start(), len(self.ends) - 1
        if number in self.commits or number < 0:
            start = self._end(number)
            end = json.dumps(reader.latestOffset(json.loads(start)))
            self._pass("planned")
            # Without a commit, Spark takes every end for a new one.
            if end == start and self.ends:
                return False
            self.ends.append(end)
            self._pass("logged")
            if number >= 0:
                reader.commit(json.loads(self.ends[number]))
            self._pass("acknowledged")
            number += 1
        start, end = self._end(number - 1), self.ends[number]
        rows: list[dict[str, Any]] = []
        for task in reader.partitions(json.loads(start), json.loads(end)):
            executor: ChangesStreamReader = pickle.loads(pickle.dumps(reader))
            for batch in executor.read(pickle.loads(pickle.dumps(task))):
                rows += batch.to_pylist()
        self._pass("read")
        self.written.setdefault(number, rows)
        assert self.written[number] == rows, "a repeated batch has other rows"
        self._pass("written")
        self.commits.add(number)
        self._pass("committed")
        return True

    def run_to_end(self) -> None:
        """Run batches as Trigger.AvailableNow does, in a driver of its own."""
        self.crash()
        self.start().prepareForTriggerAvailableNow()
        while self.run_batch():
            pass
        self.crash()

    @property
    def first_lsn(self) -> int:
        """The LSN at which a new slot is, which stands in the first end; 0 without one."""
        return parse_lsn(json.loads(self.ends[0])["position"]["lsn"]) if self.ends else 0

    def committed_lsn(self) -> int:
        """Return the LSN of the last batch that is in the log of commits; 0 without one."""
        if not self.commits:
            return 0
        return parse_lsn(json.loads(self.ends[max(self.commits)])["position"]["lsn"])

    def copy(self, column: str = "v") -> dict[int, Any]:
        """Return the table that the written rows make: the values of a column by key.

        Fails if a row came twice or not at all.
        """
        table: dict[int, Any] = {}
        for number in sorted(self.written):
            for row in self.written[number]:
                key, operation = row["id"], row["_op"]
                if operation in "rc":
                    assert key not in table, f"doubled: {row}"
                if operation == "d":
                    del table[key]
                else:
                    table[key] = row.get(column)
        return table

    def _end(self, number: int) -> str:
        if number >= 0:
            return self.ends[number]
        return json.dumps(self.start().initialOffset())

    def _pass(self, step: str) -> None:
        if step == self.dies_at:
            raise Crashed(step)
