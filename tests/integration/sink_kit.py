"""A sink's writers and committers without a runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

import pyarrow as pa
from typing_extensions import Self

from onceflow.core.protocol.committables import (
    AbortOutcome,
    CommitOutcome,
    Committable,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, OnBadRow, Sink, SinkWriter, WriterContext
from onceflow.core.spi.staging import StagingArea

SinkT = TypeVar("SinkT", bound=Sink)
OutcomeT = TypeVar("OutcomeT", bound=CommitOutcome | AbortOutcome)

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string()),
        pa.field("amount", pa.int64()),
    ]
)


def rows(ids: Iterable[int], accounts: int = 7) -> pa.RecordBatch:
    """Return one row for each id, of `accounts` accounts in turn."""
    numbers = list(ids)
    return pa.record_batch(
        [
            pa.array(numbers, pa.int64()),
            pa.array([f"acct-{number % accounts}" for number in numbers]),
            pa.array([number * 10 for number in numbers], pa.int64()),
        ],
        schema=SCHEMA,
    )


@dataclass
class Job(Generic[SinkT]):
    """A sink under one sink id; closes every writer and committer that it made."""

    sink: SinkT
    sink_id: str = "job.ledger"
    log_id: str = "log-1"
    schema: pa.Schema = field(default_factory=lambda: SCHEMA)
    staging: StagingArea | None = None
    on_bad_row: OnBadRow = OnBadRow.FAIL
    accounts: int = 7
    """Of the rows that `prepare` makes of ids."""
    _open: ExitStack = field(default_factory=ExitStack)

    def check(self, attempt: int = 1) -> Self:
        self.sink.open(self.committer_context(attempt), self.schema)
        return self

    def committer_context(self, attempt: int = 1) -> CommitterContext:
        return CommitterContext(
            "job", "ledger", self.sink_id, AttemptId(attempt), self.log_id, self.staging
        )

    def writer(
        self, attempt: int = 1, subtask: int = 0, parallelism: int = 1, first_checkpoint: int = 1
    ) -> SinkWriter:
        writer = self.sink.writer(
            WriterContext(
                job="job",
                uid="ledger",
                sink_id=self.sink_id,
                subtask=subtask,
                parallelism=parallelism,
                attempt=AttemptId(attempt),
                first_checkpoint=CheckpointId(first_checkpoint),
                schema=self.schema,
                staging=self.staging,
                on_bad_row=self.on_bad_row,
            )
        )
        self._open.callback(writer.close)
        return writer

    def committer(self, attempt: int = 1) -> Committer:
        committer = self.sink.committer(self.committer_context(attempt))
        self._open.callback(committer.close)
        return committer

    def prepare(
        self,
        checkpoint: int,
        ids: Iterable[int] | pa.RecordBatch,
        attempt: int = 1,
        subtask: int = 0,
    ) -> Committable:
        """Return what a writer of its own pre-committed; the writer is closed."""
        writer = self.writer(attempt, subtask, first_checkpoint=checkpoint)
        writer.write(ids if isinstance(ids, pa.RecordBatch) else rows(ids, self.accounts))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        return committable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()


def committables(found: Sequence[Committable]) -> list[str]:
    """Return the names of committables, sorted."""
    return sorted(str(committable.transaction) for committable in found)


def until_settled(ask: Callable[[], OutcomeT], timeout_s: float = 60) -> OutcomeT:
    """Ask as the engine does, until the outcome is final."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = ask()
        if not isinstance(outcome, (RetryLater, Unknown)) or time.monotonic() > deadline:
            return outcome
        time.sleep(0.05)


def eventually(holds: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Return once it holds.

    Raises:
        AssertionError: It does not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
