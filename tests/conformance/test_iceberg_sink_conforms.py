"""The Iceberg sink keeps every clause, also those of whole checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError

from onceflow.core.spi import Sink
from onceflow.integration.conformance import SinkConformance, SinkTarget
from onceflow.sinks import IcebergSink


class IcebergTarget(SinkTarget):
    """A table of a SQLite catalog, in a directory of its own."""

    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("account", pa.string()),
            pa.field("amount", pa.int64()),
        ]
    )

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._catalog = {
            "type": "sql",
            "uri": f"sqlite:///{directory}/catalog.db",
            "warehouse": f"file://{directory}/warehouse",
        }
        self._settings = settings

    def sink(self) -> Sink:
        return IcebergSink("kit.rows", catalog=self._catalog, create=True, **self._settings)

    def rows(self) -> Sequence[dict[str, object]]:
        catalog = load_catalog("default", **self._catalog)
        try:
            rows: Sequence[dict[str, object]]
            rows = catalog.load_table("kit.rows").scan().to_arrow().to_pylist()
        except NoSuchTableError:
            return []
        finally:
            catalog.close()
        return rows

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return rows of which one has a null where the table allows none."""
        good = self.batch(ids)
        keys = pa.array([None, *ids[1:]], pa.int64())
        return pa.RecordBatch.from_arrays([keys, *good.columns[1:]], schema=good.schema)


class TestIcebergSink(SinkConformance):
    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> Iterator[SinkTarget]:
        target = IcebergTarget(tmp_path)
        yield target
        target.close()


class TestPartitionedIcebergSink(SinkConformance):
    """Tests the sink with partitions and with snapshots of two checkpoints each."""

    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> Iterator[SinkTarget]:
        target = IcebergTarget(
            tmp_path, partition_by=("bucket(3, id)", "account"), commit_checkpoints=2
        )
        yield target
        target.close()


class TestIcebergUpserts(SinkConformance):
    """Tests upserts, in versions of two checkpoints each."""

    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> Iterator[SinkTarget]:
        target = IcebergTarget(
            tmp_path, write_mode="upsert", primary_key=("id",), commit_checkpoints=2
        )
        yield target
        target.close()
