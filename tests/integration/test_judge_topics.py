"""The judge finds every violation that is planted in a topic, and nothing in a right one."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
from confluent_kafka import Producer

from onceflow.core.errors import ConfigError
from onceflow.integration.judge import NoVerdict, Verdict, verify_topic
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers import KafkaServer
from onceflow.integration.servers.process import free_port
from onceflow.integration.workload import Payments

PAYMENTS = Payments(records=3_000, accounts=40, partitions=2, seed=7)
RIGHT = Verdict(
    records=3_000,
    rows=3_000,
    duplicates=0,
    missing=0,
    unexpected=0,
    wrong_balances=0,
    altered=False,
    in_doubt=0,
)
_TIMEOUT_S = 30.0

Row = dict[str, object]
Tamper = Callable[[list[Row]], None]


@dataclass(frozen=True)
class Topic:
    """Two partitions; an account's records stand in the one of its number's remainder."""

    server: KafkaServer
    name: str

    def producer(self) -> Producer:
        producer = Producer(
            {
                "bootstrap.servers": self.server.bootstrap_servers,
                "transactional.id": uuid.uuid4().hex,
                "log_level": 2,
            }
        )
        producer.init_transactions(_TIMEOUT_S)
        return producer

    def send(self, producer: Producer, rows: Iterable[Row], partition: int | None = None) -> None:
        for row in rows:
            place = int(str(row["account"])[-1]) % 2 if partition is None else partition
            producer.produce(self.name, json.dumps(row).encode(), partition=place)
        assert producer.flush(_TIMEOUT_S) == 0

    def commit(self, rows: Iterable[Row], partition: int | None = None) -> None:
        producer = self.producer()
        producer.begin_transaction()
        self.send(producer, rows, partition)
        producer.commit_transaction(_TIMEOUT_S)

    def judged(self) -> Verdict:
        return verify_topic(self.server.bootstrap_servers, self.name, PAYMENTS)


@pytest.fixture
def topic(onceflow_kafka: KafkaServer, kafka_topic: TopicFactory) -> Topic:
    return Topic(onceflow_kafka, kafka_topic(2))


def _right_rows() -> list[Row]:
    balances: defaultdict[int, int] = defaultdict(int)
    counts: defaultdict[int, int] = defaultdict(int)
    rows: list[Row] = []
    for chunk in PAYMENTS.chunks():
        for id_, account, amount in zip(
            chunk.ids.tolist(), chunk.accounts.tolist(), chunk.amounts.tolist(), strict=True
        ):
            balances[account] += amount
            counts[account] += 1
            rows.append(
                {
                    "id": id_,
                    "account": f"acct-{account:06}",
                    "amount": amount,
                    "ts": 0,
                    "balance": balances[account],
                    "n": counts[account],
                }
            )
    return rows


def _of_account(rows: list[Row], account: str) -> list[Row]:
    return [row for row in rows if row["account"] == account]


def _repeat_three(rows: list[Row]) -> None:
    rows += [dict(row) for row in rows[17:20]]


def _lose_one(rows: list[Row]) -> None:
    del rows[17]


def _invent_one(rows: list[Row]) -> None:
    rows.append({"id": 3_000, "account": "acct-999998", "amount": 1, "balance": 1, "n": 1})


def _swap_two_of_an_account(rows: list[Row]) -> None:
    """Both are there, and right: only their order is not."""
    account = str(rows[-1]["account"])
    places = [place for place, row in enumerate(rows) if row["account"] == account]
    one, other = places[3:5]
    rows[one], rows[other] = rows[other], rows[one]


def _alter_an_amount(rows: list[Row]) -> None:
    last = _of_account(rows, "acct-000003")[-1]
    last["amount"] = int(str(last["amount"])) + 1
    last["balance"] = int(str(last["balance"])) + 1


def _alter_an_account(rows: list[Row]) -> None:
    for row in _of_account(rows, "acct-000003"):
        row["account"] = "ACCT-000003"


def _null_the_balance(rows: list[Row]) -> None:
    _of_account(rows, "acct-000003")[-1]["balance"] = None


def test_right_topic_is_ok(topic: Topic) -> None:
    topic.commit(_right_rows())
    assert topic.judged() == RIGHT


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (_repeat_three, replace(RIGHT, rows=3_003, duplicates=3, wrong_balances=3)),
        (_lose_one, replace(RIGHT, rows=2_999, missing=1, wrong_balances=1)),
        (_invent_one, replace(RIGHT, rows=3_001, unexpected=1)),
        (_swap_two_of_an_account, replace(RIGHT, wrong_balances=3)),
        (_alter_an_amount, replace(RIGHT, altered=True)),
        pytest.param(_alter_an_account, replace(RIGHT, altered=True), marks=pytest.mark.slow),
        (_null_the_balance, replace(RIGHT, wrong_balances=1)),
        (list[Row].clear, replace(RIGHT, rows=0, missing=3_000)),
    ],
)
def test_every_planted_violation_is_found(topic: Topic, tamper: Tamper, expected: Verdict) -> None:
    rows = _right_rows()
    tamper(rows)
    topic.commit(rows)
    verdict = topic.judged()
    assert verdict == expected
    assert not verdict.ok


def test_account_whose_records_are_torn_over_two_partitions_is_wrong(topic: Topic) -> None:
    """No consumer could tell in which order they belong."""
    rows = _right_rows()
    torn = _of_account(rows, "acct-000002")[20:]
    topic.commit([row for row in rows if row not in torn])
    topic.commit(torn, partition=1)
    assert topic.judged() == replace(RIGHT, wrong_balances=len(torn))


def test_open_transaction_is_in_doubt_and_hides_what_comes_after_it(topic: Topic) -> None:
    rows = _right_rows()
    topic.commit(rows[:2_000])
    left_open = topic.producer()
    left_open.begin_transaction()
    topic.send(left_open, rows[:1], partition=0)
    topic.commit(rows[2_000:])
    verdict = topic.judged()
    assert verdict.in_doubt == 1
    assert 0 < verdict.missing < 1_000, "partition 1 can be read to its end"
    left_open.abort_transaction(_TIMEOUT_S)
    assert topic.judged() == RIGHT


def test_record_of_another_kind_is_refused_by_its_place(topic: Topic) -> None:
    producer = topic.producer()
    producer.begin_transaction()
    producer.produce(topic.name, b'{"id": 1}', partition=1)
    producer.commit_transaction(_TIMEOUT_S)
    with pytest.raises(ConfigError, match=r"partition 1 offset 0: .*account"):
        topic.judged()


def test_topic_that_does_not_exist_is_refused_by_name(onceflow_kafka: KafkaServer) -> None:
    with pytest.raises(ConfigError, match="topic nowhere cannot"):
        verify_topic(onceflow_kafka.bootstrap_servers, "nowhere", PAYMENTS)


def test_broker_that_is_down_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceflow.integration.judges.topics._ANSWER_TIMEOUT_S", 1.0)
    with pytest.raises(NoVerdict, match="topic ledger"):
        verify_topic(f"127.0.0.1:{free_port()}", "ledger", PAYMENTS)
