"""Event time of a topic is kept for each partition, whatever columns its rows have."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.integration.kafka_feed import produce
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    JobState,
    LocalProcesses,
    NoRestart,
    Pipeline,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.spi import Split
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources import KafkaSource

PARTITIONS, RECORDS = 4, 3_000
"""Records of each partition."""


@pytest.mark.parametrize("include_metadata", [False, True])
def test_no_record_is_late_that_is_in_order_in_its_partition(
    tmp_path: Path,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    include_metadata: bool,
) -> None:
    topic = kafka_topic(PARTITIONS)
    values = [b'{"at": %d, "account": "a"}' % number for number in range(RECORDS)]
    for partition in range(PARTITIONS):
        # The last one ends early, and holds up nobody then.
        few = values if partition < PARTITIONS - 1 else values[:10]
        produce(onceflow_kafka.bootstrap_servers, topic, few, partition=partition)
    source = KafkaSource(
        onceflow_kafka.bootstrap_servers,
        topic=topic,
        schema="at BIGINT NOT NULL, account STRING",
        ending_offsets="latest",
        include_metadata=include_metadata,
        batch_rows=200,
    )
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        LocalProcesses(),
        name="kafka-watermarks",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("at"))
    windows = records.key_by("account").window(TumblingEventTimeWindows(0.1))
    windows.aggregate(n=count(), uid="counts").write(sink, uid="out")
    assert pipeline.run(120).state is JobState.FINISHED
    assert sum(row["n"] for row in sink.rows()) == (PARTITIONS - 1) * RECORDS + 10


def test_job_runs_through_discoveries_and_a_restart_behind_a_quiet_partition(
    tmp_path: Path,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(2)
    sink = DirectorySink(str(tmp_path / "out"))
    (tmp_path / "out" / "committed").mkdir(parents=True)
    discoveries: list[Sequence[Split]] = []
    discover = KafkaSource.discover

    def discover_and_count(source: KafkaSource, known: Sequence[Split]) -> Sequence[Split]:
        discoveries.append(found := discover(source, known))
        return found

    monkeypatch.setattr(KafkaSource, "discover", discover_and_count)
    # Partition 1 has come further than partition 0 ever will, and gets no record again.
    produce(servers, topic, [b'{"at": 30000, "account": "quiet"}'], partition=1)
    for restores, (first, windows) in enumerate([(0, 9), (10, 19)]):
        values = [b'{"at": %d, "account": "a"}' % (1_000 * (first + n) + 500) for n in range(10)]
        produce(servers, topic, values, partition=0)
        job = _count_seconds(servers, topic, tmp_path).start()
        _await(job, sink.rows, windows)
        job.wait_for(checkpoints=job.status().checkpoints_completed + 1)
        before = len(discoveries)
        _await(job, lambda: discoveries, before + 5)
        assert job.stop().restores == restores
        assert len(sink.rows()) == windows


def _count_seconds(servers: str, topic: str, directory: Path) -> Pipeline:
    """Build topic -> a count for each second of event time -> directory."""
    source = KafkaSource(
        servers,
        topic=topic,
        schema="at BIGINT NOT NULL, account STRING",
        partition_discovery_interval=0.2,
    )
    pipeline = Pipeline(
        LocalProcesses(),
        name="kafka-windows",
        parallelism=1,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        restart=NoRestart(),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("at"))
    windows = records.key_by("account").window(TumblingEventTimeWindows(1))
    sink = DirectorySink(str(directory / "out"))
    windows.aggregate(n=count(), uid="counts").write(sink, uid="out")
    return pipeline


def _await(job: Job, read: Callable[[], Sequence[object]], count_min: int) -> None:
    deadline = time.monotonic() + 60
    while len(read()) < count_min:
        assert not job.state.ended, job.status().last_error
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.02)
