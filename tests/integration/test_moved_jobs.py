"""A job moves by a savepoint, and its storage is deleted: what waited there for Kafka moves along.

A topic proves only the last commit of each subtask. The proofs of those before are in storage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.kafka_sink_kit import decided_ids_in
from tests.support.moved_job import assert_all_once, move_killed_job, move_stopped_job

from onceflow.core.spi import Sink
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import KafkaSink


@pytest.mark.parametrize(
    "move", [move_stopped_job, pytest.param(move_killed_job, marks=pytest.mark.slow)]
)
def test_records_in_kafka_are_there_once_though_the_job_moved_by_a_savepoint(
    tmp_path: Path,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    move: Callable[[Path, Sink, str], None],
) -> None:
    topic, servers = kafka_topic(2), onceflow_kafka.bootstrap_servers
    move(tmp_path, KafkaSink(servers, topic=topic, key="account"), f"m.{topic[-16:]}")
    assert_all_once(decided_ids_in(servers, topic))
