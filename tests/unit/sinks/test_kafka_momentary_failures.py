"""Whichever single call to storage or Kafka fails, each record is in the topic once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import pyarrow as pa
import pytest
from tests.support.failing_once import Calls, CountedFiles, ask_twice, commit
from tests.support.kafka_double import KafkaDouble

from onceflow.core.protocol.committables import (
    Committable,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.storage import FileStagingArea
from onceflow.core.storage.memory_storage import MemoryFiles
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka.records import KEY, VALUE, stamp

T = TypeVar("T")
SINK_ID, TOPIC = "job.ledger", "ledger"


class Target:
    """A sink's committers, one after the other, over one broker and one staging area."""

    def __init__(self, kafka: KafkaDouble, storage_calls: Calls) -> None:
        self.kafka = kafka
        files = MemoryFiles()
        self.sound_area = FileStagingArea(files, "staged", SINK_ID)
        self.area = FileStagingArea(CountedFiles(files, storage_calls), "staged", SINK_ID)

    def stage(self, checkpoint: int) -> Committable:
        value = pa.array([b"%d" % checkpoint])
        records = pa.record_batch({KEY: pa.array([b"k"]), VALUE: value})
        staged = self.sound_area.open()
        staged.write(stamp(records, (TOPIC,)), part="0")
        return staged.seal(TransactionId(SINK_ID, 1, checkpoint, 0))

    def committer(self, attempt: int) -> Committer:
        sink = KafkaSink("localhost:1", topic=TOPIC, deadline_s=5)
        return sink.committer(
            CommitterContext("job", "ledger", SINK_ID, AttemptId(attempt), "log", self.area)
        )

    def list_rows(self) -> Sequence[TransactionId]:
        """Return the transactions whose rows are staged; the others are commit records."""
        return [
            transaction
            for transaction in self.sound_area.transactions()
            if transaction.sequence < 9000
        ]


def run(target: Target) -> None:
    """Commit four checkpoints in two slots, and again in the recovery of a third attempt."""
    committables = [target.stage(checkpoint) for checkpoint in (1, 2, 3, 4)]
    slot = target.committer(1)
    for committable in committables[:3]:
        slot.begin_commit(committable)
        commit(slot, committable)
    slot.close()
    slot = target.committer(2)
    commit(slot, committables[3])
    slot.close()
    driver = target.committer(3)
    in_doubt = ask_twice(driver.in_doubt)
    assert {one.transaction for one in in_doubt} == set(target.list_rows())
    for committable in committables:
        commit(driver, committable)
    # Two checkpoints complete: what the first one could not delete, the second one deletes.
    driver.prune(CheckpointId(4))
    driver.prune(CheckpointId(4))
    assert {transaction.checkpoint for transaction in target.sound_area.transactions()} <= {4}
    driver.close()
    last = target.committer(4)
    assert ask_twice(last.in_doubt) == ()
    last.prune(CheckpointId(5))
    last.prune(CheckpointId(5))
    last.close()
    assert target.kafka.values == [b"1", b"2", b"3", b"4"]
    assert target.sound_area.transactions() == []


def do_not_wait(_: float) -> None:
    """Let the next try come at once."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", do_not_wait)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("which", ["storage", "kafka"])
def test_each_record_is_there_once_whichever_call_fails_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, which: str, after: bool
) -> None:
    """No call fails in the first run, which counts the calls."""
    fails, count = 0, 0
    while fails <= count:
        failing, sound = Calls(fails, after=after), Calls()
        kafka = KafkaDouble(failing if which == "kafka" else sound)
        kafka.install(monkeypatch)
        run(Target(kafka, failing if which == "storage" else sound))
        count = count or failing.count
        fails += 1
    assert count > 5
