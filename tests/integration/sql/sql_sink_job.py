"""A whole job in one process, a fork for each: source, two writers, decisions, recovery.

    main([URL, DIRECTORY, ROWS, MODE, [POINT@CHECKPOINT]])

MODE is exactly_once, at_least_once, or ledger: how rows are inserted; or upsert or ledger_upsert,
by which the same rows are changes of forty keys: see `changes_of`; or upsert_columns, where MySQL
is given even a few rows column by column, as otherwise many.

Row i is of subtask i % 2; a checkpoint is taken every twenty rows a subtask. What is decided is
written to a `DecisionDirectory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.integration import decision_directory
from tests.integration.sink_kit import SCHEMA, rows
from typing_extensions import override

from onceflow.core.crash_points import reach
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import CommitterContext, SinkWriter, WriterContext
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import MySQLSink, PostgresSink
from onceflow.sinks.mysql import dml

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
MODES: dict[str, dict[str, Any]] = {
    "exactly_once": {},
    "at_least_once": {"delivery": "at_least_once"},
    "ledger": {"commit_mode": "ledger"},
    "upsert": {"commit_mode": "two_phase", **_BY_KEY},
    "upsert_columns": {"commit_mode": "two_phase", **_BY_KEY},
    "ledger_upsert": {"commit_mode": "ledger", **_BY_KEY},
}


def main(arguments: Sequence[str]) -> None:
    url, directory, total, mode, *crash = arguments
    if mode == "upsert_columns":
        # Of this process alone, which runs nothing else.
        dml.COLUMN_ROWS_MIN = 1
    log = decision_directory.DecisionDirectory(Path(directory))
    attempt = log.claim_attempt()
    sink_class = MySQLSink if url.startswith(("mysql", "mariadb")) else PostgresSink
    sink = sink_class(url, table="ledger", create=True, **MODES[mode])
    staging = _CrashingStaging.in_directory(f"{directory}/storage", SINK_ID)
    context = CommitterContext(
        "soak", "ledger", SINK_ID, AttemptId(attempt), log_id=directory, staging=staging
    )
    schema = CHANGES if "upsert" in mode else SCHEMA
    sink.open(context, schema)
    restored = log.last()
    committer = sink.committer(context)
    decision_directory.recover(committer, restored, sink_id=SINK_ID, attempt=attempt)
    writers = [_writer(sink, n, context, restored, schema) for n in range(PARALLELISM)]
    position, checkpoint = restored.position, restored.checkpoint
    while position < int(total) // PARALLELISM:
        checkpoint += 1
        decision_directory.arm(crash, checkpoint)
        end = min(position + ROWS_A_CHECKPOINT, int(total) // PARALLELISM)
        found = _write_and_prepare(writers, position, end, checkpoint, schema)
        position = end
        decision = decision_directory.Decision(checkpoint, position, tuple(found))
        log.decide(decision)
        reach("logged")
        decision_directory.commit_decided(committer, decision)
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
        found += writer.pre_commit(CheckpointId(checkpoint))
        reach("prepared")
    return found


def _writer(
    sink: PostgresSink | MySQLSink,
    subtask: int,
    context: CommitterContext,
    restored: decision_directory.Decision,
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
