"""A commit that Kafka refuses for ever waits for a person; an outage does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from tests.integration.kafka_sink_kit import KafkaJob

from onceflow.core.protocol.committables import CommitOutcome, Committable, RetryLater, Unknown
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka import clients, committer, transactional_lane
from onceflow.sinks.kafka.records import KEY, VALUE, stamp

TOPIC = "ledger"


class Refusing:
    """A producer whose calls fail as the test says."""

    failing: str = ""
    error: KafkaError

    def __init__(self, config: Mapping[str, Any]) -> None:
        del config

    def __getattr__(self, call: str) -> Any:
        def run(*_: Any, **__: Any) -> int:
            if call == self.failing:
                raise KafkaException(self.error)
            return 0

        return run


def read_nothing(*_: object, **__: object) -> Mapping[str, str]:
    return {}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KafkaJob]:
    monkeypatch.setattr(clients, "Producer", Refusing)
    for module in (transactional_lane, committer):
        monkeypatch.setattr(module, "read_decided_commit_offsets", read_nothing)
    monkeypatch.setattr(transactional_lane, "_group_of", read_nothing)
    sink = KafkaSink("localhost:1", topic=TOPIC, deadline_s=0.2)
    with KafkaJob(sink, directory=tmp_path) as made:
        yield made


def commit(job: KafkaJob, failing: str, error: KafkaError) -> CommitOutcome:
    """Return the outcome of the commit of a staged record, while the call `failing` fails."""
    transaction = TransactionId(job.sink_id, 1, 1, 0)
    records = pa.record_batch({KEY: pa.array([b"k"]), VALUE: pa.array([b"v"])})
    staged = job.area.open()
    staged.write(stamp(records, (TOPIC,)), part="0")
    staged.seal(transaction)
    Refusing.failing, Refusing.error = failing, error
    return job.committer().commit(Committable(transaction, 1, b"staged"))


@pytest.mark.parametrize(
    ("failing", "code", "advice"),
    [
        ("init_transactions", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "--transactional-id"),
        ("init_transactions", "INVALID_TRANSACTION_TIMEOUT", "transaction.max.timeout.ms"),
        ("init_transactions", "CLUSTER_AUTHORIZATION_FAILED", "IdempotentWrite"),
        ("produce", "_UNKNOWN_TOPIC", "create it again"),
        ("produce", "_UNKNOWN_PARTITION", "partition"),
        ("send_offsets_to_transaction", "GROUP_AUTHORIZATION_FAILED", "--group onceflow/"),
        ("send_offsets_to_transaction", "UNKNOWN_TOPIC_OR_PART", "create it again"),
        ("send_offsets_to_transaction", "TOPIC_AUTHORIZATION_FAILED", "--operation Write"),
        ("commit_transaction", "MSG_SIZE_TOO_LARGE", "max.message.bytes"),
        ("commit_transaction", "RECORD_LIST_TOO_LARGE", "segment.bytes"),
        ("commit_transaction", "INVALID_RECORD", "cleanup.policy"),
        ("commit_transaction", "POLICY_VIOLATION", "policy"),
    ],
)
def test_what_kafka_refuses_until_a_person_helps_is_stuck_and_says_what_to_do(
    job: KafkaJob, failing: str, code: str, advice: str
) -> None:
    outcome = commit(job, failing, KafkaError(getattr(KafkaError, code)))
    assert isinstance(outcome, RetryLater)
    assert outcome.until_fixed
    assert f"({code})" in outcome.reason
    assert advice in outcome.reason


def test_a_right_that_is_lost_while_the_commit_is_sent_is_unknown_until_a_person_helps(
    job: KafkaJob,
) -> None:
    code = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    outcome = commit(job, "commit_transaction", KafkaError(code))
    assert isinstance(outcome, Unknown)
    assert outcome.until_fixed


@pytest.mark.parametrize(
    ("failing", "code"),
    [
        ("init_transactions", "COORDINATOR_LOAD_IN_PROGRESS"),
        ("init_transactions", "_TIMED_OUT"),
        ("init_transactions", "CONCURRENT_TRANSACTIONS"),
        ("init_transactions", "INVALID_PRODUCER_EPOCH"),
        ("send_offsets_to_transaction", "NOT_COORDINATOR"),
        ("send_offsets_to_transaction", "INVALID_TXN_STATE"),
        ("produce", "_FATAL"),
        ("commit_transaction", "INVALID_TXN_STATE"),
        ("commit_transaction", "NOT_ENOUGH_REPLICAS"),
    ],
)
def test_what_the_next_try_or_a_broker_fixes_waits_for_no_person(
    job: KafkaJob, failing: str, code: str
) -> None:
    outcome = commit(job, failing, KafkaError(getattr(KafkaError, code)))
    assert isinstance(outcome, RetryLater | Unknown)
    assert not outcome.until_fixed


def test_a_lane_that_is_fenced_is_told_as_such_though_its_client_raises_again(
    job: KafkaJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced = KafkaError(KafkaError._FENCED, fatal=True)  # pyright: ignore[reportPrivateUsage]

    class Fenced(Refusing):
        def poll(self, timeout_s: float) -> int:
            raise KafkaException(fenced)

    monkeypatch.setattr(clients, "Producer", Fenced)
    outcome = commit(job, "init_transactions", fenced)
    assert isinstance(outcome, RetryLater)
    assert not outcome.until_fixed
    assert "another committer has taken over" in outcome.reason


def test_a_refused_password_behind_a_timeout_waits_for_a_person(
    job: KafkaJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RefusedLogin(Refusing):
        def __init__(self, config: Mapping[str, Any]) -> None:
            self._report = config["error_cb"]

        def poll(self, timeout_s: float) -> int:
            self._report(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, "wrong password"))
            return int(timeout_s)

    monkeypatch.setattr(clients, "Producer", RefusedLogin)
    code = KafkaError._TIMED_OUT  # pyright: ignore[reportPrivateUsage]
    outcome = commit(job, "init_transactions", KafkaError(code))
    assert isinstance(outcome, RetryLater)
    assert outcome.until_fixed
    assert "refuses to authenticate" in outcome.reason
    assert "Check the mechanism, the user and the password" in outcome.reason


def test_a_client_that_refuses_its_settings_waits_for_a_person(
    job: KafkaJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: Mapping[str, Any]) -> None:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "ssl.ca.location: no such file"))  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(clients, "Producer", refuse)
    outcome = commit(job, "", KafkaError(0))
    assert isinstance(outcome, RetryLater)
    assert outcome.until_fixed
    assert "ssl.ca.location" in outcome.reason
