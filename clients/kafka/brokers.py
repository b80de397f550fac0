"""The repetition of questions to brokers until a deadline, and the errors if no answer arrives.

The annotations of confluent-kafka are partly imprecise. This module has precise types for the part
of its admin client that is used.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from onceflow.clients.kafka import client
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

    from onceflow.clients.kafka.settings import TopicSettings

_Answer = TypeVar("_Answer")

ASK_S = 2.0
"""The time in seconds for one question. It is short, so that a refused password is noticed soon."""
_MARGIN_S = 1.0
"""The margin in seconds by which our timeout exceeds a request's own.

The request's error says more.
"""


class ClusterMetadata(Protocol):
    """The cluster's description of itself."""

    topics: Mapping[str, object]
    brokers: Mapping[int, object]


class ConfigEntry(Protocol):
    """A setting of a topic or a broker."""

    value: str | None


class GroupListing(Protocol):
    """A consumer group."""

    group_id: str


class GroupListings(Protocol):
    """The consumer groups of a cluster."""

    valid: Sequence[GroupListing]
    errors: Sequence[KafkaException]
    """The errors of brokers that did not list their groups."""


class GroupOffset(Protocol):
    """The offset and metadata that a group has committed for one partition."""

    topic: str
    partition: int
    metadata: str | None
    error: KafkaError | None


class CommittedOffsets(Protocol):
    """The offsets that a group has committed."""

    topic_partitions: Sequence[GroupOffset]


class Admin(Protocol):
    """The part of confluent-kafka's AdminClient that is used.

    Keep a reference to the client until its futures are done: a client that is garbage collected
    abandons them.
    """

    def list_topics(self, *, timeout: float) -> ClusterMetadata:
        """Return the brokers and topics that the broker knows."""
        ...

    def describe_topics(
        self, topics: TopicCollection, *, request_timeout: float
    ) -> Mapping[str, Future[TopicDescription]]:
        """Ask for the ids and partitions of topics. Returns one future for each topic."""
        ...

    def describe_cluster(self, *, request_timeout: float) -> Future[DescribeClusterResult]:
        """Ask for the cluster's id."""
        ...

    def create_topics(
        self, new_topics: Sequence[NewTopic], *, operation_timeout: float
    ) -> Mapping[str, Future[None]]:
        """Create topics. Returns one future for each topic."""
        ...

    def describe_configs(
        self, resources: Sequence[ConfigResource], *, request_timeout: float
    ) -> Mapping[ConfigResource, Future[Mapping[str, ConfigEntry]]]:
        """Ask for the current settings. Returns one future for each resource."""
        ...

    def list_offsets(
        self,
        topic_partition_offsets: dict[TopicPartition, OffsetSpec],
        *,
        isolation_level: IsolationLevel,
        request_timeout: float,
    ) -> Mapping[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Ask for offsets of partitions. Returns one future for each partition."""
        ...

    def list_consumer_groups(self, *, request_timeout: float) -> Future[GroupListings]:
        """Ask every broker for the groups that it coordinates and that the user may describe."""
        ...

    def describe_consumer_groups(
        self, group_ids: Sequence[str], *, request_timeout: float
    ) -> Mapping[str, Future[object]]:
        """Ask the coordinators for the states of groups. Returns one future for each group."""
        ...

    def list_consumer_group_offsets(
        self, groups: Sequence[ConsumerGroupTopicPartitions], *, request_timeout: float
    ) -> Mapping[str, Future[CommittedOffsets]]:
        """Ask for all offsets that one group has committed. Returns one future for each group."""
        ...

    def poll(self, timeout: float) -> int:
        """Run callbacks."""
        ...


def await_result(future: Future[_Answer], timeout_s: float) -> _Answer:
    """Return the result of a request that was given `timeout_s`.

    Raises:
        KafkaException: The request failed, or did not end.
    """
    try:
        # Wait longer than the request's own deadline, so that its error arrives first. It says more
        # than ours.
        return future.result(timeout_s + _MARGIN_S)
    except concurrent.futures.TimeoutError as error:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer")) from error


class Brokers:
    """A connection for questions to the brokers about topics. One thread uses it at a time."""

    def __init__(
        self,
        settings: TopicSettings,
        config: dict[str, Any],
        troubles: client.ClientTroubles,
        unavailable: type[OnceflowError],
    ) -> None:
        """Open the client; waits for no broker.

        Args:
            settings: The brokers' addresses, the topics and the deadline.
            config: The client's settings.
            troubles: The error callback in `config`.
            unavailable: The type of the error if no answer arrives before the deadline.

        Raises:
            ConfigError: librdkafka refuses a setting.
        """
        self.settings = settings
        self.troubles = troubles
        self.admin = cast("Admin", client.open_client(AdminClient, config, settings))
        self._unavailable = unavailable

    def ask(
        self, question: Callable[[float], _Answer], what: str, *, until: float | None = None
    ) -> _Answer:
        """Call `question(timeout_s)` until it returns, and return its result.

        Args:
            question: Makes one request. If it raises KafkaException, it is called again.
            what: The subject of the question, which errors name.
            until: The deadline, as a time of `time.monotonic`. None: the settings' deadline,
                counted from now.

        Raises:
            SettingsRefused: The brokers refuse the user, or do not permit the request.
            OnceflowError: No answer arrived in time. The type is `unavailable`.
        """
        backoff = self.begin(until)
        while True:
            try:
                return question(backoff.call_s(ASK_S))
            except KafkaException as error:
                self.pause(error, what, backoff)

    def begin(self, until: float | None) -> Backoff:
        """Return the backoff of one question; `until` as in `ask`."""
        return Backoff(
            until=time.monotonic() + self.settings.deadline_s if until is None else until
        )

    def pause(self, error: KafkaException, what: str, backoff: Backoff) -> None:
        """Wait until a question that failed with `error` may be repeated.

        Raises the errors of `ask`.
        """
        # This runs the error callback, the only place where a refused password is reported.
        self.admin.poll(0)
        # Check this before the error of the call: after a refused password, that is only a timeout.
        if self.troubles.authentication:
            raise client.make_login_error(self.settings, self.troubles.authentication)
        inner = client.error_of(error)
        if client.is_denied(inner.code()):
            raise client.make_access_error(self.settings, ", ".join(self.settings.topics))
        reason = client.describe_error(error, self.settings)
        if inner.name().endswith("AUTHORIZATION_FAILED"):
            raise SettingsRefused(f"{what}: {reason}")
        if not backoff.pause():
            raise self._unavailable(
                f"{what}: no answer within {self.settings.deadline_s:g} s:"
                f" {self.troubles.last or reason}. Check the address, the network and"
                " security.protocol"
            )
