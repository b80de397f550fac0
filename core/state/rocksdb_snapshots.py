"""Snapshots of a RocksDB store on their way to storage, and which files they may leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.api import PendingSnapshot
from onceflow.core.state.canonical import StateRows
from onceflow.core.state.handles import StateHandle, StateWriter
from onceflow.core.state.rocksdb_database import scan_copy
from onceflow.core.state.rocksdb_files import FileHandles
from onceflow.core.state.rocksdb_rows import after, group_prefix, split_row_key, state_prefix
from onceflow.core.state.rocksdb_writes import PendingWrites, WriteQueue

Upload: TypeAlias = Callable[[StateWriter, Path], tuple[StateHandle, ...]]
"""Writes a copy of the database; returns the handles of the snapshot."""

SCAN_ROWS = 32_768


class KnownFiles:
    """Which files storage will still hold when a new snapshot is decided.

    Those of the last completed checkpoint, since an aborted one's are deleted. When earlier
    snapshots are undecided, only what they name as well: should one of them complete and the last
    one be deleted, the files are still named. Used by the owner's thread, except for `uploaded`.
    """

    def __init__(self, restored: FileHandles) -> None:
        self._completed = restored
        self._undecided: dict[CheckpointId, FileHandles] = {}
        self._uploaded: dict[CheckpointId, FileHandles] = {}

    def begin(self, checkpoint: CheckpointId) -> FileHandles:
        """Return the files that the snapshot of `checkpoint` may name without uploading them."""
        files = {
            name: handle
            for name, handle in self._completed.items()
            if all(known.get(name) == handle for known in self._undecided.values())
        }
        self._undecided[checkpoint] = files
        return files

    def uploaded(self, checkpoint: CheckpointId, files: FileHandles) -> None:
        """Take note of all files that the snapshot of `checkpoint` names. Any thread."""
        self._uploaded[checkpoint] = files

    def completed(self, checkpoint: CheckpointId) -> None:
        """Build on `checkpoint` from now on; all before it are decided, too."""
        files = self._uploaded.get(checkpoint)
        if files is None:
            return
        self._completed = files
        for decided in [known for known in self._undecided if known <= checkpoint]:
            self.aborted(decided)

    def aborted(self, checkpoint: CheckpointId) -> None:
        """Never build on `checkpoint`."""
        self._undecided.pop(checkpoint, None)
        self._uploaded.pop(checkpoint, None)


class Frozen:
    """A snapshot's writes and the copy of the database that they lead to."""

    def __init__(self, writes: WriteQueue, pending: PendingWrites) -> None:
        self._writes = writes
        self._pending = pending

    def copy(self) -> Path:
        """Return where the copy is, made if need be. Any thread."""
        self._writes.settle_in_background()
        return self._pending.copy

    def discard(self) -> None:
        """Delete the copy. Any thread."""
        self._writes.discard(self._pending)


class RocksSnapshot(PendingSnapshot):
    """A snapshot on its way to storage."""

    def __init__(self, frozen: Frozen, upload: Upload) -> None:
        self._frozen = frozen
        self._upload = upload

    def upload(self, writer: StateWriter) -> tuple[StateHandle, ...]:
        """Write the dirty entries, copy the database by hard links, upload what storage lacks."""
        try:
            return self._upload(writer, self._frozen.copy())
        finally:
            self._frozen.discard()

    def discard(self) -> None:
        """Delete the copy; the entries still go to the database when it is written next."""
        self._frozen.discard()


def rows_of_copy(copy: Path, name: str, key_groups: range) -> Iterator[StateRows]:
    """Yield the rows of one state in a copy of the database, key group by key group."""
    kind = pa.large_binary()
    starts = [group_prefix(group) + state_prefix(name) for group in key_groups]
    rows = scan_copy(copy, [(start, after(start)) for start in starts])
    while batch := list(islice(rows, SCAN_ROWS)):
        split = [split_row_key(key) for key, _ in batch]
        groups = np.array([group for group, _, _ in split], np.uint16)
        keys = pa.array([rest for _, _, rest in split], kind)
        yield StateRows(groups, keys, pa.array([value for _, value in batch], kind))
