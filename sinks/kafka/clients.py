"""The clients of the sink: calls with reliable timeouts, and errors that last until a change.

A broker that starts, loads its groups, elects a leader or is away replies later by itself. A lane
that another committer has taken, or whose transaction is in a wrong state, is opened again by the
next try. So none of these errors is listed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from enum import Enum
from queue import SimpleQueue
from typing import Any, Final

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
    libversion,
)

from onceflow.clients.kafka import client
from onceflow.clients.kafka.brokers import ASK_S, Brokers
from onceflow.core.backoff import Backoff
from onceflow.core.errors import SinkError
from onceflow.core.spi.options import OptionValue
from onceflow.sinks.kafka.settings import TUNED_DEFAULTS, KafkaSinkSettings

_FORBIDDEN: Final[Mapping[str, str]] = {
    "INVALID_TRANSACTION_TIMEOUT": "transaction_timeout_s is over the broker's"
    " transaction.max.timeout.ms: lower transaction_timeout_s, or"
    " raise the broker's setting",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "grant it: kafka-acls.sh --add --allow-principal"
    " User:<user> --operation Write --operation Describe --transactional-id onceflow/"
    " --resource-pattern-type prefixed",
    "GROUP_AUTHORIZATION_FAILED": "grant it: kafka-acls.sh --add --allow-principal User:<user>"
    " --operation Read --operation Describe --group onceflow/ --resource-pattern-type prefixed",
    "TOPIC_AUTHORIZATION_FAILED": "grant it: kafka-acls.sh --add --allow-principal User:<user>"
    " --operation Write --operation Read --operation Describe --topic <topic>",
    "CLUSTER_AUTHORIZATION_FAILED": "grant it: kafka-acls.sh --add --allow-principal User:<user>"
    " --operation IdempotentWrite --cluster",
}
"""The advice by error name, for requests that the broker refuses."""

_REJECTED: Final[Mapping[str, str]] = {
    "MSG_SIZE_TOO_LARGE": "the topic's max.message.bytes was lowered after the records were"
    " staged: raise it",
    "RECORD_LIST_TOO_LARGE": "a batch of records is over the topic's segment.bytes: raise it",
    "INVALID_RECORD": "settings of the topic, such as cleanup.policy or message.timestamp.*,"
    " exclude records that are staged: change them",
    "INVALID_TIMESTAMP": "the topic's message.timestamp.* exclude records of now: change them",
    "POLICY_VIOLATION": "a policy of the broker excludes the records: change it",
    "UNSUPPORTED_FOR_MESSAGE_FORMAT": "the topic's message.format.version is too old: raise it",
    "UNSUPPORTED_COMPRESSION_TYPE": "the broker does not know the sink's compression.type: change"
    " it, and start the job again",
    "UNKNOWN_TOPIC_OR_PART": "a topic, or a partition of it, is gone: create it again",
    "_UNKNOWN_TOPIC": "the topic is gone: create it again, with as many partitions",
    "_UNKNOWN_PARTITION": "a partition of the topic is gone: give the topic as many as before",
}
"""The advice by error name, for records that the broker refuses."""


def advise_on_rights(error: KafkaError) -> str:
    """Return the statement or setting that makes the broker accept a refused request.

    Empty if the error has another cause.
    """
    return _FORBIDDEN.get(error.name(), "")


def advise(error: KafkaError) -> str:
    """Return the advice for a commit that fails by `error` until a person changes something.

    Empty if a later try may succeed by itself.
    """
    return _REJECTED.get(error.name()) or advise_on_rights(error)


def is_rejected(error: KafkaError) -> bool:
    """Return True if the broker refused records, so that their transaction was not ended."""
    return error.name() in _REJECTED


_SOCKET_TIMEOUT_MAX_S = 30.0
"""The longest wait for one reply; shorter if the transaction's timeout is short."""
_CALL_S = 5.0
"""The timeout of one call in a transaction; the call is repeated until the deadline if allowed."""
_GRACE_S = 5.0
"""The time that a call may exceed its timeout, for a machine with high load."""

_RECOVERY: Mapping[str, OptionValue] = (
    # A client that forgets all brokers when none replies may wait for ever in a later call; see
    # `BoundedCalls`.
    {"metadata.recovery.strategy": "none"} if libversion()[1] >= 0x020B0000 else {}
)
_TUNED_FOR_TRANSACTIONS: Mapping[str, OptionValue] = {
    **TUNED_DEFAULTS,
    # The rows of a checkpoint arrive at once and fill batches anyway. With a short linger the last
    # rows are sent while the commit offset is sent, and the end of the transaction need not wait
    # for them.
    "linger.ms": 2,
}
_FENCED_CODES = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
)


def open_producer(
    settings: KafkaSinkSettings,
    *,
    client_id: str,
    transactional_id: str | None,
    troubles: client.ClientTroubles | None = None,
) -> Producer:
    """Return a producer, which is always idempotent. Does not wait for any broker.

    Raises:
        ConfigError: librdkafka refuses a setting; names it.
    """
    tuned = TUNED_DEFAULTS if transactional_id is None else _TUNED_FOR_TRANSACTIONS
    config = _client_config(settings, client_id, troubles, tuned)
    timeout_ms = int(settings.transaction_timeout_s * 1000)
    # A record must not expire before its transaction: both end at the same time.
    config |= {"enable.idempotence": True, "acks": "all", "message.timeout.ms": timeout_ms}
    if transactional_id is not None:
        config |= {"transactional.id": transactional_id, "transaction.timeout.ms": timeout_ms}
    return client.open_client(Producer, config, settings)


