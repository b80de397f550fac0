"""Formats over the readers of sources, with options that are arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from onceflow.clients.mysql.endpoint import endpoint_of as mysql_endpoint_of
from onceflow.clients.postgres.connection import endpoint_of as postgres_endpoint_of
from onceflow.clients.sql.session import DatabaseAccess
from onceflow.clients.sql.tables import TableName
from onceflow.connectors.spark.arrow_rows import spark_schema
from onceflow.connectors.spark.readers.kafka import KafkaBatchReader
from onceflow.connectors.spark.readers.kafka_stream import BatchLimits, KafkaStreamReader
from onceflow.connectors.spark.readers.mysql_rows import MySQLRows
from onceflow.connectors.spark.readers.postgres_rows import PostgresRows
from onceflow.connectors.spark.readers.sql import Bounds, RowSource, sql_reader, sql_schema
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.settings import KafkaSettings
from onceflow.sources.kafka.value_formats import schema_of_rows


class KafkaFormat(DataSource):
    """Options are arguments of `KafkaSource`, and limits of batches."""

    @classmethod
    def name(cls) -> str:
        return "test-kafka"

    def settings(self) -> KafkaSettings:
        options = dict(self.options)
        given: dict[str, Any] = {
            argument: options[argument]
            for argument in ("starting_offsets", "ending_offsets", "schema", "group_id", "topic")
            if argument in options
        }
        given["topic_pattern"] = options.get("topic_pattern")
        given["fail_on_data_loss"] = options.get("fail_on_data_loss", "true") == "true"
        given["deadline_s"] = float(options.get("deadline_s", "20"))
        given["format"] = "json" if "schema" in options else "raw"
        given["options"] = {"client.rack": options["rack"]} if "rack" in options else {}
        settings = KafkaSource(options["servers"], **given).settings
        return replace(settings, include_headers="headers" in options)

    def limits(self) -> BatchLimits:
        names = ("offsets_most", "offsets_least", "tasks_least", "task_rows_most")
        given = {name: int(self.options[name]) for name in names if name in self.options}
        return BatchLimits(**given)

    def schema(self) -> StructType:
        return spark_schema(schema_of_rows(self.settings()))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return KafkaStreamReader(self.settings(), schema, self.limits())

    def reader(self, schema: StructType) -> DataSourceReader:
        return KafkaBatchReader(self.settings(), schema, self.limits())


class _SqlFormat(DataSource):
    def source(self) -> RowSource:
        raise NotImplementedError

    def schema(self) -> StructType:
        return sql_schema(self.source())

    def reader(self, schema: StructType) -> DataSourceReader:
        given = dict(self.options)
        column = given.get("column")
        bounds = None if column is None else Bounds(column, given["lower"], given["upper"])
        return sql_reader(self.source(), schema, bounds=bounds, tasks=int(given.get("tasks", "1")))


class PostgresFormat(_SqlFormat):
    @classmethod
    def name(cls) -> str:
        return "test-postgres"

    def source(self) -> RowSource:
        options = dict(self.options)
        table = TableName.parse(options["table"]) if "table" in options else None
        endpoint = postgres_endpoint_of(DatabaseAccess(options["url"]), lock_timeout_s=10.0)
        return PostgresRows(endpoint, table, options.get("query"))


class MySQLFormat(_SqlFormat):
    @classmethod
    def name(cls) -> str:
        return "test-mysql"

    def source(self) -> RowSource:
        options = dict(self.options)
        endpoint = mysql_endpoint_of(DatabaseAccess(options["url"]), lock_timeout_s=10.0)
        return MySQLRows(endpoint, TableName.parse(options["table"]))
