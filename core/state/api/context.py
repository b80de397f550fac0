"""What a state store is opened with: whose state it holds, and the seams to checkpoint storage.

`core/storage` implements `StateWriter` and `StateReader`; a backend knows no path, file system or
checkpoint directory. The thread that uploads or restores uses them, never the one that owns state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.invariant import require

__all__ = ["StateContext", "StateHandle", "StateReader", "StateWriter"]


class StateWriter(Protocol):
    """Makes pieces of state durable for one subtask and one checkpoint. Any thread."""

    def write(
        self,
        name: str,
        data: bytes | memoryview | pa.Buffer,
        *,
        key_groups: range | None = None,
    ) -> StateHandle:
        """Return the handle of `data`, durable when this returns; small data may be held inline.

        `name` becomes the handle's name; `key_groups` its inclusive first and last.
        """
        ...

    def write_chunks(
        self,
        name: str,
        chunks: Iterable[pa.Buffer],
        *,
        shared: bool = False,
        key_groups: range | None = None,
    ) -> StateHandle:
        """Return the handle of the joined `chunks`, as `write` does; they need not fit into memory.

        A shared file may be named by later checkpoints too; its `name` is unique for ever. What
        `chunks` raise is raised, and nothing shows in storage.
        """
        ...

    def write_file(
        self, name: str, path: Path, *, shared: bool, key_groups: range | None = None
    ) -> StateHandle:
        """Return the handle of a copy of the file at `path`, durable when this returns.

        A shared file may be named by later checkpoints too; its `name` is unique for ever.
        """
        ...


class StateReader(Protocol):
    """Reads back what a `StateWriter` wrote, in another process. Any thread."""

    def read(self, handle: StateHandle) -> bytes:
        """Return the bytes of `handle`.

        Raises:
            CheckpointCorrupt: They are not what was written, or are gone.
        """
        ...

    def head(self, handle: StateHandle) -> bytes:
        """Return at least the first 64 KB of `handle`, or all of it; not verified.

        Raises:
            CheckpointCorrupt: It is gone.
        """
        ...

    def read_to(self, handle: StateHandle, path: Path) -> None:
        """Leave the bytes of `handle` in a new file at `path`.

        Raises:
            CheckpointCorrupt: They are not what was written, or are gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateContext:
    """The part of an operator's state that a store holds, and its directory for working files."""

    uid: str
    subtask: int
    key_groups: range
    max_parallelism: int
    scratch_dir: Path
    allow_non_restored_state: bool = False
    """Whether what a snapshot holds and the operator does not take is dropped; else refused."""

    def __post_init__(self) -> None:
        require(
            self.key_groups.step == 1
            and 0 <= self.key_groups.start <= self.key_groups.stop <= self.max_parallelism,
            f"{self.uid}[{self.subtask}]: key groups {self.key_groups} are not a range"
            f" within 0..{self.max_parallelism - 1}",
        )

    def __str__(self) -> str:
        return f"{self.uid}[{self.subtask}]"
