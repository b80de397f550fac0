"""The settings of a Kafka source: checked once, picklable, and printed without secrets.

Client options have librdkafka's names, with or without Spark's prefix. The engine sets some of them
itself (assignment, commits, behavior at a gap). Such an option is refused, and the error names the
argument that does the same. A Java option is refused with librdkafka's name for it. Offsets are
kept as the user wrote them; no broker has been asked yet.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, cast

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.kafka.registry import CompiledSchema
from onceflow.clients.kafka.settings import (
    DEFAULTS,
    KEY_COLUMN,
    LIBRDKAFKA,
    KeyFormat,
    TopicDescription,
    TopicOptions,
    TopicSettings,
)
from onceflow.core.arrow.schema_text import SchemaLike
from onceflow.core.errors import ConfigError
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.options import BOOLEAN, COUNT, DURATION, NAMES, OptionValue, choice, option
from onceflow.formats.registry_schemas import KEY_SCHEMA_ID, VALUE_SCHEMA_ID, SchemaCache

if TYPE_CHECKING:
    from onceflow.formats.debezium.changes import DebeziumOptions

TUNED_DEFAULTS: Mapping[str, OptionValue] = {
    **DEFAULTS,
    # A fetcher whose queue is full sleeps for this long. The default of 1000 stalls a reader that
    # empties the queue faster: 137k records/s, against 324k with 1.
    "fetch.queue.backoff.ms": 1,
    "fetch.error.backoff.ms": 100,
    "isolation.level": "read_committed",
    "socket.timeout.ms": 30_000,
    # Detects batches that were damaged after the producer sent them. The processor has an
    # instruction for this checksum.
    "check.crcs": True,
    # This limit is for group members that stop polling. The reader is not a member, and
    # backpressure may last long.
    "max.poll.interval.ms": 86_400_000,
    # The client's own log repeats every failed connection attempt. The error callback logs it once.
    "log_level": 2,
    # A broker without further records answers after this time. Until then, the connection serves no
    # other partition: with the default of 500 a reader of several ranges waited for most of its
    # time.
    "fetch.wait.max.ms": 25,
}

READER_DEFAULTS: Mapping[str, OptionValue] = {
    **TUNED_DEFAULTS,
    # The broker waits up to 25 ms for more records. By default it answers with the first record: at
    # 20,000 records a second it sends about 1,000 answers of a few records. Each costs the broker
    # and the slot about as much as an answer of some thousand records. If enough records are
    # waiting, the broker answers at once.
    "fetch.min.bytes": 100_000,
}
"""The defaults of a client that reads a stream.

