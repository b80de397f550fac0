"""Which shared files of older snapshots a new one may name: see `protocol/checkpoints`."""

from __future__ import annotations

from typing import TypeAlias

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.api.context import StateHandle

FileHandles: TypeAlias = dict[str, StateHandle]
"""The backend's own name of a file, to the handle of its copy in checkpoint storage."""


class KnownFiles:
    """The files that storage will still hold when a new snapshot is decided.

    Those of the last completed checkpoint, since an aborted one's are deleted. When earlier
    snapshots are undecided, only what they name as well: should one of them complete and the last
    one be deleted, the files are still named. Used by the owner's thread, except for `note_upload`.
    """

    def __init__(self, restored: FileHandles) -> None:
        self._completed = restored
        self.base: CheckpointId | None = None
        """The last completed checkpoint whose files are known; None: none since the restore."""
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

    def begin_anew(self, checkpoint: CheckpointId) -> None:
        """Note that the snapshot of `checkpoint` names no file of another one."""
        self._undecided[checkpoint] = {}

    def is_complete(self, files: FileHandles) -> bool:
        """Tell whether `files` are all of those of the last completed checkpoint."""
        return len(files) == len(self._completed)

    def note_upload(self, checkpoint: CheckpointId, files: FileHandles) -> None:
        """Take note of all files that the snapshot of `checkpoint` names. Any thread."""
        self._uploaded[checkpoint] = files

    def complete(self, checkpoint: CheckpointId) -> None:
        """Build on `checkpoint` from now on; all before it are decided, too."""
        files = self._uploaded.get(checkpoint)
        if files is None:
            return
        self._completed = files
        self.base = checkpoint
        # An upload may have ended after a newer checkpoint had completed.
        # `list` first: an uploading thread may add to `_uploaded` meanwhile, and a set that is
        # built from a dict that grows raises.
        for decided in {*self._undecided, *list(self._uploaded)}:
            if decided <= checkpoint:
                self.abort(decided)

    def abort(self, checkpoint: CheckpointId) -> None:
        """Never build on `checkpoint`."""
        self._undecided.pop(checkpoint, None)
        self._uploaded.pop(checkpoint, None)
