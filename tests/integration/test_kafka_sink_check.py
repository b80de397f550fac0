"""Tests the checks of `open` before a row is read, on a real broker, and their remedies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from tests.integration import kafka_sink_kit
from tests.integration.sink_kit import SCHEMA, rows

from onceflow.core.errors import BadRow, ConfigError, Fenced, SinkError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import CommitterContext, OnBadRow
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers import EmbeddedKafka
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka import fence


@pytest.fixture
def topic(kafka_topic: TopicFactory) -> str:
    return kafka_topic(2)


def job_of(
    servers: str, topic: str | tuple[str, ...], directory: Path, **settings: Any
) -> kafka_sink_kit.KafkaJob:
    name = topic if isinstance(topic, str) else topic[0]
    given: dict[str, Any] = {"deadline_s": 10, **settings}
    sink = KafkaSink(servers, topic=topic, **given)
    return kafka_sink_kit.KafkaJob(sink, directory=directory, sink_id=f"c.{name[-16:]}")


def test_a_missing_topic_is_named_or_created(servers: str, topic: str, tmp_path: Path) -> None:
    missing = f"{topic}-new"
    with pytest.raises(ConfigError, match=f"{missing}.*kafka-topics.sh.*create=True"):
        job_of(servers, missing, tmp_path).check()
    with job_of(servers, missing, tmp_path, create=True, partitions=3) as job:
        job.check()
        assert job.committer().commit(job.prepare(1, range(9))) == Committed()
        assert len(kafka_sink_kit.messages(servers, missing)) == 9
        job.check(attempt=2)


def test_another_job_with_the_same_sink_id_is_refused_and_may_take_it_over(
    servers: str, topic: str, tmp_path: Path
) -> None:
    job = job_of(servers, topic, tmp_path)
    job.check()
    other = kafka_sink_kit.KafkaJob(
        job.sink, directory=tmp_path, sink_id=job.sink_id, log_id="log-2"
    )
    with pytest.raises(
        ConfigError, match=r"in another checkpoint storage.*--delete --group"
    ) as refused:
        other.check()
    assert job.log_id in str(refused.value)
    kafka_sink_kit.delete_group(servers, f"onceflow/{job.sink_id}/owner")
    other.check()
    with pytest.raises(ConfigError, match="in another checkpoint storage"):
        job.check(attempt=2)


def test_the_same_attempt_or_an_older_one_is_fenced(
    servers: str, topic: str, tmp_path: Path
) -> None:
    job = job_of(servers, topic, tmp_path).check(attempt=3)
    for attempt in (2, 3):
        with pytest.raises(Fenced, match="attempt 3 of the same job"):
            job.check(attempt=attempt)
    job.check(attempt=4)


def test_the_claim_is_renewed_while_the_job_runs_and_a_newer_one_is_left(
    servers: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker forgets it after a week; then a second job would not be noticed."""
    monkeypatch.setattr(fence, "RENEWED_EVERY_S", 0.0)
    with job_of(servers, topic, tmp_path) as job:
        job.check()
        group = f"onceflow/{job.sink_id}/owner"
        kafka_sink_kit.delete_group(servers, group)
        job.committer().prune(CheckpointId(1))
        assert (kafka_sink_kit.commit_offset(servers, group, topic) or (0, ""))[0] == 1
        job.check(attempt=2)
        job.committer(attempt=1).prune(CheckpointId(1))
        assert (kafka_sink_kit.commit_offset(servers, group, topic) or (0, ""))[0] == 2


def test_a_topic_that_takes_smaller_records_than_the_sink_lets_pass_is_refused(
    onceflow_kafka: KafkaServer, topic: str, tmp_path: Path
) -> None:
    servers = onceflow_kafka.bootstrap_servers
    small = onceflow_kafka.create_topic(f"{topic}-small", 1, config={"max.message.bytes": "5000"})
    with pytest.raises(ConfigError, match=r"5000.*1000000.*kafka-configs.sh"):
        job_of(servers, small, tmp_path).check()
    options = {"message.max.bytes": 5000}
    with job_of(servers, small, tmp_path, options=options) as job:
        job.check()
        job.on_bad_row = OnBadRow.DROP
        largest = pa.record_batch(
            [pa.array([1, 2]), pa.array(["x" * 4860, "x" * 4900]), pa.array([0, 0])], schema=SCHEMA
        )
        writer = job.writer()
        writer.write(largest)
        assert [one.rows["id"].to_pylist() for one in writer.take_rejected()] == [[2]]
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
        assert kafka_sink_kit.ids_in(servers, small) == [1]


