"""Whole jobs on Spark whose topics grow, appear and are replaced: each record is written once."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.integration import kafka_feed
from tests.integration.kafka_feed import produce
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS
from tests.support.waiting import await_in

from onceflow import Checkpointing, FixedDelay, JobState, Pipeline
from onceflow.core.api.pipeline import Job
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.errors import OffsetOutOfRange
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources import KafkaSource

pytestmark = pytest.mark.spark


@dataclass(frozen=True)
class Copy:
    """Copies records of Kafka into a directory; the same job at each start."""

    spark: SparkSession
    directory: Path
    server: KafkaServer
    interval: float | None = 0.1

    @property
    def sink(self) -> DirectorySink:
        return DirectorySink(str(self.directory / "out"))

    @contextmanager
    def running(self, **settings: Any) -> Generator[Job, None, None]:
        """Start the job and wait until it runs; stopped, or at least cancelled, afterwards."""
        given: dict[str, Any] = {
            "schema": kafka_feed.SCHEMA,
            "partition_discovery_interval": 0.2,
            **settings,
        }
        source = KafkaSource(self.server.bootstrap_servers, **given)
        pipeline = Pipeline(
            self.spark,
            name="copy",
            parallelism=2,
            checkpointing=Checkpointing(
                storage=str(self.directory / "checkpoints"), interval=self.interval
            ),
            restart=FixedDelay(attempts=3, delay_s=0.01),
            settings=SETTINGS,
        )
        pipeline.read(source, uid="records").write(self.sink, uid="copy")
        job = pipeline.start()
        try:
            await_in(job, lambda: job.state is not JobState.STARTING)
            yield job
            if not job.state.ended:
                assert job.stop().state is JobState.STOPPED
        finally:
            if not job.state.ended:
                job.cancel()

    def produce(self, topic: str, numbers: range, partition: int = 0) -> None:
        values = map(kafka_feed.record, numbers)
        produce(self.server.bootstrap_servers, topic, values, partition=partition)

    def await_rows(self, job: Job, count: int) -> None:
        """Wait until that many are committed; ask for checkpoints where none come otherwise."""

        def enough() -> bool:
            if self.interval is None and job.state is JobState.RUNNING:
                job.checkpoint()
            return len(self.sink.rows()) >= count

        await_in(job, enough)

    def assert_once(self, numbers: range) -> None:
        assert Counter(row["id"] for row in self.sink.rows()) == Counter(numbers)
        assert self.sink.prepared() == []


@pytest.fixture
def copy(spark: SparkSession, tmp_path: Path, onceflow_kafka: KafkaServer) -> Copy:
    return Copy(spark, tmp_path, onceflow_kafka)


@pytest.mark.parametrize(
    "point", [*(pytest.param(one, marks=pytest.mark.slow) for one in (None, "offered")), "decided"]
)
@pytest.mark.only_proof
def test_partitions_added_under_a_running_job_are_read_exactly_once_though_a_slot_dies(
    copy: Copy,
    kafka_topic: TopicFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: CrashPoint | None,
) -> None:
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setitem(copy.spark.sparkContext.environment, VARIABLE, str(points))
    topic = kafka_topic(1)
    copy.produce(topic, range(100))
    with copy.running(topic=topic, starting_offsets={topic: {0: 0}}) as job:
        copy.await_rows(job, 100)
        if point is not None:
            (points / point).touch()
        kafka_feed.add_partitions(copy.server.bootstrap_servers, topic, 4)
        copy.produce(topic, range(100, 120))
        for partition in (1, 2, 3):
            copy.produce(topic, range(100 * partition + 20, 100 * partition + 120), partition)
        copy.await_rows(job, 420)
        status = job.status()
    assert status.restores == (0 if point is None else 1)
    assert list(points.iterdir()) == []
    copy.assert_once(range(420))


def test_partitions_added_to_a_job_without_periodic_checkpoints_are_read(
    spark: SparkSession, tmp_path: Path, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    copy = Copy(spark, tmp_path, onceflow_kafka, interval=None)
    topic = kafka_topic(1)
    with copy.running(topic=topic) as job:
        kafka_feed.add_partitions(onceflow_kafka.bootstrap_servers, topic, 3)
        copy.produce(topic, range(50), partition=2)
        await_in(job, lambda: job.status().checkpoints_completed > 0)
        copy.await_rows(job, 50)
    copy.assert_once(range(50))


def test_partitions_added_while_the_job_is_stopped_are_read_exactly_once(
    copy: Copy, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    copy.produce(topic, range(10))
    with copy.running(topic=topic, partition_discovery_interval=None) as job:
        copy.await_rows(job, 10)
    kafka_feed.add_partitions(copy.server.bootstrap_servers, topic, 3)
    copy.produce(topic, range(10, 30))
    copy.produce(topic, range(30, 60), partition=1)
    for _ in range(2):
        with copy.running(
            topic=topic, starting_offsets="latest", partition_discovery_interval=None
        ) as job:
            copy.await_rows(job, 60)
    copy.assert_once(range(60))


def test_new_topics_of_a_pattern_are_read_under_a_running_job_and_after_a_stop(
    copy: Copy,
) -> None:
    stem = f"orders-{uuid.uuid4().hex[:8]}"
    pattern = f"{stem}-[a-z]"

    def begin(name: str, numbers: range) -> None:
        copy.server.create_topic(f"{stem}-{name}", 1)
        copy.produce(f"{stem}-{name}", numbers)

    try:
        with copy.running(topic_pattern=pattern, starting_offsets="latest") as job:
            begin("a", range(20))
            copy.await_rows(job, 20)
        begin("b", range(20, 50))
        with copy.running(topic_pattern=pattern, starting_offsets="latest") as job:
            begin("c", range(50, 70))
            copy.await_rows(job, 70)
    finally:
        for name in "abc":
            kafka_feed.delete_topic(copy.server.bootstrap_servers, f"{stem}-{name}")
    copy.assert_once(range(70))


def test_topic_that_was_replaced_while_the_job_was_stopped_is_refused_and_nothing_of_it_is_read(
    copy: Copy, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    copy.produce(topic, range(10))
    with copy.running(topic=topic) as job:
        copy.await_rows(job, 10)
    kafka_feed.recreate_topic(copy.server, topic, 1)
    copy.produce(topic, range(1000, 1050))
    with (
        pytest.raises(OffsetOutOfRange, match=f"{topic}-0: offset 10 .*created again"),
        copy.running(topic=topic) as job,
    ):
        job.wait(60)
    copy.assert_once(range(10))


def test_topic_that_is_replaced_under_a_running_job_ends_it_by_name(
    copy: Copy, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    copy.produce(topic, range(10))
    with copy.running(topic=topic) as job:
        copy.await_rows(job, 10)
        kafka_feed.recreate_topic(copy.server, topic, 1)
        copy.produce(topic, range(1000, 1050))
        # The reader may go on behind offset 10 of the new topic before the discovery meets its id.
        with pytest.raises(OffsetOutOfRange, match=rf"{topic}-0: offset \d+ .*created again"):
            job.wait(60)


def test_topic_that_is_replaced_under_a_running_job_is_read_anew_where_loss_is_accepted(
    copy: Copy, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(1)
    copy.produce(topic, range(10))
    with copy.running(topic=topic, fail_on_data_loss=False) as job:
        copy.await_rows(job, 10)
        kafka_feed.recreate_topic(copy.server, topic, 2)
        # The reader may meet the old topic's end before the discovery meets the new one's id.
        await_in(job, lambda: _next_offsets(job, topic) == {f"{topic}-0": 0, f"{topic}-1": 0})
        copy.produce(topic, range(10, 60))
        copy.produce(topic, range(60, 90), partition=1)
        copy.await_rows(job, 90)
        assert job.status().restores <= 1
    copy.assert_once(range(90))


def _next_offsets(job: Job, topic: str) -> dict[str, int]:
    """Return what the last checkpoint says is to be read next, by split."""
    return {
        split.split_id: split.next
        for splits in job.status().offsets.values()
        for split in splits
        if split.split_id.startswith(topic)
    }
