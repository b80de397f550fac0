"""A whole job in one process: source, two writers, decisions, recovery. Run as a program, killed.

    python sql_sink_job.py URL DIRECTORY ROWS KIND [POINT@CHECKPOINT]

KIND is exactly_once, at_least_once, or ledger: how rows are inserted; or upsert or ledger_upsert,
by which the same rows are changes of forty keys: see `changes_of`.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.integration.sink_kit import SCHEMA, rows
from typing_extensions import override

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
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import MySQLSink, PostgresSink

SINK_ID = "soak.ledger"
PARALLELISM = 2
ROWS_A_CHECKPOINT = 20
BATCH = 7
KEYS = 40

CHANGES = pa.schema([("id", pa.int64()), ("amount", pa.int64()), ("op", pa.string())])

_BY_KEY: dict[str, Any] = {
    "write_mode": "upsert",
    "primary_key": ("id",),
    "operation_column": "op",
}
KINDS: dict[str, dict[str, Any]] = {
    "exactly_once": {},
    "at_least_once": {"delivery": "at_least_once"},
    "ledger": {"commit_mode": "ledger"},
    "upsert": {"commit_mode": "two_phase", **_BY_KEY},
    "ledger_upsert": {"commit_mode": "ledger", **_BY_KEY},
}


@dataclass(frozen=True)
class Decision:
    """The last decided checkpoint: how many rows each subtask had written, and what to commit."""

    checkpoint: int
    position: int
    committables: tuple[Committable, ...]


def main(arguments: Sequence[str]) -> None:
    url, directory, total, kind, *crash = arguments
    log = Path(directory)
    attempt = _claim_attempt(log)
    sink_class = MySQLSink if url.startswith(("mysql", "mariadb")) else PostgresSink
    sink = sink_class(url, table="ledger", create=True, **KINDS[kind])
    staging = _CrashingStaging.in_directory(str(log / "storage"), SINK_ID)
    context = CommitterContext(
        "soak", "ledger", SINK_ID, AttemptId(attempt), log_id=str(log), staging=staging
    )
    schema = CHANGES if "upsert" in kind else SCHEMA
    sink.check(context, schema)
    restored = _last_decision(log)
    committer = sink.committer(context)
    _recover(committer, restored, attempt)
    writers = [_writer(sink, n, context, restored, schema) for n in range(PARALLELISM)]
    position, checkpoint = restored.position, restored.checkpoint
    while position < int(total) // PARALLELISM:
        checkpoint += 1
        if crash:
            _arm(crash[0], checkpoint)
        end = min(position + ROWS_A_CHECKPOINT, int(total) // PARALLELISM)
        found = _write_and_prepare(writers, position, end, checkpoint, schema)
        position = end
        _publish(
            log / f"decision-{checkpoint:06d}",
            json.dumps([checkpoint, position, [_text(one) for one in found]]),
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


def changes_of(numbers: Iterable[int]) -> pa.RecordBatch:
    """Return a change of key n % 40 for each n: a delete if n is divisible by three."""
    given = list(numbers)
    columns = [
        pa.array([n % KEYS for n in given], pa.int64()),
        pa.array(given, pa.int64()),
        pa.array(["d" if n % 3 == 0 else "u" for n in given]),
    ]
    return pa.record_batch(columns, schema=CHANGES)


def _text(committable: Committable) -> list[str]:
    return [str(committable.transaction), committable.payload.decode()]


class _CrashingStaging(FileStagingArea):
    """Can be killed with rows committed and not yet discarded, at the point `replied`."""

    @override
    def discard(self, transaction: TransactionId) -> None:
        reach("replied")
        super().discard(transaction)


def _write_and_prepare(
    writers: Sequence[SinkWriter], position: int, end: int, checkpoint: int, schema: pa.Schema
) -> list[Committable]:
    batch_of = changes_of if schema is CHANGES else rows
    for subtask, writer in enumerate(writers):
        for first in range(position, end, BATCH):
            last = min(first + BATCH, end)
            numbers = range(first * PARALLELISM + subtask, last * PARALLELISM, PARALLELISM)
            writer.write(batch_of(numbers))
            reach("write")
    found: list[Committable] = []
    for writer in writers:
        committable = writer.pre_commit(CheckpointId(checkpoint))
        reach("prepared")
        if committable is not None:
            found.append(committable)
    return found


def _recover(committer: Committer, restored: Decision, attempt: int) -> None:
    plan = plan_recovery(
        restored.committables,
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


def _writer(
    sink: PostgresSink | MySQLSink,
    subtask: int,
    context: CommitterContext,
    restored: Decision,
    schema: pa.Schema,
) -> SinkWriter:
    return sink.writer(
        WriterContext(
            job="soak",
            uid="ledger",
            sink_id=SINK_ID,
            subtask=subtask,
            parallelism=PARALLELISM,
            attempt=context.attempt,
            first_checkpoint=CheckpointId(restored.checkpoint + 1),
            schema=schema,
            staging=context.staging,
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
    committables: list[Committable] = []
    for name, payload in transactions:
        transaction = TransactionId.parse(name)
        assert transaction is not None
        committables.append(Committable(transaction, payload=payload.encode()))
    return Decision(checkpoint, position, tuple(committables))


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
