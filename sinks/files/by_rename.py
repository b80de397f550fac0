"""Publishes by renaming: local disks, NFS, HDFS."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.files.layout import SinkPaths
from onceflow.sinks.files.manifest import Manifest
from onceflow.sinks.files.publication import Publication, PublicationBegun
from onceflow.sinks.files.store import RenamingStore


class ByRename(Publication):
    """One step a file, which readers see as a whole; the manifest's own moves are the journal.

    Before the first rename every file is looked at, and the manifest moves from staged to
    publishing. From then on a file that is not where it was staged has been renamed. An abort moves
    it from staged to aborting, so of a commit and an abort at one moment only one goes on.
    """

    def __init__(self, store: RenamingStore, paths: SinkPaths) -> None:
        super().__init__(store, paths)
        self._renaming = store

    @override
    def commit(self, transaction: TransactionId) -> CommitOutcome:
        """Steps: 1. look at the files, 2. note the beginning, 3. rename, 4. leave the proof."""
        paths = self._paths
        # In the order in which a manifest moves, so that one that moves meanwhile is met again.
        manifest = self._manifest(paths.staged, transaction)
        if manifest is not None:
            # 1.
            missing = self._missing(manifest)
            if missing is not None and self._manifest(paths.staged, transaction) is not None:
                return self._lost(transaction, missing)
            # 2. Nothing happens when another committer was faster.
            self._move(transaction, paths.staged, paths.publishing)
        manifest = self._manifest(paths.publishing, transaction)
        if manifest is None:
            return AlreadyCommitted() if self._has_proof(transaction) else self._lost(transaction)
        try:
            # 3.
            self._publish(manifest)
            # 4.
            moved = self._move(transaction, paths.publishing, paths.committed)
        except (SinkError, ConfigError) as error:
            raise PublicationBegun(str(error)) from error
        return Committed() if moved else AlreadyCommitted()

    @override
    def abort(self, transaction: TransactionId) -> AbortOutcome:
        paths = self._paths
        self._move(transaction, paths.staged, paths.aborting)
        manifest = self._manifest(paths.aborting, transaction)
        if manifest is not None:
            self._delete_data(manifest)
            self._store.delete(self._at(paths.aborting, transaction))
            return Aborted()
        if self._manifest(paths.publishing, transaction) is not None:
            # Some of its files are seen: what was begun can only be finished.
            self.commit(transaction)
            return AlreadyCommitted()
        return AlreadyCommitted() if self._has_proof(transaction) else Aborted()

    @override
    def in_doubt(self) -> Sequence[TransactionId]:
        paths = self._paths
        found = {
            name
            for directory in (paths.staged, paths.publishing, paths.aborting)
            for name in self._store.list(directory)
        }
        return paths.transactions(found)

    def _publish(self, manifest: Manifest) -> None:
        for file in manifest.files:
            self._renaming.rename(file.staged, file.path)
        for directory in sorted({file.path.rpartition("/")[0] for file in manifest.files}):
            self._store.make_names_durable(directory)

    def _move(self, transaction: TransactionId, source: str, target: str) -> bool:
        """Move the manifest; return False when it was not in `source` any more."""
        moved = self._renaming.rename(self._at(source, transaction), self._at(target, transaction))
        if moved or self._store.size(self._at(target, transaction)) is not None:
            # Also when another process moved it, which may have died before this.
            self._store.make_names_durable(target)
        return moved
