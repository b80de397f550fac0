"""A job moves by a savepoint, and its storage is deleted: what waited there for Kafka moves along.

A topic proves only the last commit of each subtask. The proofs of those before are in storage.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.kafka_sink_kit import decided_ids_in, delete_group
from tests.support import moved_job

from onceflow.core.spi import Sink
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import KafkaSink


@pytest.mark.parametrize(
    "move",
    [moved_job.move_stopped_job, pytest.param(moved_job.move_killed_job, marks=pytest.mark.slow)],
)
def test_records_in_kafka_are_there_once_though_the_job_moved_by_a_savepoint(
    tmp_path: Path,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    move: Callable[[Path, Sink, str], None],
) -> None:
    topic, servers = kafka_topic(2), onceflow_kafka.bootstrap_servers
    move(tmp_path, KafkaSink(servers, topic=topic, key="account"), f"m.{topic[-16:]}")
    moved_job.assert_all_once(decided_ids_in(servers, topic))


def test_a_stopped_job_moves_though_the_brokers_have_forgotten_its_commits(
    tmp_path: Path, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    """The savepoint has the proofs of the last commits, which brokers keep for a week."""
    topic, servers = kafka_topic(2), onceflow_kafka.bootstrap_servers
    sink, sink_id = KafkaSink(servers, topic=topic, key="account"), f"m.{topic[-16:]}"
    job = moved_job.copy_job(tmp_path / "old", sink, sink_id).start()
    job.wait_for(checkpoints=3)
    savepoint = job.stop(60, savepoint=str(tmp_path / "kept")).savepoints[-1].place
    shutil.rmtree(tmp_path / "old")
    for subtask in (0, 1):
        delete_group(servers, f"onceflow/{sink_id}/{subtask}")
    moved_job.go_on(moved_job.copy_job(tmp_path / "new", sink, sink_id), savepoint)
    moved_job.assert_all_once(decided_ids_in(servers, topic))
