"""What the kit's processes run. Each takes its link first, and pickles by reference."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.cluster.process_host import Link
from onceflow.core.spi import CommitterContext, Sink, WriterContext
from onceflow.integration.conformance.harness import ask_until_known
from onceflow.integration.conformance.lines import LineTracer
from onceflow.integration.conformance.target import describe_error

HELD = "held"
"""What a process says that waits to be told to go on."""


@dataclass(frozen=True, slots=True)
class HeldCommit:
    """How a commit ended that may have been held up, and which lines it ran."""

    outcome: CommitOutcome | str
    """What was raised, as text, where nothing was returned."""
    lines: int
    own: tuple[int, ...]
    """Those in the module of the sink's class."""
    location: str
    """The line before which it was held up: file, line, function; empty if it was not."""


def write_and_wait(link: Link, sink: Sink, context: WriterContext, batch: pa.RecordBatch) -> None:
    """Write rows, say so, and wait to be killed."""
    writer = sink.writer(context)
    writer.write(batch)
    link.send("written")
    link.recv()


def pre_commit_and_wait(
    link: Link, sink: Sink, context: WriterContext, batch: pa.RecordBatch, checkpoint: int
) -> None:
    """Pre-commit rows, say the committables, and wait to be killed."""
    writer = sink.writer(context)
    writer.write(batch)
    link.send(writer.pre_commit(CheckpointId(checkpoint)))
    link.recv()


def commit(
    link: Link, sink: Sink, context: CommitterContext, committables: Sequence[Committable]
) -> list[CommitOutcome]:
    """Commit in the order given; return how each ended."""
    committer = sink.committer(context)
    outcomes = [ask_until_known(partial(committer.commit, one)) for one in committables]
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
    outcomes = [ask_until_known(partial(committer.abort, one)) for one in committables]
    committer.close()
    return outcomes


def begin_and_wait(
    link: Link,
    sink: Sink,
    context: CommitterContext,
    first: Committable,
    committable: Committable,
) -> None:
    """Commit `first`, begin the commit of `committable`, say whether, and wait to be killed."""
    committer = sink.committer(context)
    ask_until_known(partial(committer.commit, first))
    link.send(committer.begin_commit(committable))
    link.recv()


def begin_and_commit_until_line(
    link: Link,
    sink: Sink,
    context: CommitterContext,
    first: Committable,
    committable: Committable,
    line: int,
) -> int:
    """Commit `first`; begin and commit `committable`, and be killed at the `line`-th line of that.

    Sends the line, or returns how many there are.
    """
    committer = sink.committer(context)
    ask_until_known(partial(committer.commit, first))

    def begin_and_commit() -> None:
        committer.begin_commit(committable)
        committer.commit(committable)

    with_kill = LineTracer(sink, line, _killer(link), committer)
    with_kill.run(begin_and_commit)
    return with_kill.lines


def commit_until_line(
    link: Link, sink: Sink, context: CommitterContext, committable: Committable, line: int
) -> int:
    """Commit, and be killed at the sink's `line`-th line, which is sent; return the line count."""
    with_kill = LineTracer(sink, line, _killer(link))
    with_kill.run(lambda: sink.committer(context).commit(committable))
    return with_kill.lines


def abort_until_line(
    link: Link, sink: Sink, context: CommitterContext, committable: Committable, line: int
) -> int:
    """Abort, and be killed at the sink's `line`-th line, which is sent; return the line count."""
    with_kill = LineTracer(sink, line, _killer(link))
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
    with_kill = LineTracer(sink, line, _killer(link), writer)
    with_kill.run(lambda: writer.pre_commit(CheckpointId(checkpoint)))
    return with_kill.lines


def commit_held_at_line(
    link: Link, sink: Sink, context: CommitterContext, committable: Committable, line: int
) -> HeldCommit:
    """Commit, say so at the sink's `line`-th line and wait there to be told to go on."""

    def hold(location: str) -> None:
        link.send(HELD)
        link.recv()

    return commit_and_hold(sink, context, committable, LineTracer(sink, line, hold))


def commit_and_hold(
    sink: Sink, context: CommitterContext, committable: Committable, tracer: LineTracer
) -> HeldCommit:
    """Commit once under `tracer`, with a committer of its own."""
    outcomes: list[CommitOutcome | str] = []

    def commit() -> None:
        committer = sink.committer(context)
        try:
            outcomes.append(committer.commit(committable))
            committer.close()
        except OnceflowError as error:
            outcomes.append(describe_error(error))

    tracer.run(commit)
    return HeldCommit(outcomes[0], tracer.lines, tuple(tracer.own), tracer.location)


def _killer(link: Link) -> Callable[[str], None]:
    """Return what sends the location of a line over `link`, and then kills this process."""

    def kill_self(location: str) -> None:
        link.send(location)
        # A signal of its own, and no exit: no destructor, `finally` or atexit runs, as in a real
        # crash.
        os.kill(os.getpid(), signal.SIGKILL)

    return kill_self
