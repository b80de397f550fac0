"""Checkpoint storage in memory, with steps before and after each change."""

from __future__ import annotations

from collections.abc import Iterable

from tests.simulation_runtime.scheduler import scheduler

from onceflow.core.errors import StorageError
from onceflow.core.storage import CheckpointStorage, JobStorage
from onceflow.core.storage.filesystems.filesystem import CreateOutcome
from onceflow.core.storage.memory_storage import MemoryFiles
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory

FAILURE_RATE = 0.1
"""How often a file of a slot cannot be written, until all failures of the plan have happened."""


class SimulatedFiles(MemoryFiles):
    """Files that all processes see."""

    def __init__(self, root: str, failures: int = 0) -> None:
        """`failures` is how many files of slots cannot be written."""
        super().__init__()
        self._root = root
        self._failures_left = failures

    def location(self, path: str) -> str:
        return f"{self._root}/{path}"

    def create_if_absent(self, path: str, data: bytes) -> CreateOutcome:
        scheduler().pause()
        outcome = super().create_if_absent(path, data)
        scheduler().pause()
        return outcome

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        data = b"".join(chunks)
        run = scheduler()
        run.pause()
        is_slot = run.require_alive().process.name.startswith("slot")
        if is_slot and self._failures_left and run.rng.random() < FAILURE_RATE:
            self._failures_left -= 1
            raise StorageError(f"{path} cannot be written")
        size = super().write(path, (data,))
        run.pause()
        return size

    def read(self, path: str) -> bytes | None:
        scheduler().maybe_pause()
        return super().read(path)

    def delete(self, path: str) -> None:
        scheduler().pause()
        super().delete(path)

    def delete_tree(self, path: str) -> None:
        scheduler().pause()
        super().delete_tree(path)


class SimulatedStorage(CheckpointStorage):
    """Storage of one schedule; `inline_threshold_bytes` is the size from which state is a file."""

    def __init__(self, inline_threshold_bytes: int, failures: int) -> None:
        """`failures` is how many files of slots cannot be written."""
        self._files = SimulatedFiles("memory:", failures)
        self._savepoints: dict[str, SimulatedFiles] = {}
        self._inline_threshold_bytes = inline_threshold_bytes

    def open(self, job: str) -> JobStorage:
        return JobStorage(self._files, job, self._inline_threshold_bytes)

    def open_savepoint(self, location: str) -> SavepointDirectory:
        return SavepointDirectory(self._savepoints.setdefault(location, SimulatedFiles(location)))

    def __str__(self) -> str:
        return "memory"