def test_a_topic_that_demands_more_replicas_than_it_has_is_refused(
    onceflow_kafka: KafkaServer, topic: str, tmp_path: Path
) -> None:
    strict = onceflow_kafka.create_topic(f"{topic}-strict", 1, config={"min.insync.replicas": "2"})
    with pytest.raises(ConfigError, match=r"1 replicas, but requires 2 in sync"):
        job_of(onceflow_kafka.bootstrap_servers, strict, tmp_path).check()


def test_a_compacted_topic_is_refused_for_records_without_keys(
    onceflow_kafka: KafkaServer, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"cleanup.policy": "compact,delete"}
    compacted = onceflow_kafka.create_topic(f"{topic}-compacted", 1, config=config)
    servers = onceflow_kafka.bootstrap_servers
    with pytest.raises(ConfigError, match=r"cleanup\.policy=compact,delete.*no key.*key="):
        job_of(servers, compacted, tmp_path).check()
    raw = job_of(servers, compacted, tmp_path, format="raw")
    with pytest.raises(ConfigError, match=r"cleanup\.policy=compact,delete.*no key.*key="):
        raw.sink.open(raw.committer_context(1), pa.schema([pa.field("value", pa.string())]))
    with job_of(servers, compacted, tmp_path, key="id") as job:
        job.check()
    assert "may be null" not in caplog.text
    with job_of(servers, compacted, tmp_path, key="account") as job:
        job.check(attempt=2)
        assert job.committer().commit(job.prepare(1, range(3))) == Committed()
        assert kafka_sink_kit.ids_in(servers, compacted) == [0, 1, 2]
    assert "column 'account' of the key may be null" in caplog.text


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_row_without_a_key_for_a_compacted_topic_is_a_bad_row(
    onceflow_kafka: KafkaServer,
    topic: str,
    tmp_path: Path,
    delivery: Literal["exactly_once", "at_least_once"],
) -> None:
    config = {"cleanup.policy": "compact"}
    compacted = onceflow_kafka.create_topic(f"{topic}-compacted", 1, config=config)
    servers = onceflow_kafka.bootstrap_servers
    mixed = pa.RecordBatch.from_pylist(
        [
            {"id": number, "account": key, "to": to}
            for number, (key, to) in enumerate(
                [("7", compacted), (None, compacted), (None, topic), ("7", topic)]
            )
        ],
        pa.schema([SCHEMA.field("id"), SCHEMA.field("account"), pa.field("to", pa.string())]),
    )
    sink = KafkaSink(
        servers, topic=(compacted, topic), topic_column="to", key="account", delivery=delivery
    )
    with kafka_sink_kit.KafkaJob(
        sink,
        directory=tmp_path,
        sink_id=f"c.{topic[-16:]}",
        schema=mixed.schema,
        on_bad_row=OnBadRow.DROP,
    ) as job:
        writer = job.check().writer()
        writer.write(mixed)
        (rejected,) = writer.take_rejected()
        assert rejected.rows.to_pylist() == mixed.slice(1, 1).to_pylist()
        assert "compacted" in rejected.reasons[0]
        for committable in writer.pre_commit(CheckpointId(1)):
            assert job.committer().commit(committable) == Committed()
    assert kafka_sink_kit.ids_in(servers, compacted) == [0]
    assert kafka_sink_kit.ids_in(servers, topic) == [2, 3]


def test_a_transaction_timeout_over_the_brokers_is_refused(
    servers: str, topic: str, tmp_path: Path
) -> None:
    """L12: Flink's own default fails at the first start, with the broker's error alone."""
    with pytest.raises(ConfigError, match=r"transaction\.max\.timeout\.ms"):
        job_of(servers, topic, tmp_path, transaction_timeout_s=3600).check()


