"""The settings of a Kafka sink, checked once; they can be pickled, and their repr shows no secrets.

Options of the producer have librdkafka's names, with or without Spark's prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar

from onceflow.clients.kafka.registry import SchemaKind, schema_kind
from onceflow.clients.kafka.settings import DEFAULTS, LIBRDKAFKA, TopicOptions, TopicSettings
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.spi.options import BOOLEAN, DURATION, OptionValue, option, option_of

STAGED = "exactly once into Kafka, unlike delivery='at_least_once', stages rows"
"""The reason why checkpoint storage is needed, for errors."""

MESSAGE_BYTES_MAX = "message.max.bytes"
MESSAGE_BYTES_MAX_DEFAULT = 1_000_000
"""librdkafka's default; 48 kB below the broker's limit, which includes headers and batch frames."""

TUNED_DEFAULTS: Mapping[str, OptionValue] = {
    **DEFAULTS,
    # The partitioner of Java and Spark, so that a key goes to the same partition as with them.
    "partitioner": "murmur2_random",
    # Fills batches for at-least-once delivery; transactions use a shorter linger.
    "linger.ms": 20,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 262_144,
    # A transaction right after another must wait and retry until that one has ended; librdkafka's
    # default is 100 ms.
    "retry.backoff.ms": 10,
    # librdkafka's own log repeats every failed connection attempt; errors are raised with their
    # reason.
    "log_level": 0,
}

_OWNED: Mapping[str, str] = {
    "bootstrap.servers": "give it as bootstrap_servers=",
    "client.id": "it is derived from sink id and subtask",
    "group.id": "it is derived from sink id and subtask",
    "transactional.id": "it is derived from sink id and subtask",
    "transaction.timeout.ms": "give it as transaction_timeout_s=",
    "delivery.timeout.ms": "transaction_timeout_s= bounds it",
    "message.timeout.ms": "transaction_timeout_s= bounds it",
    "enable.idempotence": "it is always on",
    "enable.gapless.guarantee": "a transaction is committed whole or not at all",
    "acks": "it is always all: a commit must survive the leader",
    "request.required.acks": "it is always all: a commit must survive the leader",
    "isolation.level": "proofs are always read committed",
    "enable.auto.commit": "nothing is consumed",
    "key.serializer": "format= and key= say how rows are encoded",
    "value.serializer": "format= says how rows are encoded",
    "interceptor.classes": "interceptors are classes of Java clients, and this one is not Java",
}
_JAVA_PRODUCERS: Mapping[str, str] = {
    "max.request.size": "give message.max.bytes instead",
    "buffer.memory": "give queue.buffering.max.kbytes instead",
    "max.block.ms": "give deadline_s= instead",
    "partitioner.class": "give partitioner=murmur2_random, consistent_random or fnv1a instead",
}

RULES = replace(
    LIBRDKAFKA,
    owner="the sink",
    owned=_OWNED,
    foreign={**LIBRDKAFKA.foreign, **_JAVA_PRODUCERS},
)

TRANSACTION_TIMEOUT_MIN_S = 1.0
"""The shortest timeout. Below it librdkafka has no time for a single request."""


class RecordFormat(Enum):
    """The form of a row as a record."""

    JSON = "json"
    """The value is one JSON object, with a field per column."""
    RAW = "raw"
    """Columns key, value and headers are written unchanged, under Spark's names."""
    AVRO = "avro"
    """The value is an Avro record in the wire format of Confluent's schema registry."""
    PROTOBUF = "protobuf"
    """The value is a Protobuf message in that format."""
    JSON_SCHEMA = "json-schema"
    """The value is a JSON object behind the header of the registry's wire format."""

    @property
    def registered(self) -> bool:
        """True if values begin with the id of a schema in a registry."""
        return schema_kind(self.value) is not None


class StaleRows(Enum):
    """The handling of decided rows that waited longer than the broker keeps proofs of commits."""

    FAIL = "fail"
    """It is unknown whether they were committed: the job stops and says so."""
    PRODUCE = "produce"
    """They are produced: twice if they had been committed, once if not."""
    DISCARD = "discard"
    """They count as committed: lost if they had not been committed, once if they had."""


@dataclass(frozen=True, slots=True)
class StaleRowsRules:
    """The handling of stale rows, by transaction."""

    otherwise: StaleRows = StaleRows.FAIL
    by_transaction: Mapping[TransactionId, StaleRows] = field(
        default_factory=dict[TransactionId, StaleRows]
    )

    @classmethod
    def parse(cls, text: str) -> StaleRowsRules:
        """Return the rules of `text`: `fail`, `produce`, or words with ids: `discard ID, …`.

        Raises:
            ConfigError: The text has another form, or `discard` without an id.
        """
        if text in (StaleRows.FAIL.value, StaleRows.PRODUCE.value):
            return cls(StaleRows(text))
        rules: dict[TransactionId, StaleRows] = {}
        for part in text.split(","):
            word, _, name = part.strip().partition(" ")
            transaction = TransactionId.parse(name.strip())
            if transaction is None or word not in (choice.value for choice in StaleRows):
                raise ConfigError(
                    f"stale_rows={text!r}: say fail, produce, or for single transactions"
                    " 'produce ID' or 'discard ID', with commas between"
                )
            rules[transaction] = StaleRows(word)
        return cls(by_transaction=rules)

    def rule_for(self, transaction: TransactionId) -> StaleRows:
        """Return the rule for the rows of `transaction`, if they are stale."""
        return self.by_transaction.get(transaction, self.otherwise)


