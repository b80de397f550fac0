"""Which decision log this is. Sinks remember it: two logs that write to one sink are two jobs."""

from __future__ import annotations

import uuid

import msgspec

from onceflow.core.errors import CheckpointCorrupt
from onceflow.core.storage.filesystem import AlreadyExists, CheckpointFileSystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.record_codec import seal, unseal

FORMAT = 1

_REMEDY = "sinks know this job by the identity in that file: restore it from a backup"


class _Meta(msgspec.Struct, frozen=True):
    format: int
    log_id: str


def log_id(fs: CheckpointFileSystem, paths: JobPaths) -> str:
    """Return the log's identity, a UUID created once in a job's life, durably.

    Raises:
        CheckpointCorrupt: There are records and the identity is gone or damaged.
    """
    data = fs.read(paths.meta)
    if data is None and (fs.list(paths.log) and fs.read(paths.meta) is None):
        raise CheckpointCorrupt(
            f"{fs.location(paths.meta)} is gone and the decision log beside it is not; {_REMEDY}"
        )
    data = data or fs.read(paths.meta) or _create(fs, paths)
    line, _ = unseal(data, fs.location(paths.meta), _REMEDY)
    return msgspec.json.decode(line, type=_Meta).log_id


def _create(fs: CheckpointFileSystem, paths: JobPaths) -> bytes:
    fs.make_directory(paths.job)
    data, _ = seal(msgspec.json.encode(_Meta(FORMAT, str(uuid.uuid4()))))
    outcome = fs.create_if_absent(paths.meta, data)
    return outcome.existing if isinstance(outcome, AlreadyExists) else data
