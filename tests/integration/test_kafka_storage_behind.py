"""Kafka tells what it has committed: a start from storage that is behind it is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.integration.kafka_sink_kit import KafkaJob, decided_ids_in, delete_group
from tests.support import moving_job
from tests.support.clusters import AnyCluster

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka import fence


@dataclass(frozen=True)
class KafkaTarget:
    """A topic, as consumers see it that read what is committed."""

    servers: str
    topic: str

    def sink(self) -> KafkaSink:
        return KafkaSink(self.servers, topic=self.topic)

    def ids(self) -> list[int]:
        return decided_ids_in(self.servers, self.topic)


@pytest.fixture
def moving(
    cluster: AnyCluster, tmp_path: Path, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> moving_job.MovingJob:
    topic = kafka_topic()
    target = KafkaTarget(onceflow_kafka.bootstrap_servers, topic)
    return moving_job.MovingJob(cluster, tmp_path, target, f"m.{topic[-16:]}")


def test_an_older_copy_of_the_storage_is_refused_at_every_try_by_what_is_in_the_topic(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.refuse_an_older_copy(moving)


def test_a_savepoint_that_is_older_than_the_topic_is_refused_at_every_try(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.refuse_an_older_savepoint(moving)


@pytest.mark.slow
def test_a_job_that_writes_to_kafka_moves_from_storage_to_storage_and_back(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.go_there_and_back(moving)


def test_another_storage_of_a_job_that_writes_to_kafka_is_named_and_no_remedy_doubles_a_row(
    moving: moving_job.MovingJob,
) -> None:
    moving_job.refuse_empty_storage(moving)


@pytest.fixture
def job(onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path) -> KafkaJob:
    topic = kafka_topic()
    sink = KafkaSink(onceflow_kafka.bootstrap_servers, topic=topic)
    return KafkaJob(sink, directory=tmp_path, sink_id=f"r.{topic[-16:]}")


def record_of(job: KafkaJob) -> TargetRecord | None:
    return job.sink.target_record(job.committer_context(attempt=9))


def test_the_last_commits_of_all_subtasks_tell_also_of_those_that_are_gone(job: KafkaJob) -> None:
    with job, KafkaJob(job.sink, directory=job.directory, sink_id=f"{job.sink_id}x") as other:
        assert record_of(job) is None
        job.check()
        assert record_of(job) == TargetRecord(job.sink_id, AttemptId(1), proves_each=False)
        for subtask, checkpoint in ((0, 1), (12, 2), (0, 3)):
            committer = job.committer()
            assert committer.commit(job.prepare(checkpoint, [1], subtask=subtask)) == Committed()
        job.check(attempt=2)
        assert job.committer(2).commit(job.prepare(5, [1], attempt=2)) == Committed()
        assert other.committer().commit(other.prepare(8, [1])) == Committed()
        job.prepare(9, [1], attempt=2)
        told, marks = record_of(job), (Decided(1, 3), Decided(2, 5))
        assert told == TargetRecord(job.sink_id, AttemptId(2), marks, proves_each=False)
        elsewhere = KafkaJob(
            job.sink, directory=job.directory, sink_id=job.sink_id, log_id="another log"
        )
        with pytest.raises(ConfigError, match="in another checkpoint storage"):
            record_of(elsewhere)


def test_a_commit_is_remembered_with_the_claim_when_no_rows_have_come_for_long(
    job: KafkaJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit offset is deleted, as the broker does after offsets.retention.minutes."""
    monkeypatch.setattr(fence, "RENEWED_EVERY_S", 0.0)
    servers = job.sink.bootstrap_servers
    with job:
        job.check()
        committer = job.committer()
        assert committer.commit(job.prepare(4, [1])) == Committed()
        committer.prune(CheckpointId(1))
        delete_group(servers, f"onceflow/{job.sink_id}/0")
        remembered = TargetRecord(job.sink_id, AttemptId(1), (Decided(1, 4),), proves_each=False)
        assert record_of(job) == remembered
        committer.prune(CheckpointId(2))
        job.check(attempt=2)
        assert record_of(job) == replace(remembered, attempt=AttemptId(2))
