"""Where checkpoints are, as a user says it: a path or a url."""

from __future__ import annotations

from onceflow.core.storage.bucket_settings import is_bucket
from onceflow.core.storage.memory_storage import MemoryStorage
from onceflow.core.storage.object_storage import ObjectStorage
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
    return ObjectStorage(said) if is_bucket(said) else FileSystemStorage(said)
