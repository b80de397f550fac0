"""A whole job in one process, a fork for each: source, writers, decisions, recovery.

    main([SERVERS, TOPIC, DIRECTORY, ROWS, PARALLELISM, DELIVERY, BEGINS, [POINT@CHECKPOINT]])

Row i is of subtask i % PARALLELISM; a checkpoint is taken every `ROWS_A_CHECKPOINT` rows. What is
decided is written to a `DecisionDirectory`.

With BEGINS the committer begins each commit before its decision, as a slot does.

Besides the engine's crash points this process has some inside the Kafka transaction, `STEPS`. A
point `stop-<step>` stops the process there with SIGSTOP instead: a zombie that somebody may wake.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from confluent_kafka import Producer
from tests.integration import decision_directory
from tests.integration.sink_kit import SCHEMA, rows

from onceflow.core.crash_points import VARIABLE, reach
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext, SinkWriter, WriterContext
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import KafkaSink
from onceflow.sinks.kafka import clients

STEPS = ("init", "opened", "producing", "offset", "begun", "decided", "sent", "record")
"""Before a lane is taken, and after; with some records on the broker; with the commit
offset there; with all commits begun and nothing decided; with the decision there and nothing
ended; with the transaction committed; with the commit record written and the rows not yet
deleted."""

ROWS_A_CHECKPOINT = 40
BATCH = 7
_PRODUCED_FIRST = 9
_RETAINED = 3
"""Checkpoints whose proofs of commits are kept; a zombie may ask for one."""


class SteppingProducer(Producer):
    """A producer that can be killed between any two of its steps."""

    _produced = 0

    def init_transactions(self, timeout: Any = -1) -> None:
        _step("init")
        super().init_transactions(timeout)
        _step("opened")

    def begin_transaction(self) -> None:
        self._produced = 0
        super().begin_transaction()

    def produce(self, *arguments: Any, **named: Any) -> None:
        super().produce(*arguments, **named)
        self._produced += 1
        if self._produced == _PRODUCED_FIRST and _is_armed("producing"):
            self.flush(10)
            _step("producing")

    def send_offsets_to_transaction(
        self, positions: Any, group_metadata: Any, timeout: Any = -1
    ) -> None:
        super().send_offsets_to_transaction(positions, group_metadata, timeout)
        _step("offset")

    def commit_transaction(self, timeout: Any = -1) -> None:
        super().commit_transaction(timeout)
        _step("sent")


def _is_armed(step: str) -> bool:
    directory = Path(os.environ[VARIABLE])
    return (directory / step).exists() or (directory / f"stop-{step}").exists()


def _step(step: str) -> None:
    directory = Path(os.environ[VARIABLE])
    for name, number in ((step, signal.SIGKILL), (f"stop-{step}", signal.SIGSTOP)):
        try:
            (directory / name).unlink()
        except FileNotFoundError:
            continue
        os.kill(os.getpid(), number)


def _discard_in_steps() -> None:
    discard = FileStagingArea.discard

    def stepping(self: FileStagingArea, transaction: TransactionId) -> None:
        if transaction.sequence == 0:
            _step("record")
        discard(self, transaction)

    FileStagingArea.discard = stepping  # type: ignore[method-assign]


@dataclass(frozen=True)
class Job:
    """One attempt of the job."""

    sink: KafkaSink
    sink_id: str
    log: decision_directory.DecisionDirectory
    attempt: int
    parallelism: int
    begins: bool

    @property
    def staging(self) -> FileStagingArea:
        return FileStagingArea.in_directory(str(self.log.path), self.sink_id)

    @property
    def context(self) -> CommitterContext:
        return CommitterContext(
            "soak", "ledger", self.sink_id, AttemptId(self.attempt), "log-1", self.staging
        )

    def writer(self, subtask: int, restored: decision_directory.Decision) -> SinkWriter:
        return self.sink.writer(
            WriterContext(
                job="soak",
                uid="ledger",
                sink_id=self.sink_id,
                subtask=subtask,
                parallelism=self.parallelism,
                attempt=AttemptId(self.attempt),
                first_checkpoint=CheckpointId(restored.checkpoint + 1),
                schema=SCHEMA,
                staging=self.staging,
            )
        )


def main(arguments: Sequence[str]) -> None:
    servers, topic, directory, total, parallelism, delivery, begins, *crash = arguments
    clients.Producer = SteppingProducer  # type: ignore[attr-defined]
    _discard_in_steps()
    log = decision_directory.DecisionDirectory(Path(directory))
    decision_directory.arm(crash, 0)
    sink = KafkaSink(
        servers,
        topic=topic,
        key="account",
        delivery=cast("Literal['exactly_once', 'at_least_once']", delivery),
        transaction_timeout_s=60,
    )
    job = Job(sink, f"soak.{topic[-16:]}", log, log.claim_attempt(), int(parallelism), bool(begins))
    _run(job, int(total), crash)


def _run(job: Job, total: int, crash: Sequence[str]) -> None:
    job.sink.open(job.context, SCHEMA)
    restored = job.log.last()
    committer = job.sink.committer(job.context)
    decision_directory.recover(committer, restored, sink_id=job.sink_id, attempt=job.attempt)
    writers = [job.writer(subtask, restored) for subtask in range(job.parallelism)]
    position, checkpoint = restored.position, restored.checkpoint
    while position < total:
        checkpoint += 1
        decision_directory.arm(crash, checkpoint)
        end = min(position + ROWS_A_CHECKPOINT, total)
        found = _write_and_prepare(writers, position, end, checkpoint)
        position = end
        if job.begins:
            _begin(committer, found)
        decision = decision_directory.Decision(checkpoint, position, tuple(found))
        if job.log.attempts() > job.attempt or not job.log.decide(decision):
            sys.exit("fenced: a newer attempt decides")
        reach("logged")
        _step("decided")
        decision_directory.commit_decided(committer, decision)
        committer.prune(CheckpointId(max(0, checkpoint - _RETAINED)))
    for writer in writers:
        writer.close()
    committer.close()


def _begin(committer: Committer, committables: Sequence[Committable]) -> None:
    begun = [committer.begin_commit(committable) for committable in committables]
    if any(begun):
        _step("begun")


def _write_and_prepare(
    writers: Sequence[SinkWriter], position: int, end: int, checkpoint: int
) -> list[Committable]:
    for subtask, writer in enumerate(writers):
        mine = [number for number in range(position, end) if number % len(writers) == subtask]
        for first in range(0, len(mine), BATCH):
            writer.write(rows(mine[first : first + BATCH]))
            reach("write")
    found: list[Committable] = []
    for writer in writers:
        found += writer.pre_commit(CheckpointId(checkpoint))
        reach("prepared")
    return found
