"""An Iceberg sink over a SQLite catalog in a directory, with a faulty catalog on demand."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from tests.support import faulty_catalog

from onceflow.core.protocol.committables import CommitOutcome, Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import (
    CommitterContext,
    GlobalCommitter,
    OnBadRow,
    SinkWriter,
    WriterContext,
)
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import IcebergSink

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
SINK_ID = "job.rows"


class IcebergJob:
    """One job's sink, writer and committer, without an engine."""

    def __init__(self, directory: Path, schema: pa.Schema = SCHEMA, **settings: Any) -> None:
        self.schema = schema
        self.properties = {
            "py-catalog-impl": faulty_catalog.NAME,
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        }
        given: dict[str, Any] = {"table": "shop.orders", "create": True, **settings}
        self.sink = IcebergSink(catalog=self.properties, **given)
        self.staging = FileStagingArea.in_directory(str(directory / "staging"), SINK_ID)

    def with_settings(self, **settings: Any) -> IcebergJob:
        """Return the job with another sink for the same table and storage."""
        other = object.__new__(IcebergJob)
        other.__dict__.update(self.__dict__)
        other.sink = replace(self.sink, **settings)
        return other

    def open(self, attempt: int = 1, log_id: str = "log-1") -> IcebergJob:
        self.sink.open(self.context(attempt, log_id), self.schema)
        return self

    def context(self, attempt: int = 1, log_id: str = "log-1") -> CommitterContext:
        return CommitterContext("job", "rows", SINK_ID, AttemptId(attempt), log_id, self.staging)

    def writer(
        self,
        attempt: int = 1,
        subtask: int = 0,
        on_bad_row: OnBadRow = OnBadRow.FAIL,
        first_checkpoint: int = 1,
    ) -> SinkWriter:
        return self.sink.writer(
            WriterContext(
                job="job",
                uid="rows",
                sink_id=SINK_ID,
                subtask=subtask,
                parallelism=2,
                attempt=AttemptId(attempt),
                first_checkpoint=CheckpointId(first_checkpoint),
                schema=self.schema,
                staging=self.staging,
                on_bad_row=on_bad_row,
            )
        )

    def prepare(
        self, checkpoint: int, rows: Sequence[Mapping[str, Any]], **context: Any
    ) -> Committable:
        writer = self.writer(**context)
        writer.write(self.batch(rows))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        return committable

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=self.schema)

    def commit(
        self, checkpoint: int, *committables: Committable, attempt: int = 1
    ) -> CommitOutcome:
        with self.committer(attempt) as committer:
            return committer.commit_checkpoint(CheckpointId(checkpoint), committables)

    @contextmanager
    def committer(self, attempt: int = 1) -> Generator[GlobalCommitter, None, None]:
        committer = self.sink.committer(self.context(attempt))
        try:
            yield committer
        finally:
            committer.close()

    @contextmanager
    def catalog(self) -> Generator[Catalog, None, None]:
        """Lend the catalog as another program has it."""
        catalog = load_catalog("default", **self.properties)
        try:
            yield catalog
        finally:
            catalog.close()

    @contextmanager
    def table(self) -> Generator[Table, None, None]:
        """Lend the table as another program has it."""
        with self.catalog() as catalog:
            yield catalog.load_table(("shop", "orders"))

    def rows(self) -> list[dict[str, Any]]:
        """Return what a reader sees, by id."""
        with self.table() as table:
            rows: list[dict[str, Any]] = table.scan().to_arrow().to_pylist()
        return sorted(rows, key=lambda row: row["id"])

    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows()]
