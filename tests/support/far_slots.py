"""Checkpoint storage whose savepoints slots cannot reach, as if they were on other machines."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from typing_extensions import override

from onceflow import FileSystemStorage
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory


@dataclass(frozen=True, slots=True)
class FarSlotsStorage(FileSystemStorage):
    """A savepoint's path leads slots to a directory on their own disk, below `disk`."""

    disk: str = ""
    driver_pid: int = field(default_factory=os.getpid)

    @override
    def open_savepoint(self, location: str) -> SavepointDirectory:
        if os.getpid() != self.driver_pid:
            location = f"{self.disk}/{location}"
        return FileSystemStorage.open_savepoint(self, location)
