"""How a job ended, for whoever asks when its driver is not there any more.

    <job>/last_run.json   written by a driver once it owns the job, and again when it ends

A driver that is killed leaves a record that says "running". Nothing is decided by this file: the
decision log says how far the job is.
"""

from __future__ import annotations

import msgspec

from onceflow.core.storage.filesystems.filesystem import FileSystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.log.json_file import JsonFile

FORMAT = 1
ERROR_LENGTH_MAX = 4_000


class LastRun(msgspec.Struct, frozen=True):
    """One driver process, from its claim of the job to its end."""

    run: str
    """Drawn by the driver: one that was overtaken does not write over its successor's record."""
    state: str
    """`running` until the driver has ended; then the job's last state: `stopped`, `failed`, …"""
    host: str
    pid: int
    began_ms: int
    ended_ms: int = 0
    attempt: int = 0
    error: str = ""
    """Why it failed."""
    format: int = FORMAT


class LastRunFile:
    """Reads and writes it. Any thread, any process."""

    def __init__(self, fs: FileSystem, paths: JobPaths) -> None:
        """Take the file system that only the owner may read: errors quote records."""
        self._file = JsonFile(fs, paths.last_run, LastRun, "the record of a run")

    def read(self) -> LastRun | None:
        """Return the record; None: no driver has written one.

        Raises:
            CheckpointCorrupt: It is no such record.
        """
        return self._file.read()

    def begin(self, run: LastRun) -> None:
        """Write that a driver owns the job."""
        self._file.write(run)

    def end(self, run: LastRun) -> None:
        """Write how the driver has ended, unless another one owns the job by now."""
        recorded = self.read()
        if recorded is None or recorded.run == run.run:
            self._file.write(run)
