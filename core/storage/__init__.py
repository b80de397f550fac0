"""Checkpoint storage: the decision log, state files, and the file systems that they live in."""

from onceflow.core.storage.decision_log import ClaimedLog, DecisionLog, DecisionUnknown
from onceflow.core.storage.descriptions import checkpoint_storage
from onceflow.core.storage.memory_storage import MemoryStorage
from onceflow.core.storage.object_storage import ObjectStorage
from onceflow.core.storage.staging import FileStagingArea
from onceflow.core.storage.state_files import FileStateReader, FileStateWriter
from onceflow.core.storage.storage import CheckpointStorage, FileSystemStorage, JobStorage, Probe

__all__ = [
    "CheckpointStorage",
    "ClaimedLog",
    "DecisionLog",
    "DecisionUnknown",
    "FileStagingArea",
    "FileStateReader",
    "FileStateWriter",
    "FileSystemStorage",
    "JobStorage",
    "MemoryStorage",
    "ObjectStorage",
    "Probe",
    "checkpoint_storage",
]