A client that reads up to an offset does not wait for more records.
"""

_OWNED: Mapping[str, str] = {
    "bootstrap.servers": "give it as bootstrap_servers=",
    "group.id": "give it as group_id=",
    "client.id": "it is derived from job, uid and subtask",
    "auto.offset.reset": "give starting_offsets=, and fail_on_data_loss= for gaps",
    "enable.auto.commit": "offsets belong to checkpoints; commit_offsets= publishes them",
    "auto.commit.enable": "offsets belong to checkpoints; commit_offsets= publishes them",
    "enable.auto.offset.store": "offsets belong to checkpoints; commit_offsets= publishes them",
    "enable.partition.eof": "the reader needs it to find the end of a partition",
    "group.instance.id": "partitions are assigned by the engine and not by a group",
    "group.protocol": "partitions are assigned by the engine and not by a group",
    "partition.assignment.strategy": "partitions are assigned by the engine and not by a group",
    "key.deserializer": "format= says how records are decoded",
    "value.deserializer": "format= says how records are decoded",
    "max.poll.records": "give it as batch_rows=",
    "interceptor.classes": "interceptors are classes of Java clients, and this one is not Java",
}
RULES = replace(LIBRDKAFKA, owner="the engine", owned=_OWNED)

EARLIEST = -2
"""The number for "earliest" among explicit offsets, as in Spark."""
LATEST = -1


@dataclass(frozen=True, slots=True)
class Earliest:
    """The first record that the broker still has."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The current end: the position after the last committed record."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record of each partition at or after this time, or the end if there is none."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """The explicit offsets by topic and partition; -2 means earliest and -1 latest, as in Spark."""

    offsets: Mapping[str, Mapping[int, int]]


EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
Offsets: TypeAlias = Earliest | Latest | AtTime | AtOffsets
OffsetsLike: TypeAlias = "str | datetime | Mapping[str, Mapping[int, int]]"


def offsets_of(given: OffsetsLike, *, setting: str) -> Offsets:
    """Parse `given`: a word, a time, or offsets (a mapping, or Spark's JSON text).

    Raises:
        ConfigError: `given` is none of these, or a time without a zone.
    """
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise ConfigError(
                f"{setting}={given.isoformat()} has no time zone; write"
                " datetime(..., tzinfo=timezone.utc)"
            )
        since = given - EPOCH
        if since < timedelta(0):
            # Kafka takes -1 for the end of a partition, and refuses most other negative numbers.
            raise ConfigError(
                f"{setting}={given.isoformat()} is before 1970, and no record has such a time;"
                " write 'earliest' for the first record"
            )
        # Round up: a record of the millisecond in which `given` is may be older.
        return AtTime(-(-since // timedelta(milliseconds=1)))
    if isinstance(given, str):
        match given.strip().lower():
            case "earliest":
                return Earliest()
            case "latest":
                return Latest()
            case text if text.startswith("{"):
                return AtOffsets(_parse_offsets(_parse_json(given, setting), setting))
            case _:
                raise ConfigError(
                    f"{setting}={given!r}: choose earliest, latest, a datetime, or offsets such as"
                    ' {"topic": {0: 23}}'
                )
    return AtOffsets(_parse_offsets(given, setting))


def _parse_json(text: str, setting: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_make_object)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{setting}={text!r} is not JSON: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{setting}={text!r} names {error} twice; name it once") from error


def _make_object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for name, value in pairs:
        if name in made:
            raise KeyError(name)
        made[name] = value
    return made


def _parse_offsets(given: object, setting: str) -> dict[str, dict[int, int]]:
    complaint = f'{setting}={given!r}: offsets look like {{"topic": {{0: 23, 1: -2}}}}'
    if not isinstance(given, Mapping):
        raise ConfigError(complaint)
    offsets_by_topic: dict[str, dict[int, int]] = {}
    for topic, partitions in cast("Mapping[object, object]", given).items():
        if not isinstance(topic, str) or not isinstance(partitions, Mapping):
            raise ConfigError(complaint)
        offsets = offsets_by_topic[topic] = {}
        for partition, offset in cast("Mapping[object, object]", partitions).items():
            try:
                number, at = _parse_number(partition), _parse_number(offset)
            except (TypeError, ValueError) as error:
                raise ConfigError(complaint) from error
            if number in offsets:
                raise ConfigError(
                    f"{setting}={given!r} names partition {number} of topic {topic!r} twice; name"
                    " it once"
                )
            if number < 0 or at < EARLIEST:
                raise ConfigError(f"{complaint}; partition {number} at {at} cannot be")
            offsets[number] = at
    return offsets_by_topic


def _parse_number(given: object) -> int:
    if isinstance(given, str):
        return int(given)
    if isinstance(given, bool):
        raise TypeError(f"{given!r} is not a whole number")
    # Accepts the integers of numpy, too, and no fractions.
    return operator.index(cast("SupportsIndex", given))


BATCH_ROWS_MAX = 1_000_000


class ValueFormat(Enum):
    """A format of records, which decides how a record becomes a row."""

    JSON = "json"
    """The value is one JSON object; its fields are the columns of the schema."""
    RAW = "raw"
    """The key and value as bytes, with Spark's columns of the record's topic, partition, offset and
    time.
    """
    AVRO = "avro"
    """The value is an Avro record in the wire format of Confluent's schema registry."""
    PROTOBUF = "protobuf"
    """The value is a Protobuf message in the registry's wire format."""
    JSON_SCHEMA = "json-schema"
    """The value is a JSON object after the header of the registry's wire format."""
    CSV = "csv"
    """The value is one line of comma separated fields, without names."""
    DEBEZIUM_JSON = "debezium-json"
    """The value is a change of a row in Debezium's JSON envelope, with or without its schema."""
    DEBEZIUM_AVRO = "debezium-avro"
    """The value is a change of a row in Debezium's envelope, in the format of `AVRO`."""

    @property
    def decodes_by_id(self) -> bool:
        """True if values can be decoded only with a schema from the registry."""
        return self in {ValueFormat.AVRO, ValueFormat.PROTOBUF, ValueFormat.DEBEZIUM_AVRO}

    @property
    def discovers(self) -> bool:
        """True if the columns can come from a registry."""
        return self.decodes_by_id or self is ValueFormat.JSON_SCHEMA

    @property
    def is_debezium(self) -> bool:
        """True if rows are Debezium's changes of rows."""
        return self in {ValueFormat.DEBEZIUM_JSON, ValueFormat.DEBEZIUM_AVRO}


UNAVAILABLE_VALUE = "__debezium_unavailable_value"
"""The default word that Debezium writes for a large value which it did not receive."""

_PLAIN_KEYS: Mapping[KeyFormat, pa.DataType] = {
    KeyFormat.STRING: pa.string(),
    KeyFormat.RAW: pa.binary(),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class ReadOptions(TopicOptions):
    """The options of the source that need no conversion."""

    topic_pattern: str | None = field(
        default=None,
        metadata=option(
            "A regular expression, instead of topics by name. It must match the whole name of a"
            " topic. A topic that is created later is read from its first record. Kafka's own"
            " topics are never read",
            spark="subscribePattern",
        ),
    )
    include_metadata: bool = field(
        default=False,
        metadata=option(
            "Whether to add the columns _topic, _partition, _offset and _timestamp (not with"
            " `raw`, which has them)",
            BOOLEAN,
            spark="includeMetadata",
        ),
    )
    group_id: str | None = field(
        default=None,
        metadata=option(
            "Consumer group in which the job publishes its offsets, so that Kafka's tools show its"
            " lag. Default: `onceflow-<job>-<uid>`",
            spark="kafka.group.id",
        ),
    )
    commit_offsets: bool = field(
        default=True, metadata=option("Whether the job publishes its offsets in group_id", BOOLEAN)
    )
    fail_on_data_loss: bool = field(
        default=True,
        metadata=option(
            "Whether it is an error if records were deleted before they were read, or the topic was"
            " deleted (and perhaps created again). If not: a warning is logged, and reading goes on"
            " at the first record",
            BOOLEAN,
            spark="failOnDataLoss",
        ),
    )
    batch_rows: int = field(
        default=10_000,
        metadata=option(
            "Maximum number of rows in a batch. A smaller batch is passed on at once if no more"
            " records are waiting",
            COUNT,
        ),
    )
    batch_bytes: int = field(
        default=16 * 1024 * 1024,
        metadata=option(
            "Approximate size of the values in bytes after which a batch is passed on", COUNT
        ),
    )
    unavailable_value_placeholder: str = field(
        default=UNAVAILABLE_VALUE,
        metadata=option(
            "Formats of Debezium: what it writes for a large value that it was not sent, if its own"
            " `unavailable.value.placeholder` is set. A record with such a value is a bad record"
        ),
    )
    primary_key: str | Sequence[str] = field(
        default=(),
        metadata=option(
            "Formats of Debezium: the columns that identify a row of the target, if they are not"
            " the table's own key. An update that changes one deletes the old row, too",
            NAMES,
        ),
    )
    decimal_handling_mode: str | None = field(
        default=None,
        metadata=option(
            "`debezium-json` without a schema beside the payload: Debezium's"
            " `decimal.handling.mode`, `string` or `double`. None: a text that may be bytes in"
            " base64 is a bad record"
        ),
    )
    binary_handling_mode: str | None = field(
        default=None,
        metadata=option(
            "`debezium-json`: Debezium's `binary.handling.mode`, `bytes`, `base64`,"
            " `base64-url-safe` or `hex`. None: base64; a text that may be hexadecimal digits is a"
            " bad record"
        ),
    )
    native: bool | None = field(
        default=None,
        metadata=option(
            "Whether records are read without a Python object each, by the package"
            " onceflow-kafka-native: True is refused where that cannot be, False never does it."
            " None: where the package is installed and knows the client, for `json` and `raw`",
            BOOLEAN,
        ),
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SourceOptions(ReadOptions, TopicDescription):
    """The options of the source, as users give them."""

    topic: str | Sequence[str] | None = field(
        default=None,
        metadata=option(
            "The topic or topics. Give this or topic_pattern", NAMES, spark="subscribe"
        ),
    )
    format: ValueFormat | str = field(
        default=ValueFormat.JSON,
        metadata=option(
            "Format of a value: `json` (one object), `csv` (one line), `debezium-json` (the change"
            " of a row, with a column _op); by the schema registry `avro`, `protobuf`,"
            " `json-schema`, `debezium-avro`; or `raw`: the columns of Spark's own Kafka source,"
            " with key and value as bytes",
            choice(ValueFormat),
            spark="valueFormat",
        ),
    )
    schema: SchemaLike | None = field(
        default=None,
        metadata=option(
            "Columns of a value (not with `raw`): DDL as in `id BIGINT NOT NULL, name STRING`, an"
            " Arrow schema, or a mapping from name to type. A column that is NOT NULL must be in"
            " every record. Default with a registry: the columns of the subject's latest schema",
            spark="valueSchema",
        ),
    )
    starting_offsets: OffsetsLike = field(
        default="earliest",
        metadata=option(
            "Where reading starts: `earliest`, `latest`, a datetime, or offsets by topic and"
            " partition (-2: earliest, -1: latest), as a mapping or as Spark's JSON. Only for the"
            " first start: a job that has a checkpoint goes on from its positions",
            spark="startingOffsets",
        ),
    )
    ending_offsets: OffsetsLike | None = field(
        default=None,
        metadata=option(
            "Where reading ends, exclusive, with the values of starting_offsets. It is resolved"
            " when the job starts, and makes the source bounded. Default: reading never ends",
            spark="endingOffsets",
        ),
    )
    on_bad_record: OnBadRow | str = field(
        default=OnBadRow.FAIL,
        metadata=option(
            "What happens to a record that cannot be decoded. `fail`: the job stops. `drop`: it is"
            " left out, counted and logged. `dead_letter`: it goes to the sink of"
            " `Pipeline.read(…, dead_letters=…)`, with reason, topic, partition and offset",
            choice(OnBadRow),
        ),
    )
    key_format: KeyFormat | str | None = field(
        default=None,
        metadata=option(
            "Adds the record's key as the column _key (not with `raw` values), in the format"
            " `string`, `raw` (bytes), or by the schema registry `avro`, `protobuf`, `json-schema`:"
            " a struct for a record, message or object, else one value. A key that is not in this"
            " format makes the record a bad record. A record without a key has null in _key",
            choice(KeyFormat),
            spark="keyFormat",
        ),
    )
    partition_discovery_interval: float | str | None = field(
        default="1 min",
        metadata=option(
            "How often a running stream looks for new partitions and topics: seconds, or text as in"
            " `1 min`. `None`: only when the job starts",
            DURATION,
        ),
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class KafkaSettings(ReadOptions, TopicSettings):
    """The settings of one `KafkaSource`, in their final form.

    The columns come from the latest version of `subject` unless the user gave them; the key's type
    comes from that of `key_subject`. With a `topic_pattern`, `topics` is empty.
    """

    format: ValueFormat
    columns: pa.Schema
    """The columns of the value; empty for `RAW`."""
    starting: Offsets
    ending: Offsets | None
    on_bad_record: OnBadRow
    partition_discovery_interval_s: float | None = None
    include_headers: bool = False
    """True if raw records have a column of their headers."""
    reader_schema: CompiledSchema | None = None
    """The latest version of the subject. It has the defaults of fields that older records lack."""
    key_type: pa.DataType | None = None
    """The type of the keys, or None before the registry was asked for it."""
    key_schema: CompiledSchema | None = None
    """The latest version of the keys' subject."""

    def __post_init__(self) -> None:
        self.check_cluster()
        self._check_schema()
        self._check_key()
        self._check_debezium()
        self._check_topics()
        if not 1 <= self.batch_rows <= BATCH_ROWS_MAX:
            raise ConfigError(f"batch_rows={self.batch_rows} is not 1 to {BATCH_ROWS_MAX}")
        if self.batch_bytes < 1:
            raise ConfigError(f"batch_bytes={self.batch_bytes} is not positive")
        if self.partition_discovery_interval_s == 0:
            raise ConfigError(
                "partition_discovery_interval=0 is not positive; None asks only at each start"
            )

    def _check_topics(self) -> None:
        if self.topics and self.topic_pattern is not None:
            raise ConfigError(
                f"topic={self.topics!r} and topic_pattern={self.topic_pattern!r}: give one of the"
                " two"
            )
        if not all(self.topics) or (not self.topics and self.topic_pattern is None):
            raise ConfigError(
                f"topic={self.topics!r}: give the name of at least one topic, or topic_pattern="
            )
        try:
            re.compile(self.topic_pattern or "")
        except re.error as error:
            raise ConfigError(
                f"topic_pattern={self.topic_pattern!r} is not a regular expression: {error}"
            ) from error

    def _check_schema(self) -> None:
        setting = f"format={self.format.value!r}"
        self.check_value_format(self.format.value, asks_registry=self.format.discovers)
        if not self.format.discovers:
            if not self.columns.names and self.format is not ValueFormat.RAW:
                raise ConfigError(
                    f"{setting} needs schema=, e.g. 'id BIGINT NOT NULL, name STRING'"
                )
            return
        if self.format.decodes_by_id or self.asks_latest:
            self.require_registry(setting)
        if self.asks_latest and self.subject is None and len(self.topics) != 1:
            other = "" if self.format is ValueFormat.PROTOBUF else ", or schema="
            raise ConfigError(f"{setting} takes its columns from one subject: give subject={other}")

    def _check_key(self) -> None:
        if self.key_format is not None:
            setting = f"key_format={self.key_format.value!r}"
            if self.format is ValueFormat.RAW:
                raise ConfigError(
                    "format='raw' has the record's key as the column key; omit key_format="
                )
            if KEY_COLUMN in self.columns.names:
                raise ConfigError(
                    f"{setting} makes a column {KEY_COLUMN!r}, and the value has one: leave it out"
                    " by schema="
                )
        self.check_key_format()

    def _check_debezium(self) -> None:
        if self.format.is_debezium:
            from onceflow.formats.debezium.changes import read_placeholder
            from onceflow.formats.debezium.fields import check_modes

            read_placeholder(self.unavailable_value_placeholder)
            check_modes(self.decimal_handling_mode, self.binary_handling_mode)
            if self.columns.names:
                self.debezium_options.check(self.columns)
            return
        given = {
            "unavailable_value_placeholder": self.unavailable_value_placeholder
            != UNAVAILABLE_VALUE,
            "primary_key": bool(self.primary_key),
            "decimal_handling_mode": self.decimal_handling_mode is not None,
            "binary_handling_mode": self.binary_handling_mode is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(
                    f"format={self.format.value!r} has no changes of Debezium; omit {name}="
                )

    @property
    def debezium_options(self) -> DebeziumOptions:
        """The options that say how Debezium writes changes, and the primary key of the target."""
        from onceflow.formats.debezium.changes import DebeziumOptions

        given = self.primary_key
        key = (given,) if isinstance(given, str) else tuple(given)
        return DebeziumOptions(key, self.decimal_handling_mode, self.binary_handling_mode)

    @property
    def key_field(self) -> pa.Field | None:
        """The column of keys, or None if there is none. Do not use it while `asks_key` is true."""
        if self.key_format is None:
            return None
        kind = _PLAIN_KEYS.get(self.key_format, self.key_type)
        assert kind is not None
        return pa.field(KEY_COLUMN, kind)

    @property
    def asks_key(self) -> bool:
        """True if the registry must still be asked for the key's type."""
        return self.has_registered_keys and self.key_type is None

    @property
    def asks_latest(self) -> bool:
        """True if the registry must still be asked for the subject's latest version."""
        if self.format is ValueFormat.PROTOBUF:
            return self.reader_schema is None
        return self.format.discovers and not self.columns.names

    def open_schemas(self) -> SchemaCache:
        """Return a cache of the registry's schemas of values. It has not fetched any schema yet.

        Raises:
            ConfigError: The registry's client is not installed, or refuses an option.
        """
        registry = self.require_registry(f"format={self.format.value!r}")
        return SchemaCache(registry, self.deadline_s, VALUE_SCHEMA_ID, self.subject)

    def open_key_schemas(self) -> SchemaCache:
        """Return a cache of the registry's schemas of keys. Raises the errors of `open_schemas`."""
        registry = self.require_registry(f"key_format={self.key_format}")
        return SchemaCache(registry, self.deadline_s, KEY_SCHEMA_ID, self.key_subject)

    @property
    @override
    def what(self) -> str:
        if self.topic_pattern is not None:
            return f"topics matching {self.topic_pattern!r}"
        return f"topic {', '.join(self.topics)}"

    def reads(self, topic: str) -> bool:
        """Return True if `topic` is a named topic, or the pattern matches its whole name."""
        if self.topic_pattern is not None:
            return re.fullmatch(self.topic_pattern, topic) is not None
        return topic in self.topics

    def __repr__(self) -> str:
        shown = {item.name: getattr(self, item.name) for item in fields(self)}
        shown["columns"] = ", ".join(f"{column.name}: {column.type}" for column in self.columns)
        shown["options"] = RULES.printable(self.options)
        return f"KafkaSource({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
