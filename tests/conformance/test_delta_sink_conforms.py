"""The Delta sink keeps every clause, also those of whole checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from onceflow.core.spi import Sink
from onceflow.integration.conformance import SinkConformance, SinkTarget
from onceflow.sinks import DeltaSink


class DeltaTarget(SinkTarget):
    """A table in a directory."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.path = str(directory / "table")
        self._settings = settings

    def sink(self) -> Sink:
        return DeltaSink(self.path, create=True, **self._settings)

    def rows(self) -> list[dict[str, Any]]:
        if not DeltaTable.is_deltatable(self.path):
            return []
        rows: list[dict[str, Any]] = (
            cast("Any", DeltaTable(self.path)).to_pyarrow_table().to_pylist()
        )
        return rows

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return rows of which one has a null where the table allows none."""
        good = self.batch(ids)
        keys = pa.array([None, *ids[1:]], pa.int64())
        return pa.RecordBatch.from_arrays([keys, *good.columns[1:]], schema=good.schema)


class TestDeltaSink(SinkConformance):
    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> Iterator[SinkTarget]:
        target = DeltaTarget(tmp_path)
        yield target
        target.close()


class TestPartitionedDeltaSink(SinkConformance):
    """Tests the sink with partitions and with versions of two checkpoints each."""

    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> Iterator[SinkTarget]:
        target = DeltaTarget(tmp_path, partition_by=("account",), commit_checkpoints=2)
        yield target
        target.close()


class TestDeltaUpserts(SinkConformance):
    """Tests upserts, in versions of two checkpoints each."""

    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> Iterator[SinkTarget]:
        target = DeltaTarget(
            tmp_path, write_mode="upsert", primary_key=("id",), commit_checkpoints=2
        )
        yield target
        target.close()
