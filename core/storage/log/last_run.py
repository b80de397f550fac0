"""The state of a job's last driver, for readers after that driver has ended.

    <job>/last_run.json   written by a driver once it owns the job, and again when it ends

A driver that is killed leaves a record that says "running". No decision depends on this file: the
progress of the job is in the decision log.
"""

from __future__ import annotations

import msgspec

from onceflow.core.storage.filesystems.filesystem import FileSystem
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.log.json_file import JsonFile

FORMAT = 1
ERROR_LENGTH_MAX = 4_000


class LastRun(msgspec.Struct, frozen=True):
    """The record of a driver process, from its claim of the job to its end."""

    run: str
    """A random id of the driver: an overtaken driver must not replace its successor's record."""
    state: str
    """`running` until the driver has ended; then the job's last state: `stopped`, `failed`, …"""
    host: str
    pid: int
    began_ms: int
    ended_ms: int = 0
    attempt: int = 0
    error: str = ""
    """The reason why the job failed."""
    format: int = FORMAT


class LastRunFile:
    """Reads and writes the record of the last run. Any thread, any process."""

    def __init__(self, fs: FileSystem, paths: JobPaths) -> None:
        """Set up the file.

        `fs` must write files that only the owner may read: errors quote records.
        """
        self._file = JsonFile(fs, paths.last_run, LastRun, "the record of a run")

    def read(self) -> LastRun | None:
        """Return the record, or None if no driver has written one yet.

        Raises:
            CheckpointCorrupt: The file is not a valid record.
        """
        return self._file.read()

    def begin(self, run: LastRun) -> None:
        """Write that a driver owns the job."""
        self._file.write(run)

    def end(self, run: LastRun) -> None:
        """Write how the driver has ended, unless another driver owns the job by now."""
        recorded = self.read()
        if recorded is None or recorded.run == run.run:
            self._file.write(run)
