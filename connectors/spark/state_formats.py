"""The formats of jobs' checkpoints, and of the state in them. See `formats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from typing_extensions import override

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceWriter
    from pyspark.sql.types import StructType


class CheckpointsFormat(DataSource):
    """The format `onceflow-checkpoints`: the checkpoints and savepoints; `readers.checkpoints`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-checkpoints"

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.readers.checkpoints import checkpoints_schema

        return checkpoints_schema()

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from onceflow.connectors.spark.readers.checkpoints import CheckpointsReader

        return CheckpointsReader(self.options, schema)


class StateFormat(DataSource):
    """The format `onceflow-state`: one operator's state in a checkpoint; see `readers.state`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-state"

    @override
    def schema(self) -> StructType:
        from onceflow.connectors.spark.readers.state import state_schema

        return state_schema(self.options)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from onceflow.connectors.spark.readers.state import StateFrameReader

        return StateFrameReader(self.options, schema)


class SavepointFormat(DataSource):
    """The format `onceflow-savepoint`: a new savepoint; see `batch.unkeyed_savepoint_writer`."""

    @classmethod
    @override
    def name(cls) -> str:
        return "onceflow-savepoint"

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from onceflow.connectors.spark.batch.unkeyed_savepoint_writer import savepoint_writer

        return savepoint_writer(self.options, schema, overwrite=overwrite)


STATE_FORMATS: tuple[type[DataSource], ...] = (CheckpointsFormat, SavepointFormat, StateFormat)
"""The formats of this module. Spark discovers each by a module `pyspark_onceflow_…`."""
