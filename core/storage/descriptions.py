"""Where checkpoints are, as a user says it: a path or a url."""

from __future__ import annotations

from onceflow.core.storage.filesystems.bucket_settings import is_bucket
from onceflow.core.storage.filesystems.webhdfs import is_hdfs
from onceflow.core.storage.hdfs_storage import HdfsStorage
from onceflow.core.storage.memory_storage import MemoryStorage
from onceflow.core.storage.object_storage import ObjectStorage
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.core.storage.storage import CheckpointStorage, FileSystemStorage


def checkpoint_storage(said: str | CheckpointStorage) -> CheckpointStorage:
    """Return what `said` names: a path, `file:///path`, `s3://bucket/prefix`, `memory://`, ….

    Raises:
        ConfigError: It names no checkpoint storage.
    """
    if isinstance(said, CheckpointStorage):
        return said
    if said == "memory://":
        return MemoryStorage()
    if is_hdfs(said):
        return HdfsStorage(said)
    return ObjectStorage(said) if is_bucket(said) else FileSystemStorage(said)


def savepoint_directory(storage: CheckpointStorage, place: str) -> SavepointDirectory:
    """Return the savepoint at `place`, which may be in another kind of place than `storage`.

    Raises:
        ConfigError: `place` is nowhere that can be reached.
    """
    if is_bucket(place) and not isinstance(storage, ObjectStorage):
        return ObjectStorage(place).open_savepoint(place)
    if is_hdfs(place) and not isinstance(storage, HdfsStorage):
        return HdfsStorage(place).open_savepoint(place)
    return storage.open_savepoint(place)
