"""Options of `onceflow-kafka` that only Spark has, and those that it refuses or ignores.

Most options are declared elsewhere, as fields with `option(…, spark="name")`:

    read             sources/kafka/settings.py
    write            sinks/kafka/sink.py, sinks/kafka/settings.py
    both             clients/kafka/settings.py: brokers, registry, the client's own options
    micro-batches    connectors/spark/readers/kafka_stream.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pyarrow as pa
from typing_extensions import override

from onceflow.connectors.spark.options.option_table import OptionTable
from onceflow.connectors.spark.readers.kafka_stream import BatchLimits
from onceflow.core.errors import ConfigError
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.options import BOOLEAN, WHOLE, choice, copy_values, option
from onceflow.sinks.kafka import KafkaSink
from onceflow.sinks.kafka.settings import RecordFormat
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.settings import EPOCH, KafkaSettings, ValueFormat
from onceflow.sources.kafka.value_formats import schema_of_rows

_READING = "it is an option of `readStream` and `read`"
_NAMED: Mapping[str, str] = {"schema_registry": "schema.registry.url"}
_WITH_PREFIX: Mapping[str, str] = {
    "Kafka option '": "option 'kafka.",
    **{
        f"{before} {part}.": f"{before} kafka.{part}."
        for before in ("give", ",", "and", "or")
        for part in ("sasl", "ssl", "socket")
    },
}
"""The replacements in errors about client options, which have a prefix here."""
_OF_REGISTRY = "options of the schema registry begin with schema.registry., as schema.registry.url"
_REGISTRY_MISNAMED: Mapping[str, str] = dict[str, str].fromkeys(
    (
        *("schemaRegistry", "schemaRegistryUrl", "schemaRegistryAddress", "schema.registry"),
        *("basic.auth.user.info", "basic.auth.credentials.source", "subject"),
    ),
    _OF_REGISTRY,
)
_CLIENT = "Any option of librdkafka, with `kafka.` before its name"
_REGISTRY = (
    "Any option of Confluent's client of the schema registry, with `schema.registry.` before its"
    " name"
)
_CLIENTS: Mapping[str, str] = {"options": _CLIENT, "schema_registry": _REGISTRY}
_STALE_ROWS = (
    "What happens to decided rows that waited for longer than the broker keeps the proofs of"
    " commits. `fail`: the write fails and names them. `produce ID`: the rows of one transaction"
    " are produced. `discard ID`: they count as committed. `produce`: all such rows are produced"
)

KAFKA_WRITE = OptionTable(
    format="onceflow-kafka",
    direction="write",
    description=KafkaSink,
    # The columns are the parts of the record, like in Spark's own format.
    defaults={"format": RecordFormat.RAW.value},
    helps={**_CLIENTS, "stale_rows": _STALE_ROWS},
    named=_NAMED,
    instead=_WITH_PREFIX,
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


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class KafkaRead(KafkaSource, BatchLimits):
    """A Kafka source with the additional options of Spark's formats."""

    starting_timestamp_ms: int | None = field(
        default=None,
        metadata=option(
            "Overrides starting_offsets: reading starts at the first record at or after this time,"
            " in milliseconds since 1970",
            WHOLE,
            spark="startingTimestamp",
        ),
    )
    include_headers: bool = field(
        default=False,
        metadata=option(
            "Whether to add a column of headers (only with `raw`)", BOOLEAN, spark="includeHeaders"
        ),
    )
    on_bad_record: OnBadRow | str = field(
        default=OnBadRow.FAIL,
        metadata=option(
            "What happens to a record that cannot be decoded. `fail`: the query ends. `drop`: it is"
            " left out. `raw` decodes nothing",
            choice(OnBadRow.FAIL.value, OnBadRow.DROP.value),
            spark="onBadRecord",
        ),
    )

    @override
    def __post_init__(self) -> None:
        if self.starting_timestamp_ms is not None:
            start = _to_time(self.starting_timestamp_ms)
            object.__setattr__(self, "starting_offsets", start)
        KafkaSource.__post_init__(self)
        BatchLimits.__post_init__(self)

    @property
    @override
    def settings(self) -> KafkaSettings:
        return replace(super().settings, include_headers=self.include_headers)

    @property
    def limits(self) -> BatchLimits:
        """The limits of a micro-batch."""
        return BatchLimits(**copy_values(self, BatchLimits))


