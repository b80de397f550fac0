"""The sink for Kafka topics that users configure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pyarrow as pa

from onceflow.clients.kafka.settings import KeyFormat, TopicDescription, list_names
from onceflow.clients.kafka.topics import Topics
from onceflow.core import spi
from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.setting_values import accept_durations, choice_of
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.spi import options
from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.spi.staging import require_staging
from onceflow.sinks.kafka.clients import open_brokers
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
    WriteOptions,
)
from onceflow.sinks.kafka.writer import KafkaAtLeastOnceWriter, StagingWriter


@options.document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class KafkaSink(WriteOptions, TopicDescription, spi.Sink):
    """Writes every row to a topic; a read_committed consumer sees each once, through any crash.

    Rows wait in checkpoint storage until their checkpoint is decided. They become visible in one
    Kafka transaction that also commits an offset of a group `onceflow/<sink id>/<subtask>`: the
    proof that it was committed. The transaction is begun shortly before the decision, and aborted
    when that is late, so that consumers do not wait. If it expires, the rows are produced again.
    Records of one subtask keep their order.

    Pickles with its options, prints without their secrets.

    Raises:
        ConfigError: A setting is wrong by itself; what needs the broker is found by `open`.
    """

    instead_of_replacing: ClassVar[str] = (
        "A topic keeps its records until its own retention or compaction removes them:"
        " append, with a key and a topic of cleanup.policy=compact, or write to a new topic"
    )
    topic: str | Sequence[str] = field(
        metadata=options.option(
            "The topic. With topic_column: all topics that the column may name",
            options.NAMES,
            spark="topic",
        )
    )
    key: str | Sequence[str] | None = field(
        default=None,
        metadata=options.option(
            "The columns of the key (not with `raw`). A key goes to the partition that Kafka's Java"
            " client would choose",
            options.NAMES,
            spark="keyColumns",
        ),
    )
    key_format: Literal["string", "raw", "avro", "protobuf", "json-schema"] | None = field(
        default=None,
        metadata=options.option(
            "Format of the key: `string`, `raw` (bytes), or by the schema registry `avro`,"
            " `protobuf`, `json-schema`. By the registry, several key columns or one struct become"
            " a record, message or object; one other column becomes the key itself. With any of"
            " these formats a column _key (a source's key) is not part of the value. Default: one"
            " key column is written as text or bytes, several as a JSON object",
            options.choice(KeyFormat),
            spark="keyFormat",
        ),
    )
    format: Literal["json", "avro", "protobuf", "json-schema", "raw"] = field(
        default="json",
        metadata=options.option(
            "`json`: the value is a JSON object of all columns. `avro`, `protobuf`, `json-schema`:"
            " it is a record, message or object whose schema is in the registry. `raw`: the columns"
            " key, value and headers are written as they are, as in Spark",
            options.choice(RecordFormat),
            spark="valueFormat",
        ),
    )
    headers: str | None = field(
        default=None,
        metadata=options.option(
            "Column of headers: a list of (key, value), or a map (not with `raw`)",
            spark="headersColumn",
        ),
    )
    delivery: Literal["exactly_once", "at_least_once"] = field(
        default="exactly_once",
        metadata=options.option(
            "`at_least_once` produces rows at once, without transactions: readers see them before"
            " their checkpoint, and after a failure rows may be produced twice",
            options.choice(Delivery),
        ),
    )
    create: bool = field(
        default=False,
        metadata=options.option(
            "Whether to create topics that are missing", options.BOOLEAN, spark="createTopic"
        ),
    )
    partitions: int | None = field(
        default=None,
        metadata=options.option(
            "Number of partitions of a topic that is created. Default: the broker's",
            options.COUNT,
            spark="partitions",
        ),
    )
    replication_factor: int | None = field(
        default=None,
        metadata=options.option(
            "Number of replicas of a topic that is created. Default: the broker's",
            options.COUNT,
            spark="replicationFactor",
        ),
    )
    stale_rows: str = field(
        default="fail",
        metadata=options.option(
            "What happens to decided rows that waited for longer than the broker keeps the proofs"
            " of commits. `fail`: the job stops and names them. `produce ID`: the rows of one"
            " transaction are produced. `discard ID`: they count as committed. `produce`: all such"
            " rows are produced",
            spark="staleRows",
        ),
    )

    def __post_init__(self) -> None:
        for name in ("partitions", "replication_factor"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"{name}={count} must be over 0")
        _ = self.settings

    def __repr__(self) -> str:
        return repr(self.settings)

    def validate(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Raise ConfigError unless such rows can become records; asks no broker.

        Raises:
            ConfigError: They cannot: settings, columns or types.
        """
        RecordEncoder(self.settings, schema, BadRows(spi.OnBadRow.FAIL, schema))
        if self.settings.delivery is Delivery.EXACTLY_ONCE:
            require_staging(context.staging, context.sink_id, STAGED)

    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Prepare the target for rows of `schema`: create topics, fence the sink id.

        A second call in the same attempt is refused, as the SPI requires. A crash in this call
        leaves at most a schema registered, topics created and the sink id claimed, which the next
        attempt claims in turn. At-least-once delivery needs no transactions, and claims nothing.

        Raises:
            ConfigError: The rows cannot be written: settings, broker, permissions, topics, columns,
                types, or a schema that the registry refuses.
            Fenced: This attempt or a newer one has claimed the sink id.
            SinkError: The broker, or the registry, cannot be reached now.
        """
        settings = self.settings
        self.validate(context, schema)
        if settings.asks_registry:
            # Before topics are created: rows that the registry refuses must leave nothing behind.
            RecordEncoder(settings, schema, BadRows(spi.OnBadRow.FAIL, schema)).ask_schema()
        preflight = Preflight(settings)
        preflight.require_topics(
            NewTopics(self.partitions, self.replication_factor) if self.create else None
        )
        preflight.require_topics_fit(schema)
        if settings.delivery is Delivery.AT_LEAST_ONCE:
            return
        preflight.require_brokers_fit()
        # The claim comes last: a start that fails on a check must not fence the running attempt.
        Fence(settings, context).claim()

    def describe_target(self) -> str:
        """Return the brokers."""
        return f"Kafka at {self.settings.bootstrap_servers}"

    def target_record(self, context: spi.CommitterContext) -> TargetRecord | None:
        """Return the record of the commit offsets; None for at-least-once, or if Kafka has none.

        Kafka forgets the offsets of an unused group (`offsets.retention.minutes`).
        """
        if self.settings.delivery is Delivery.AT_LEAST_ONCE:
            return None
        return Fence(self.settings, context).read_record()

    def find_cluster_id(self) -> str:
        """Return the id of the cluster that has the topics; empty if it has none of them.

        Raises:
            ConfigError: The query is not permitted.
            SinkError: No broker replied in time.
        """
        facts = Topics(open_brokers(self.settings)).find(self.settings.topics)
        return next((topic.cluster_id for topic in facts.values()), "")

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        """Return a writer; for exactly-once it connects only if rows choose their partition.

        Raises:
            ConfigError: The rows do not fit the settings.
            SinkError: The broker cannot be reached now.
        """
        if self.settings.delivery is Delivery.AT_LEAST_ONCE:
            return KafkaAtLeastOnceWriter(self.settings, context)
        return StagingWriter(self.settings, context)

    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        """Return a committer, which connects when it is first asked.

        With at-least-once delivery it has nothing to commit. It still finds transactions in doubt
        that the job left when it ran with exactly-once delivery.
        """
        if context.staging is None and self.settings.delivery is Delivery.AT_LEAST_ONCE:
            return IdleCommitter()
        return KafkaCommitter(self.settings, context)

    @property
    def settings(self) -> KafkaSinkSettings:
        """The resolved settings; they may contain secrets, and their repr does not show them."""
        return KafkaSinkSettings(
            **options.copy_values(self, WriteOptions),
            **self.resolve_topic_settings(RULES, self.key_format),
            topics=list_names(self.topic),
            format=choice_of(RecordFormat, self.format, setting="format"),
            key=list_names(self.key),
            headers_column=self.headers,
            delivery=choice_of(Delivery, self.delivery, setting="delivery"),
            stale_rows=StaleRowsRules.parse(self.stale_rows),
        )
