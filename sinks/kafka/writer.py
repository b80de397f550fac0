"""The writers of one subtask.

exactly once    rows are encoded as they arrive and staged in checkpoint storage at each barrier; no
                broker is needed for that
at least once   rows are produced as they arrive, and flushed at each barrier
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message

from onceflow.clients.kafka.client import ClientTroubles, describe_error, hide_secrets
from onceflow.clients.kafka.topics import Topics
from onceflow.core.errors import PreCommitFailed, SinkError, StorageError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.spi.staging import RowStager, require_staging
from onceflow.sinks.kafka.clients import open_brokers, open_producer
from onceflow.sinks.kafka.encoder import RecordEncoder
from onceflow.sinks.kafka.preflight import find_compacted_topics
from onceflow.sinks.kafka.records import Produces, produce
from onceflow.sinks.kafka.settings import STAGED, KafkaSinkSettings


class RecordWriter(SinkWriter):
    """The base of both writers: it finds bad rows before a batch is used."""

    def __init__(self, settings: KafkaSinkSettings, context: WriterContext) -> None:
        """Choose the columns; ask for the schema, and for partitions if rows choose theirs.

        Raises:
            ConfigError: The rows do not fit the settings, or the registry refuses their schema.
            SinkError: The registry did not reply, or no broker told the partitions that are needed.
        """
        self._settings = settings
        self._context = context
        self._closed = False
        self._where = f"sink {context.sink_id} subtask {context.subtask}, {settings.where}"
        self._bad_rows = BadRows(context.on_bad_row, context.schema, where=self._where)
        self._encoder = RecordEncoder(settings, context.schema, self._bad_rows)
        if settings.asks_registry:
            self._encoder.ask_schema()
        if settings.partition_column is not None:
            self._encoder.know_partitions(_partition_counts(settings))
        self._encoder.refuse_null_keys(partial(find_compacted_topics, settings))

    def take_rejected(self) -> tuple[RejectedRows, ...]:
        """Return the rows left out since the last call, with their reasons."""
        return tuple(self._bad_rows.take())

    def _require_open(self, doing: str, kind: type[SinkError]) -> None:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")


class StagingWriter(RecordWriter):
    """A writer that stages records at each barrier, for a committer to produce."""

    def __init__(self, settings: KafkaSinkSettings, context: WriterContext) -> None:
        """Open as `RecordWriter` does.

        Raises:
            ConfigError: There is no checkpoint storage for staged rows.
        """
        super().__init__(settings, context)
        self._stager = RowStager(
            require_staging(context.staging, context.sink_id, STAGED),
            sink_id=context.sink_id,
            attempt=context.attempt,
            subtask=context.subtask,
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Encode `batch` and keep it in memory, or in a local file if it is large.

        Raises:
            BadRow: A row cannot be a record; names the reason.
            SinkError: The records cannot be kept because the disk is full.
        """
        self._require_open("rows were not written", SinkError)
        if not batch.num_rows:
            return
        with self._or_close("rows were not written", SinkError):
            records = self._encoder.encode(batch)
            if records.num_rows:
                self._stager.write(records)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """Make the records durable in checkpoint storage; return nothing if there are none.

        Raises:
            PreCommitFailed: They are not durable.
        """
        doing = f"checkpoint {checkpoint} was not pre-committed"
        self._require_open(doing, PreCommitFailed)
        with self._or_close(doing, PreCommitFailed):
            return self._stager.pre_commit(checkpoint)

    def close(self) -> None:
        """Drop the records that are not pre-committed."""
        self._closed = True
        self._stager.close()

    @contextmanager
    def _or_close(self, doing: str, kind: type[SinkError]) -> Generator[None, None, None]:
        try:
            yield
        except (StorageError, OSError) as error:
            self.close()
            raise kind(f"{self._where}: {doing}: {error}") from error
        except BaseException:
            self.close()
            raise


class KafkaAtLeastOnceWriter(RecordWriter):
    """A writer that produces rows as they arrive; after a crash, rows may be produced twice."""

    def __init__(self, settings: KafkaSinkSettings, context: WriterContext) -> None:
        """Open as `RecordWriter` does, without waiting for a broker.

        Raises:
            ConfigError: The rows do not fit the settings, or librdkafka refuses a setting.
        """
        super().__init__(settings, context)
        self._failure = ""
        self._troubles = ClientTroubles(settings)
        self._producer = open_producer(
            settings,
            client_id=f"onceflow.{context.sink_id}.{context.subtask}",
            transactional_id=None,
            troubles=self._troubles,
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Enqueue the records of `batch`. Blocks while the broker is slower than the rows arrive.

        Raises:
            BadRow: A row cannot be a record; names the reason.
            SinkError: A record, of this or of an earlier call, was refused.
        """
        doing = "rows were not written"
        self._require_open(doing, SinkError)
        if not batch.num_rows:
            return
        records = self._encoder.encode(batch)
        deadline = time.monotonic() + self._settings.transaction_timeout_s
        try:
            produce(
                cast("Produces", self._producer),
                records,
                deadline=deadline,
                on_delivery=self._on_delivery,
            )
        except (KafkaException, TimeoutError) as error:
            self._fail(doing, SinkError, error)
        self._raise_failure(doing, SinkError)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """Wait until all replicas in sync have every record; return nothing to commit.

        Raises:
            PreCommitFailed: Some records were not acknowledged within transaction_timeout_s.
        """
        doing = f"records before checkpoint {checkpoint} were not all acknowledged"
        self._require_open(doing, PreCommitFailed)
        # `flush` also processes delivery reports, so every failure is known when it returns.
        left = self._producer.flush(self._settings.transaction_timeout_s)
        self._raise_failure(doing, PreCommitFailed)
        if left:
            self._closed = True
            raise PreCommitFailed(
                f"{self._where}: {doing}: {left} are missing after transaction_timeout_s="
                f"{self._settings.transaction_timeout_s:g}: {self._troubles.last}"
            )
        return ()

    def close(self) -> None:
        """Drop the records that are not acknowledged."""
        if not self._closed:
            self._closed = True
            self._producer.purge(blocking=False)

    def _on_delivery(self, error: KafkaError | None, _: Message) -> None:
        # The first failure is the cause of the later ones.
        if error is not None and not self._failure:
            reason = hide_secrets(error.str(), self._settings.options)
            self._failure = f"{reason} ({error.name()}) {self._troubles.last}".strip()

    def _raise_failure(self, doing: str, kind: type[SinkError]) -> None:
        if self._failure:
            self.close()
            raise kind(f"{self._where}: {doing}: {self._failure}")

    def _fail(
        self, doing: str, kind: type[SinkError], error: KafkaException | TimeoutError
    ) -> None:
        self.close()
        text = (
            describe_error(error, self._settings)
            if isinstance(error, KafkaException)
            else str(error)
        )
        raise kind(f"{self._where}: {doing}: {text} {self._troubles.last}".strip()) from error


def _partition_counts(settings: KafkaSinkSettings) -> dict[str, int]:
    topics = Topics(open_brokers(settings)).wait_for(settings.topics)
    return {name: len(facts.partitions) for name, facts in topics.items()}
