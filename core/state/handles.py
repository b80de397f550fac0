"""The two seams between a state backend and checkpoint storage.

`core/storage` implements them; a backend knows no path, file system or checkpoint directory. Both
are used by the thread that uploads or restores, never by the thread that owns the state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pyarrow as pa

from onceflow.core.protocol.snapshots import StateHandle

__all__ = ["StateHandle", "StateReader", "StateWriter"]


class StateWriter(Protocol):
    """Makes pieces of state durable for one subtask and one checkpoint."""

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

    def write_file(
        self, name: str, path: Path, *, shared: bool, key_groups: range | None = None
    ) -> StateHandle:
        """Return the handle of a copy of the file at `path`, durable when this returns.

        A shared file may be named by later checkpoints too; its `name` is unique for ever.
        """
        ...


class StateReader(Protocol):
    """Reads back what a `StateWriter` wrote, in another process."""

    def read(self, handle: StateHandle) -> bytes:
        """Return the bytes of `handle`.

        Raises:
            CheckpointCorrupt: They are not what was written, or are gone.
        """
        ...

    def read_to(self, handle: StateHandle, path: Path) -> None:
        """Leave the bytes of `handle` in a new file at `path`.

        Raises:
            CheckpointCorrupt: They are not what was written, or are gone.
        """
        ...
