"""What a user writes to have rows in Kafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import pyarrow as pa

from onceflow.connectors.kafka.keys import KeyFormat
from onceflow.connectors.kafka.registry import registry_settings
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.setting_values import choice_of
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.spi import (
    Committer,
    CommitterContext,
    OnBadRow,
    Sink,
    SinkWriter,
    WriterContext,
)
from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.spi.client_options import OptionValue
from onceflow.core.spi.connector import ServerAccess, SinkConnector
from onceflow.core.spi.staging import required_staging
from onceflow.sinks.kafka.committer import IdleCommitter, KafkaCommitter
from onceflow.sinks.kafka.encoder import RecordEncoder
from onceflow.sinks.kafka.fence import Fence
from onceflow.sinks.kafka.preflight import NewTopics, Preflight
from onceflow.sinks.kafka.settings import (
    RULES,
    STAGED,
    KafkaSinkSettings,
    RecordFormat,
    StaleRowsRules,
)
from onceflow.sinks.kafka.writer import AtLeastOnceWriter, StagingWriter

if TYPE_CHECKING:  # a slot does not pay for it
    from onceflow.core.in_doubt import ResourceManager


@dataclass(frozen=True, repr=False)
class KafkaSink(Sink):
    """Writes every row to a topic; a read_committed consumer sees each once, through any crash.

    Rows wait in checkpoint storage until their checkpoint is decided, and are then produced in one
    Kafka transaction that also commits an offset of a group `onceflow/<sink id>/<subtask>`: the
    proof that it was committed. No transaction is open between checkpoints, so none can expire, and
    no consumer waits for a job that is down. Records of one subtask keep their order.

    Pickles with its options, prints without their secrets.

    Args:
        bootstrap_servers: `host:port[,host:port]`.
        topic: The topic; with `topic_column` all topics that it may name.
        topic_column: Column that says which topic a row goes to; not part of the value.
        key: Columns of the key: one is written as text or bytes, several as a JSON object. Keys
            land in the partitions that Java's partitioner chooses.
        format: `json`: the value is an object of all columns. `avro`, `protobuf`, `json-schema`: a
            record, message or object whose schema a registry keeps. `raw`: the columns `key`,
            `value` and `headers` as they are, as in Spark.
        partition_column: Column that says which partition; null leaves it to the partitioner.
        headers: Column of headers: a list of (key, value), or a map. With `raw` it is `headers`.
        delivery: `at_least_once` produces rows at once, without transactions: they are seen before
            their checkpoint, and come twice after a failure.
        create: Whether to create topics that are missing.
        partitions: Of a topic that is created; None is the broker's default.
        replication_factor: Of a topic that is created; None is the broker's default.
        schema_registry: Address of Confluent's schema registry, or of one that speaks as it does;
            or options of its client, Confluent's names, with `url` among them.
        subject: Of the values' schema; None is `<topic>-value`.
        auto_register: Whether the rows' own schema is registered, unless it has been before. False
            writes by the subject's latest version, into which the columns must fit.
        message: In Protobuf, the name of the message in the subject's latest version; None is the
            first.
        key_format: `string`, `raw` (bytes), or by a schema of the registry `avro`, `protobuf`,
            `json-schema`: several key columns, or those of a struct, are a record, message or
            object, any other one the key itself. None is text or JSON, as `key` says. The column
            `_key`, as which a source hands out keys, is then no part of the value.
        key_subject: Of the keys' schema; None is `<topic>-key`.
        transaction_timeout_s: How long producing one checkpoint's rows of one subtask may take;
            the broker's transaction.max.timeout.ms is the upper limit.
        deadline_s: How long a broker, or the registry, may not answer before a call is given up.
        stale_rows: What becomes of decided rows that waited, while the job was down, for longer
            than the broker keeps proofs: `fail` says so, `produce ID` produces those of one
            transaction, `discard ID` counts them as committed, and `produce` produces all.
        options: Further settings of librdkafka, with or without Spark's prefix `kafka.`.

    Raises:
        ConfigError: A setting is wrong by itself; what needs the broker is found by `open`.
    """

    instead_of_replacing: ClassVar[str] = (
        "A topic keeps its records until its own retention or compaction removes them:"
        " append, with a key and a topic of cleanup.policy=compact, or write to a new topic"
    )
    bootstrap_servers: str
    topic: str | Sequence[str] = field(kw_only=True)
    topic_column: str | None = field(default=None, kw_only=True)
    key: str | Sequence[str] | None = field(default=None, kw_only=True)
    format: Literal["json", "avro", "protobuf", "json-schema", "raw"] = field(
        default="json", kw_only=True
    )
    partition_column: str | None = field(default=None, kw_only=True)
    headers: str | None = field(default=None, kw_only=True)
    delivery: Literal["exactly_once", "at_least_once"] = field(default="exactly_once", kw_only=True)
    create: bool = field(default=False, kw_only=True)
    partitions: int | None = field(default=None, kw_only=True)
    replication_factor: int | None = field(default=None, kw_only=True)
    schema_registry: str | Mapping[str, OptionValue] | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)
    auto_register: bool = field(default=True, kw_only=True)
    message: str | None = field(default=None, kw_only=True)
    key_format: Literal["string", "raw", "avro", "protobuf", "json-schema"] | None = field(
        default=None, kw_only=True
    )
    key_subject: str | None = field(default=None, kw_only=True)
    transaction_timeout_s: float = field(default=300.0, kw_only=True)
    deadline_s: float = field(default=30.0, kw_only=True)
    stale_rows: str = field(default="fail", kw_only=True)
    options: Mapping[str, OptionValue] = field(default_factory=dict[str, OptionValue], kw_only=True)

    def __post_init__(self) -> None:
        for name in ("partitions", "replication_factor"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"{name}={count} must be over 0")
        _ = self.settings

    def __repr__(self) -> str:
        return repr(self.settings)

    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Raise ConfigError unless records can be made of such rows; asks no broker.

        Raises:
            ConfigError: They cannot: settings, columns or types.
        """
        RecordEncoder(self.settings, schema, BadRows(OnBadRow.FAIL, schema))
        if self.settings.delivery is Delivery.EXACTLY_ONCE:
            required_staging(context.staging, context.sink_id, STAGED)

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Prepare the target for rows of `schema`: create topics, fence the sink id.

        Repeated in the same attempt it is refused, as the SPI says. A crash in it leaves at most
        a schema registered, topics created and the sink id claimed, which the next attempt claims
        in turn. At least
        once needs no transactions, and claims nothing.

        Raises:
            ConfigError: They cannot: settings, broker, permissions, topics, columns, types, or a
                schema that the registry refuses.
            Fenced: This attempt or a newer one has claimed the sink id.
            SinkError: The broker, or the registry, cannot be reached now.
        """
        settings = self.settings
        self.validate(context, schema)
        if settings.asks_registry:
            RecordEncoder(settings, schema, BadRows(OnBadRow.FAIL, schema)).ask_schema()
        preflight = Preflight(settings)
        preflight.require_topics(
            NewTopics(self.partitions, self.replication_factor) if self.create else None
        )
        preflight.require_topics_fit()
        if settings.delivery is Delivery.AT_LEAST_ONCE:
            return
        preflight.require_brokers_fit()
        Fence(settings, context).claim()

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        """Return what commit offsets say; None at least once, or where Kafka has nothing of it.

        Kafka forgets the offsets of a group that nobody uses (`offsets.retention.minutes`).
        """
        if self.settings.delivery is Delivery.AT_LEAST_ONCE:
            return None
        return Fence(self.settings, context).read_record()

    def writer(self, context: WriterContext) -> SinkWriter:
        """Return a writer; exactly once it connects only where rows choose their partition.

        Raises:
            ConfigError: The rows do not fit the settings.
            SinkError: The broker cannot be reached now.
        """
        if self.settings.delivery is Delivery.AT_LEAST_ONCE:
            return AtLeastOnceWriter(self.settings, context)
        return StagingWriter(self.settings, context)

    def committer(self, context: CommitterContext) -> Committer:
        """Return a committer, which connects when it is first asked.

        At least once it has nothing to commit, but finds what the job left in doubt when it was
        still exactly once.
        """
        if context.staging is None and self.settings.delivery is Delivery.AT_LEAST_ONCE:
            return IdleCommitter()
        return KafkaCommitter(self.settings, context)

    @property
    def settings(self) -> KafkaSinkSettings:
        """What the arguments say, resolved; may hold secrets, and prints without them."""
        return KafkaSinkSettings(
            bootstrap_servers=self.bootstrap_servers,
            topics=_names(self.topic),
            topic_column=self.topic_column,
            format=choice_of(RecordFormat, self.format, setting="format"),
            key=_names(self.key or ()),
            partition_column=self.partition_column,
            headers_column=self.headers,
            delivery=choice_of(Delivery, self.delivery, setting="delivery"),
            stale_rows=StaleRowsRules.parse(self.stale_rows),
            transaction_timeout_s=self.transaction_timeout_s,
            deadline_s=self.deadline_s,
            options=RULES.accepted(self.options),
            registry=None
            if self.schema_registry is None
            else registry_settings(self.schema_registry),
            subject=self.subject,
            auto_register=self.auto_register,
            message=self.message,
            key_format=None
            if self.key_format is None
            else choice_of(KeyFormat, self.key_format, setting="key_format"),
            key_subject=self.key_subject,
        )


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _resource_manager(access: ServerAccess) -> ResourceManager:
    from onceflow.sinks.kafka.resource_manager import KafkaResourceManager

    servers, options = access.url.removeprefix("kafka://"), dict(access.options)
    any_topic = "onceflow"
    sink = KafkaSink(servers, topic=any_topic, deadline_s=access.timeout_s, options=options)
    return KafkaResourceManager(sink.settings)


CONNECTOR = SinkConnector(sink=KafkaSink, resource_manager=_resource_manager)
"""What the catalogue finds."""
