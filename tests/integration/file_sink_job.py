"""Whole jobs with a file sink, each in a process of its own that dies at a step. Run as a program.

    python file_sink_job.py

reads a request a line from standard input, `[url, options, log, kill_at]`, forks, and answers with
what became of the child: its exit status, negative when a signal killed it, and how many steps it
took. Forked, because a thousand steps are tried and importing takes a second.

A step is what changes the target: with a local directory a file opened for writing, a rename, link,
deletion or new directory; with S3 a request that is not a read. With `kill_at` n the child is
killed by SIGKILL just before its n-th step, with a text before its first step on a path or key that
holds the text; 0 lets it finish.

The job: 2 subtasks, 2 checkpoints of 8 rows each, in 3 partitions and files of one row. What is
decided is written to a `DecisionDirectory`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.decision_directory import Decision, DecisionDirectory, recover
from tests.integration.file_sink_kit import FileJob, rows

from onceflow.core.protocol.committables import Committable, Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import FileSink

SINK_ID = "soak.files"
CHECKPOINTS = 2
ROWS_A_CHECKPOINT = 8
SUBTASKS = 2
ALL_IDS = list(range(CHECKPOINTS * ROWS_A_CHECKPOINT))

_WRITES = os.O_WRONLY | os.O_RDWR
_CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir"}


class Steps:
    """Counts, and dies just before the one that was asked for."""

    def __init__(self, kill_at: int | str) -> None:
        self.taken = 0
        self._kill_at = kill_at

    def take(self, path: str) -> None:
        self.taken += 1
        wanted = self._kill_at
        if wanted in path if isinstance(wanted, str) else wanted == self.taken:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_directory(self, root: str) -> None:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                counts = isinstance(arguments[2], int) and arguments[2] & _WRITES
            else:
                counts = event in _CHANGES
            if counts and str(arguments[0]).startswith(root):
                self.take(str(arguments[-1 if event == "os.rename" else 0]))

        sys.addaudithook(hook)

    def watch_s3(self) -> None:
        from obstore.store import S3Store

        kind: Any = S3Store
        for method, place in (("put", 0), ("copy", 1), ("delete", 0)):
            setattr(kind, method, self._counted(method, place, getattr(kind, method)))

    def _counted(self, method: str, place: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(store: Any, *paths: Any, **options: Any) -> Any:
            self.take(f"{method}_object {paths[place]}")
            return call(store, *paths, **options)

        return counted


def run(url: str, options: dict[str, Any], log: DecisionDirectory) -> None:
    """Recover, then go on from the last decision until every checkpoint is committed."""
    sink = FileSink(url, partition_by=("account",), max_rows_per_file=1, storage_options=options)
    attempt = log.claim_attempt()
    with FileJob(sink, sink_id=SINK_ID, log_id=str(log.path)) as job:
        job.check(attempt)
        committer = job.committer(attempt)
        restored = log.last()
        recover(committer, restored, sink_id=SINK_ID, attempt=attempt, patience_s=0)
        writers = [job.writer(attempt, subtask) for subtask in range(SUBTASKS)]
        for checkpoint in range(restored.checkpoint + 1, CHECKPOINTS + 1):
            first = (checkpoint - 1) * ROWS_A_CHECKPOINT
            found: list[Committable] = []
            for subtask, writer in enumerate(writers):
                writer.write(rows(range(first + subtask, first + ROWS_A_CHECKPOINT, SUBTASKS)))
                (committable,) = writer.pre_commit(CheckpointId(checkpoint))
                found.append(committable)
            log.decide(Decision(checkpoint, first + ROWS_A_CHECKPOINT, tuple(found)))
            for committable in found:
                assert committer.commit(committable) == Committed()
            committer.prune(CheckpointId(checkpoint))


def _child(request: list[Any], answer: int) -> None:
    url, options, log, kill_at = request
    steps = Steps(kill_at)
    if url.startswith("s3://"):
        steps.watch_s3()
    else:
        steps.watch_directory(url)
    run(url, options, DecisionDirectory(Path(log)))
    os.write(answer, str(steps.taken).encode())


def main() -> None:
    """Serve requests until standard input ends."""
    for line in sys.stdin:
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _child(json.loads(line), writable)
                status = 0
            except BaseException:  # the child's traceback is all that tells what went wrong
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writable)
        _, status = os.waitpid(pid, 0)
        taken = os.read(readable, 20).decode() or "0"
        os.close(readable)
        sys.stdout.write(f"{json.dumps([os.waitstatus_to_exitcode(status), int(taken)])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
