"""The shared files of older snapshots that a new one may reference: see `protocol/checkpoints`."""

from __future__ import annotations

from typing import TypeAlias

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.api.context import StateHandle

FileHandles: TypeAlias = dict[str, StateHandle]
"""The backend's own name of a file, to the handle of its copy in checkpoint storage."""


class KnownFiles:
    """The files that storage will still hold when a new snapshot is decided.

    These are the files of the last completed checkpoint, because the files of an aborted one are
    deleted. If earlier snapshots are undecided, only files that these reference, too, are included:
    if one of them completes and the last completed checkpoint is deleted, the files are still
    referenced. Used by the owner's thread, except for `note_upload`.
    """

    def __init__(self, restored: FileHandles) -> None:
        self._completed = restored
        self.base: CheckpointId | None = None
        """The last completed checkpoint whose files are known, or None if there was none since the
        restore."""
        self._undecided: dict[CheckpointId, FileHandles] = {}
        self._uploaded: dict[CheckpointId, FileHandles] = {}

    def begin(self, checkpoint: CheckpointId) -> FileHandles:
        """Return the files that the snapshot of `checkpoint` may reference without an upload."""
        files = {
            name: handle
            for name, handle in self._completed.items()
            if all(known.get(name) == handle for known in self._undecided.values())
        }
        self._undecided[checkpoint] = files
        return files

    def begin_anew(self, checkpoint: CheckpointId) -> None:
        """Record that the snapshot of `checkpoint` references no file of another one."""
        self._undecided[checkpoint] = {}

    def is_complete(self, files: FileHandles) -> bool:
        """Return True if `files` are all files of the last completed checkpoint."""
        return len(files) == len(self._completed)

    def note_upload(self, checkpoint: CheckpointId, files: FileHandles) -> None:
        """Record all files that the snapshot of `checkpoint` references. Any thread."""
        self._uploaded[checkpoint] = files

    def complete(self, checkpoint: CheckpointId) -> None:
        """Build on `checkpoint` from now on. All earlier checkpoints are decided, too."""
        files = self._uploaded.get(checkpoint)
        if files is None:
            return
        self._completed = files
        self.base = checkpoint
        # An upload may have ended after a newer checkpoint had completed. `list` first: an
        # uploading thread may add to `_uploaded` meanwhile, and building a set from a growing dict
        # raises.
        for decided in {*self._undecided, *list(self._uploaded)}:
            if decided <= checkpoint:
                self.abort(decided)

    def abort(self, checkpoint: CheckpointId) -> None:
        """Forget the aborted checkpoint, so that no later snapshot references its files."""
        self._undecided.pop(checkpoint, None)
        self._uploaded.pop(checkpoint, None)
