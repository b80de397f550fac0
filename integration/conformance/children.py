"""What the kit's processes run. Each takes its link first, and pickles by reference."""

from __future__ import annotations

import os
import signal
import sys
from abc import ABC
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import pyarrow as pa

from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import CommitterContext, Sink, WriterContext
from onceflow.integration.conformance.link import Link
from onceflow.integration.conformance.rig import settled

_Trace: TypeAlias = Callable[[FrameType, str, Any], Any]


def write_and_wait(link: Link, sink: Sink, context: WriterContext, batch: pa.RecordBatch) -> None:
    """Write rows, say so, and wait to be killed."""
    writer = sink.writer(context)
    writer.write(batch)
    link.send("written")
    link.recv()


def pre_commit_and_wait(
    link: Link, sink: Sink, context: WriterContext, batch: pa.RecordBatch, checkpoint: int
) -> None:
    """Pre-commit rows, say the committable, and wait to be killed."""
    writer = sink.writer(context)
    writer.write(batch)
    link.send(writer.pre_commit(CheckpointId(checkpoint)))
    link.recv()


def commit(
    link: Link, sink: Sink, context: CommitterContext, committables: Sequence[Committable]
) -> list[CommitOutcome]:
    """Commit in the order given; return how each ended."""
    committer = sink.committer(context)
    outcomes = [settled(partial(committer.commit, one)) for one in committables]
    committer.close()
    return outcomes


def commit_some_and_wait(
    link: Link, sink: Sink, context: CommitterContext, committables: Sequence[Committable]
) -> None:
    """Commit, say how it ended, and wait to be killed."""
    link.send(commit(link, sink, context, committables))
    link.recv()


def abort(
    link: Link, sink: Sink, context: CommitterContext, committables: Sequence[Committable]
) -> list[AbortOutcome]:
    """Abort in the order given; return how each ended."""
    committer = sink.committer(context)
    outcomes = [settled(partial(committer.abort, one)) for one in committables]
    committer.close()
    return outcomes


def commit_until_line(
    link: Link, sink: Sink, context: CommitterContext, committable: Committable, line: int
) -> int:
    """Commit, and be killed at the sink's `line`-th line; return how many there were."""
    with_kill = _KillAt(sink, line)
    with_kill.run(lambda: sink.committer(context).commit(committable))
    return with_kill.lines


def abort_until_line(
    link: Link, sink: Sink, context: CommitterContext, committable: Committable, line: int
) -> int:
    """Abort, and be killed at the sink's `line`-th line; return how many there were."""
    with_kill = _KillAt(sink, line)
    with_kill.run(lambda: sink.committer(context).abort(committable))
    return with_kill.lines


def pre_commit_until_line(
    link: Link,
    sink: Sink,
    context: WriterContext,
    batch: pa.RecordBatch,
    checkpoint: int,
    line: int,
) -> int:
    """Write and pre-commit, and be killed at the sink's `line`-th line of the latter."""
    writer = sink.writer(context)
    writer.write(batch)
    with_kill = _KillAt(sink, line)
    with_kill.run(lambda: writer.pre_commit(CheckpointId(checkpoint)))
    return with_kill.lines


class _KillAt:
    """Counts the lines that run in the sink's own code, and kills this process at one of them."""

    def __init__(self, sink: Sink, line: int) -> None:
        self.lines = 0
        self._kill_at = line
        # What a sink inherits is its own code too; the contract itself has none.
        self._packages = {
            kind.__module__.partition(".")[0]
            for kind in type(sink).__mro__
            if kind not in (Sink, ABC, object)
        }

    def run(self, call: Callable[[], object]) -> None:
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> _Trace | None:
        module = str(frame.f_globals.get("__name__", ""))
        return self._line if module.partition(".")[0] in self._packages else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> _Trace:
        if event == "line":
            self.lines += 1
            if self.lines == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line
