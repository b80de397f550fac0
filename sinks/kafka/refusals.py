"""Tells errors of Kafka that last until a person changes something, and what to change.

A broker that starts, loads its groups, elects a leader or is away answers later by itself. A lane
that another committer has taken, or whose transaction is in a wrong state, is opened anew by the
next try. So none of these errors is listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from confluent_kafka import KafkaError

_FORBIDDEN: Final[Mapping[str, str]] = {
    "INVALID_TRANSACTION_TIMEOUT": "transaction_timeout_s is over the broker's"
    " transaction.max.timeout.ms: lower the one or raise the other",
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
"""Advice by the name of the error, for requests that the broker does not accept from the sink."""

_REJECTED: Final[Mapping[str, str]] = {
    "MSG_SIZE_TOO_LARGE": "the topic takes smaller records than when they were staged: raise its"
    " max.message.bytes",
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
"""Advice by the name of the error, for records that the broker does not take."""


def advise_on_rights(error: KafkaError) -> str:
    """Return what to grant or set if the broker does not accept the sink's requests; or nothing."""
    return _FORBIDDEN.get(error.name(), "")


def advise(error: KafkaError) -> str:
    """Return what a person must change before a commit that failed by `error` can succeed.

    It is empty if a later try may succeed by itself.
    """
    return _REJECTED.get(error.name()) or advise_on_rights(error)


def is_rejected(error: KafkaError) -> bool:
    """Return whether the broker did not take records: their transaction was not ended then."""
    return error.name() in _REJECTED
