"""The errors of Kafka that last until a person changes something, with the change.

A broker that starts, loads its groups, elects a leader or is away replies later by itself. A lane
that another committer has taken, or whose transaction is in a wrong state, is opened again by the
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
"""The advice by error name, for requests that the broker refuses."""

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
"""The advice by error name, for records that the broker refuses."""


def advise_on_rights(error: KafkaError) -> str:
    """Return the right or setting that the broker requires for the sink's requests.

    Empty if none.
    """
    return _FORBIDDEN.get(error.name(), "")


def advise(error: KafkaError) -> str:
    """Return the change by a person without which a commit that failed by `error` cannot succeed.

    Empty if a later try may succeed by itself.
    """
    return _REJECTED.get(error.name()) or advise_on_rights(error)


def is_rejected(error: KafkaError) -> bool:
    """Return True if the broker refused records, so that their transaction was not ended."""
    return error.name() in _REJECTED