@dataclass(frozen=True, kw_only=True, repr=False)
class WriteOptions(TopicOptions):
    """The options of the sink that are used as they are given."""

    topic_column: str | None = field(
        default=None,
        metadata=option(
            "Column with the topic of each row. It is not part of the value", spark="topicColumn"
        ),
    )
    partition_column: str | None = field(
        default=None,
        metadata=option(
            "Column with the partition of each row. Null: the partitioner chooses",
            spark="partitionColumn",
        ),
    )
    auto_register: bool = field(
        default=True,
        metadata=option(
            "Whether the sink registers the schema of the columns. If not, it writes rows in the"
            " subject's latest schema, which the columns must fit",
            BOOLEAN,
            spark="autoRegister",
            aliases=("auto.register.schemas",),
        ),
    )
    transaction_timeout_s: float = field(
        default=300.0,
        metadata=option(
            "How long one subtask may take to produce the rows of one checkpoint or micro-batch."
            " Not more than the broker's transaction.max.timeout.ms",
            DURATION,
            spark="transactionTimeout",
        ),
    )
    deadline_s: float = field(default=30.0, metadata=option_of(TopicOptions, "deadline_s"))


@dataclass(frozen=True, kw_only=True, repr=False)
class KafkaSinkSettings(WriteOptions, TopicSettings):
    """The settings of one `KafkaSink`, in their final form.

    Without `key_format`, a key of one column is text or bytes, and a key of several is a JSON
    object.
    """

    operation: ClassVar[str] = "Write"

    format: RecordFormat
    key: tuple[str, ...]
    headers_column: str | None
    delivery: Delivery
    stale_rows: StaleRowsRules
    is_key: bool = False
    """True if these settings write keys, as values of their own subject."""
    alone: bool = False
    """True if the only column is the value itself, and not a field of a record."""

    def __post_init__(self) -> None:
        self.check_cluster()
        if not self.topics or not all(self.topics):
            raise ConfigError(f"topic={self.topics!r}: give the name of at least one topic")
        self._check_schema()
        self._check_key()
        if len(self.topics) > 1 and self.topic_column is None:
            raise ConfigError(
                f"topic={self.topics!r}: with several topics topic_column= must name the column"
                " that says which one a row goes to"
            )
        if not self.transaction_timeout_s >= TRANSACTION_TIMEOUT_MIN_S:
            raise ConfigError(
                f"transaction_timeout_s={self.transaction_timeout_s} is under"
                f" {TRANSACTION_TIMEOUT_MIN_S:g}"
            )
        limit = self.options.get(MESSAGE_BYTES_MAX, "1")
        if not limit.isdecimal():
            raise ConfigError(
                f"Kafka option {MESSAGE_BYTES_MAX}={limit!r} must be a whole number of bytes"
            )

    def _check_schema(self) -> None:
        setting = f"format={self.format.value!r}"
        self.check_value_format(self.format.value, asks_registry=self.format.registered)
        if self.format.registered:
            self.require_registry(setting)
            if self.subject is None and len(self.topics) > 1:
                raise ConfigError(f"{setting} with several topics needs subject=")

    def _check_key(self) -> None:
        if self.key_format is not None:
            setting = f"key_format={self.key_format.value!r}"
            if self.format is RecordFormat.RAW:
                raise ConfigError(
                    "format='raw' takes the key from the column 'key'; omit key_format="
                )
            if not self.key:
                raise ConfigError(f"{setting} needs key=: the columns of the key")
            if len(self.key) > 1 and not self.key_format.registered:
                raise ConfigError(f"{setting} takes one column, and key={self.key!r}")
        self.check_key_format()

    @property
    def asks_registry(self) -> bool:
        """True if values or keys begin with the id of a schema in a registry."""
        return self.format.registered or self.has_registered_keys

    def of_key(self, *, alone: bool) -> KafkaSinkSettings:
        """Return the settings that write registered keys as values of their own subject."""
        assert self.key_format is not None
        return replace(
            self,
            format=RecordFormat(self.key_format.value),
            subject=self.subject_of_keys,
            message=None,
            key=(),
            key_format=None,
            key_subject=None,
            is_key=True,
            alone=alone,
        )

    @property
    def schema_kind(self) -> SchemaKind:
        """The language of the values' schema; only for formats of a registry."""
        kind = schema_kind(self.format.value)
        assert kind is not None, self.format
        return kind

    @property
    def subject_setting(self) -> str:
        """The argument that names the subject."""
        return "key_subject=" if self.is_key else "subject="

    @property
    def message_bytes_max(self) -> int:
        """The largest size of one record in bytes; topics must accept this size."""
        return int(self.options.get(MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX_DEFAULT))

    def __repr__(self) -> str:
        return (
            f"KafkaSink({self.bootstrap_servers!r}, topic={self.topics!r},"
            f" topic_column={self.topic_column!r}, format={self.format.value!r}, key={self.key!r},"
            f" delivery={self.delivery.value!r}, options={RULES.printable(self.options)!r})"
        )
