"""Options of `onceflow-kafka`: Spark's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial

import pyarrow as pa

from onceflow.connectors.kafka.keys import KeyFormat
from onceflow.connectors.spark.options.tables import (
    BOOLEAN,
    COUNT,
    DURATION,
    NAMES,
    WHOLE,
    OptionTable,
    SparkOption,
    choice,
)
from onceflow.connectors.spark.readers.kafka_stream import BatchLimits
from onceflow.sinks.kafka import KafkaSink
from onceflow.sinks.kafka.settings import RecordFormat
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.rows import schema_of_rows
from onceflow.sources.kafka.settings import KafkaSettings, ValueFormat

_READING = "it is an option of `readStream` and `read`"
_CLIENTS: Mapping[str, str] = {"kafka.": "options", "schema.registry.": "schema_registry"}
_NAMED: Mapping[str, str] = {"format": "valueFormat", "schema_registry": "schema.registry.url"}
_OF_REGISTRY = "options of the schema registry begin with schema.registry., as schema.registry.url"
_REGISTRY_MISNAMED: Mapping[str, str] = dict[str, str].fromkeys(
    (
        *("schemaRegistry", "schemaRegistryUrl", "schemaRegistryAddress", "schema.registry"),
        *("basic.auth.user.info", "basic.auth.credentials.source", "subject"),
    ),
    _OF_REGISTRY,
)

_KEY_IN_REGISTRY = SparkOption(
    "keySubject", "key_subject", "Of the key's schema in the registry; `<topic>-key` unless given"
)
_SCHEMA_IN_REGISTRY = (
    SparkOption(
        "valueSubject",
        "subject",
        "Of the value's schema in the registry; `<topic>-value` unless given",
    ),
    SparkOption(
        "valueMessage",
        "message",
        "With protobuf, the message in the subject's latest version; the first unless given",
    ),
)

KAFKA_WRITE = OptionTable(
    format="onceflow-kafka",
    direction="write",
    # As Spark's own format: the columns are the record.
    target=partial(KafkaSink, format="raw"),
    options=(
        SparkOption("kafka.bootstrap.servers", "bootstrap_servers", "`host:port[,host:port]`"),
        SparkOption("topic", "topic", "The topic; with topicColumn all that it may name", NAMES),
        SparkOption(
            "topicColumn", "topic_column", "The column that says which topic a row goes to"
        ),
        SparkOption("keyColumns", "key", "Unless raw, the columns of the key", NAMES),
        SparkOption(
            "keyFormat",
            "key_format",
            "`string`, `raw` (bytes), or by the schema registry `avro`, `protobuf`, `json-schema`;"
            " unless given one column goes as text or bytes, several as a JSON object",
            choice(KeyFormat),
        ),
        _KEY_IN_REGISTRY,
        SparkOption(
            "valueFormat",
            "format",
            "`json`: the value is an object of all columns; `avro`, `protobuf`, `json-schema`: by"
            " the schema registry of `schema.registry.url`; `raw`: columns key, value and headers"
            " as Spark has them",
            choice(RecordFormat),
        ),
        *_SCHEMA_IN_REGISTRY,
        SparkOption(
            "autoRegister",
            "auto_register",
            "Whether the columns' own schema is registered, or the subject's latest version holds",
            BOOLEAN,
            ("auto.register.schemas",),
        ),
        SparkOption("partitionColumn", "partition_column", "The column that says which partition"),
        SparkOption("headersColumn", "headers", "The column of headers"),
        SparkOption("createTopic", "create", "Whether to create topics that are missing", BOOLEAN),
        SparkOption("partitions", "partitions", "Of a topic that is created", COUNT),
        SparkOption("replicationFactor", "replication_factor", "Of a topic that is created", COUNT),
        SparkOption(
            "transactionTimeout",
            "transaction_timeout_s",
            "How long producing one batch's rows of one partition may take",
            DURATION,
        ),
        SparkOption("deadline", "deadline_s", "How long a broker may not answer", DURATION),
        SparkOption(
            "staleRows",
            "stale_rows",
            "Decided rows that waited for longer than the broker keeps proofs: `fail`,"
            " `produce ID`, `discard ID` or `produce`",
        ),
    ),
    clients=_CLIENTS,
    named=_NAMED,
    refused={
        "includeHeaders": "headersColumn names the column of headers; with raw it is `headers`",
        **dict.fromkeys(
            ("subscribe", "subscribePattern", "assign", "startingOffsets", "endingOffsets"),
            _READING,
        ),
        "delivery": "a format is always exactly once",
        **_REGISTRY_MISNAMED,
        "valueSchema": "the value's schema is that of the columns",
    },
)


@dataclass(frozen=True, slots=True)
class KafkaReading:
    """What the readers of `onceflow-kafka` are made of."""

    settings: KafkaSettings
    limits: BatchLimits


def kafka_reading(
    bootstrap_servers: str,
    *,
    topic: tuple[str, ...] | None = None,
    topic_pattern: str | None = None,
    starting_offsets: str,
    starting_timestamp_ms: int | None = None,
    ending_offsets: str | None = None,
    fail_on_data_loss: bool = True,
    include_headers: bool = False,
    value_format: str = "raw",
    schema: str | None = None,
    on_bad_record: str = "fail",
    include_metadata: bool = False,
    group_id: str | None = None,
    deadline_s: float = 60.0,
    options: Mapping[str, str] | None = None,
    schema_registry: Mapping[str, str] | None = None,
    subject: str | None = None,
    message: str | None = None,
    key_format: str | None = None,
    key_subject: str | None = None,
    offsets_most: int | None = None,
    offsets_least: int | None = None,
    delay_most_s: float = 900.0,
    tasks_least: int = 0,
    task_rows_most: int | None = None,
) -> KafkaReading:
    """Return the settings of a reader; connects to nothing.

    Raises:
        ConfigError: Options contradict each other.
    """
    start: str | datetime = starting_offsets
    if starting_timestamp_ms is not None:
        start = datetime.fromtimestamp(starting_timestamp_ms / 1000, timezone.utc)
    source = KafkaSource(
        bootstrap_servers,
        topic=topic,
        topic_pattern=topic_pattern,
        format=value_format,
        schema=schema,
        starting_offsets=start,
        ending_offsets=ending_offsets,
        on_bad_record=on_bad_record,
        include_metadata=include_metadata,
        group_id=group_id,
        fail_on_data_loss=fail_on_data_loss,
        deadline_s=deadline_s,
        options=options,
        schema_registry=schema_registry,
        subject=subject,
        message=message,
        key_format=key_format,
        key_subject=key_subject,
    )
    return KafkaReading(
        replace(source.settings, include_headers=include_headers),
        BatchLimits(
            offsets_most=offsets_most,
            offsets_least=offsets_least,
            delay_most_s=delay_most_s,
            tasks_least=tasks_least,
            task_rows_most=task_rows_most,
        ),
    )


_READ = (
    SparkOption("kafka.bootstrap.servers", "bootstrap_servers", "`host:port[,host:port]`"),
    SparkOption("subscribe", "topic", "The topics; or subscribePattern", NAMES),
    SparkOption(
        "subscribePattern", "topic_pattern", "A regular expression for whole names of topics"
    ),
    SparkOption(
        "startingOffsets",
        "starting_offsets",
        "`earliest`, `latest`, or Spark's JSON of offsets; a query that has a checkpoint goes on."
        " The default is Spark's; `KafkaSource` begins at `earliest`",
    ),
    SparkOption(
        "startingTimestamp",
        "starting_timestamp_ms",
        "Over startingOffsets: from the first record at or after it, in milliseconds",
        WHOLE,
    ),
    SparkOption(
        "failOnDataLoss",
        "fail_on_data_loss",
        "Whether records that are gone end the query, or are passed over with a warning",
        BOOLEAN,
    ),
    SparkOption(
        "includeHeaders", "include_headers", "Whether there is a column of headers", BOOLEAN
    ),
    SparkOption(
        "valueFormat",
        "value_format",
        "`raw`: Spark's columns; otherwise the value's fields are the columns, decoded as they are"
        " read, without `from_json` and the like: `json`, `csv`, `debezium-json`, and by the schema"
        " registry of `schema.registry.url` `avro`, `protobuf`, `json-schema`, `debezium-avro`",
        choice(ValueFormat),
    ),
    SparkOption(
        "valueSchema",
        "schema",
        "Unless raw, the value's columns as DDL: `id BIGINT, name STRING`; by a registry those of"
        " the subject's latest version unless given",
    ),
    *_SCHEMA_IN_REGISTRY,
    SparkOption(
        "keyFormat",
        "key_format",
        "Unless raw, adds the record's key as the column _key: `string`, `raw` (bytes), or by the"
        " schema registry `avro`, `protobuf`, `json-schema`",
        choice(KeyFormat),
    ),
    _KEY_IN_REGISTRY,
    SparkOption(
        "onBadRecord",
        "on_bad_record",
        "Unless raw, a record that cannot be decoded ends the query, or is dropped",
        choice("fail", "drop"),
    ),
    SparkOption(
        "includeMetadata",
        "include_metadata",
        "Unless raw, adds _topic, _partition, _offset and _timestamp",
        BOOLEAN,
    ),
    SparkOption(
        "minPartitions", "tasks_least", "Into how many tasks a batch is cut at least", COUNT
    ),
    SparkOption(
        "maxRecordsPerPartition", "task_rows_most", "How many records a task reads at most", COUNT
    ),
    SparkOption("deadline", "deadline_s", "How long the brokers may be silent", DURATION),
)
_LIMITS = (
    SparkOption(
        "maxOffsetsPerTrigger", "offsets_most", "How many records a batch has at most", COUNT
    ),
    SparkOption(
        "minOffsetsPerTrigger", "offsets_least", "A batch waits for so many records …", COUNT
    ),
    SparkOption("maxTriggerDelay", "delay_most_s", "… but no longer than this", DURATION),
    SparkOption("kafka.group.id", "group_id", "The group in which offsets are published, for lag"),
)
_WRITING = "it is an option of `writeStream` and `write`"
_NOT_READ = {
    "assign": "give subscribe, and filter by the column partition",
    "startingOffsetsByTimestamp": "give startingTimestamp, the same for all partitions",
    "startingOffsetsByTimestampStrategy": "a partition without such a record starts at its end",
    "groupIdPrefix": "no group is joined; kafka.group.id names the one that shows the lag",
    **dict.fromkeys(
        ("topic", "topicColumn", "keyColumns", "createTopic", "autoRegister"), _WRITING
    ),
    **_REGISTRY_MISNAMED,
}
_NOT_SAID: Mapping[str, str] = {
    "keep such records in a table or topic of their own with on_bad_record='dead_letter' and"
    " read(…, dead_letters=…), or leave them out": "leave them out"
}
_POLLED_ELSEWHERE = "give deadline instead"
_IGNORED: Mapping[str, str] = dict[str, str].fromkeys(
    ("kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
    _POLLED_ELSEWHERE,
)

KAFKA_READ_STREAM = OptionTable(
    format="onceflow-kafka",
    direction="readStream",
    target=partial(kafka_reading, starting_offsets="latest"),
    options=(*_READ, *_LIMITS),
    clients=_CLIENTS,
    named=_NAMED,
    instead=_NOT_SAID,
    ignored=_IGNORED,
    refused={**_NOT_READ, "endingOffsets": "a stream has no end; use `read`"},
)
KAFKA_READ = OptionTable(
    format="onceflow-kafka",
    direction="read",
    target=partial(kafka_reading, starting_offsets="earliest"),
    options=(
        *_READ,
        SparkOption(
            "endingOffsets",
            "ending_offsets",
            "`latest`, which holds unless given, or Spark's JSON of offsets",
        ),
    ),
    clients=_CLIENTS,
    named=_NAMED,
    instead=_NOT_SAID,
    ignored=_IGNORED,
    refused={**_NOT_READ, **dict.fromkeys((one.name for one in _LIMITS), "`read` has no triggers")},
)


def schema_of_reading(given: Mapping[str, str]) -> pa.Schema:
    """Return the columns of what `given` reads, by `read` or `readStream`: both have the same.

    Raises:
        ConfigError: Neither takes these options.
    """
    names = {name.lower() for name in given}
    of_stream = names & {one.name.lower() for one in _LIMITS}
    table = KAFKA_READ_STREAM if of_stream else KAFKA_READ
    settings = table.make(given).settings
    with table.words.translate_errors():
        return schema_of_rows(settings)
