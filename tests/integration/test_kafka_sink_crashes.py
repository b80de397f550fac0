"""A job killed with SIGKILL at every step, and started again, has each record in the topic once."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration import kafka_sink_job, kafka_sink_kit
from tests.integration.killed_jobs import Attempt, KilledJob, finished

from onceflow.integration.faults import is_paused
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers import EmbeddedKafka
from onceflow.integration.servers.kinds import KafkaServer

_ROWS = 160
_A_CHECKPOINT = 40
_MANY_ROWS = 8_000
_KILLS = 3

# Points before the decision; what they leave staged is aborted by the next attempt.
_UNDECIDED = ("flushed", "prepared")
# Steps that come before the decision where commits are begun early.
_BEFORE_DECISION = ("producing", "offset", "begun")


class Runs(KilledJob):
    """The attempts of one job that writes to a topic."""

    def __init__(self, servers: str, topic: str, directory: Path) -> None:
        super().__init__(kafka_sink_job.main, directory)
        self.servers, self.topic = servers, topic

    def start(
        self,
        *crash: str,
        rows: int = _ROWS,
        parallelism: int = 2,
        delivery: str = "exactly_once",
        begins: bool = False,
    ) -> Attempt:
        what = (self.servers, self.topic, self.log.path, rows, parallelism, delivery)
        return self.start_with(*what, "begins" if begins else "", *crash)

    def run(
        self,
        *crash: str,
        parallelism: int = 2,
        delivery: str = "exactly_once",
        begins: bool = False,
    ) -> int:
        """Return how the attempt ended: 0, or minus SIGKILL."""
        attempt = self.start(*crash, parallelism=parallelism, delivery=delivery, begins=begins)
        return finished(attempt)

    def is_blocked(self) -> bool:
        """Return whether consumers wait behind an open transaction in a partition."""
        return any(
            kafka_sink_kit.open_transaction_blocks(self.servers, self.topic, one) for one in (0, 1)
        )

    def staged(self) -> list[str]:
        return [path.name for path in self.log.path.rglob("*-0.arrow")]

    def assert_exactly_once(self, rows: int = _ROWS) -> None:
        assert kafka_sink_kit.decided_ids_in(self.servers, self.topic) == list(range(rows))
        assert self.staged() == []
        assert not self.is_blocked()


@pytest.fixture
def runs(onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, tmp_path: Path) -> Iterator[Runs]:
    with Runs(onceflow_kafka.bootstrap_servers, kafka_topic(2), tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    "crash",
    [
        *("prepared@2", "logged@2", "producing@3", "offset@2", "sent@3", "record@2"),
        *(
            pytest.param(step, marks=pytest.mark.slow)
            for step in ("flushed@2", "init@1", "opened@1", "producing@1", "sent@1")
        ),
    ],
)
def test_job_killed_at_a_step_writes_each_record_once(runs: Runs, crash: str) -> None:
    assert runs.run(crash) == -signal.SIGKILL
    point, _, checkpoint = crash.partition("@")
    assert runs.log.decided() == int(checkpoint) - (point in _UNDECIDED)
    seen = kafka_sink_kit.ids_in(runs.servers, runs.topic)
    assert len(seen) == len(set(seen)), "nothing doubled while it was down"
    assert set(seen) <= set(range(runs.log.decided() * _A_CHECKPOINT)), "nothing undecided is seen"
    assert runs.run() == 0
    runs.assert_exactly_once()


@pytest.mark.parametrize(
    ("crash", "decided"),
    [
        ("begun@2", 1),
        ("decided@2", 2),
        *(
            pytest.param(*step, marks=pytest.mark.servers)
            for step in (("producing@2", 1), ("offset@2", 1), ("sent@2", 2), ("record@2", 2))
        ),
    ],
)
def test_job_killed_after_it_began_a_commit_early_writes_each_record_once(
    runs: Runs, crash: str, decided: int
) -> None:
    """A commit that has begun before the decision is neither visible nor left open in the end."""
    assert runs.run(crash, begins=True) == -signal.SIGKILL
    assert runs.log.decided() == decided
    if crash.startswith(("begun", "decided")):
        assert runs.is_blocked(), "the kill left a transaction open"
        assert kafka_sink_kit.ids_in(runs.servers, runs.topic) == list(range(_A_CHECKPOINT))
    assert runs.run(begins=True) == 0
    runs.assert_exactly_once()


@pytest.mark.servers
def test_job_killed_after_it_began_commits_early_goes_on_at_another_parallelism(runs: Runs) -> None:
    """Other subtasks' transactions are open when it starts, decided ones and undecided ones."""
    assert runs.run("begun@2", parallelism=3, begins=True) == -signal.SIGKILL
    assert runs.run("decided@3", parallelism=1, begins=True) == -signal.SIGKILL
    assert runs.run(parallelism=4, begins=True) == 0
    runs.assert_exactly_once()


def test_job_killed_while_it_makes_good_an_earlier_kill_writes_each_record_once(
    runs: Runs,
) -> None:
    """The second attempt dies in its recovery, in the middle of the same transaction."""
    assert runs.run("producing@2") == -signal.SIGKILL
    assert runs.run("offset@0") == -signal.SIGKILL
    assert runs.run("sent@0") == -signal.SIGKILL
    assert runs.run("record@0") == -signal.SIGKILL
    assert runs.run() == 0
    runs.assert_exactly_once()


