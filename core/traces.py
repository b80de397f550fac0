"""The trace of a job: one line of JSON for each step of the protocol.

If the environment variable `ONCEFLOW_TRACES` names a directory, each process appends its steps to a
file of its own there. The logger `onceflow.traces` writes the same steps at level debug. If both
are off, as in production, a step costs one look-up in the environment and one in the logger.

The order of a file is the order of the process. No line has a time. The order across processes
follows from numbers that both sides name: an attempt, a checkpoint, a subtask. So a step that
another process must see first is recorded before it is sent, and a received step after its arrival.
`onceflow.integration.traces` checks traces against the rules of the protocol.

A line is written by one system call, and survives SIGKILL of its process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec

from onceflow.core.protocol.ids import TransactionId

VARIABLE = "ONCEFLOW_TRACES"
"""The environment variable with the directory of the files `<process id>.jsonl`."""

TraceStep: TypeAlias = Literal[
    # the decision log
    "claimed", "deciding", "decided", "fenced", "rewound",
    # the driver
    "listed", "asked", "returned", "recovered", "sweeping", "swept", "deployed", "triggered",
    "completed", "aborted", "saving", "ending", "ended",
    # a slot
    "restored", "restored_positions", "barrier", "read", "prepared", "acked", "heard",
    "acknowledged",
    # a committer, in either process
    "committing", "committed", "rolling_back", "rolled_back",
    # the driver of a batch
    "settled",
]  # fmt: skip

_log = logging.getLogger("onceflow.traces")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one attempt in one process. Any thread."""

    log: str
    """The location of the job's decision log, which distinguishes jobs."""
    attempt: int
    slot: int | None = None
    """None on the driver."""

    def record(self, step: TraceStep, **facts: object) -> None:
        """Append `step` with `facts`. Iterators among them are read only if traces are on."""
        directory = os.environ.get(VARIABLE)
        if directory is None and not _log.isEnabledFor(logging.DEBUG):
            return
        line = {
            "step": step,
            "log": self.log,
            "attempt": self.attempt,
            **({} if self.slot is None else {"slot": self.slot}),
            **facts,
        }
        encoded = msgspec.json.encode(line, enc_hook=_encode)
        _log.debug("%s", encoded.decode())
        if directory is not None:
            _append(os.path.join(directory, f"{os.getpid()}.jsonl"), encoded + b"\n")  # noqa: PTH118 - hot

    def record_commit(
        self, transactions: Iterable[TransactionId], call: Callable[[], T], *, by: str
    ) -> T:
        """Record a commit before and after `call`, which makes it. Return its outcome."""
        return self._record_call("committing", "committed", transactions, call, by)

    def record_rollback(
        self, transactions: Iterable[TransactionId], call: Callable[[], T], *, by: str
    ) -> T:
        """Record a rollback before and after `call`, which makes it. Return its outcome."""
        return self._record_call("rolling_back", "rolled_back", transactions, call, by)

    def _record_call(
        self,
        begins: TraceStep,
        ends: TraceStep,
        transactions: Iterable[TransactionId],
        call: Callable[[], T],
        by: str,
    ) -> T:
        named = tuple(transactions)
        self.record(begins, transactions=iter(named), by=by)
        outcome = call()
        self.record(ends, transactions=iter(named), by=by, outcome=type(outcome).__name__)
        return outcome


NO_TRACE = Trace("", 0)
"""The trace of parts that run outside of a job. Checks ignore its lines."""


def _encode(value: Any) -> object:
    if not isinstance(value, Iterator):
        return str(value)
    # msgspec would write the fields of a transaction instead of its name.
    items = cast("Iterator[object]", value)
    return [str(item) if isinstance(item, TransactionId) else item for item in items]


def _append(path: str, line: bytes) -> None:
    # Open for each line: the process may be a fork of one that has written lines, too.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)
