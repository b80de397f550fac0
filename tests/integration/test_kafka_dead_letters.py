"""Kafka records that cannot be decoded, through a whole job and a killed slot."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
from tests.integration.kafka_feed import produce, record
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, FixedDelay, JobState, LocalProcesses, Pipeline
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources import KafkaSource

RECORDS = 4_000


def is_bad(number: int) -> bool:
    return number % 37 == 3


def test_undecodable_records_are_dead_letters_exactly_once_though_a_slot_is_killed(
    tmp_path: Path, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic(2)
    values = [b'{"id": oops' if is_bad(n) else record(n) for n in range(RECORDS)]
    for partition in (0, 1):
        produce(onceflow_kafka.bootstrap_servers, topic, values[partition::2], partition=partition)
    source = KafkaSource(
        onceflow_kafka.bootstrap_servers,
        topic=topic,
        schema="id BIGINT NOT NULL, account STRING",
        on_bad_record="dead_letter",
        ending_offsets="latest",
        batch_rows=20,
    )
    good, bad = DirectorySink(str(tmp_path / "good")), DirectorySink(str(tmp_path / "bad"))
    pipeline = Pipeline(
        LocalProcesses(tmp_path / "logs"),
        name="kafka-letters",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    pace = pipeline.read(source, uid="records", dead_letters=bad).map_batches(_slowly, uid="pace")
    pace.write(good, uid="ledger")
    job = pipeline.start()
    deadline = time.monotonic() + 60
    while (status := job.status()).checkpoints_completed < 3:
        assert not status.state.ended, status
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    os.kill(status.slots[0].pid, signal.SIGKILL)
    assert job.wait(120).state is JobState.FINISHED
    assert job.status().restores == 1

    assert Counter(row["id"] for row in good.rows()) == Counter(
        n for n in range(RECORDS) if not is_bad(n)
    )
    letters = bad.rows()
    origins = Counter((row["topic"], row["partition"], row["offset"]) for row in letters)
    assert origins == Counter((topic, n % 2, n // 2) for n in range(RECORDS) if is_bad(n))
    assert {row["value"] for row in letters} == {b'{"id": oops'}
    assert all("invalid" in row["reason"].lower() for row in letters), letters[0]["reason"]


def _slowly(rows: pa.RecordBatch) -> pa.RecordBatch:
    time.sleep(0.03)
    return rows
