"""Sinks of lake tables in a directory, without an engine, with faulty commits on demand.

`IcebergJob` has a SQLite catalog, `DeltaJob` the table's directory alone. What both formats have to
keep is tested over both: `test_lake_sinks`.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from tests.support.lake_faults import FAULTY_CATALOG
from typing_extensions import Self, override

from onceflow.core import spi
from onceflow.core.protocol.committables import CommitOutcome, Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import DeltaSink, IcebergSink
from onceflow.sinks.lake.table import LakeTable

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
SINK_ID = "job.rows"


def one(number: int) -> list[dict[str, Any]]:
    return [{"id": number, "v": f"v{number}"}]


class LakeJob(ABC):
    """One job's sink, writer and committer."""

    replaced: ClassVar[str]
    """What the format calls a table that another one has taken the place of."""
    missing: ClassVar[str]
    """What the sink says where there is no table."""

    def __init__(self, directory: Path, schema: pa.Schema = SCHEMA, **settings: Any) -> None:
        self.directory, self.schema = directory, schema
        self.sink = self.make_sink({"create": True, **settings})
        self.staging = FileStagingArea.in_directory(str(directory / "staging"), SINK_ID)

    @abstractmethod
    def make_sink(self, settings: dict[str, Any]) -> IcebergSink | DeltaSink:
        """Return the sink of the table."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return what a reader sees, by id."""

    @abstractmethod
    def data_files(self) -> list[Path]:
        """Return all Parquet files of the table's directory, committed or not."""

    @abstractmethod
    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows as another program does."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the table."""

    @abstractmethod
    def expire(self) -> None:
        """Forget all of the table's history but the last version."""

    def with_settings(self, **settings: Any) -> Self:
        """Return the job with another sink for the same table and storage."""
        other = copy(self)
        other.sink = replace(self.sink, **settings)
        return other

    def open(self, attempt: int = 1, log_id: str = "log-1") -> Self:
        self.sink.open(self.context(attempt, log_id), self.schema)
        return self

    def context(self, attempt: int = 1, log_id: str = "log-1") -> spi.CommitterContext:
        return spi.CommitterContext(
            "job", "rows", SINK_ID, AttemptId(attempt), log_id, self.staging
        )

    def writer(
        self,
        attempt: int = 1,
        subtask: int = 0,
        on_bad_row: spi.OnBadRow = spi.OnBadRow.FAIL,
        first_checkpoint: int = 1,
    ) -> spi.SinkWriter:
        return self.sink.writer(
            spi.WriterContext(
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
    def committer(self, attempt: int = 1) -> Generator[spi.GlobalCommitter, None, None]:
        committer = self.sink.committer(self.context(attempt))
        try:
            yield committer
        finally:
            committer.close()

    @contextmanager
    def open_table(self) -> Generator[LakeTable, None, None]:
        """Lend the table as committers have it."""
        with self.committer() as committer:
            yield cast("Any", committer)._table

    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows()]


class MakeLakeJob(Protocol):
    """The fixture `make_job`: a job of one format, in the test's directory."""

    def __call__(self, schema: pa.Schema = SCHEMA, **settings: Any) -> LakeJob: ...


class IcebergJob(LakeJob):
    """Writes the table `shop.orders`."""

    replaced = "was dropped, and another one created in its place"
    missing = "shop.orders is not in catalog 'default'"

    @override
    def make_sink(self, settings: dict[str, Any]) -> IcebergSink:
        self.properties = {
            "py-catalog-impl": FAULTY_CATALOG,
            "uri": f"sqlite:///{self.directory}/catalog.db",
            "warehouse": f"file://{self.directory}/warehouse",
        }
        given: dict[str, Any] = {"table": "shop.orders", **settings}
        return IcebergSink(catalog=self.properties, **given)

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

    @override
    def rows(self) -> list[dict[str, Any]]:
        with self.table() as table:
            rows: list[dict[str, Any]] = table.scan().to_arrow().to_pylist()
        return sorted(rows, key=lambda row: row["id"])

    @override
    def data_files(self) -> list[Path]:
        return list((self.directory / "warehouse").rglob("*.parquet"))

    @override
    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with self.table() as table:
            table.append(pa.Table.from_batches([self.batch(rows)]))

    @override
    def drop(self) -> None:
        with self.catalog() as catalog:
            catalog.drop_table(("shop", "orders"))

    @override
    def expire(self) -> None:
        with self.table() as table:
            table.maintenance.expire_snapshots().older_than(datetime.now(timezone.utc)).commit()
            assert len(table.refresh().snapshots()) == 1


class DeltaJob(LakeJob):
    """Writes the table in the directory `table`."""

    replaced = "was deleted, and another one created in its place"
    missing = "does not exist"

    @property
    def path(self) -> Path:
        return self.directory / "table"

    @override
    def make_sink(self, settings: dict[str, Any]) -> DeltaSink:
        return DeltaSink(str(self.path), **settings)

    @override
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]]
        rows = cast("Any", DeltaTable(self.path)).to_pyarrow_table().to_pylist()
        return sorted(rows, key=lambda row: row["id"])

    @override
    def data_files(self) -> list[Path]:
        return [one for one in self.path.rglob("*.parquet") if one.parent.name != "_delta_log"]

    @override
    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_deltalake(
            self.path, cast("Any", pa.Table.from_batches([self.batch(rows)])), mode="append"
        )

    @override
    def drop(self) -> None:
        shutil.rmtree(self.path)

    @override
    def expire(self) -> None:
        """Vacuum, too; also what is kept of `txn` by time."""
        names = ("logRetentionDuration", "deletedFileRetentionDuration")
        expired = {f"delta.{name}": "interval 0 seconds" for name in names}
        expired["delta.setTransactionRetentionDuration"] = "interval 0 seconds"
        DeltaTable(self.path).alter.set_table_properties(expired)
        table = DeltaTable(self.path)
        table.create_checkpoint()
        table.cleanup_metadata()
        table.vacuum(0, dry_run=False, enforce_retention_duration=False)
        log = sorted(file.name for file in (self.path / "_delta_log").glob("*.json"))
        assert len(log) < table.version(), log
