"""The context in which a state store opens: its clock, and its interface to checkpoint storage.

`core/storage` implements `StateWriter` and `StateReader`, so a backend knows no path, file system
or checkpoint directory. The thread that uploads or restores uses them, never the thread that owns
the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import pyarrow as pa

from onceflow.core.errors import require
from onceflow.core.protocol.checkpoints.snapshots import StateHandle

WallClock: TypeAlias = Callable[[], float]


class StateClock:
    """A clock in ms since 1970 that never goes back, even if the machine's clock does."""

    def __init__(self, wall_clock: WallClock = time.time) -> None:
        self._wall_clock = wall_clock
        self._latest_ms = 0

    def now_ms(self) -> int:
        """Return the time in ms since 1970."""
        self._latest_ms = max(self._latest_ms, int(self._wall_clock() * 1000))
        return self._latest_ms


__all__ = ["StateContext", "StateHandle", "StateReader", "StateWriter"]


class StateWriter(Protocol):
    """A writer of durable state for one subtask and one checkpoint. Any thread."""

    def write(
        self,
        name: str,
        data: bytes | memoryview | pa.Buffer,
        *,
        key_groups: range | None = None,
    ) -> StateHandle:
        """Make `data` durable and return its handle. Small data may be held inline.

        `name` becomes the handle's name. `key_groups` becomes its first and last key group,
        inclusive.
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
        """Write the joined `chunks` like `write` and return their handle.

        They need not fit into memory.

        Later checkpoints may reference a shared file; its `name` must never be used again. An
        exception of `chunks` is raised to the caller, and no file appears in storage.
        """
        ...

    def write_file(
        self, name: str, path: Path, *, shared: bool, key_groups: range | None = None
    ) -> StateHandle:
        """Make a durable copy of the file at `path` and return its handle.

        Later checkpoints may reference a shared file; its `name` must never be used again.
        """
        ...


class StateReader(Protocol):
    """A reader of the state that a `StateWriter` wrote, in another process. Any thread."""

    def read(self, handle: StateHandle) -> bytes:
        """Return the bytes of `handle`.

        Raises:
            CheckpointCorrupt: The bytes are gone, or are not those that were written.
        """
        ...

    def head(self, handle: StateHandle) -> bytes:
        """Return at least the first 64 KB of `handle`, or all of it. The bytes are not verified.

        Raises:
            CheckpointCorrupt: The file is gone.
        """
        ...

    def read_to(self, handle: StateHandle, path: Path) -> None:
        """Write the bytes of `handle` to a new file at `path`.

        Raises:
            CheckpointCorrupt: The bytes are gone, or are not those that were written.
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
    """True if state that a snapshot holds and the operator does not ask for is dropped. Otherwise
    the start is refused."""

    def __post_init__(self) -> None:
        require(
            self.key_groups.step == 1
            and 0 <= self.key_groups.start <= self.key_groups.stop <= self.max_parallelism,
            f"{self.uid}[{self.subtask}]: key groups {self.key_groups} are not a range"
            f" within 0..{self.max_parallelism - 1}",
        )

    def __str__(self) -> str:
        return f"{self.uid}[{self.subtask}]"
