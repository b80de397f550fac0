"""The Kafka source that users describe, and that the driver asks for splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from onceflow.clients.kafka.settings import list_names
from onceflow.core.argument_types import check_fields
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import accept_durations, choice_of, seconds_of
from onceflow.core.spi import OnBadRow, ReaderContext, Source, SourceReader, Split, SplitOffsets
from onceflow.core.spi.options import copy_values, document_options
from onceflow.sources.kafka.catalog import Catalog, describe_hold, find_positions
from onceflow.sources.kafka.client import logger
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.reader import KafkaReader
from onceflow.sources.kafka.registered import with_columns
from onceflow.sources.kafka.settings import (
    RULES,
    KafkaSettings,
    ReadOptions,
    SourceOptions,
    ValueFormat,
    offsets_of,
)
from onceflow.sources.kafka.value_formats import require_columns, schema_of_rows


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class KafkaSource(SourceOptions, Source):
    """A source that reads the records of Kafka topics, each exactly once per checkpointed position.

    The engine assigns partitions and keeps their offsets in checkpoints. It publishes offsets to
    the group only for lag tools. A source is immutable. It is pickled to the executors with its
    options, which include passwords because executors need them. Its repr omits them. Creating a
    source opens no connection.

    Raises:
        ConfigError: A setting is wrong. The message names it and the value to give instead.
    """

    _settings: KafkaSettings = field(init=False)
    _columns: SchemaLike | None = field(init=False)
    """The value of the option `schema`.

    The property `schema` returns the columns of the rows instead.
    """

    def __post_init__(self) -> None:
        value_format = choice_of(ValueFormat, self.format, setting="format")
        if value_format is ValueFormat.RAW and self._columns is not None:
            raise ConfigError("format='raw' has a schema of its own; omit schema=")
        if value_format is ValueFormat.RAW and self.include_metadata:
            raise ConfigError(
                "format='raw' has topic, partition, offset and timestamp already;"
                " omit include_metadata="
            )
        columns = schema_of(self._columns) if self._columns is not None else pa.schema([])
        require_columns(value_format, columns)
        interval = self.partition_discovery_interval
        settings = KafkaSettings(
            **copy_values(self, ReadOptions),
            **self.resolve_topic_settings(RULES, self.key_format),
            topics=list_names(self.topic),
            format=value_format,
            columns=columns,
            starting=offsets_of(self.starting_offsets, setting="starting_offsets"),
            ending=None
            if self.ending_offsets is None
            else offsets_of(self.ending_offsets, setting="ending_offsets"),
            on_bad_record=choice_of(OnBadRow, self.on_bad_record, setting="on_bad_record"),
            partition_discovery_interval_s=None
            if interval is None
            else seconds_of(interval, setting="partition_discovery_interval"),
        )
        object.__setattr__(self, "_settings", settings)

    @property
    def settings(self) -> KafkaSettings:
        """The settings in their final form. The first access may ask the registry.

        Raises:
            ConfigError: The registry has no usable columns, or refuses the user.
            SourceUnavailable: The registry did not answer within `deadline_s`.
        """
        object.__setattr__(self, "_settings", with_columns(self._settings))
        return self._settings

    def __repr__(self) -> str:
        return repr(self._settings)

    @property  # type: ignore[misc]
    def schema(self) -> pa.Schema:
        """The columns of every batch. Raises the errors of `settings`."""
        return schema_of_rows(self.settings)

    @schema.setter
    def schema(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, columns: SchemaLike | None
    ) -> None:
        # The dataclass's __init__ sets the option of this name; readers ask for the columns of the
        # rows.
        object.__setattr__(self, "_columns", columns)

    @property
    def bounded(self) -> bool:
        """True if `ending_offsets` was given."""
        return self._settings.ending is not None

    @property
    def has_dead_letters(self) -> bool:
        """True if bad records go to a separate sink."""
        return self._settings.on_bad_record is OnBadRow.DEAD_LETTER

    def validate(self) -> None:
        """Raise ConfigError if a topic does not exist or this client may not describe it.

        Raises:
            ConfigError: Also raised if librdkafka refuses an option.
            SourceUnavailable: No broker answered within `deadline_s`.
        """
        with Catalog(self._settings) as catalog:
            catalog.list_topics()

    def splits(self) -> Sequence[Split]:
        """Return one split for each partition, with its start resolved, and its stop if bounded.

        Raises:
            ConfigError: A topic does not exist, or explicit offsets do not fit its partitions.
            OffsetOutOfRange: The record at an explicit start was deleted, and data loss is an
                error.
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
        """The interval in seconds of the search for new partitions and topics, or None."""
        return self._settings.partition_discovery_interval_s

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Return `known`, and a split at the first record of each new partition.

        A topic that was deleted and created again has a different id. It is refused, or, if data
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
        """Return the end of each partition: the end of its log, or the offset where reading stops.

        Under read_committed the reader stops at the last stable offset. If a partition is read up
        to there and its log continues, an open transaction holds it.

        Raises:
            SourceUnavailable: The brokers did not answer within `deadline_s`.
        """
        with Catalog(self._settings) as catalog:
            offsets: list[SplitOffsets] = []
            positions = list(map(PartitionPosition.from_split, splits))
            asked = [(position.topic, position.partition) for position in positions]
            ends = catalog.find_log_ends(asked)
            for position in positions:
                stable, end = ends[position.topic, position.partition]
                stop = end if position.stop is None else min(end, position.stop)
                is_held = stable <= position.next < stop
                held_by = describe_hold(self._settings, position, stable, end) if is_held else ""
                offsets.append(SplitOffsets(str(position), position.next, stop, held_by))
            return offsets

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        """Return a reader of `splits`. It connects in the background."""
        return KafkaReader(self.settings, splits, context)
