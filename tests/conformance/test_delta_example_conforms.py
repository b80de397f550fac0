"""The sink of examples/delta_sink.py keeps every clause, also those of whole checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from deltalake import DeltaTable
from examples.delta_sink import DeltaSink

from onceflow.connectors import Committable, Sink
from onceflow.integration.conformance import SinkConformance, SinkTarget


class DeltaTarget(SinkTarget):
    """A table in a directory."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "table")

    def sink(self) -> Sink:
        return DeltaSink(self.path)

    def lose(self, committable: Committable) -> None:
        it = committable.transaction
        name = f"{it.attempt}-{it.checkpoint}-{it.subtask}-{it.sequence}.parquet"
        Path(self.path, "onceflow", it.sink_id, name).unlink()

    def rows(self) -> list[dict[str, Any]]:
        if not DeltaTable.is_deltatable(self.path):
            return []
        found: list[dict[str, Any]] = (
            cast("Any", DeltaTable(self.path)).to_pyarrow_table().to_pylist()
        )
        return found


class TestDeltaExample(SinkConformance):
    @pytest.fixture
    def sink_target(self, tmp_path: Path) -> SinkTarget:
        return DeltaTarget(tmp_path)