def _to_time(starting_timestamp_ms: int) -> datetime:
    """Return the time of `startingTimestamp`.

    Raises:
        ConfigError: No record has such a time.
    """
    given = f"startingTimestamp={starting_timestamp_ms}"
    if starting_timestamp_ms < 0:
        raise ConfigError(
            f"{given} is before 1970, and no record has such a time. Give startingOffsets=latest or"
            " startingOffsets=earliest instead, or milliseconds since 1970"
        )
    try:
        # Integers throughout: a float of seconds is not exact to the millisecond.
        return EPOCH + timedelta(milliseconds=starting_timestamp_ms)
    except OverflowError as error:
        raise ConfigError(
            f"{given} is after the year 9999. Give milliseconds since 1970, not microseconds or"
            " nanoseconds"
        ) from error


_PATTERN = (
    "A regular expression, instead of subscribe. It must match the whole name of a topic. Kafka's"
    " own topics are never read"
)
_OFFSETS = (
    "Where reading starts: `earliest`, `latest`, or Spark's JSON of offsets by topic and partition"
    " (-2: earliest, -1: latest)"
)
_HELPS: Mapping[str, str] = {
    **_CLIENTS,
    "topic": "The topic, or several with commas between them. Give this or subscribePattern",
    "topic_pattern": f"{_PATTERN}. A topic that is created later is read from its first record",
    "group_id": "Consumer group in which the query publishes its offsets, so that Kafka's tools"
    " show its lag. Unless given, no offsets are published",
    "schema": "Columns of a value (not with `raw`): DDL as in `id BIGINT NOT NULL, name STRING`. A"
    " column that is NOT NULL must be in every record. Default with a registry: the columns of the"
    " subject's latest schema",
}
_OF_STREAMS = ("group_id", "offsets_most", "offsets_least", "delay_most_s")
_ONE_OF_THEM = ("topic", "topic_pattern")
_OF_ENGINE = ("native",)
"""The options of the engine's reader, which Spark's formats do not use."""
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
    **_WITH_PREFIX,
    "keep such records in a table or topic of their own with on_bad_record='dead_letter' and"
    " read(…, dead_letters=…), or leave them out": "leave them out",
}
_POLLED_ELSEWHERE = "give deadline instead"
_IGNORED: Mapping[str, str] = dict[str, str].fromkeys(
    ("kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
    _POLLED_ELSEWHERE,
)

KAFKA_READ_STREAM = OptionTable(
    format="onceflow-kafka",
    direction="readStream",
    description=KafkaRead,
    without=("ending_offsets", *_OF_ENGINE),
    first=_ONE_OF_THEM,
    defaults={"format": ValueFormat.RAW.value, "starting_offsets": "latest"},
    helps={
        **_HELPS,
        "starting_offsets": f"{_OFFSETS}. Only for the first start: a query that has a checkpoint"
        " goes on from it",
    },
    named=_NAMED,
    instead=_NOT_SAID,
    ignored=_IGNORED,
    refused={**_NOT_READ, "endingOffsets": "a stream has no end; use `read`"},
)
_LIMITS = tuple(
    spark_option.name
    for spark_option in KAFKA_READ_STREAM.options
    if spark_option.argument in _OF_STREAMS
)
KAFKA_READ = OptionTable(
    format="onceflow-kafka",
    direction="read",
    description=KafkaRead,
    without=(*_OF_STREAMS, *_OF_ENGINE),
    first=_ONE_OF_THEM,
    defaults={"format": ValueFormat.RAW.value},
    helps={
        **_HELPS,
        "topic_pattern": _PATTERN,
        "starting_offsets": _OFFSETS,
        "ending_offsets": "Where reading ends, exclusive, with the values of startingOffsets. It is"
        " resolved when Spark plans the read. Default: `latest`",
    },
    named=_NAMED,
    instead=_NOT_SAID,
    ignored=_IGNORED,
    refused={**_NOT_READ, **dict.fromkeys(_LIMITS, "`read` has no triggers")},
)


def schema_of_reading(given: Mapping[str, str]) -> pa.Schema:
    """Return the columns that `given` reads, which are the same for `read` and `readStream`.

    Raises:
        ConfigError: Neither direction accepts these options.
    """
    names = {name.lower() for name in given}
    of_stream = names & {limit.lower() for limit in _LIMITS}
    table = KAFKA_READ_STREAM if of_stream else KAFKA_READ
    read = table.make(given)
    with table.words.translate_errors():
        return schema_of_rows(read.settings)
