"""A checkpoint that a decision log still holds, as something that a job can begin from.

A savepoint stands alone. A retained checkpoint does not: its log names its files, and the log says
what was decided after it. Both are read as a `Savepoint`, so that the same rules hold for both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from onceflow.core.errors import ConfigError, SavepointRefused
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.savepoints.savepoint import Savepoint, build_first_decision
from onceflow.core.storage.descriptions import checkpoint_storage, savepoint_directory
from onceflow.core.storage.filesystems.bucket_settings import is_bucket
from onceflow.core.storage.filesystems.webhdfs import is_hdfs
from onceflow.core.storage.hdfs_storage import HdfsStorage
from onceflow.core.storage.object_storage import ObjectStorage
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.core.storage.snapshots.state_files import FileStateReader
from onceflow.core.storage.staging.staged_rows import FileStagingArea
from onceflow.core.storage.storage import CheckpointStorage, FileSystemStorage, JobStorage

_CHECKPOINT = re.compile(r"(?P<root>.*)/(?P<job>[^/]+)/chk-(?P<number>\d+)/*")


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """One checkpoint of a job's decision log. Touches nothing until it is asked to."""

    source: JobStorage
    number: CheckpointId
    is_own: bool
    """Whether `source` is the storage of the job that begins from it."""

    def __str__(self) -> str:
        return f"{self.source}/chk-{self.number}"

    def read(self) -> Savepoint:
        """Return it as a savepoint that was taken then.

        In other storage nobody knows what the log has decided since. So there it counts as taken
        by the last attempt, after the last decision: numbers go on from those.

        Raises:
            SavepointRefused: The log does not hold it; says which it holds.
            CheckpointCorrupt: The log is damaged.
        """
        view = self.source.log.read()
        matching = [one for one in view.decided if one.completed.checkpoint == self.number]
        if not matching:
            there = ", ".join(str(one.checkpoint) for one in view.completed) or "none"
            raise SavepointRefused(
                f"the decision log of job {self.source.job!r} in {self.source} does not retain"
                f" checkpoint {self.number} (retained: {there}); `onceflow checkpoints list` shows"
                " those that are. A directory of that name is written ./chk-N"
            )
        decided, completed = matching[0], matching[0].completed
        is_last = decided == view.decided[-1]
        # What was decided later is no part of it: a start from it takes that back.
        memory = (decided.memory or view.memory).with_sinks(view.memory.sinks)
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
        before = [one for one in view.decided if one.sequence <= decided.sequence]
        copied = build_first_decision(
            checkpoint,
            replace(view, decided=tuple(before), memory=memory),
            attempt=view.attempt,
            now_ms=completed.completed_at_ms,
        )
        return replace(checkpoint, completed=replace(copied, checkpoint=view.next_checkpoint))

    def reader(self) -> FileStateReader:
        """Return what reads its state files."""
        return self.source.reader()

    def staging(self, sink_id: str) -> FileStagingArea:
        """Return what `sink_id` has staged in the checkpoint's storage."""
        return self.source.open_staged_files(sink_id)

    def dispose(self) -> None:
        """Delete nothing: the log retains it for as long as it retains any of its age."""


def restore_point(
    storage: CheckpointStorage, own: JobStorage, location: str
) -> SavepointDirectory | RetainedCheckpoint:
    """Return what `location` names for the job that `own` is of, in `storage`.

    A number is a checkpoint of the job's own log; `<storage>/<job>/chk-<number>` is one of any log;
    all else is the directory of a savepoint, also one that is called so.

    Raises:
        ConfigError: It is nowhere that can be reached.
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
    """Raise ConfigError if `point` cannot become a job's own and be deleted."""
    if isinstance(point, RetainedCheckpoint):
        raise ConfigError(
            f"claim=True deletes a savepoint once the job has begun from it, and {point} is a"
            " checkpoint, which its log deletes: leave claim out"
        )


def _storage_at(storage: CheckpointStorage, root: str) -> CheckpointStorage:
    """Return the storage at `root`, by the credentials of `storage` if both are of one kind."""
    if isinstance(storage, ObjectStorage) and is_bucket(root):
        return replace(storage, url=root)
    if isinstance(storage, HdfsStorage) and is_hdfs(root):
        return replace(storage, url=root)
    if isinstance(storage, FileSystemStorage) and not (is_bucket(root) or is_hdfs(root)):
        return replace(storage, root=root)
    return checkpoint_storage(root)
