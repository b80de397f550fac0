"""The functions that the kit's processes run. Each takes a link first and pickles by reference."""

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
"""The message of a process that waits for permission to continue."""


@dataclass(frozen=True, slots=True)
class HeldCommit:
    """The outcome of a commit that may have been held, and the lines that it ran."""

    outcome: CommitOutcome | str
    """The outcome, or the text of the error that was raised."""
    lines: int
    own: tuple[int, ...]
    """The numbers of the lines in the module of the sink's class."""
    location: str
    """The line before which it was held: file, line, function; empty if it was not held."""


def write_and_wait(link: Link, sink: Sink, context: WriterContext, batch: pa.RecordBatch) -> None:
    """Write rows, report it, and wait to be killed."""
    writer = sink.writer(context)
    writer.write(batch)
    link.send("written")
    link.recv()


def pre_commit_and_wait(
    link: Link, sink: Sink, context: WriterContext, batch: pa.RecordBatch, checkpoint: int
) -> None:
    """Pre-commit rows, send the committables, and wait to be killed."""
    writer = sink.writer(context)
    writer.write(batch)
    link.send(writer.pre_commit(CheckpointId(checkpoint)))
    link.recv()


def commit(
    link: Link, sink: Sink, context: CommitterContext, committables: Sequence[Committable]
) -> list[CommitOutcome]:
    """Commit in the given order. Return the outcomes."""
    committer = sink.committer(context)
    outcomes = [
        ask_until_known(partial(committer.commit, committable)) for committable in committables
    ]
    committer.close()
    return outcomes


def commit_some_and_wait(
    link: Link, sink: Sink, context: CommitterContext, committables: Sequence[Committable]
) -> None:
    """Commit, send the outcomes, and wait to be killed."""
    link.send(commit(link, sink, context, committables))
    link.recv()


def abort(
    link: Link, sink: Sink, context: CommitterContext, committables: Sequence[Committable]
) -> list[AbortOutcome]:
    """Abort in the given order. Return the outcomes."""
    committer = sink.committer(context)
    outcomes = [
        ask_until_known(partial(committer.abort, committable)) for committable in committables
    ]
    committer.close()
    return outcomes


def begin_and_wait(
    link: Link,
    sink: Sink,
    context: CommitterContext,
    first: Committable,
    committable: Committable,
) -> None:
    """Commit `first`, begin the commit of `committable`, send the answer, and wait to be killed."""
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
    """Commit `first`. Begin and commit `committable`, and get killed at the `line`-th line of it.

    Sends the location of the line before the kill, or returns the number of lines.
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
    """Commit, and get killed at the sink's `line`-th line. Return the number of lines otherwise."""
    with_kill = LineTracer(sink, line, _killer(link))
    with_kill.run(lambda: sink.committer(context).commit(committable))
    return with_kill.lines


def abort_until_line(
    link: Link, sink: Sink, context: CommitterContext, committable: Committable, line: int
) -> int:
    """Abort, and get killed at the sink's `line`-th line. Return the number of lines otherwise."""
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
    """Write and pre-commit, and get killed at the sink's `line`-th line of the pre-commit."""
    writer = sink.writer(context)
    writer.write(batch)
    with_kill = LineTracer(sink, line, _killer(link), writer)
    with_kill.run(lambda: writer.pre_commit(CheckpointId(checkpoint)))
    return with_kill.lines


def commit_held_at_line(
    link: Link, sink: Sink, context: CommitterContext, committable: Committable, line: int
) -> HeldCommit:
    """Commit. At the sink's `line`-th line, send HELD and wait for permission to continue."""

    def hold(location: str) -> None:
        link.send(HELD)
        link.recv()

    return commit_and_hold(sink, context, committable, LineTracer(sink, line, hold))


def commit_and_hold(
    sink: Sink, context: CommitterContext, committable: Committable, tracer: LineTracer
) -> HeldCommit:
    """Commit once under `tracer`, with a new committer."""
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
    """Return a function that sends the location of a line over `link` and kills this process."""

    def kill_self(location: str) -> None:
        link.send(location)
        # Use a signal instead of an exit: no destructor, `finally` or atexit runs, as in a real
        # crash.
        os.kill(os.getpid(), signal.SIGKILL)

    return kill_self
