"""Commits into Kafka that are begun before their decision, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from tests.integration.kafka_sink_kit import (
    KafkaJob,
    await_markers,
    decided_ids_in,
    ids_in,
    messages,
    open_transaction_blocks,
    values_of,
)

from onceflow.core.protocol.committables import Aborted, AlreadyCommitted, Committed, Lost
from onceflow.core.spi import Committer
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka import clients

_TIMEOUT_S = 40


@pytest.fixture
def topic(kafka_topic: TopicFactory) -> str:
    return kafka_topic(1)


@pytest.fixture
def job(servers: str, topic: str, tmp_path: Path) -> KafkaJob:
    return KafkaJob(
        KafkaSink(servers, topic=topic, key="account"),
        directory=tmp_path,
        sink_id=f"e.{topic[-16:]}",
    )


def open_committer(job: KafkaJob) -> Committer:
    """Return a committer that has committed ids 0 to 9 as checkpoint 1, so its lane is open."""
    committer = job.committer()
    assert committer.commit(job.prepare(1, range(10))) == Committed()
    return committer


def test_what_is_begun_is_seen_after_its_commit_alone_and_produced_once(
    job: KafkaJob, servers: str, topic: str
) -> None:
    with job:
        committer = open_committer(job)
        committable = job.prepare(2, range(10, 20))
        assert committer.begin_commit(committable)
        assert len(messages(servers, topic, isolation="read_uncommitted")) > 10
        assert ids_in(servers, topic) == list(range(10))
        assert committer.commit(committable) == Committed()
        assert decided_ids_in(servers, topic) == list(range(20))
        assert len(messages(servers, topic, isolation="read_uncommitted")) == 20
        assert job.staged() == []
        assert job.committer(2).commit(committable) == AlreadyCommitted()


def test_nothing_is_begun_where_no_decision_has_taken_the_lane(
    job: KafkaJob, servers: str, topic: str
) -> None:
    """An attempt that was overtaken must not fence its successor without a decision."""
    with job:
        overtaken = open_committer(job)
        late = job.prepare(2, range(100, 110))
        successor = job.committer(2)
        assert successor.commit(job.prepare(2, range(10, 20), attempt=2)) == Committed()
        assert not overtaken.begin_commit(late), "its lane is not its own any more"
        committable = job.prepare(3, range(20, 30), attempt=2)
        assert successor.begin_commit(committable)
        assert not overtaken.begin_commit(job.prepare(3, range(110, 120)))
        assert successor.commit(committable) == Committed()
        assert decided_ids_in(servers, topic) == list(range(30))
        assert len(messages(servers, topic, isolation="read_uncommitted")) == 30


def test_what_is_withdrawn_blocks_no_reader_and_is_committed_later(
    job: KafkaJob, servers: str, topic: str
) -> None:
    """As after a checkpoint that was given up: the next one commits its rows with its own."""
    with job:
        committer = open_committer(job)
        first, second = job.prepare(2, range(10, 20)), job.prepare(3, range(20, 30))
        assert committer.begin_commit(first)
        assert open_transaction_blocks(servers, topic)
        committer.withdraw_commit(first)
        assert await_markers(servers, topic, timeout_s=_TIMEOUT_S)
        assert ids_in(servers, topic) == list(range(10))
        assert [committer.commit(one) for one in (first, second)] == [Committed()] * 2
        found = [value["id"] for value in values_of(messages(servers, topic))]
        assert found == list(range(30)), "in the order of their checkpoints"


def test_a_closed_committer_leaves_nothing_open(job: KafkaJob, servers: str, topic: str) -> None:
    with job:
        committer = open_committer(job)
        assert committer.begin_commit(job.prepare(2, range(10, 20)))
        committer.close()
        assert await_markers(servers, topic, timeout_s=_TIMEOUT_S)
        assert ids_in(servers, topic) == list(range(10))
        assert len(job.staged()) == 1


def test_another_attempt_aborts_what_is_begun(job: KafkaJob, servers: str, topic: str) -> None:
    with job:
        committer = open_committer(job)
        committable = job.prepare(2, range(10, 20))
        assert committer.begin_commit(committable)
        assert job.committer(2).abort(committable) == Aborted()
        assert await_markers(servers, topic, timeout_s=_TIMEOUT_S)
        # Nobody may ask for it; who does all the same is not told that it is committed.
        outcome = committer.commit(committable)
        assert not isinstance(outcome, Committed | AlreadyCommitted)
        assert isinstance(committer.commit(committable), Lost)
        assert decided_ids_in(servers, topic) == list(range(10))


def test_another_attempt_commits_what_is_begun(job: KafkaJob, servers: str, topic: str) -> None:
    with job:
        committer = open_committer(job)
        committable = job.prepare(2, range(10, 20))
        assert committer.begin_commit(committable)
        assert job.committer(2).commit(committable) == Committed()
        assert committer.commit(committable) == AlreadyCommitted()
        assert decided_ids_in(servers, topic) == list(range(20))


def test_another_commit_of_the_lane_comes_before_what_is_begun(
    job: KafkaJob, servers: str, topic: str
) -> None:
    with job:
        committer = open_committer(job)
        first, begun = job.prepare(2, range(10, 20)), job.prepare(3, range(20, 30))
        assert committer.begin_commit(begun)
        assert committer.commit(first) == Committed()
        assert committer.commit(begun) == Committed()
        found = [value["id"] for value in values_of(messages(servers, topic))]
        assert found == list(range(30))


class _Rigged(Producer):
    """A producer around whose commits a test does something."""

    around_commit: Callable[[Callable[[], None]], None]

    def commit_transaction(self, timeout: Any = -1) -> None:
        type(self).around_commit(lambda: super(_Rigged, self).commit_transaction(timeout))


@pytest.mark.parametrize("lands", [True, False])
def test_the_end_of_what_is_begun_fails_and_each_row_is_there_once(
    job: KafkaJob, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    """The commit offset tells whether it landed, as for a commit that was not begun."""
    failures: list[str] = []

    def fail(commit: Callable[[], None]) -> None:
        if not failures or lands:
            commit()
        if failures:
            failures.pop()
            raise KafkaException(KafkaError(KafkaError._FAIL, "the test says so", fatal=True))  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(_Rigged, "around_commit", staticmethod(fail), raising=False)
    monkeypatch.setattr(clients, "Producer", _Rigged)
    with job:
        committer = open_committer(job)
        committable = job.prepare(2, range(10, 20))
        assert committer.begin_commit(committable)
        failures.append("once")
        assert committer.commit(committable) == Committed()
        assert decided_ids_in(servers, topic) == list(range(20))


@pytest.mark.servers
def test_what_the_broker_timed_out_is_produced_again(
    servers: str, topic: str, tmp_path: Path
) -> None:
    sink = KafkaSink(servers, topic=topic, key="account", transaction_timeout_s=1.5)
    with KafkaJob(sink, directory=tmp_path, sink_id=f"t.{topic[-16:]}") as job:
        committer = open_committer(job)
        committable = job.prepare(2, range(10, 20))
        assert committer.begin_commit(committable)
        assert await_markers(servers, topic, timeout_s=_TIMEOUT_S), "the broker ends it"
        outcomes = [committer.commit(committable) for _ in range(2)]
        assert Committed() in outcomes, outcomes
        assert decided_ids_in(servers, topic) == list(range(20))
