"""Questions to brokers, each repeated until a deadline, and what it means that none is answered.

confluent-kafka's own annotations are loose at some edges; what is used of its admin client is typed
here.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from onceflow.connectors.kafka.client import (
    ClientTroubles,
    describe_error,
    error_of,
    is_denied,
    make_access_error,
    make_login_error,
    open_client,
)
from onceflow.core.backoff import Backoff
from onceflow.core.errors import OnceflowError, SettingsRefused

if TYPE_CHECKING:
    from confluent_kafka import (
        ConsumerGroupTopicPartitions,
        IsolationLevel,
        TopicCollection,
        TopicPartition,
    )
    from confluent_kafka.admin._cluster import DescribeClusterResult
    from confluent_kafka.admin._config import ConfigResource
    from confluent_kafka.admin._listoffsets import ListOffsetsResultInfo, OffsetSpec
    from confluent_kafka.admin._topic import TopicDescription
    from confluent_kafka.cimpl import NewTopic

    from onceflow.connectors.kafka.settings import TopicSettings

_Answer = TypeVar("_Answer")

ASK_S = 2.0
"""One question to the broker; short, so that a refused password is noticed between two of them."""
_MARGIN_S = 1.0
"""A request's own deadline, whose error says more, comes this much before ours."""


class ClusterMetadata(Protocol):
    """What the cluster says of itself."""

    topics: Mapping[str, object]
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
    """The errors of brokers that did not list their groups."""


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
    """The part of confluent-kafka's AdminClient that is used.

    Hold it by a name until its futures are done: one that is collected gives them up.
    """

    def list_topics(self, *, timeout: float) -> ClusterMetadata:
        """Return brokers and topics as the broker knows them."""
        ...

    def describe_topics(
        self, topics: TopicCollection, *, request_timeout: float
    ) -> Mapping[str, Future[TopicDescription]]:
        """Ask for ids and partitions of topics; one future each."""
        ...

    def describe_cluster(self, *, request_timeout: float) -> Future[DescribeClusterResult]:
        """Ask for the cluster's id."""
        ...

    def create_topics(
        self, new_topics: Sequence[NewTopic], *, operation_timeout: float
    ) -> Mapping[str, Future[None]]:
        """Create topics; one future each."""
        ...

    def describe_configs(
        self, resources: Sequence[ConfigResource], *, request_timeout: float
    ) -> Mapping[ConfigResource, Future[Mapping[str, ConfigEntry]]]:
        """Ask for the settings in force; one future each."""
        ...

    def list_offsets(
        self,
        topic_partition_offsets: dict[TopicPartition, OffsetSpec],
        *,
        isolation_level: IsolationLevel,
        request_timeout: float,
    ) -> Mapping[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Ask for offsets of partitions; one future each."""
        ...

    def list_consumer_groups(self, *, request_timeout: float) -> Future[GroupListings]:
        """Ask every broker for the groups that it coordinates and we may describe."""
        ...

    def list_consumer_group_offsets(
        self, groups: Sequence[ConsumerGroupTopicPartitions], *, request_timeout: float
    ) -> Mapping[str, Future[CommittedOffsets]]:
        """Ask for what one group has committed, with every partition; one future each."""
        ...

    def poll(self, timeout: float) -> int:
        """Serve callbacks."""
        ...


def await_result(future: Future[_Answer], timeout_s: float) -> _Answer:
    """Return the result of a request that was given `timeout_s`.

    Raises:
        KafkaException: It failed, or did not end.
    """
    try:
        # Longer than the request's own deadline, so that its error arrives first: that says more
        # than ours.
        return future.result(timeout_s + _MARGIN_S)
    except concurrent.futures.TimeoutError as error:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer")) from error


class Brokers:
    """A connection to ask the brokers about topics; used by one thread at a time."""

    def __init__(
        self,
        settings: TopicSettings,
        config: dict[str, Any],
        troubles: ClientTroubles,
        unavailable: type[OnceflowError],
    ) -> None:
        """Open the client; waits for no broker.

        Args:
            settings: Where the brokers are, which topics are meant, and the deadline.
            config: Of the client.
            troubles: The error callback of `config`.
            unavailable: Raised where no answer comes in time.

        Raises:
            ConfigError: librdkafka refuses a setting.
        """
        self.settings = settings
        self.troubles = troubles
        self.admin = cast("Admin", open_client(AdminClient, config, settings))
        self._unavailable = unavailable

    def ask(
        self, question: Callable[[float], _Answer], what: str, *, until: float | None = None
    ) -> _Answer:
        """Return what `question(timeout_s)` returns, asked again until it does.

        Args:
            question: Raises KafkaException where it is to be asked again.
            what: Is asked about, for errors.
            until: A time of `time.monotonic`; None: the deadline of the settings, from now on.

        Raises:
            SettingsRefused: The brokers refuse who we are, or forbid it.
            OnceflowError: No answer came in time; it is `unavailable`.
        """
        backoff = self.begin(until)
        while True:
            try:
                return question(backoff.call_s(ASK_S))
            except KafkaException as error:
                self.pause(error, what, backoff)

    def begin(self, until: float | None) -> Backoff:
        """Return the tries of one question; `until` as in `ask`."""
        return Backoff(
            until=time.monotonic() + self.settings.deadline_s if until is None else until
        )

    def pause(self, error: KafkaException, what: str, backoff: Backoff) -> None:
        """Wait until a question that failed by `error` may be asked again. Raises as `ask`."""
        # Serves the error callback, which alone hears of a refused password.
        self.admin.poll(0)
        # Before the error of the call, which is a mere timeout when the password is refused.
        if self.troubles.authentication:
            raise make_login_error(self.settings, self.troubles.authentication)
        inner = error_of(error)
        if is_denied(inner.code()):
            raise make_access_error(self.settings, ", ".join(self.settings.topics))
        reason = describe_error(error, self.settings)
        if inner.name().endswith("AUTHORIZATION_FAILED"):
            raise SettingsRefused(f"{what}: {reason}")
        if not backoff.pause():
            raise self._unavailable(
                f"{what}: no answer within {self.settings.deadline_s:g} s:"
                f" {self.troubles.last or reason}. Check the address, the network and"
                " security.protocol"
            )
