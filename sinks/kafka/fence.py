"""Who may write under a sink id: kept by Kafka as an offset of group `onceflow/<sink id>/owner`.

Kafka has no table to note it in. The offset's metadata hold the decision log and the attempt; it is
changed in transactions of one transactional id, so that of two claims at once one is fenced. It is
renewed while the job runs, because a broker forgets offsets that nobody commits any more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from confluent_kafka import KafkaException, Producer, TopicPartition

from onceflow.core.errors import ConfigError, Fenced, SinkError
from onceflow.core.spi import CommitterContext
from onceflow.sinks.fence import FenceOwner, check_fence
from onceflow.sinks.kafka.clients import (
    Isolation,
    committed_metadata,
    described,
    error_of,
    is_fenced,
    open_group_reader,
    open_producer,
    repeated,
)
from onceflow.sinks.kafka.settings import KafkaSinkSettings

RENEWED_EVERY_S = 6 * 3600.0
"""A quarter of the shortest retention that `open` accepts."""

_ADVICE = {
    "INVALID_TRANSACTION_TIMEOUT": "transaction_timeout_s is over the broker's"
    " transaction.max.timeout.ms: lower the one or raise the other",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "grant it: kafka-acls.sh --add --allow-principal"
    " User:<user> --operation Write --operation Describe --transactional-id onceflow/"
    " --resource-pattern-type prefixed",
    "GROUP_AUTHORIZATION_FAILED": "grant it: kafka-acls.sh --add --allow-principal User:<user>"
    " --operation Read --operation Describe --group onceflow/ --resource-pattern-type prefixed",
    "TOPIC_AUTHORIZATION_FAILED": "grant it: kafka-acls.sh --add --allow-principal User:<user>"
    " --operation Write --operation Read --operation Describe --topic <topic>",
}


def owner_group(sink_id: str) -> str:
    """Return the group whose offsets say who owns `sink_id`."""
    return f"onceflow/{sink_id}/owner"


class Fence:
    """The claim of one job, in one attempt, to one sink id."""

    def __init__(self, settings: KafkaSinkSettings, context: CommitterContext) -> None:
        self._settings = settings
        self._context = context
        self._name = owner_group(context.sink_id)
        self._renew_at_s = time.monotonic() + RENEWED_EVERY_S

    def claim(self) -> None:
        """Return when this attempt is the only one that may write under the sink id.

        Runs a whole transaction with an offset in it, which is also the proof that transactional
        ids, groups and topics of ours are permitted.

        Raises:
            ConfigError: Another job owns the sink id, or something is not permitted.
            Fenced: The same attempt or a newer one has claimed it.
            SinkError: Kafka cannot be asked now.
        """

        def admitted(owner: FenceOwner | None) -> bool:
            check_fence(
                self._context.sink_id,
                owner,
                self._owner,
                take_over="kafka-consumer-groups.sh --bootstrap-server"
                f" {self._settings.bootstrap_servers} --delete --group '{self._name}'",
            )
            return True

        self._write_if(admitted)

    def refresh(self) -> None:
        """Renew the claim when it is time; one that is a newer attempt's, or foreign, is left.

        Raises:
            SinkError: Kafka cannot be asked now.
        """
        if time.monotonic() >= self._renew_at_s:
            self._renew_at_s = time.monotonic() + RENEWED_EVERY_S
            self._write_if(lambda owner: owner is None or owner == self._owner)

    @property
    def _owner(self) -> FenceOwner:
        return FenceOwner(self._context.log_id, self._context.attempt, self._context.job)

    def _write_if(self, wanted: Callable[[FenceOwner | None], bool]) -> None:
        deadline = time.monotonic() + self._settings.deadline_s
        producer = open_producer(
            self._settings, client_id="onceflow-owner", transactional_id=self._name
        )
        reader = open_group_reader(self._settings, self._name, Isolation.DECIDED)
        try:
            # Whoever claims at the same time is fenced by this, or fences us.
            repeated(producer.init_transactions, deadline=deadline)
            texts = committed_metadata(reader, self._settings.topics, deadline=deadline)
            if wanted(newest_owner(texts)):
                group = cast("Any", reader).consumer_group_metadata()
                self._write(producer, group, deadline)
        except KafkaException as error:
            raise self._refused(error) from error
        except TimeoutError as error:
            raise SinkError(f"sink id {self._context.sink_id!r} is not claimed: {error}") from error
        finally:
            reader.close()

    def _write(self, producer: Producer, group: Any, deadline: float) -> None:
        text = json.dumps(
            {"log": self._owner.log_id, "attempt": self._owner.attempt, "job": self._owner.job}
        )
        offsets = [
            TopicPartition(topic, 0, self._owner.attempt, text) for topic in self._settings.topics
        ]

        def send(timeout_s: float) -> None:
            producer.send_offsets_to_transaction(offsets, group, timeout_s)

        producer.begin_transaction()
        repeated(send, deadline=deadline)
        repeated(producer.commit_transaction, deadline=deadline)

    def _refused(self, error: KafkaException) -> ConfigError | Fenced | SinkError:
        reason = described(error, self._settings)
        text = f"sink id {self._context.sink_id!r} cannot be claimed at {self._settings.where}"
        if is_fenced(error_of(error)):
            return Fenced(f"{text}: another attempt claims it at this moment: {reason}")
        advice = _ADVICE.get(error_of(error).name())
        return (
            ConfigError(f"{text}: {reason}; {advice}") if advice else SinkError(f"{text}: {reason}")
        )


def newest_owner(texts: Mapping[str, str]) -> FenceOwner | None:
    """Return the newest claim among the metadata of the owner group's offsets; None: no claim."""
    return max(map(_parsed, texts.values()), key=_attempt_of, default=None)


def _parsed(text: str) -> FenceOwner:
    found = json.loads(text)
    return FenceOwner(str(found["log"]), int(found["attempt"]), str(found["job"]))


def _attempt_of(owner: FenceOwner) -> int:
    return owner.attempt