class Isolation(Enum):
    """The broker's reply if a transaction over the requested offsets is open."""

    DECIDED = "read_committed"
    """It replies when that transaction has ended."""
    LAST = "read_uncommitted"
    """It replies at once with the last committed offsets. Despite the name, none are
    uncommitted."""


def open_group_reader(settings: KafkaSinkSettings, group: str, isolation: Isolation) -> Consumer:
    """Return a consumer that reads the committed offsets of `group`, and never subscribes."""
    config = _client_config(settings, group.replace("/", "."), None)
    config |= {"group.id": group, "isolation.level": isolation.value, "enable.auto.commit": False}
    return client.open_client(Consumer, config, settings)


def open_brokers(settings: KafkaSinkSettings) -> Brokers:
    """Return a client for queries and creations. Does not wait for any broker.

    Raises:
        ConfigError: librdkafka refuses a setting; names it.
    """
    troubles = client.ClientTroubles(settings)
    config = _client_config(settings, "onceflow-check", troubles)
    return Brokers(settings, config, troubles, SinkError)


def read_committed_metadata(
    reader: Consumer, topics: Sequence[str], *, deadline: float
) -> Mapping[str, str]:
    """Return, by topic, the metadata that the reader's group has committed with partition 0.

    Raises:
        KafkaException: There was no reply before `deadline` (of `time.monotonic`), or the broker
            forbids it.
    """
    asked = [TopicPartition(topic, 0) for topic in topics]
    backoff = Backoff(until=deadline)
    while True:
        try:
            partitions = reader.committed(asked, timeout=backoff.call_s(ASK_S))
            # A reply with an error for a single partition counts as no reply.
            failed = next(
                (partition.error for partition in partitions if partition.error is not None), None
            )
            if failed is None:
                return {
                    partition.topic: partition.metadata
                    for partition in partitions
                    if partition.metadata
                }
            raise KafkaException(failed)
        except KafkaException as error:
            # A broker that has just started may still be loading its groups.
            if advise_on_rights(client.error_of(error)) or not backoff.pause():
                raise


class BoundedCalls:
    """A thread that calls a client, because a call's own timeout is not reliable.

    librdkafka (2.10 to 2.16 at least) waits for ever in `send_offsets_to_transaction` if the
    group's coordinator is a broker that was dropped from the metadata since it was last asked. One
    thread serves all calls, because starting a thread takes as long as a call.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call_repeatedly(self, call: Callable[[float], object], *, deadline: float) -> None:
        """Call `call(timeout_s)`; repeat it after each error that Kafka calls retriable.

        Raises:
            KafkaException: The error is not retriable, or `deadline` (of `time.monotonic`) is over.
            TimeoutError: As `call`.
        """
        # Each try is short, so that `deadline` is checked; librdkafka continues where it was.
        backoff = Backoff(until=deadline)
        while True:
            try:
                self.call(call, backoff.call_s(_CALL_S))
                return
            except KafkaException as error:
                if not client.error_of(error).retriable() or not backoff.pause():
                    raise

    def call(self, call: Callable[[float], object], timeout_s: float) -> None:
        """Call `call(timeout_s)`.

        Raises:
            TimeoutError: `call` has not returned long after its timeout. It still occupies the
                thread, so neither the client nor this object can be used any more.
        """
        raised: list[BaseException] = []
        returned = threading.Event()

        def run() -> None:
            try:
                call(timeout_s)
            except BaseException as error:
                raised.append(error)
            finally:
                returned.set()

        if self._thread is None:
            # A daemon thread: a call that never returns must not keep the process alive.
            self._thread = threading.Thread(
                target=self._serve, name="onceflow-kafka-call", daemon=True
            )
            self._thread.start()
        self._waiting.put(run)
        if not returned.wait(timeout_s + _GRACE_S):
            raise TimeoutError(
                f"the Kafka client has not returned {_GRACE_S:g} s after its timeout of"
                f" {timeout_s:g} s; it is abandoned and another client is opened"
            )
        if raised:
            raise raised[0]

    def close(self) -> None:
        """End the thread once its present call has returned. May be called twice."""
        self._waiting.put(None)

    def _serve(self) -> None:
        while (run := self._waiting.get()) is not None:
            run()


def call_repeatedly(call: Callable[[float], object], *, deadline: float) -> None:
    """Call `call` by a `BoundedCalls` of its own; see `BoundedCalls.call_repeatedly`."""
    with closing(BoundedCalls()) as calls:
        calls.call_repeatedly(call, deadline=deadline)


def is_fenced(error: KafkaError) -> bool:
    """Return True if another producer of the same transactional id has taken over."""
    return error.code() in _FENCED_CODES


def _client_config(
    settings: KafkaSinkSettings,
    client_id: str,
    troubles: client.ClientTroubles | None,
    tuned: Mapping[str, OptionValue] = TUNED_DEFAULTS,
) -> dict[str, Any]:
    # Half of the timeout, so that a lost request can be sent again within the transaction.
    socket_s = min(_SOCKET_TIMEOUT_MAX_S, settings.transaction_timeout_s / 2)
    defaults = {**tuned, **_RECOVERY, "socket.timeout.ms": int(socket_s * 1000)}
    return client.client_config(settings, client_id, defaults, troubles)
