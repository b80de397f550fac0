"""Event time of a topic is kept for each partition, whatever columns its rows have."""

from __future__ import annotations

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
