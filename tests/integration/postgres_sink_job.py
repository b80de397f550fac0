"""A whole job in one process: source, two writers, decisions, recovery. Run as a program, killed.

    python postgres_sink_job.py URL DIRECTORY ROWS DELIVERY [POINT@CHECKPOINT]

The decision log is a directory: `attempt-<n>` claims an attempt, `decision-<n>` is a checkpoint
with its committables, both created by link so that they are there whole or not at all. Row i is
of subtask i % 2; a checkpoint is taken every twenty rows a subtask. What recovery commits and
aborts is decided by `protocol.recovery`, as in the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from tests.integration.postgres_sink_kit import SCHEMA, rows

from onceflow.core.crash_points import VARIABLE, reach
from onceflow.core.protocol.committables import (
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.recovery import plan_recovery
from onceflow.core.spi import Committer, CommitterContext, SinkWriter, WriterContext
from onceflow.sinks import PostgresSink

SINK_ID = "soak.ledger"
PARALLELISM = 2
ROWS_A_CHECKPOINT = 20
BATCH = 7


@dataclass(frozen=True)
class Decision:
    """The last decided checkpoint: how many rows each subtask had written, and what to commit."""

    checkpoint: int
    position: int
    transactions: tuple[str, ...]


def main(arguments: Sequence[str]) -> None:
    url, directory, total, delivery, *crash = arguments
    log = Path(directory)
    attempt = _claim_attempt(log)
    sink = PostgresSink(
        url,
        table="ledger",
        create=True,
        delivery=cast("Literal['exactly_once', 'at_least_once']", delivery),
    )
    context = CommitterContext("soak", "ledger", SINK_ID, AttemptId(attempt), log_id=str(log))
    sink.check(context, SCHEMA)
    restored = _last_decision(log)
    committer = sink.committer(context)
    _recover(committer, restored, attempt)
    writers = [_writer(sink, subtask, attempt, restored) for subtask in range(PARALLELISM)]
    position, checkpoint = restored.position, restored.checkpoint
    while position < int(total) // PARALLELISM:
        checkpoint += 1
        if crash:
            _arm(crash[0], checkpoint)
        end = min(position + ROWS_A_CHECKPOINT, int(total) // PARALLELISM)
        found = _write_and_prepare(writers, position, end, checkpoint)
        position = end
        _publish(
            log / f"decision-{checkpoint:06d}",
            json.dumps([checkpoint, position, [str(one.transaction) for one in found]]),
        )
        reach("logged")
        for committable in found:
            reach("commit")
            outcome = _until_settled(committer, committable)
            assert isinstance(outcome, (Committed, AlreadyCommitted)), outcome
            reach("committed")
        committer.prune(CheckpointId(checkpoint))
    for writer in writers:
        writer.close()
    committer.close()


def _write_and_prepare(
    writers: Sequence[SinkWriter], position: int, end: int, checkpoint: int
) -> list[Committable]:
    for subtask, writer in enumerate(writers):
        for first in range(position, end, BATCH):
            last = min(first + BATCH, end)
            writer.write(
                rows(range(first * PARALLELISM + subtask, last * PARALLELISM, PARALLELISM))
            )
            reach("write")
    found: list[Committable] = []
    for writer in writers:
        committable = writer.pre_commit(CheckpointId(checkpoint))
        reach("prepared")
        if committable is not None:
            found.append(committable)
    return found


def _recover(committer: Committer, restored: Decision, attempt: int) -> None:
    parsed = [TransactionId.parse(name) for name in restored.transactions]
    plan = plan_recovery(
        [Committable(one) for one in parsed if one is not None],
        committer.in_doubt(),
        sink_id=SINK_ID,
        attempt=AttemptId(attempt),
    )
    for committable in plan.commit:
        outcome = _until_settled(committer, committable)
        assert isinstance(outcome, (Committed, AlreadyCommitted)), outcome
    for committable in plan.abort:
        aborted: AbortOutcome = committer.abort(committable)
        assert not isinstance(aborted, AlreadyCommitted), committable


def _until_settled(committer: Committer, committable: Committable) -> CommitOutcome:
    deadline = time.monotonic() + 60
    while True:
        outcome = committer.commit(committable)
        if not isinstance(outcome, (RetryLater, Unknown)) or time.monotonic() > deadline:
            return outcome
        time.sleep(0.05)


def _writer(sink: PostgresSink, subtask: int, attempt: int, restored: Decision) -> SinkWriter:
    return sink.writer(
        WriterContext(
            job="soak",
            uid="ledger",
            sink_id=SINK_ID,
            subtask=subtask,
            parallelism=PARALLELISM,
            attempt=AttemptId(attempt),
            first_checkpoint=CheckpointId(restored.checkpoint + 1),
            schema=SCHEMA,
        )
    )


def _claim_attempt(log: Path) -> int:
    attempt = 1
    while not _publish(log / f"attempt-{attempt:06d}", ""):
        attempt += 1
    return attempt


def _last_decision(log: Path) -> Decision:
    found = sorted(log.glob("decision-*"))
    if not found:
        return Decision(0, 0, ())
    checkpoint, position, transactions = json.loads(found[-1].read_text())
    return Decision(checkpoint, position, tuple(transactions))


def _publish(path: Path, text: str) -> bool:
    """Create `path` with `text`, whole and durable; False when somebody else has created it."""
    fresh = path.with_name(f"fresh-{os.getpid()}")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink()
    return True


def _arm(wanted: str, checkpoint: int) -> None:
    point, _, at = wanted.partition("@")
    if int(at) == checkpoint:
        (Path(os.environ[VARIABLE]) / point).touch()


if __name__ == "__main__":
    main(sys.argv[1:])
