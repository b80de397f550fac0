"""Formats of what jobs remember: their checkpoints, and the state in them. See `formats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from typing_extensions import override

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType


class CheckpointsFormat(DataSource):
    """`onceflow-checkpoints`: a row for each checkpoint and savepoint; see `checkpoints_reader`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-checkpoints"

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.checkpoints_reader import checkpoints_schema

        return checkpoints_schema()

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from onceflow.connectors.spark.checkpoints_reader import CheckpointsReader

        return CheckpointsReader(self.options, schema)


class StateFormat(DataSource):
    """`onceflow-state`: the state of one operator as of a checkpoint; see `state_reader`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-state"

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.state_reader import state_schema

        return state_schema(self.options)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from onceflow.connectors.spark.state_reader import StateFrameReader

        return StateFrameReader(self.options, schema)


STATE_FORMATS: tuple[type[DataSource], ...] = (CheckpointsFormat, StateFormat)
"""Those of this module; each has a module `pyspark_onceflow_…` by which Spark discovers it."""
