"""`onceflow-kafka` on Spark with values whose schemas a registry keeps: written, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from tests.support.schema_registry_double import SchemaRegistryDouble

from onceflow.connectors.spark.formats import register
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.timeout(600)]

_ROWS = [Row(id=number, tags=[f"t{number}"], name=None) for number in range(20)]
_SCHEMA = "id BIGINT NOT NULL, tags ARRAY<STRING> NOT NULL, name STRING"


@pytest.mark.parametrize("value_format", [pytest.param("avro", marks=pytest.mark.slow), "protobuf"])
def test_values_of_a_schema_registry_are_written_and_read_as_columns(
    spark: SparkSession,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    tmp_path: Path,
    value_format: str,
) -> None:
    register(spark)
    topic = kafka_topic()
    (tmp_path / "user").write_text("ledger:s3cret")
    with SchemaRegistryDouble(user="ledger:s3cret") as registry:
        options: dict[str, Any] = {
            "kafka.bootstrap.servers": onceflow_kafka.bootstrap_servers,
            "valueFormat": value_format,
            "schema.registry.url": registry.url,
            "schema.registry.basic.auth.user.info": f"${{file:{tmp_path / 'user'}}}",
        }
        keyed = {**options, "keyFormat": "avro"}
        frame = spark.createDataFrame(_ROWS, _SCHEMA).coalesce(1)
        write = (
            frame.write.format("onceflow-kafka")
            .mode("append")
            .options(**keyed, keyColumns="id,name")
        )
        staged = str(tmp_path / "staged")
        write.options(topic=topic, sinkId=topic, stagingLocation=staged).save()
        reading = {**options, "subscribe": topic, "startingOffsets": "earliest"}

        read = spark.read.format("onceflow-kafka").options(**reading).load()
        assert [field.name for field in read.schema] == ["id", "tags", "name"]
        assert sorted(read.collect(), key=lambda row: row.id) == _ROWS

        with_keys = spark.read.format("onceflow-kafka").options(**reading, keyFormat="avro").load()
        assert [field.name for field in with_keys.schema] == ["id", "tags", "name", "_key"]
        assert {row.id: row._key for row in with_keys.collect()} == {
            one.id: Row(id=one.id, name=None) for one in _ROWS
        }

        stream = spark.readStream.format("onceflow-kafka").options(**reading).load()
        query = (
            stream.writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(400)
        finally:
            query.stop()
        assert sorted(spark.read.parquet(str(tmp_path / "out")).collect()) == _ROWS

        wrong = {**reading, "schema.registry.basic.auth.user.info": "ledger:wr0ng"}
        with pytest.raises(PySparkException) as caught:
            spark.read.format("onceflow-kafka").options(**wrong).load()
        assert "Check basic.auth.user.info" in str(caught.value)
        assert "wr0ng" not in str(caught.value)
