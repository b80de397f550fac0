"""Options of Spark formats become settings of sinks; whatever cannot is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa
import pytest

from onceflow.clients.kafka.registry import RegistrySettings
from onceflow.clients.kafka.settings import KeyFormat
from onceflow.connectors.spark.options import sql_reads
from onceflow.connectors.spark.options.files import FILES_READ, FILES_WRITE
from onceflow.connectors.spark.options.kafka import (
    KAFKA_READ,
    KAFKA_READ_STREAM,
    KAFKA_WRITE,
    KafkaRead,
    schema_of_reading,
)
from onceflow.connectors.spark.options.option_table import PROTOCOL_OPTIONS, OptionTable, own_sink
from onceflow.connectors.spark.options.postgres_changes import CHANGES_READ
from onceflow.core.errors import ConfigError
from onceflow.core.spi import Sink
from onceflow.sinks import FileSink, KafkaSink, MySQLSink, PostgresSink, SQLiteSink
from onceflow.sinks.kafka.settings import RecordFormat
from onceflow.sources.kafka.settings import AtTime, Earliest, Latest

TABLES = (
    sql_reads.describe_postgres_writes(),
    sql_reads.describe_mysql_writes(),
    sql_reads.describe_sqlite_writes(),
    KAFKA_WRITE,
    KAFKA_READ_STREAM,
    KAFKA_READ,
    CHANGES_READ,
    FILES_WRITE,
    FILES_READ,
)
JDBC = {"url": "jdbc:postgresql://db/shop", "user": "u", "dbtable": "shop.orders"}


def refusal(table: OptionTable[object], options: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        table.make(options)
    return str(caught.value)


def test_options_of_sparks_jdbc_writer_make_a_sink() -> None:
    sink = sql_reads.describe_postgres_writes().make(
        {
            **JDBC,
            "password": "${env:SHOP_PASSWORD}",
            "driver": "org.postgresql.Driver",
            "batchsize": "10000",
            "queryTimeout": "30",
        }
    )
    assert sink == PostgresSink(
        "jdbc:postgresql://db/shop",
        user="u",
        table="shop.orders",
        password="${env:SHOP_PASSWORD}",
        statement_timeout_s=30.0,
    )


def test_names_are_read_in_any_case_as_spark_hands_them_over() -> None:
    options = {
        "url": "jdbc:mariadb://db/shop",
        "dbtable": "t",
        "writemode": "UPSERT",
        "PRIMARYKEY": "a, b",
        "createtable": "True",
        "user": "u",
    }
    assert sql_reads.describe_mysql_writes().make(options) == MySQLSink(
        "jdbc:mariadb://db/shop",
        table="t",
        write_mode="upsert",
        primary_key=("a", "b"),
        create=True,
        user="u",
    )


def test_every_other_format_makes_its_sink(tmp_path: object) -> None:
    kafka = KAFKA_WRITE.make(
        {"kafka.bootstrap.servers": "b:9092", "topic": "t", "kafka.sasl.password": "${env:P}"}
    )
    assert repr(kafka) == repr(
        KafkaSink("b:9092", topic="t", format="raw", options={"sasl.password": "${env:P}"})
    )
    files = FILES_WRITE.make(
        {
            "path": f"{tmp_path}/out",
            "partitionby": "day",
            "storage.key": "${env:K}",
            "storage.client_kwargs": '{"endpoint_url": "http://s3"}',
        }
    )
    assert files == FileSink(
        f"{tmp_path}/out",
        partition_by=("day",),
        storage_options={"key": "${env:K}", "client_kwargs": {"endpoint_url": "http://s3"}},
    )
    path = f"{tmp_path}/out.db"
    assert sql_reads.describe_sqlite_writes().make({"url": path, "dbtable": "t"}) == SQLiteSink(
        path, table="t"
    )


def test_a_mistyped_option_is_refused_with_the_nearest_name() -> None:
    assert "no option 'primarykeys' for write: did you mean 'primaryKey'?" in refusal(
        sql_reads.describe_postgres_writes(), {**JDBC, "primarykeys": "id"}
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [("batchSise", "batchsize"), ("numPartition", "numPartitions"), ("txnApId", "txnAppId")],
)
def test_a_mistyped_option_that_no_table_reads_is_refused_with_the_nearest_name(
    written: str, meant: str
) -> None:
    said = refusal(sql_reads.describe_postgres_writes(), {**JDBC, written: "1"})
    assert f"no option '{written}' for write: did you mean '{meant}'?" in said


def test_an_option_of_the_jdbc_writer_that_would_mislead_is_refused_with_what_to_do() -> None:
    assert "use coalesce(n)" in refusal(
        sql_reads.describe_postgres_writes(), {**JDBC, "numPartitions": "4"}
    )


def test_a_missing_option_is_named_with_what_it_means() -> None:
    assert "onceflow-postgres needs option 'dbtable': The table" in refusal(
        sql_reads.describe_postgres_writes(), {"url": "postgresql://u@db/shop"}
    )


def test_a_value_of_another_type_is_refused_with_what_it_must_be() -> None:
    assert "option 'createTable'='yes' must be true or false" in refusal(
        sql_reads.describe_postgres_writes(), {**JDBC, "createtable": "yes"}
    )
    assert "must be one of insert, upsert, ignore, update" in refusal(
        sql_reads.describe_postgres_writes(), {**JDBC, "writemode": "merge"}
    )
    assert "must be a duration" in refusal(
        sql_reads.describe_postgres_writes(), {**JDBC, "locktimeout": "soon"}
    )


def test_two_names_of_one_option_are_refused() -> None:
    assert "options 'querytimeout' and 'statementtimeout' say the same" in refusal(
        sql_reads.describe_postgres_writes(), {**JDBC, "querytimeout": "5", "statementtimeout": "6"}
    )


def test_no_error_repeats_a_secret() -> None:
    secret = "hunter2"
    for options in (
        {"url": f"jdbc:oracle://u:{secret}@db/shop", "dbtable": "t"},
        {**JDBC, "password": secret, "tables": "t"},
        {"url": f"jdbc:postgresql://db/shop?password={secret}", "dbtable": "a.b.c.d"},
    ):
        assert secret not in refusal(sql_reads.describe_postgres_writes(), options)


def test_options_of_sparks_kafka_source_make_a_reader() -> None:
    reading = KAFKA_READ_STREAM.make(
        {
            "kafka.bootstrap.servers": "b:9092",
            "subscribe": "a,b",
            "startingoffsets": "earliest",
            "failondataloss": "false",
            "maxoffsetspertrigger": "1000",
            "minpartitions": "8",
            "kafka.group.id": "shown",
            "kafka.security.protocol": "SASL_SSL",
            "kafkaConsumer.pollTimeoutMs": "500",
        }
    )
    assert isinstance(reading, KafkaRead)
    settings, limits = reading.settings, reading.limits
    assert settings.topics == ("a", "b")
    assert settings.starting == Earliest()
    assert settings.options == {"security.protocol": "SASL_SSL"}
    assert (settings.fail_on_data_loss, settings.group_id) == (False, "shown")
    assert (limits.offsets_most, limits.tasks_least) == (1000, 8)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("-1", "startingTimestamp=-1 is before 1970.* Give startingOffsets=latest"),
        ("-86400000", "startingTimestamp=-86400000 is before 1970"),
        ("1700000000123456", "startingTimestamp=1700000000123456 is after the year 9999"),
        ("9999999999999999999", "startingTimestamp=9999999999999999999 is after the year 9999"),
    ],
    ids=["latest in Spark's JSON", "negative", "microseconds", "beyond 64 bits"],
)
def test_a_starting_timestamp_that_is_no_time_of_records_is_refused(
    given: str, reason: str
) -> None:
    options = {"kafka.bootstrap.servers": "broker:9092", "subscribe": "payments"}
    assert re.search(reason, refusal(KAFKA_READ_STREAM, {**options, "startingTimestamp": given}))


def test_a_starting_timestamp_is_exact_to_the_millisecond() -> None:
    options = {"kafka.bootstrap.servers": "broker:9092", "subscribe": "payments"}
    for given in (0, 1700000000123, 253402300799999):
        read = KAFKA_READ.make({**options, "startingTimestamp": str(given)})
        assert read.settings.starting == AtTime(given)


def test_options_of_a_schema_registry_are_its_clients_behind_a_prefix() -> None:
    registry = {
        "schema.registry.url": "http://r:8081",
        "schema.registry.basic.auth.user.info": "${env:REGISTRY_USER}",
    }
    servers = {"kafka.bootstrap.servers": "b:9092", **registry}
    written = KAFKA_WRITE.make(
        {**servers, "topic": "t", "valueformat": "protobuf", "auto.register.schemas": "false"}
    )
    settings = written.settings
    assert (settings.format, settings.auto_register) == (RecordFormat.PROTOBUF, False)
    assert settings.registry == RegistrySettings(
        "http://r:8081", {"basic.auth.user.info": "${env:REGISTRY_USER}"}
    )
    options = {**servers, "subscribe": "a", "valueFormat": "avro", "valueSchema": "id BIGINT"}
    read = KAFKA_READ.make({**options, "valueSubject": "s"}).settings
    assert (read.registry, read.subject) == (settings.registry, "s")
    assert "did you mean 'valueMessage'" in refusal(KAFKA_READ, {**options, "valueMesage": "M"})
    for name in ("schemaRegistryUrl", "basic.auth.user.info"):
        assert "as schema.registry.url" in refusal(KAFKA_READ, {**options, name: "s3cret"})
        assert "as schema.registry.url" in refusal(KAFKA_WRITE, {**servers, name: "s3cret"})
    java = {**options, "schema.registry.ssl.truststore.location": "a.jks"}
    assert "export the certificates as PEM" in refusal(KAFKA_READ, java)


def test_options_of_keys_make_a_column_of_a_reading_and_records_of_a_writing() -> None:
    servers = {"kafka.bootstrap.servers": "b:9092"}
    options = {**servers, "subscribe": "a", "valueFormat": "json", "valueSchema": "id BIGINT"}
    columns = schema_of_reading({**options, "keyformat": "string", "includeMetadata": "true"})
    assert columns.names[:3] == ["id", "_key", "_topic"]
    assert columns.field("_key").type == pa.string()
    registry = {"schema.registry.url": "http://r:8081", "keySubject": "s"}
    written = KAFKA_WRITE.make(
        {**servers, **registry, "topic": "t", "valueFormat": "json", "keyColumns": "a,b"}
        | {"keyFormat": "avro"}
    )
    settings = written.settings
    assert (settings.key, settings.key_format) == (("a", "b"), KeyFormat.AVRO)
    assert settings.of_key(alone=False).value_subject == "s"
    assert "omit keyFormat=" in refusal(KAFKA_WRITE, {**servers, "topic": "t", "keyFormat": "raw"})


def test_options_of_streams_are_refused_where_there_are_no_triggers() -> None:
    options = {"kafka.bootstrap.servers": "b:9092", "subscribe": "a"}
    assert KAFKA_READ.make(options).settings.starting == Earliest()
    assert KAFKA_READ_STREAM.make(options).settings.starting == Latest()
    for name in ("maxOffsetsPerTrigger", "kafka.group.id"):
        assert f"{name!r} is not taken by read: `read` has no triggers" in refusal(
            KAFKA_READ, {**options, name: "5"}
        )
    assert "it is an option of `readStream` and `read`" in refusal(
        KAFKA_WRITE, {"kafka.bootstrap.servers": "b:9092", "topic": "t", "startingOffsets": "x"}
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.format} {table.direction}")
def test_no_option_is_the_protocols_or_stands_twice(table: OptionTable[object]) -> None:
    names = [
        name.lower() for option in table.options for name in (option.name, *option.meaning.aliases)
    ]
    others = [
        *(one.name.lower() for one in PROTOCOL_OPTIONS),
        *(name.lower() for name in (*table.ignored, *table.refused)),
    ]
    assert len({*names, *others}) == len(names) + len(others)


def test_a_sink_of_ones_own_gets_its_options_by_names_in_any_case() -> None:
    def make(options: Mapping[str, str]) -> Sink:
        protocols = "checkpointLocation" in options
        got.append((options["maxRows"], options.get("proxy", "none"), protocols))
        return FileSink("/nowhere")

    got: list[tuple[str, str, bool]] = []
    own_sink("my-http", make, {"maxrows": "5", "checkpointlocation": "/c"})
    assert got == [("5", "none", False)]
    with pytest.raises(ConfigError, match="my-http needs option 'maxRows'"):
        own_sink("my-http", make, {})
    with pytest.raises(ConfigError, match="no option 'maxrow': did you mean 'maxRows'"):
        own_sink("my-http", make, {"maxrows": "5", "maxrow": "6"})
