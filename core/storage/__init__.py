"""Checkpoint storage: the decision log, state files, and the file systems that hold them.

Each name is imported at its first use, so using one file system does not import the decision log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceflow.core.imports import lazy_names

if TYPE_CHECKING:
    from onceflow.core.storage.described_storage import (
        HdfsStorage,
        ObjectStorage,
        checkpoint_storage,
    )
    from onceflow.core.storage.log.decision_log import ClaimedLog, DecisionLog, DecisionUnknown
    from onceflow.core.storage.memory_storage import MemoryStorage
    from onceflow.core.storage.snapshots.state_files import FileStateReader, FileStateWriter
    from onceflow.core.storage.staging.staged_rows import FileStagingArea
    from onceflow.core.storage.storage import (
        CheckpointStorage,
        FileSystemStorage,
        JobStorage,
        Probe,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "onceflow.core.storage.log.decision_log": "ClaimedLog DecisionLog DecisionUnknown",
            "onceflow.core.storage.described_storage": (
                "HdfsStorage ObjectStorage checkpoint_storage"
            ),
            "onceflow.core.storage.memory_storage": "MemoryStorage",
            "onceflow.core.storage.staging.staged_rows": "FileStagingArea",
            "onceflow.core.storage.snapshots.state_files": "FileStateReader FileStateWriter",
            "onceflow.core.storage.storage": "CheckpointStorage FileSystemStorage JobStorage Probe",
        },
    )

__all__ = [
    "CheckpointStorage",
    "ClaimedLog",
    "DecisionLog",
    "DecisionUnknown",
    "FileStagingArea",
    "FileStateReader",
    "FileStateWriter",
    "FileSystemStorage",
    "HdfsStorage",
    "JobStorage",
    "MemoryStorage",
    "ObjectStorage",
    "Probe",
    "checkpoint_storage",
]
