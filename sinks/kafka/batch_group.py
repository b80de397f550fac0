"""The notes in Kafka of a topic's numbered batches, so that readers need no other files.

Group `onceflow/<sink id>/batches` stores the note as the metadata of offsets, as the owner's group
stores the claim. The note is written in transactions of the owner's transactional id, and only
under the newest claim. So a note is written before a newer claim, or not at all.

A broker forgets the offsets of an unused group (`offsets.retention.minutes`, a week by default).
"""

from __future__ import annotations

import json
import time
from typing import Any, cast

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition
from typing_extensions import override

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError, Fenced, SinkError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import NO_ATTEMPT
from onceflow.core.spi import CommitterContext
from onceflow.core.spi.batch_decisions import BatchNotes, NotedBatches
from onceflow.sinks.kafka import clients
from onceflow.sinks.kafka.fence import owner_group, refusal
from onceflow.sinks.kafka.settings import KafkaSinkSettings


class _Note(msgspec.Struct, frozen=True):
    attempt: int
    begun: int | None
    written: tuple[int, ...]


class KafkaBatchNotes(BatchNotes):
    """The note of one sink id. Connects for each call."""

    def __init__(self, settings: KafkaSinkSettings, context: CommitterContext) -> None:
        """Ask nothing yet."""
        self._settings = settings
        self._sink_id, self._log_id = context.sink_id, context.log_id
        self._group = f"onceflow/{context.sink_id}/batches"

    @override
    def read(self) -> NotedBatches:
        deadline = time.monotonic() + self._settings.deadline_s
        owner, notes = self._reader(owner_group(self._sink_id)), self._reader(self._group)
        try:
            return NotedBatches(
                self._newest_claim(owner, deadline), *self._read_notes(notes, deadline)
            )
        except KafkaException as error:
            raise self._to_error(error, "read") from error
        finally:
            owner.close()
            notes.close()

    @override
    def write(self, attempt: AttemptId, *, begun: int | None, written: tuple[int, ...]) -> None:
        deadline = time.monotonic() + self._settings.deadline_s
        name = owner_group(self._sink_id)
        producer = clients.open_producer(
            self._settings, client_id="onceflow-batches", transactional_id=name
        )
        owner, notes = self._reader(name), self._reader(self._group)
        try:
            # A process that claims at the same time is fenced by this call, or fences this one.
            clients.call_repeatedly(producer.init_transactions, deadline=deadline)
            # Read after the fence, so that no claim can come between this read and the commit
            # below.
            newest = self._newest_claim(owner, deadline)
            if newest != attempt:
                raise Fenced(
                    f"sink id {self._sink_id!r}: attempt {attempt} is fenced: attempt {newest} of"
                    f" another run has claimed the sink id at {self._settings.where}; leave the"
                    " writing to that run"
                )
            text = msgspec.json.encode(_Note(attempt, begun, written)).decode()
            offsets = [TopicPartition(topic, 0, attempt, text) for topic in self._settings.topics]
            group: Any = cast("Any", notes).consumer_group_metadata()
            producer.begin_transaction()
            clients.call_repeatedly(
                lambda wait_s: producer.send_offsets_to_transaction(offsets, group, wait_s),
                deadline=deadline,
            )
            clients.call_repeatedly(producer.commit_transaction, deadline=deadline)
        except KafkaException as error:
            raise self._to_error(error, "noted") from error
        except TimeoutError as error:
            raise SinkError(f"sink id {self._sink_id!r}: {error}") from error
        finally:
            owner.close()
            notes.close()

    def _reader(self, group: str) -> Consumer:
        return clients.open_group_reader(self._settings, group, clients.Isolation.DECIDED)

    def _newest_claim(self, owner: Consumer, deadline: float) -> AttemptId:
        texts = clients.read_committed_metadata(owner, self._settings.topics, deadline=deadline)
        claims = [json.loads(text) for text in texts.values()]
        ours = [int(claim["attempt"]) for claim in claims if claim["log"] == self._log_id]
        return AttemptId(max(ours, default=NO_ATTEMPT))

    def _read_notes(self, notes: Consumer, deadline: float) -> tuple[int | None, tuple[int, ...]]:
        texts = clients.read_committed_metadata(notes, self._settings.topics, deadline=deadline)
        recorded = [json_decoder(_Note).decode(text) for text in texts.values()]
        newest = max(recorded, key=lambda note: note.attempt, default=_Note(0, None, ()))
        return newest.begun, newest.written

    def _to_error(self, error: KafkaException, doing: str) -> ConfigError | Fenced | SinkError:
        text = f"sink id {self._sink_id!r}: its batches are not {doing} at {self._settings.where}"
        return refusal(error, self._settings, text)
