"""A checkpoint that a decision log still retains, as a starting point of a job.

A savepoint is complete in itself. A retained checkpoint needs its log: the log references its files
and holds the later decisions. Both are read as a `Savepoint`, so that the same rules apply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from onceflow.core.errors import ConfigError, SavepointRefused
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.savepoints.savepoint import Savepoint, build_first_decision
from onceflow.core.storage.described_storage import (
    HdfsStorage,
    ObjectStorage,
    checkpoint_storage,
    savepoint_directory,
)
from onceflow.core.storage.filesystems.bucket_settings import is_bucket
from onceflow.core.storage.filesystems.webhdfs import is_hdfs
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.core.storage.snapshots.state_files import FileStateReader
from onceflow.core.storage.staging.staged_rows import FileStagingArea
from onceflow.core.storage.storage import CheckpointStorage, FileSystemStorage, JobStorage

_CHECKPOINT = re.compile(r"(?P<root>.*)/(?P<job>[^/]+)/chk-(?P<number>\d+)/*")


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """A checkpoint of a job's decision log. Reads nothing before the first call of a method."""

    source: JobStorage
    number: CheckpointId
    is_own: bool
    """True if `source` is the storage of the job that starts from this checkpoint."""

    def __str__(self) -> str:
        return f"{self.source}/chk-{self.number}"

    def read(self) -> Savepoint:
        """Return the checkpoint as a savepoint that was taken at the checkpoint's time.

        If the checkpoint is in other storage, the new job's log does not contain the later
        decisions of the checkpoint's log. So the savepoint gets the number of that log's last
        attempt, and the checkpoint number after its last decision. No number is then used twice.

        Raises:
            SavepointRefused: The log does not retain the checkpoint; names those that it retains.
            CheckpointCorrupt: The log is damaged.
        """
        view = self.source.log.read()
        matching = [record for record in view.decided if record.completed.checkpoint == self.number]
        if not matching:
            there = ", ".join(str(retained.checkpoint) for retained in view.completed) or "none"
            raise SavepointRefused(
                f"the decision log of job {self.source.job!r} in {self.source} does not retain"
                f" checkpoint {self.number} (retained: {there}); `onceflow checkpoints list`"
                " shows the retained checkpoints. To name a directory called chk-N, write"
                " ./chk-N"
            )
        decided, completed = matching[0], matching[0].completed
        is_last = decided == view.decided[-1]
        # Later decisions are left out: a start from this checkpoint takes them back.
        memory = decided.memory.with_sinks(view.memory.sinks)
        checkpoint = Savepoint(
            f"checkpoint-{completed.attempt}-{self.number}",
            self.source.job,
            self.source.log_id,
            CheckpointKind.STOP if is_last else CheckpointKind.PERIODIC,
            completed,
            memory,
        )
        if self.is_own:
            return checkpoint
        before = [record for record in view.decided if record.sequence <= decided.sequence]
        copied = build_first_decision(
            checkpoint,
            replace(view, decided=tuple(before), memory=memory),
            attempt=view.attempt,
            now_ms=completed.completed_at_ms,
        )
        return replace(checkpoint, completed=replace(copied, checkpoint=view.next_checkpoint))

    def reader(self) -> FileStateReader:
        """Return the reader of its state files."""
        return self.source.reader()

    def staging(self, sink_id: str) -> FileStagingArea:
        """Return the rows that `sink_id` has staged in the checkpoint's storage."""
        return self.source.open_staged_files(sink_id)

    def dispose(self) -> None:
        """Delete nothing: the log deletes the checkpoint when it no longer retains it."""


def restore_point(
    storage: CheckpointStorage, own: JobStorage, location: str
) -> SavepointDirectory | RetainedCheckpoint:
    """Return the savepoint or checkpoint at `location`, for the job of `own` in `storage`.

    A number names a checkpoint of the job's own log, and `<storage>/<job>/chk-<number>` a
    checkpoint of any log. Any other text names the directory of a savepoint. If a directory of the
    form `…/chk-<number>` is a savepoint, the savepoint is returned.

    Raises:
        ConfigError: `location` cannot be reached.
    """
    if location.isdecimal():
        return RetainedCheckpoint(own, CheckpointId(int(location)), is_own=True)
    directory = savepoint_directory(storage, location)
    match = _CHECKPOINT.fullmatch(location)
    if match is None or directory.is_there():
        return directory
    source = _storage_at(storage, match["root"]).open(match["job"])
    is_own = str(source) == str(own)
    return RetainedCheckpoint(source, CheckpointId(int(match["number"])), is_own=is_own)


def check_not_claimed(point: SavepointDirectory | RetainedCheckpoint) -> None:
    """Raise ConfigError if `point` is a checkpoint, which a job cannot claim and delete."""
    if isinstance(point, RetainedCheckpoint):
        raise ConfigError(
            f"claim=True deletes a savepoint once the job has started from it, but {point} is a"
            " checkpoint, which its own job deletes: omit claim"
        )


def _storage_at(storage: CheckpointStorage, root: str) -> CheckpointStorage:
    """Return the storage at `root`, with the credentials of `storage` if both are of one kind."""
    if isinstance(storage, ObjectStorage) and is_bucket(root):
        return replace(storage, url=root)
    if isinstance(storage, HdfsStorage) and is_hdfs(root):
        return replace(storage, url=root)
    if isinstance(storage, FileSystemStorage) and not (is_bucket(root) or is_hdfs(root)):
        return replace(storage, root=root)
    return checkpoint_storage(root)