@pytest.mark.parametrize("step", ["producing", pytest.param("sent", marks=pytest.mark.slow)])
def test_job_killed_and_started_at_another_parallelism_writes_each_record_once(
    runs: Runs, step: str
) -> None:
    """S31, S32, S33: three subtasks, one, four; transactions are left open by the first two."""
    assert runs.run(f"{step}@2", parallelism=3) == -signal.SIGKILL
    if step == "producing":
        assert runs.is_blocked(), "the kill left a transaction open"
    assert runs.run(f"{step}@3", parallelism=1) == -signal.SIGKILL
    assert runs.run(parallelism=4) == 0
    runs.assert_exactly_once()


@pytest.mark.parametrize(
    ("step", "begins"),
    [
        ("producing", False),
        ("decided", True),
        *(pytest.param(one, False, marks=pytest.mark.slow) for one in ("opened", "offset", "sent")),
        *(pytest.param(one, True, marks=pytest.mark.slow) for one in ("producing", "begun")),
    ],
)
def test_a_zombie_that_wakes_after_its_successor_committed_changes_nothing(
    runs: Runs, step: str, begins: bool
) -> None:
    """Also one that is about to end what it had begun before the decision."""
    checkpoint = 1 if step == "opened" else 2
    zombie = runs.start(f"stop-{step}@{checkpoint}", begins=begins)
    deadline = time.monotonic() + 60
    while not is_paused(zombie.pid):
        assert zombie.poll() is None, zombie.errors
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert runs.run() == 0
    runs.assert_exactly_once()
    zombie.signal(signal.SIGCONT)
    zombie.wait()
    assert "fenced: a newer attempt decides" in zombie.errors
    assert kafka_sink_kit.decided_ids_in(runs.servers, runs.topic) == list(range(_ROWS))
    if not (begins and step in _BEFORE_DECISION):
        assert runs.staged() != [], "it went on to the checkpoint that it may not decide"
    assert runs.run() == 0
    runs.assert_exactly_once()


def test_at_least_once_job_killed_before_its_decision_doubles_records(runs: Runs) -> None:
    """The same kill that exactly-once survives: what the two guarantees differ in."""
    assert runs.run("prepared@3", delivery="at_least_once") == -signal.SIGKILL
    assert runs.run(delivery="at_least_once") == 0
    seen = kafka_sink_kit.ids_in(runs.servers, runs.topic)
    assert set(seen) == set(range(_ROWS))
    assert len(seen) > _ROWS


@pytest.mark.parametrize("seed", [1])
@pytest.mark.servers
def test_job_and_broker_killed_at_random_moments_write_each_record_once(
    tmp_path: Path, seed: int
) -> None:
    """Set ONCEFLOW_TEST_SEED to run another schedule."""
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", seed))
    sys.stdout.write(f"seed {seed}\n")
    schedule = random.Random(seed)
    with (
        EmbeddedKafka() as server,
        Runs(server.bootstrap_servers, server.create_topic("soak", 2), tmp_path) as runs,
    ):
        for kill in range(1, _KILLS + 1):
            process = runs.start(rows=_MANY_ROWS, parallelism=schedule.choice([1, 2, 3]))
            _await_progress(runs, process, kill, schedule.uniform(0.0, 0.8))
            assert process.poll() is None, f"done before kill {kill}, seed {seed}"
            match schedule.choice(["job", "broker", "both"]):
                case "job":
                    process.kill()
                    process.wait()
                case "both":
                    server.kill()
                    process.kill()
                    process.wait()
                    server.start()
                case _:
                    server.kill()
                    server.start()
                    time.sleep(schedule.uniform(0.0, 0.5))
                    process.kill()
                    process.wait()
        assert finished(runs.start(rows=_MANY_ROWS, parallelism=2), timeout_s=150) == 0
        runs.assert_exactly_once(_MANY_ROWS)
        _assert_checkpoints_in_order(runs)


def _assert_checkpoints_in_order(runs: Runs) -> None:
    """In a partition, the records of a checkpoint come before those of the next one's subtask.

    Rows of a key meet in one subtask only while the parallelism stays the same; what holds over
    all attempts is that a subtask's checkpoints follow each other.
    """
    positions: dict[tuple[int | None, int], int] = {}
    for message in kafka_sink_kit.messages(runs.servers, runs.topic):
        (value,) = kafka_sink_kit.values_of([message])
        key = (message.partition(), value["id"] % 6)
        checkpoint = value["id"] // _A_CHECKPOINT
        assert positions.get(key, -1) <= checkpoint, f"{value} comes late"
        positions[key] = checkpoint


def _await_progress(runs: Runs, process: Attempt, kill: int, extra_s: float) -> None:
    """Wait until this attempt has decided something, and then a little longer."""
    attempt = runs.log.path / f"attempt-{kill:06d}"
    deadline = time.monotonic() + 60
    while not attempt.exists():
        assert process.poll() is None, process.errors
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = runs.log.decided()
    while runs.log.decided() <= before + 1:
        assert process.poll() is None, process.errors
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(extra_s)
