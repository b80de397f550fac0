"""All that a Kafka source is told, checked once, picklable, and printed without its secrets.

Options of the client carry librdkafka's names, with or without Spark's prefix. The engine owns a
few (who assigns, who commits, what happens at a gap): giving one is refused with the name of the
argument that does the same. Java's names are refused with librdkafka's. Offsets are what the user
says; no broker has been asked yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import TypeAlias, cast

import pyarrow as pa

from onceflow.connectors.kafka.keys import KEY_COLUMN, KeyFormat
from onceflow.connectors.kafka.registry import KeptSchema, RegistrySettings
from onceflow.connectors.kafka.schema_cache import SchemaCache
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.invariant import InvariantViolation
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.client_options import OptionRules, OptionValue

SPARK_PREFIX = "kafka."

TUNED_DEFAULTS: Mapping[str, OptionValue] = {
    # A fetcher whose queue is full sleeps for this long. The default of 1000 stalls a reader that
    # takes a queue's worth in less: 137k records/s then, against 324k with 1.
    "fetch.queue.backoff.ms": 1,
    "fetch.error.backoff.ms": 100,
    "isolation.level": "read_committed",
    "allow.auto.create.topics": False,
    # A broker that comes back is found within a second; librdkafka's own maximum is 10 s.
    "reconnect.backoff.max.ms": 1000,
    "socket.keepalive.enable": True,
    "socket.timeout.ms": 30_000,
    # Whether a batch is what the producer sent; the checksum is the processor's own instruction.
    "check.crcs": True,
    # For group members that stop polling. The reader is not a member, and backpressure may last.
    "max.poll.interval.ms": 86_400_000,
    # Its own lines repeat every failed connection attempt; the error callback says it once.
    "log_level": 2,
}

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
    "interceptor.classes": "there are no interceptors here",
}
_JAVA_ONLY: Mapping[str, str] = {
    "sasl.jaas.config": "give sasl.mechanism, sasl.username and sasl.password instead",
    "sasl.login.callback.handler.class": "for OAUTHBEARER give sasl.oauthbearer.method=oidc and"
    " sasl.oauthbearer.client.id, .client.secret and .token.endpoint.url",
    "sasl.client.callback.handler.class": "give sasl.mechanism and its own settings instead",
    "sasl.login.class": "give sasl.mechanism and its own settings instead",
    "ssl.truststore.location": "export the certificates as PEM and give ssl.ca.location",
    "ssl.truststore.password": "export the certificates as PEM and give ssl.ca.location",
    "ssl.truststore.type": "export the certificates as PEM and give ssl.ca.location",
    "ssl.truststore.certificates": "give ssl.ca.pem instead",
    "ssl.keystore.type": "a PKCS#12 file goes to ssl.keystore.location as it is",
    "ssl.keystore.key": "give ssl.key.pem instead",
    "ssl.keystore.certificate.chain": "give ssl.certificate.pem instead",
    "ssl.protocol": "TLS versions are OpenSSL's affair here; leave it away",
    "ssl.enabled.protocols": "TLS versions are OpenSSL's affair here; leave it away",
    "ssl.engine.factory.class": "give ssl.ca.location, ssl.certificate.location, ssl.key.location",
    "security.providers": "leave it away",
    "default.api.timeout.ms": "give deadline_s= instead",
    "request.timeout.ms": "give socket.timeout.ms or deadline_s= instead",
}
_JAVA_FILES: Mapping[str, str] = {
    ".jks": "a Java keystore: convert it with `keytool"
    " -importkeystore -deststoretype PKCS12`, or export PEM files and give"
    " ssl.ca.location, ssl.certificate.location and ssl.key.location",
}
_SECRET_PARTS = ("password", "secret", "key.pem", "token", "assertion", "sasl.oauthbearer.config")

RULES = OptionRules(
    what="Kafka option",
    prefix=SPARK_PREFIX,
    owned=_OWNED,
    owner="the engine",
    foreign=_JAVA_ONLY,
    foreign_client="the Java client",
    foreign_files=_JAVA_FILES,
    secret_parts=_SECRET_PARTS,
)


EARLIEST = -2
"""Spark's number for it in explicit offsets."""
LATEST = -1


