"""The Kafka source as users describe it, and as the driver asks it for splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from onceflow.connectors.kafka.keys import KeyFormat
from onceflow.connectors.kafka.registry import registry_settings
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import choice_of, seconds_of
from onceflow.core.spi import OnBadRow, ReaderContext, Source, SourceReader, Split, SplitOffsets
from onceflow.core.spi.client_options import OptionValue
from onceflow.sources.kafka.catalog import Catalog, find_positions
from onceflow.sources.kafka.client import logger
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.reader import KafkaReader
from onceflow.sources.kafka.registered import with_columns
from onceflow.sources.kafka.rows import require_columns, schema_of_rows
from onceflow.sources.kafka.settings import (
    RULES,
    KafkaSettings,
    OffsetsLike,
    ValueFormat,
    offsets_of,
)


class KafkaSource(Source):
    """Reads the records of Kafka topics, each exactly once per checkpointed position.

    The engine assigns partitions and keeps their offsets in checkpoints; the group's offsets are
    published only for lag tools. Immutable. It is pickled to the executors with its options, which
    include passwords because executors need them; it is printed without them.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        topic: str | Sequence[str] | None = None,
        topic_pattern: str | None = None,
        format: ValueFormat | str = ValueFormat.JSON,  # noqa: A002 - Spark's word
        schema: SchemaLike | None = None,
        starting_offsets: OffsetsLike = "earliest",
        ending_offsets: OffsetsLike | None = None,
        on_bad_record: OnBadRow | str = OnBadRow.FAIL,
        include_metadata: bool = False,
        group_id: str | None = None,
        commit_offsets: bool = True,
        fail_on_data_loss: bool = True,
        batch_rows: int = 10_000,
        batch_bytes: int = 16 * 1024 * 1024,
        schema_registry: str | Mapping[str, OptionValue] | None = None,
        subject: str | None = None,
        message: str | None = None,
        key_format: KeyFormat | str | None = None,
        key_subject: str | None = None,
        deadline_s: float = 60.0,
        partition_discovery_interval: float | str | None = "1 min",
        options: Mapping[str, OptionValue] | None = None,
    ) -> None:
        """Describe the source; connects to nothing.

        Args:
            bootstrap_servers: host:port[,host:port].
            topic: One topic or several.
            topic_pattern: Instead of `topic`, a regular expression: every topic whose whole name it
                matches is read, those created later from their first record. Topics of Kafka's own
                (__consumer_offsets) are left out.
            format: "json" (one object a value), "csv" (one line), "avro", "protobuf" and
                "json-schema" (of a schema registry), "debezium-json" and "debezium-avro" (changes
                of rows, with a column _op), or "raw" (key and value as bytes, Spark's columns).
            schema: The columns of a value: an Arrow schema, Spark DDL text, or a mapping from
                name to type. A column that is not nullable must be in every record. Timestamps are
                ISO 8601 text (with a zone if the column has one, without if not; finer than
                microseconds is rounded) or integers in the column's unit; binary is base64;
                decimals are numbers or text, taken exactly.
            starting_offsets: "earliest", "latest", a datetime, {"topic": {partition: offset}} with
                -2 for earliest and -1 for latest, or Spark's JSON text of that. The default is
                "earliest"; that of Spark's formats is latest where a query streams. Used once in a
                job's life: afterwards its checkpoints say where it goes on, and partitions that are
                added are read from their first record.
            ending_offsets: The same for the end, exclusive, which makes the source bounded; None
                for a stream. Resolved when the job starts.
            on_bad_record: "fail", "drop" (counted and logged), or "dead_letter": to the sink that
                `Pipeline.read(…, dead_letters=…)` names, with reason, topic, partition and offset.
            include_metadata: Adds _topic, _partition, _offset and _timestamp to JSON's columns.
            group_id: Where offsets are published; default onceflow-<job>-<uid>.
            commit_offsets: Whether they are.
            fail_on_data_loss: Whether an offset that is gone, or a topic that was deleted, also if
                it was created again, is an error, or a warning and a jump to the first record.
            batch_rows: Rows of a batch at most. A batch is returned at once, however small, when
                nothing more is waiting.
            batch_bytes: Bytes of values, about, after which a batch is returned.
            schema_registry: Address of Confluent's schema registry, or of one that speaks as it
                does; or options of its client, Confluent's names: {"url": …,
                "basic.auth.user.info": "${env:NAME}", "ssl.ca.location": …}.
            subject: Whose latest version has the columns where schema= is not given, and the
                message that Protobuf is read as; default <topic>-value.
            message: In Protobuf, the name of that message; default the first of its schema.
            key_format: Adds the record's key as the column _key: "string", "raw" (bytes), or of the
                schema registry "avro", "protobuf" and "json-schema": a struct of a record, message
                or object, or one value. A key that is none is a bad record; no key is null.
            key_subject: Whose latest version has the key's type; default <topic>-key.
            deadline_s: How long brokers and registry may be silent, here and in the reader.
            partition_discovery_interval: How often a running stream looks for partitions and topics
                that were added; seconds or text. None: only when the job starts.
            options: Settings of librdkafka; Spark's `kafka.` before a name is taken off. A value
                may refer to a secret: `${env:NAME}` or `${file:/path}`, followed where it connects.

        Raises:
            ConfigError: A setting is wrong; says which and what to give instead.
        """
        value_format = choice_of(ValueFormat, format, setting="format")
        if value_format is ValueFormat.RAW and schema is not None:
            raise ConfigError("format='raw' has a schema of its own; leave schema= away")
        if value_format is ValueFormat.RAW and include_metadata:
            raise ConfigError(
                "format='raw' has topic, partition, offset and timestamp already;"
                " leave include_metadata= away"
            )
        columns = schema_of(schema) if schema is not None else pa.schema([])
        require_columns(value_format, columns)
        self._settings = KafkaSettings(
            bootstrap_servers=bootstrap_servers,
            topics=(topic,) if isinstance(topic, str) else tuple(topic or ()),
            topic_pattern=topic_pattern,
            format=value_format,
            columns=columns,
            starting=offsets_of(starting_offsets, setting="starting_offsets"),
            ending=None
            if ending_offsets is None
            else offsets_of(ending_offsets, setting="ending_offsets"),
            on_bad_record=choice_of(OnBadRow, on_bad_record, setting="on_bad_record"),
            include_metadata=include_metadata,
            group_id=group_id,
            commit_offsets=commit_offsets,
            fail_on_data_loss=fail_on_data_loss,
            batch_rows=batch_rows,
            batch_bytes=batch_bytes,
            deadline_s=deadline_s,
            partition_discovery_interval_s=None
            if partition_discovery_interval is None
            else seconds_of(partition_discovery_interval, setting="partition_discovery_interval"),
            options=RULES.accepted(options or {}),
            registry=None if schema_registry is None else registry_settings(schema_registry),
            subject=subject,
            message=message,
            key_format=None
            if key_format is None
            else choice_of(KeyFormat, key_format, setting="key_format"),
            key_subject=key_subject,
        )

    @property
    def settings(self) -> KafkaSettings:
        """The settings in their final form; the first call may ask the registry.

        Raises:
            ConfigError: The registry has no columns for it, or refuses the user.
            SourceUnavailable: It did not answer within `deadline_s`.
        """
        self._settings = with_columns(self._settings)
        return self._settings

    def __repr__(self) -> str:
        return repr(self._settings)

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch; as `settings` may raise."""
        return schema_of_rows(self.settings)

    @property
    def bounded(self) -> bool:
        """Whether `ending_offsets` was given."""
        return self._settings.ending is not None

    @property
    def has_dead_letters(self) -> bool:
        """Whether bad records go to a sink of their own."""
        return self._settings.on_bad_record is OnBadRow.DEAD_LETTER

    def validate(self) -> None:
        """Raise ConfigError unless every topic exists and this client may describe it.

        Raises:
            ConfigError: Also where librdkafka refuses an option.
            SourceUnavailable: No broker answered within `deadline_s`.
        """
        with Catalog(self._settings) as catalog:
            catalog.list_topics()

    def splits(self) -> Sequence[Split]:
        """Return one split for each partition, its start (and stop, if bounded) resolved.

        Raises:
            ConfigError: A topic does not exist, or explicit offsets do not fit its partitions.
            OffsetOutOfRange: An explicit start was deleted already, and data loss is an error.
            SourceUnavailable: The brokers did not answer within `deadline_s`.
        """
        with Catalog(self._settings) as catalog:
            topics = catalog.list_topics().values()
            if not topics:
                logger.warning(
                    "Kafka at %s has no %s yet; those that are created later are read",
                    self._settings.bootstrap_servers,
                    self._settings.what,
                )
            return [
                position.to_split()
                for topic in topics
                for position in catalog.resolve_positions(topic)
            ]

    @property
    def discovery_interval_s(self) -> float | None:
        """How often a running job asks for new partitions and topics."""
        return self._settings.partition_discovery_interval_s

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Return `known`, and a split at the first record of each partition that has been added.

        A topic that was deleted and created again has another id: it is refused, or, where data
        loss is accepted, read from its first record.

        Raises:
            OffsetOutOfRange: A topic is gone or was replaced, and data loss is an error.
            StateIncompatible: `known` has a topic that this source does not name.
            ConfigError: A topic does not exist.
            SourceUnavailable: The brokers did not answer within `deadline_s`.
        """
        with Catalog(self._settings) as catalog:
            now = find_positions(
                self._settings, catalog, list(map(PartitionPosition.from_split, known))
            )
        return [position.to_split() for position in now]

    def latest_offsets(self, splits: Sequence[Split]) -> Sequence[SplitOffsets]:
        """Return the end of each partition: its last stable offset, or where reading stops.

        Raises:
            SourceUnavailable: The brokers did not answer within `deadline_s`.
        """
        with Catalog(self._settings) as catalog:
            offsets: list[SplitOffsets] = []
            for position in map(PartitionPosition.from_split, splits):
                _, end = catalog.read_watermarks(position.topic, position.partition)
                stop = end if position.stop is None else min(end, position.stop)
                offsets.append(SplitOffsets(str(position), position.next, stop))
            return offsets

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader of `splits`; connects in the background."""
        return KafkaReader(self.settings, splits, context)
