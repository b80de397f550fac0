"""Lake tables in a directory, beside a plain Parquet writer with the same settings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from typing_extensions import override

from benchmarks.sinks.files import FilesPlace
from benchmarks.sinks.place import Effect, Place, Way
from benchmarks.sinks.rows import SCHEMA, Rows
from benchmarks.stage import BenchmarkError
from onceflow.core.spi import Sink
from onceflow.sinks import DeltaSink, IcebergSink

_RATIO_MIN = 0.8


class LakePlace(FilesPlace):
    """A table below an empty directory."""

    @property
    @override
    def ways(self) -> Mapping[str, Way]:
        return {"append": Way(self.sink, ratio_min=_RATIO_MIN)}

    @abstractmethod
    def sink(self, address: str) -> Sink:
        """Return the sink of the table."""

    @abstractmethod
    def read(self, address: str) -> pa.Table:
        """Return all rows as a reader of the table sees them."""

    @override
    def verify(self, address: str, rows: Rows, effect: Effect) -> None:
        if (Path(address) / "bare.parquet").exists():
            super().verify(address, rows, effect)
            return
        found = self.read(address).select(SCHEMA.names).sort_by("id").cast(SCHEMA)
        if not found.equals(pa.Table.from_batches(rows.batches, SCHEMA)):
            raise BenchmarkError(f"the {self.name} table has other rows: {found.num_rows}")


class IcebergPlace(LakePlace):
    """Tables of a SQLite catalog."""

    name = "Iceberg"

    @override
    def sink(self, address: str) -> Sink:
        return IcebergSink("bench.rows", catalog=_catalog(address), create=True)

    @override
    def read(self, address: str) -> pa.Table:
        from pyiceberg.catalog import load_catalog

        with closing(load_catalog("default", **_catalog(address))) as catalog:
            return catalog.load_table("bench.rows").scan().to_arrow()


class DeltaPlace(LakePlace):
    """Tables of which each is a directory."""

    name = "Delta"

    @override
    def sink(self, address: str) -> Sink:
        return DeltaSink(f"{address}/table", create=True)

    @override
    def read(self, address: str) -> pa.Table:
        from deltalake import DeltaTable

        table: pa.Table = cast("Any", DeltaTable(f"{address}/table")).to_pyarrow_table()
        return table


def lake_places(directory: Path) -> list[Place]:
    """Return the targets that are lake tables; they need no server."""
    return [IcebergPlace(directory), DeltaPlace(directory)]


def _catalog(address: str) -> dict[str, str]:
    return {"uri": f"sqlite:///{address}/catalog.db", "warehouse": f"file://{address}"}
