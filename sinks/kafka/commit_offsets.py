"""The commit offsets of all lanes of a sink id, read without fencing any process.

A removed subtask, or a topic that is no longer written to, leaves its commit offset behind. So
brokers are asked for all lanes, and for the offsets of all topics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException

from onceflow.clients.kafka.brokers import Admin, await_result
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.kafka.clients import open_brokers
from onceflow.sinks.kafka.settings import KafkaSinkSettings
from onceflow.sinks.kafka.transactional_lane import lane_name, proven


def last_commits(settings: KafkaSinkSettings, sink_id: str, log_id: str) -> Sequence[TransactionId]:
    """Return the last transaction of each lane and topic, of the job with that decision log.

    Raises:
        ConfigError: The query is not permitted.
        SinkError: No broker replied in time.
    """
    brokers = open_brokers(settings)
    groups = brokers.ask(
        partial(_list_groups, brokers.admin), f"consumer groups of {settings.where}"
    )
    # The name of lane 0 without its number, then any number.
    lane = re.compile(re.escape(lane_name(sink_id, 0)[:-1]) + r"\d+")
    texts = [read_texts(settings, group).values() for group in groups if lane.fullmatch(group)]
    return proven(chain.from_iterable(texts), log_id)


def read_texts(settings: KafkaSinkSettings, group: str) -> Mapping[str, str]:
    """Return by topic the metadata that `group` has committed with partition 0.

    Empty if no such group.

    Raises:
        ConfigError: The query is not permitted.
        SinkError: No broker replied in time.
    """
    brokers = open_brokers(settings)
    what = f"offsets of group {group} at {settings.where}"
    return brokers.ask(partial(_ask_texts, brokers.admin, group), what)


def _list_groups(admin: Admin, timeout_s: float) -> Sequence[str]:
    listing = await_result(admin.list_consumer_groups(request_timeout=timeout_s), timeout_s)
    for error in listing.errors:  # a broker that did not list its own groups
        raise error
    return [group.group_id for group in listing.valid]


def _ask_texts(admin: Admin, group: str, timeout_s: float) -> Mapping[str, str]:
    # First ask for the group. librdkafka 2.16 ends the process by SIGSEGV if a broker answers the
    # question for offsets by "not coordinator", for example right after it has started (librdkafka
    # issue 5040). This question fails instead, and is repeated until a coordinator answers.
    await_result(
        admin.describe_consumer_groups([group], request_timeout=timeout_s)[group], timeout_s
    )
    asked = [ConsumerGroupTopicPartitions(group)]
    futures = admin.list_consumer_group_offsets(asked, request_timeout=timeout_s)
    partitions = await_result(futures[group], timeout_s).topic_partitions
    for partition in partitions:
        if partition.error is not None:
            raise KafkaException(partition.error)
    return {
        partition.topic: partition.metadata
        for partition in partitions
        if partition.metadata and not partition.partition
    }
