"""How Kafka clients are opened here, and what their errors mean.

confluent-kafka's own annotations are loose at some edges; what the sink uses of them is typed here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, Protocol, TypeVar, cast

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
    libversion,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewTopic

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.retries import Retries
from onceflow.core.spi.client_options import OptionValue
from onceflow.sinks.kafka.settings import RULES, TUNED_DEFAULTS, KafkaSinkSettings

_T = TypeVar("_T")
_SOCKET_TIMEOUT_MAX_S = 30.0
_ASK_S = 2.0
"""One question to the broker; short, so that a refused password is noticed between two of them."""
_CALL_S = 5.0
"""One call into a transaction; repeated until the deadline while it may be."""
_GRACE_S = 5.0
"""How much longer than its timeout a call may take, on a machine that has much to do."""

_RECOVERY: Mapping[str, OptionValue] = (
    # Forgetting all brokers when none answers makes a later call wait for ever; see `bounded`.
    {"metadata.recovery.strategy": "none"} if libversion()[1] >= 0x020B0000 else {}
)
_FENCED_CODES = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
)
_AUTHENTICATION_CODES = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
    }
)


class TopicMetadata(Protocol):
    """What the cluster says of one topic."""

    partitions: Mapping[int, object]
    error: KafkaError | None


class ClusterMetadata(Protocol):
    """What the cluster says of itself."""

    topics: Mapping[str, TopicMetadata]
    brokers: Mapping[int, object]


class ConfigEntry(Protocol):
    """One setting of a topic or a broker."""

    value: str | None


class GroupListing(Protocol):
    """One consumer group."""

    group_id: str


class GroupListings(Protocol):
    """The consumer groups of a cluster."""

    valid: Sequence[GroupListing]
    errors: Sequence[KafkaException]
    """Of brokers that did not tell theirs."""


class GroupOffset(Protocol):
    """What a group has committed with one partition."""

    topic: str
    partition: int
    metadata: str | None
    error: KafkaError | None


class CommittedOffsets(Protocol):
    """What a group has committed."""

    topic_partitions: Sequence[GroupOffset]


class Admin(Protocol):
    """The part of confluent-kafka's AdminClient that the sink uses.

    Hold it by a name until its futures are done: one that is collected gives them up.
    """

    def list_topics(self, topic: str | None = ..., *, timeout: float) -> ClusterMetadata:
        """Return brokers and topics as the broker knows them."""
        ...

    def create_topics(
        self, new_topics: Sequence[NewTopic], *, operation_timeout: float
    ) -> dict[str, Future[None]]:
        """Create topics; one future each."""
        ...

    def describe_configs(
        self, resources: Sequence[ConfigResource], *, request_timeout: float
    ) -> dict[ConfigResource, Future[dict[str, ConfigEntry]]]:
        """Ask for the settings in force; one future each."""
        ...

    def list_consumer_groups(self, *, request_timeout: float) -> Future[GroupListings]:
        """Ask every broker for the groups that it coordinates and we may describe."""
        ...

    def list_consumer_group_offsets(
        self, groups: Sequence[ConsumerGroupTopicPartitions], *, request_timeout: float
    ) -> dict[str, Future[CommittedOffsets]]:
        """Ask for what one group has committed, with every partition; one future each."""
        ...

    def poll(self, timeout: float) -> int:
        """Serve callbacks."""
        ...


class Troubles:
    """Remembers what a client reported last; given to it as its error callback."""

    def __init__(self, settings: KafkaSinkSettings) -> None:
        self._settings = settings
        self.last = ""
        self.authentication = ""

    def note(self, error: KafkaError) -> None:
        """Remember `error`, without secrets."""
        self.last = RULES.without_secrets(error.str(), self._settings.options)
        if error.code() in _AUTHENTICATION_CODES:
            self.authentication = self.last


def open_producer(
    settings: KafkaSinkSettings,
    *,
    client_id: str,
    transactional_id: str | None,
    troubles: Troubles | None = None,
) -> Producer:
    """Return a producer, idempotent always. Does not wait for any broker.

    Raises:
        ConfigError: librdkafka refuses a setting; names it.
    """
    config = _client_config(settings, client_id, troubles)
    timeout_ms = int(settings.transaction_timeout_s * 1000)
    config |= {"enable.idempotence": True, "acks": "all", "message.timeout.ms": timeout_ms}
    if transactional_id is not None:
        config |= {"transactional.id": transactional_id, "transaction.timeout.ms": timeout_ms}
    return _opened(settings, lambda: Producer(config))


class Isolation(Enum):
    """What the broker does when a transaction over the offsets asked for is open."""

    DECIDED = "read_committed"
    """It answers when that one is ended."""
    LAST = "read_uncommitted"
    """It answers at once with what was committed before; nothing uncommitted, despite its name."""


def open_group_reader(settings: KafkaSinkSettings, group: str, isolation: Isolation) -> Consumer:
    """Return a consumer that reads what `group` has committed, and is never subscribed."""
    config = _client_config(settings, group.replace("/", "."), None)
    config |= {"group.id": group, "isolation.level": isolation.value, "enable.auto.commit": False}
    return _opened(settings, lambda: Consumer(config))


def open_admin(settings: KafkaSinkSettings, troubles: Troubles) -> Admin:
    """Return a client that asks and creates."""
    config = _client_config(settings, "onceflow-check", troubles)
    return cast("Admin", _opened(settings, lambda: AdminClient(config)))


def committed_metadata(
    reader: Consumer, topics: Sequence[str], *, deadline: float
) -> Mapping[str, str]:
    """Return, by topic, the text that the reader's group has committed with partition 0.

    Raises:
        KafkaException: There was no answer before `deadline` (of `time.monotonic`).
    """
    asked = [TopicPartition(topic, 0) for topic in topics]
    retries = Retries(until=deadline)
    while True:
        try:
            found = reader.committed(asked, timeout=retries.call_s(_ASK_S))
            failed = next((one.error for one in found if one.error is not None), None)
            if failed is None:
                return {one.topic: one.metadata for one in found if one.metadata}
            raise KafkaException(failed)
        except KafkaException:
            # A broker that has just started is still loading its groups.
            if not retries.pause():
                raise


def repeated(call: Callable[[float], object], *, deadline: float) -> None:
    """Return when `call(timeout_s)` has; it is made again while Kafka says that it may be.

    Raises:
        KafkaException: It failed for good, or once more after `deadline` (of `time.monotonic`).
        TimeoutError: As `bounded`.
    """
    retries = Retries(until=deadline)
    while True:
        try:
            bounded(call, retries.call_s(_CALL_S))
            return
        except KafkaException as error:
            if not error_of(error).retriable() or not retries.pause():
                raise


def bounded(call: Callable[[float], object], timeout_s: float) -> None:
    """Return when `call(timeout_s)` has, whose own timeout cannot be relied on.

    librdkafka (2.10 to 2.16 at least) waits for ever in `send_offsets_to_transaction` when the
    group's coordinator is a broker that was dropped from the metadata since it was last asked.

    Raises:
        TimeoutError: It has not returned long after its timeout. It goes on in its own thread, and
            the client is good for nothing more.
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

    threading.Thread(target=run, name="onceflow-kafka-call", daemon=True).start()
    if not returned.wait(timeout_s + _GRACE_S):
        raise TimeoutError(
            f"the Kafka client has not returned {_GRACE_S:g} s after its timeout of"
            f" {timeout_s:g} s; it is left behind and another one is opened"
        )
    if raised:
        raise raised[0]