@dataclass(frozen=True, slots=True)
class Earliest:
    """The first record that the broker still has."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The end as of now: behind the last record that is committed."""


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record of each partition at or after this time; the end where there is none."""

    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """These offsets by topic and partition; -2 means earliest and -1 latest, as in Spark."""

    offsets: Mapping[str, Mapping[int, int]]


Offsets: TypeAlias = Earliest | Latest | AtTime | AtOffsets
OffsetsLike: TypeAlias = "str | datetime | Mapping[str, Mapping[int, int]]"


def offsets_of(given: OffsetsLike, *, setting: str) -> Offsets:
    """Return what `given` says: a word, a time, or offsets (a mapping, or Spark's JSON text).

    Raises:
        ConfigError: It says none of them, or a time without a zone.
    """
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise ConfigError(
                f"{setting}={given.isoformat()} has no time zone; write"
                " datetime(..., tzinfo=timezone.utc)"
            )
        since = given - datetime(1970, 1, 1, tzinfo=timezone.utc)
        return AtTime(since // timedelta(milliseconds=1))
    if isinstance(given, str):
        match given.strip().lower():
            case "earliest":
                return Earliest()
            case "latest":
                return Latest()
            case text if text.startswith("{"):
                return AtOffsets(_checked(_parsed(given, setting), setting))
            case _:
                raise ConfigError(
                    f"{setting}={given!r}: choose earliest, latest, a datetime, or offsets such as"
                    ' {"topic": {0: 23}}'
                )
    return AtOffsets(_checked(given, setting))


def _parsed(text: str, setting: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{setting}={text!r} is no JSON: {error}") from error


def _checked(given: object, setting: str) -> dict[str, dict[int, int]]:
    wanted = f'{setting}={given!r}: offsets look like {{"topic": {{0: 23, 1: -2}}}}'
    if not isinstance(given, Mapping):
        raise ConfigError(wanted)
    found: dict[str, dict[int, int]] = {}
    for topic, partitions in cast("Mapping[object, object]", given).items():
        if not isinstance(topic, str) or not isinstance(partitions, Mapping):
            raise ConfigError(wanted)
        try:
            found[topic] = {
                int(cast("str | int", partition)): int(cast("str | int", offset))
                for partition, offset in cast("Mapping[object, object]", partitions).items()
            }
        except (TypeError, ValueError) as error:
            raise ConfigError(wanted) from error
        for partition, offset in found[topic].items():
            if partition < 0 or offset < EARLIEST:
                raise ConfigError(f"{wanted}; partition {partition} at {offset} cannot be")
    return found


BATCH_ROWS_MAX = 1_000_000


class ValueFormat(Enum):
    """How a record becomes a row."""

    JSON = "json"
    """The value is one JSON object; its fields are the columns of the schema."""
    RAW = "raw"
    """Key and value as bytes, with Spark's columns about where the record lay."""
    AVRO = "avro"
    """The value is an Avro record in the wire format of Confluent's schema registry."""
    PROTOBUF = "protobuf"
    """The value is a Protobuf message in the registry's wire format."""
    JSON_SCHEMA = "json-schema"
    """The value is a JSON object behind the header of the registry's wire format."""
    CSV = "csv"
    """The value is one line of comma separated fields, without names."""
    DEBEZIUM_JSON = "debezium-json"
    """The value is a change of a row in Debezium's JSON envelope, with or without its schema."""
    DEBEZIUM_AVRO = "debezium-avro"
    """The value is a change of a row in Debezium's envelope, as `AVRO`."""

    @property
    def decodes_by_id(self) -> bool:
        """Whether no value can be decoded without the schema that a registry keeps."""
        return self in {ValueFormat.AVRO, ValueFormat.PROTOBUF, ValueFormat.DEBEZIUM_AVRO}

    @property
    def discovers(self) -> bool:
        """Whether a registry can say the columns."""
        return self.decodes_by_id or self is ValueFormat.JSON_SCHEMA

    @property
    def is_debezium(self) -> bool:
        """Whether rows are changes of rows."""
        return self in {ValueFormat.DEBEZIUM_JSON, ValueFormat.DEBEZIUM_AVRO}


_PLAIN_KEYS: Mapping[KeyFormat, pa.DataType] = {
    KeyFormat.STRING: pa.string(),
    KeyFormat.RAW: pa.binary(),
}


@dataclass(frozen=True, slots=True, repr=False)
class KafkaSettings:
    """The settings of one `KafkaSource`, in their final form."""

    bootstrap_servers: str
    topics: tuple[str, ...]
    """By name; empty with a pattern."""
    format: ValueFormat
    columns: pa.Schema
    """What the value holds; empty for `RAW`."""
    starting: Offsets
    ending: Offsets | None
    on_bad_record: OnBadRow
    include_metadata: bool
    group_id: str | None
    commit_offsets: bool
    fail_on_data_loss: bool
    batch_rows: int
    batch_bytes: int
    deadline_s: float
    options: dict[str, str] = field(default_factory=dict[str, str])
    topic_pattern: str | None = None
    partition_discovery_interval_s: float | None = None
    include_headers: bool = False
    """Of raw records."""
    registry: RegistrySettings | None = None
    subject: str | None = None
    """Whose latest version says the columns, if nobody else does; none: the topic's values."""
    reader_schema: KeptSchema | None = None
    """That version: has the defaults of fields that older records lack."""
    message: str | None = None
    """In Protobuf, which message of its schema a value is; none: the first."""
    reader_descriptors: bytes = b""
    """In Protobuf, what `reader_schema` is compiled to."""
    key_format: KeyFormat | None = None
    """None: there is no column of keys."""
    key_subject: str | None = None
    """Whose latest version says the key's type; none: the topic's keys."""
    key_type: pa.DataType | None = None
    """Of a registry, once it has been asked."""
    key_schema: KeptSchema | None = None
    """That version."""
    key_descriptors: bytes = b""
    """In Protobuf, what it is compiled to."""

    def __post_init__(self) -> None:
        if not self.bootstrap_servers.strip():
            raise ConfigError("bootstrap_servers is empty; give host:port[,host:port]")
        self._check_schema()
        self._check_key()
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
                f"topic_pattern={self.topic_pattern!r} is no regular expression: {error}"
            ) from error
        if len(set(self.topics)) != len(self.topics):
            raise ConfigError(f"topic={self.topics!r} names a topic twice")
        if not 1 <= self.batch_rows <= BATCH_ROWS_MAX:
            raise ConfigError(f"batch_rows={self.batch_rows} is not 1 to {BATCH_ROWS_MAX}")
        if self.batch_bytes < 1:
            raise ConfigError(f"batch_bytes={self.batch_bytes} is not positive")
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s={self.deadline_s} is not positive")
        if self.partition_discovery_interval_s == 0:
            raise ConfigError(
                "partition_discovery_interval=0 is not positive; None asks only at each start"
            )

    def _check_schema(self) -> None:
        name = self.format.value
        if self.message is not None and self.format is not ValueFormat.PROTOBUF:
            raise ConfigError(f"format={name!r} has no messages; leave message= away")
        described = self.format is ValueFormat.RAW or self.format.discovers
        if not self.columns.names and not described:
            raise ConfigError(
                f"format={name!r} needs schema=, e.g. 'id BIGINT NOT NULL, name STRING'"
            )
        if not self.format.discovers:
            of_keys = self.key_format is not None and self.key_format.registered
            if (self.registry is not None and not of_keys) or self.subject is not None:
                raise ConfigError(
                    f"format={name!r} asks no schema registry; leave schema_registry= and subject="
                    " away"
                )
            return
        if self.registry is None and (self.format.decodes_by_id or self.asks_latest):
            raise ConfigError(
                f"format={name!r} needs schema_registry=, e.g. 'http://localhost:8081'"
            )
        if self.asks_latest and self.subject is None and len(self.topics) != 1:
            other = "" if self.format is ValueFormat.PROTOBUF else ", or schema="
            raise ConfigError(
                f"format={name!r} takes its columns from one subject: give subject={other}"
            )

    def _check_key(self) -> None:
        if self.key_format is None:
            if self.key_subject is not None:
                raise ConfigError("key_subject= goes with key_format=, and none is given")
            return
        name = self.key_format.value
        if self.format is ValueFormat.RAW:
            raise ConfigError(
                "format='raw' has the record's key as the column key; leave key_format= away"
            )
        if KEY_COLUMN in self.columns.names:
            raise ConfigError(
                f"key_format={name!r} makes a column {KEY_COLUMN!r}, and the value has one: leave"
                " it out by schema="
            )
        if not self.key_format.registered:
            if self.key_subject is not None:
                raise ConfigError(f"key_format={name!r} has no schema; leave key_subject= away")
            return
        if self.registry is None:
            raise ConfigError(
                f"key_format={name!r} needs schema_registry=, e.g. 'http://localhost:8081'"
            )
        if self.key_subject is None and len(self.topics) != 1:
            raise ConfigError(
                f"key_format={name!r} takes the key's type from one subject: give key_subject="
            )

    @property
    def key_field(self) -> pa.Field | None:
        """The column of keys, if there is one; once `asks_key` is over."""
        if self.key_format is None:
            return None
        kind = _PLAIN_KEYS.get(self.key_format, self.key_type)
        assert kind is not None
        return pa.field(KEY_COLUMN, kind)

    @property
    def asks_key(self) -> bool:
        """Whether the registry has to be asked for the key's type, and has not been yet."""
        return self.key_format is not None and self.key_format.registered and self.key_type is None

    @property
    def subject_of_keys(self) -> str:
        """The subject of the keys."""
        return self.key_subject or f"{self.topics[0]}-key"

    @property
    def asks_latest(self) -> bool:
        """Whether the registry has to be asked for the latest version, and has not been yet."""
        if self.format is ValueFormat.PROTOBUF:
            return not self.reader_descriptors
        return self.format.discovers and not self.columns.names

    @property
    def value_subject(self) -> str:
        """The subject of the values."""
        return self.subject or f"{self.topics[0]}-value"

    def open_schemas(self) -> SchemaCache:
        """Return the registry's schemas, none of them fetched yet.

        Raises:
            ConfigError: The registry's client is not installed, or refuses an option.
        """
        if self.registry is None:
            raise InvariantViolation("a schema registry is read without its address")
        return SchemaCache(self.registry, self.deadline_s)

    @property
    def what(self) -> str:
        """What is read, for messages."""
        if self.topic_pattern is not None:
            return f"topics matching {self.topic_pattern!r}"
        return f"topic {', '.join(self.topics)}"

    def reads(self, topic: str) -> bool:
        """Return whether `topic` is named, or matched whole by the pattern."""
        if self.topic_pattern is not None:
            return re.fullmatch(self.topic_pattern, topic) is not None
        return topic in self.topics

    def __repr__(self) -> str:
        shown = {item.name: getattr(self, item.name) for item in fields(self)}
        del shown["reader_descriptors"], shown["key_descriptors"]
        shown["columns"] = ", ".join(f"{column.name}: {column.type}" for column in self.columns)
        shown["options"] = RULES.printable(self.options)
        return f"KafkaSource({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