def test_without_checkpoint_storage_only_at_least_once_is_there(
    servers: str, topic: str, tmp_path: Path
) -> None:
    context = CommitterContext("job", "ledger", "c.none", AttemptId(1), "log-1")
    with pytest.raises(ConfigError, match="at_least_once"):
        KafkaSink(servers, topic=topic).open(context, SCHEMA)
    once = KafkaSink(servers, topic=topic, delivery="at_least_once")
    once.open(context, SCHEMA)
    assert once.committer(context).in_doubt() == ()


def test_at_least_once_writes_at_once_and_finds_what_exactly_once_left(
    servers: str, topic: str, tmp_path: Path
) -> None:
    with job_of(servers, topic, tmp_path) as before:
        before.prepare(1, range(5))
    with job_of(servers, topic, tmp_path, delivery="at_least_once") as job:
        writer = job.check().writer(attempt=2)
        writer.write(rows(range(5, 10)))
        assert writer.pre_commit(CheckpointId(2)) == ()
        assert kafka_sink_kit.ids_in(servers, topic) == list(range(5, 10))
        (left,) = job.committer(2).in_doubt()
        assert job.committer(2).commit(left) == Committed()
        assert kafka_sink_kit.ids_in(servers, topic) == list(range(10))


def test_rows_choose_topic_and_partition_and_one_commit_offset_proves_them_all(
    servers: str, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    left, right = kafka_topic(2), kafka_topic(3)
    schema = pa.schema([("id", pa.int64()), ("to", pa.string()), ("p", pa.int32())])
    batch = pa.record_batch(
        [
            pa.array([1, 2, 3, 4]),
            pa.array([left, right, left, right]),
            pa.array([1, 2, 0, None], pa.int32()),
        ],
        schema=schema,
    )
    with job_of(servers, (left, right), tmp_path, topic_column="to", partition_column="p") as job:
        job.schema = schema
        job.check()
        committable = job.prepare(1, batch)
        assert job.committer().commit(committable) == Committed()
        found = kafka_sink_kit.messages(servers, left) + kafka_sink_kit.messages(servers, right)
        where = {
            value["id"]: (one.topic(), one.partition())
            for one, value in zip(found, kafka_sink_kit.values_of(found), strict=True)
        }
        assert where[1] == (left, 1)
        assert where[2] == (right, 2)
        assert where[3] == (left, 0)
        assert where[4][0] == right
        assert kafka_sink_kit.values_of(found)[0].keys() == {"id"}
        group = f"onceflow/{job.sink_id}/0"
        proof = (1, f"{committable.transaction} {job.log_id}")
        assert kafka_sink_kit.commit_offset(servers, group, left) == proof
        assert kafka_sink_kit.commit_offset(servers, group, right) == proof
        with pytest.raises(BadRow, match="must be a partition"):
            job.prepare(2, batch.set_column(2, "p", pa.array([9, 0, 0, 0], pa.int32())))


def test_rows_staged_for_a_topic_go_there_though_the_sink_has_another_one_by_now(
    servers: str, kafka_topic: TopicFactory, tmp_path: Path
) -> None:
    before, after = kafka_topic(1), kafka_topic(1)
    with job_of(servers, before, tmp_path) as old:
        committable = old.prepare(1, range(5))
        with kafka_sink_kit.KafkaJob(
            KafkaSink(servers, topic=after), directory=tmp_path, sink_id=old.sink_id
        ) as new:
            assert new.committer(2).commit(committable) == Committed()
            assert kafka_sink_kit.ids_in(servers, before) == list(range(5))
            assert kafka_sink_kit.ids_in(servers, after) == []


def test_an_address_where_no_broker_is_fails_in_time_and_says_so(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(SinkError, match="no answer within 1 s"):
        job_of("127.0.0.1:9", "t", tmp_path, deadline_s=1).check()
    assert time.monotonic() - began < 60


@pytest.fixture(scope="module")
def forgetful() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka({"offsets.retention.minutes": "60"}) as server:
        yield server


@pytest.mark.servers
def test_a_broker_that_forgets_proofs_within_a_day_is_refused(
    forgetful: EmbeddedKafka, tmp_path: Path
) -> None:
    topic = forgetful.create_topic("short")
    with pytest.raises(ConfigError, match=r"60 minutes.*offsets\.retention\.minutes=10080"):
        job_of(forgetful.bootstrap_servers, topic, tmp_path).check()