def error_of(error: KafkaException) -> KafkaError:
    """Return the error inside `error`."""
    inner = error.args[0] if error.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(error))


def described(error: KafkaException, settings: KafkaSinkSettings) -> str:
    """Return what Kafka said, with its code and without secrets."""
    inner = error_of(error)
    return f"{RULES.without_secrets(inner.str(), settings.options)} ({inner.name()})"


def is_fenced(error: KafkaError) -> bool:
    """Return whether another producer of the same transactional id has taken over."""
    return error.code() in _FENCED_CODES


def answered(
    settings: KafkaSinkSettings, troubles: Troubles, ask: Callable[[float], _T], what: str
) -> _T:
    """Return what `ask(timeout_s)` returns, asked again until the sink's deadline.

    Raises:
        ConfigError: The broker refuses who we are, or forbids it.
        SinkError: No answer came in time.
    """
    retries = Retries(until=time.monotonic() + settings.deadline_s)
    while True:
        try:
            return ask(retries.call_s(_ASK_S))
        except KafkaException as error:
            reason = described(error, settings)
            code = error_of(error).name()
        if troubles.authentication:
            raise ConfigError(
                f"Kafka at {settings.bootstrap_servers} refuses to authenticate this client:"
                f" {troubles.authentication}. Check security.protocol, mechanism, user and password"
            )
        if code.endswith("AUTHORIZATION_FAILED"):
            raise ConfigError(f"{what}: {reason}")
        if not retries.pause():
            raise SinkError(
                f"{what}: no answer within {settings.deadline_s:g} s:"
                f" {troubles.last or reason}. Check the address, the network and security.protocol"
            )


def _client_config(
    settings: KafkaSinkSettings, client_id: str, troubles: Troubles | None
) -> dict[str, Any]:
    socket_s = min(_SOCKET_TIMEOUT_MAX_S, settings.transaction_timeout_s / 2)
    config: dict[str, OptionValue | object] = {
        **TUNED_DEFAULTS,
        **_RECOVERY,
        "socket.timeout.ms": int(socket_s * 1000),
        **RULES.resolved(settings.options),
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": client_id,
    }
    if troubles is not None:
        config["error_cb"] = troubles.note
    return config


def _opened(settings: KafkaSinkSettings, construct: Callable[[], _T]) -> _T:
    try:
        return construct()
    except KafkaException as error:
        raise ConfigError(
            f"the Kafka client refuses its settings: {described(error, settings)}. Options carry"
            " librdkafka's names; see its CONFIGURATION.md"
        ) from None
