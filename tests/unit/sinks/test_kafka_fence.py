"""The claim of a sink id in Kafka is the newest attempt's, and names the newest commit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from tests.support import kafka_double
from tests.support.failing_once import Calls
from tests.support.kafka_double import KafkaDouble, Producer

from onceflow.core.errors import ConfigError, Fenced, SettingsRefused, SinkError
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.spi import CommitterContext
from onceflow.sinks import KafkaSink
from onceflow.sinks.base.checks import FenceOwner
from onceflow.sinks.kafka import fence
from onceflow.sinks.kafka.fence import Fence, owner_group
from onceflow.sinks.kafka.transactional_lane import lane_name, proof_of

SINK_ID = "job.rows"
T = TypeVar("T")


class Brokers:
    """Answers questions about the groups of `kafka`, as the admin client does."""

    def __init__(self, kafka: KafkaDouble) -> None:
        self.kafka = kafka
        self.admin = self
        self.described: list[str] = []
        self.error: KafkaError | None = None
        self.listing_errors: list[KafkaException] = []
        self.partition = 0

    def ask(self, question: Callable[[float], T], what: str) -> T:
        return question(1.0)

    def list_consumer_groups(self, *, request_timeout: float) -> Future[Any]:
        groups = sorted({group for group, _ in self.kafka.offsets})
        valid = [SimpleNamespace(group_id=group) for group in groups]
        return answer(SimpleNamespace(valid=valid, errors=self.listing_errors))

    def describe_consumer_groups(
        self, groups: Sequence[str], *, request_timeout: float
    ) -> dict[str, Future[Any]]:
        self.described += groups
        return {group: answer(None) for group in groups}

    def list_consumer_group_offsets(
        self, asked: Sequence[ConsumerGroupTopicPartitions], *, request_timeout: float
    ) -> dict[str, Future[Any]]:
        (group,) = (each.group_id for each in asked)
        assert group in self.described, "librdkafka may crash if the coordinator is not known"
        partitions = [
            SimpleNamespace(topic=topic, partition=number, metadata=text, error=self.error)
            for (owner, topic), metadata in self.kafka.offsets.items()
            if owner == group
            for number, text in ((self.partition, metadata), (1, "of another partition"))
        ]
        partitions.append(
            SimpleNamespace(topic="empty", partition=0, metadata=None, error=self.error)
        )
        return {group: answer(SimpleNamespace(topic_partitions=partitions))}


def answer(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaDouble:
    kafka = KafkaDouble(Calls())
    kafka.install(monkeypatch)
    brokers = Brokers(kafka)

    def open_brokers(_: object) -> Brokers:
        return brokers

    monkeypatch.setattr(fence, "open_brokers", open_brokers)
    return kafka


@pytest.fixture
def brokers(kafka: KafkaDouble) -> Brokers:
    sink = KafkaSink("localhost:1", topic="ledger")
    opened: Any = vars(fence)["open_brokers"](sink.settings)
    assert isinstance(opened, Brokers)
    return opened


def fence_of(attempt: int, *, log_id: str = "log", job: str = "job") -> Fence:
    sink = KafkaSink("localhost:1", topic="ledger", deadline_s=1.0)
    context = CommitterContext(job, "rows", SINK_ID, AttemptId(attempt), log_id, None)
    return Fence(sink.settings, context)


def claim_in(kafka: KafkaDouble) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kafka.offsets[owner_group(SINK_ID), "ledger"])
    return found


def prove(kafka: KafkaDouble, attempt: int, checkpoint: int, subtask: int = 0) -> TransactionId:
    transaction = TransactionId(SINK_ID, attempt, checkpoint, subtask)
    kafka.offsets[lane_name(SINK_ID, subtask), "ledger"] = proof_of(transaction, "log")
    return transaction


def test_a_claim_goes_to_a_newer_attempt_of_the_same_log_alone(kafka: KafkaDouble) -> None:
    fence_of(2).claim()
    assert claim_in(kafka) == {"log": "log", "attempt": 2, "job": "job"}
    for attempt in (1, 2):
        with pytest.raises(Fenced, match="attempt 2"):
            fence_of(attempt).claim()
    with pytest.raises(ConfigError, match=f"--delete --group '{owner_group(SINK_ID)}'"):
        fence_of(9, log_id="other").claim()
    assert claim_in(kafka)["attempt"] == 2
    fence_of(3).claim()
    assert claim_in(kafka)["attempt"] == 3
    assert kafka.begun == set()


def test_a_claim_names_the_newest_commit_of_all_lanes_and_of_the_claim_before(
    kafka: KafkaDouble,
) -> None:
    prove(kafka, 1, 7)
    prove(kafka, 1, 9, subtask=12)
    fence_of(2).claim()
    assert claim_in(kafka)["committed"] == [1, 9]
    # Brokers forget the offsets of lanes without rows.
    kafka.offsets = {key: text for key, text in kafka.offsets.items() if key[0].endswith("owner")}
    fence_of(3).claim()
    assert claim_in(kafka)["committed"] == [1, 9]
    prove(kafka, 2, 4)
    fence_of(4).claim()
    assert claim_in(kafka)["committed"] == [2, 4], "the attempt counts before the checkpoint"


def test_the_last_commits_are_those_of_this_sink_ids_lanes_and_log(kafka: KafkaDouble) -> None:
    settings = KafkaSink("localhost:1", topic="ledger").settings
    own = prove(kafka, 1, 7)
    for group, text in (
        (lane_name(SINK_ID, 3), proof_of(own, "another log")),
        (f"{lane_name(SINK_ID, 0)}x", proof_of(own, "log")),
        (lane_name("job-rows", 0), proof_of(own, "log")),
        (owner_group(SINK_ID), proof_of(own, "log")),
    ):
        kafka.offsets[group, "ledger"] = text
    kafka.offsets[lane_name(SINK_ID, 0), "other topic"] = proof_of(own, "log")
    assert fence.last_commits(settings, SINK_ID, "log") == [own, own]


def test_questions_that_a_broker_does_not_answer_are_no_answer(
    kafka: KafkaDouble, brokers: Brokers
) -> None:
    settings = KafkaSink("localhost:1", topic="ledger").settings
    prove(kafka, 1, 7)
    brokers.error = KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
    with pytest.raises(KafkaException):
        fence.last_commits(settings, SINK_ID, "log")
    brokers.error = None
    brokers.listing_errors = [KafkaException(KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE))]
    with pytest.raises(KafkaException):
        fence.last_commits(settings, SINK_ID, "log")
    brokers.listing_errors = []
    brokers.partition = 2
    assert fence.last_commits(settings, SINK_ID, "log") == []


def test_the_record_of_a_sink_id_has_its_claim_and_commits(kafka: KafkaDouble) -> None:
    assert fence_of(1).read_record() is None
    commit = prove(kafka, 1, 7)
    record = fence_of(1).read_record()
    assert record is not None
    assert (record.attempt, record.committed) == (0, (Decided(1, 7),))
    fence_of(2).claim()
    record = fence_of(2).read_record()
    assert record is not None
    assert record.attempt == 2
    assert Decided(1, 7) in record.committed
    assert commit not in record.proofs, "one commit offset is overwritten by the next"
    before = dict(kafka.offsets)
    with pytest.raises(ConfigError, match="kafka-consumer-groups.sh --bootstrap-server localhost"):
        fence_of(3, log_id="other").read_record()
    assert kafka.offsets == before
    # Reading fences nobody.
    assert kafka.epochs[owner_group(SINK_ID)] == 1


def test_the_newest_of_several_claims_counts() -> None:
    texts = [
        json.dumps({"log": "log", "attempt": attempt, "job": "job", "committed": committed})
        for attempt, committed in ((2, [1, 9]), (10, [2, 3]), (3, None))
    ]
    claim = fence.newest_claim(texts)
    assert claim == fence.Claim(FenceOwner("log", AttemptId(10), "job"), Decided(2, 3))
    assert fence.newest_claim([]) is None


def test_a_claim_is_renewed_when_it_is_due_unless_it_is_another_ones(
    kafka: KafkaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = fence_of(2)
    mine.claim()
    kafka.offsets.clear()
    mine.refresh()
    assert kafka.offsets == {}, "it is not due"
    now_s = time.monotonic()

    def later(hours: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: now_s + hours * 3600)

    later(6.1)
    prove(kafka, 2, 5)
    mine.refresh()
    assert claim_in(kafka)["committed"] == [2, 5]
    kafka.offsets.clear()
    mine.refresh()
    assert kafka.offsets == {}, "it was renewed a moment ago"
    later(12.3)
    fence_of(3).claim()
    mine.refresh()
    assert claim_in(kafka)["attempt"] == 3
    kafka.offsets.clear()
    later(18.5)
    mine.refresh()
    assert claim_in(kafka)["attempt"] == 2, "the broker has forgotten the claim"


def test_a_claim_that_another_process_overtakes_is_fenced(
    kafka: KafkaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Producer.send_offsets_to_transaction

    def overtake(producer: Producer, offsets: Any, group: str, timeout_s: float) -> None:
        kafka.epochs[owner_group(SINK_ID)] += 1
        send(producer, offsets, group, timeout_s)

    monkeypatch.setattr(Producer, "send_offsets_to_transaction", overtake)
    with pytest.raises(Fenced, match="another attempt claims it at this moment"):
        fence_of(2).claim()
    assert kafka.offsets == {}


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (
            KafkaException(KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)),
            SettingsRefused,
            "cannot be claimed at .*; grant it: kafka-acls.sh",
        ),
        (
            KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE)),
            SinkError,
            "cannot be claimed at",
        ),
        (TimeoutError("the client hangs"), SinkError, "is not claimed: the client hangs"),
    ],
)
def test_a_claim_that_fails_says_who_can_help(
    kafka: KafkaDouble,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    raised: type[Exception],
    told: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Producer, "commit_transaction", fail)
    with pytest.raises(raised, match=told) as caught:
        fence_of(2).claim()
    assert type(caught.value) is raised
    assert kafka.offsets == {}


def test_a_claim_is_an_offset_of_each_topic_with_its_attempt(
    kafka: KafkaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int, int]] = []
    send = Producer.send_offsets_to_transaction

    def note(
        producer: Producer, offsets: Sequence[TopicPartition], group: str, timeout_s: float
    ) -> None:
        sent.extend((each.topic, each.partition, each.offset) for each in offsets)
        send(producer, offsets, group, timeout_s)

    monkeypatch.setattr(Producer, "send_offsets_to_transaction", note)
    fence_of(7).claim()
    assert sent == [("ledger", 0, 7)]


def test_a_claim_waits_for_a_broker_that_loads_its_groups_and_closes_its_reader(
    kafka: KafkaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    committed = kafka_double.Consumer.committed

    def answer_later(
        reader: kafka_double.Consumer, partitions: Sequence[TopicPartition], timeout: float
    ) -> list[TopicPartition]:
        asked.append("asked")
        if len(asked) == 1:
            raise KafkaException(KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS))
        return committed(reader, partitions, timeout)

    def close(_: kafka_double.Consumer) -> None:
        asked.append("closed")

    monkeypatch.setattr(kafka_double.Consumer, "committed", answer_later)
    monkeypatch.setattr(kafka_double.Consumer, "close", close)
    fence_of(1).claim()
    assert claim_in(kafka)["attempt"] == 1
    assert asked == ["asked", "asked", "closed"]
