"""The parser of checkpoint storage descriptions: a path or a url, as the user writes it."""

from __future__ import annotations

from onceflow.core.storage.filesystems.bucket_settings import is_bucket
from onceflow.core.storage.filesystems.webhdfs import is_hdfs
from onceflow.core.storage.hdfs_storage import HdfsStorage
from onceflow.core.storage.memory_storage import MemoryStorage
from onceflow.core.storage.object_storage import ObjectStorage
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.core.storage.storage import CheckpointStorage, FileSystemStorage


def checkpoint_storage(description: str | CheckpointStorage) -> CheckpointStorage:
    """Return the storage that `description` names: a path, `file:///path`, `s3://bucket/prefix`, ….

    Raises:
        ConfigError: The description names no checkpoint storage.
    """
    if isinstance(description, CheckpointStorage):
        return description
    if description == "memory://":
        return MemoryStorage()
    if is_hdfs(description):
        return HdfsStorage(description)
    return ObjectStorage(description) if is_bucket(description) else FileSystemStorage(description)


def savepoint_directory(storage: CheckpointStorage, location: str) -> SavepointDirectory:
    """Return the savepoint at `location`, which may be in another kind of storage than `storage`.

    Raises:
        ConfigError: `location` cannot be reached.
    """
    # If both are of one kind, `storage` opens the savepoint: it has the endpoint and the
    # credentials, which the url lacks.
    if is_bucket(location) and not isinstance(storage, ObjectStorage):
        return ObjectStorage(location).open_savepoint(location)
    if is_hdfs(location) and not isinstance(storage, HdfsStorage):
        return HdfsStorage(location).open_savepoint(location)
    return storage.open_savepoint(location)
