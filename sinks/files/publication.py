"""How a transaction's files become visible, and how it is known afterwards that they did.

    on a file system with rename     staged → publishing → committed, or staged → aborting
    on an object store               staged → staged and committed → committed

Each word is a directory in which the transaction's manifest lies. Every step may be repeated, by
any number of processes at once, and a crash between any two leaves a state from which the next call
goes on. Whether a public file is (still) there is never asked: what is published belongs to its
readers, who may move or delete it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime

from typing_extensions import override

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
    Lost,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.files.layout import SinkPaths, name_of
from onceflow.sinks.files.manifest import Manifest, ManifestFile
from onceflow.sinks.files.store import CopyingStore, RenamingStore, Store

_logger = logging.getLogger("onceflow.sinks.files")


class PublicationBegun(SinkError):
    """Raised when a publication stopped half way: some of its files may be visible."""


class Publication(ABC):
    """The transactions of one sink id in one store."""

    def __init__(self, store: Store, paths: SinkPaths) -> None:
        self._store = store
        self._paths = paths

    def stage(self, transaction: TransactionId, manifest: Manifest) -> None:
        """Make `transaction` committable by any process; its files are finished and durable.

        Raises:
            SinkError: It is not; or its name is taken.
        """
        path = self._at(self._paths.staged, transaction)
        if not self._store.create_if_absent(path, manifest.encode()):
            raise SinkError(
                f"files are staged under {transaction} already ({self._store.location(path)}): "
                "attempt or checkpoint numbers were used twice; is the decision log gone?"
            )

    @abstractmethod
    def commit(self, transaction: TransactionId) -> CommitOutcome:
        """Publish all files of `transaction` and leave the proof.

        Raises:
            PublicationBegun: The store failed, and some files may be visible.
            SinkError: The store failed before any was.
        """

    @abstractmethod
    def abort(self, transaction: TransactionId) -> AbortOutcome:
        """Delete all files of `transaction`, unless it is committed or has begun to be.

        Raises:
            SinkError: The store failed; some may be deleted.
        """

    @abstractmethod
    def in_doubt(self) -> Sequence[TransactionId]:
        """Return what is staged and neither committed nor aborted, oldest first."""

    def proven(self) -> Sequence[TransactionId]:
        """Return every transaction whose proof of commit is there, oldest first."""
        return self._paths.transactions(self._store.list(self._paths.committed))

    def forget(self, transaction: TransactionId) -> bool:
        """Delete the proof of a transaction that nobody asks for any more; return whether it is.

        It stays while something of the transaction is still staged: it says what that is.
        """
        self._store.delete(self._at(self._paths.committed, transaction))
        return True

    def staged_at(self, transaction: TransactionId) -> datetime | None:
        """Return when a transaction in doubt was staged; None when it is not in doubt."""
        for directory in (self._paths.staged, self._paths.publishing, self._paths.aborting):
            manifest = self._manifest(directory, transaction)
            if manifest is not None:
                return None if self._has_proof(transaction) else manifest.staged_at
        return None

    def files_in_doubt(self) -> frozenset[str]:
        """Return the data files, by path, that transactions in doubt need."""
        found: set[str] = set()
        for directory in (self._paths.staged, self._paths.publishing, self._paths.aborting):
            for transaction in self._paths.transactions(self._store.list(directory)):
                manifest = self._manifest(directory, transaction)
                found.update(file.staged for file in (manifest.files if manifest else ()))
        return frozenset(found)

    def _at(self, directory: str, transaction: TransactionId) -> str:
        return f"{directory}/{name_of(transaction)}"

    def _manifest(self, directory: str, transaction: TransactionId) -> Manifest | None:
        path = self._at(directory, transaction)
        data = self._store.read(path)
        if data is None:
            return None
        return Manifest.decode(data, transaction, self._store.location(path))

    def _has_proof(self, transaction: TransactionId) -> bool:
        return self._store.size(self._at(self._paths.committed, transaction)) is not None

    def _is_whole(self, file: ManifestFile) -> bool:
        return self._store.size(file.staged) == file.size_bytes

    def _missing(self, manifest: Manifest) -> ManifestFile | None:
        """Return a file that is not what was staged."""
        files = {file.staged: file for file in manifest.files}
        missing: list[ManifestFile] = []

        def look(staged: str) -> None:
            if not self._is_whole(files[staged]):
                missing.append(files[staged])

        self._store.for_each(look, files)
        return missing[0] if missing else None

    def _delete_data(self, manifest: Manifest) -> None:
        self._store.for_each(self._store.delete, [file.staged for file in manifest.files])

    def _lost(self, transaction: TransactionId, missing: ManifestFile | None = None) -> Lost:
        what = f"transaction {transaction} is not staged any more"
        if missing is not None:
            what = (
                f"file {self._store.location(missing.staged)} of {missing.rows} rows is gone or "
                f"no longer {missing.size_bytes} bytes long"
            )
        return Lost(
            f"{what}, and there is no proof that it was committed "
            f"({self._store.location(self._at(self._paths.committed, transaction))}): somebody "
            "deleted it, or went back to an older copy of the directory"
        )


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


class ByCopy(Publication):
    """One copy a file, whole or not at all; what was staged stays until the proof is written.

    Copies have names and bytes that the transaction determines, so a repeated one changes nothing,
    except that it brings back what a reader deleted before the proof was there: readers that
    delete take only what `committed_files` lists. Commit and abort of one transaction at one moment
    are not kept apart; the engine, which decides one or the other, never calls both.
    """

    def __init__(self, store: CopyingStore, paths: SinkPaths) -> None:
        super().__init__(store, paths)
        self._copying = store

    @override
    def commit(self, transaction: TransactionId) -> CommitOutcome:
        """Steps: 1. look for proof and files, 2. copy, 3. leave the proof, 4. clean up."""
        # 1. The manifest first: it goes only after the proof has come.
        manifest = self._manifest(self._paths.staged, transaction)
        if self._has_proof(transaction):
            return self._committed_before(transaction, manifest)
        if manifest is None:
            return self._lost(transaction)
        missing = self._missing(manifest)
        if missing is not None:
            return self._gone(transaction, missing)
        try:
            # 2.
            missing = self._copied(manifest)
            if missing is not None:
                return self._gone(transaction, missing)
            # 3.
            self._store.write(self._at(self._paths.committed, transaction), manifest.encode())
        except (SinkError, ConfigError) as error:
            raise PublicationBegun(str(error)) from error
        # 4.
        self._clean_up(transaction, manifest)
        return Committed()

    @override
    def abort(self, transaction: TransactionId) -> AbortOutcome:
        manifest = self._manifest(self._paths.staged, transaction)
        if self._has_proof(transaction):
            return self._committed_before(transaction, manifest)
        if manifest is None:
            return Aborted()
        if any(self._store.size(file.path) is not None for file in manifest.files):
            # Some of its files are seen: what was begun can only be finished.
            self.commit(transaction)
            return AlreadyCommitted()
        self._delete_data(manifest)
        # The last: until now it lists what is left.
        self._store.delete(self._at(self._paths.staged, transaction))
        return Aborted()

    @override
    def in_doubt(self) -> Sequence[TransactionId]:
        # Staged first: what is committed between the two looks is then in both.
        staged = self._paths.transactions(self._store.list(self._paths.staged))
        proven = set(self.proven())
        return [transaction for transaction in staged if transaction not in proven]

    @override
    def forget(self, transaction: TransactionId) -> bool:
        # Whoever wrote the proof may have died before it cleaned up.
        manifest = self._manifest(self._paths.staged, transaction)
        if manifest is not None and not self._clean_up(transaction, manifest):
            return False
        return super().forget(transaction)

    def _committed_before(
        self, transaction: TransactionId, manifest: Manifest | None
    ) -> AlreadyCommitted:
        if manifest is not None:
            self._clean_up(transaction, manifest)
        return AlreadyCommitted()

    def _gone(self, transaction: TransactionId, missing: ManifestFile) -> AlreadyCommitted | Lost:
        # Another committer may have finished, and cleaned up, since the last look.
        if self._has_proof(transaction):
            return AlreadyCommitted()
        return self._lost(transaction, missing)

    def _copied(self, manifest: Manifest) -> ManifestFile | None:
        """Copy every file; return one that was not there."""
        files = {file.staged: file for file in manifest.files}
        missing: list[ManifestFile] = []

        def copy(staged: str) -> None:
            file = files[staged]
            if not self._copying.copy(staged, file.path):
                missing.append(file)
                return
            # Azure answers when a copy has begun.
            found_bytes = self._store.size(file.path)
            if found_bytes != file.size_bytes:
                raise SinkError(
                    f"the copy of {self._store.location(staged)} to "
                    f"{self._store.location(file.path)} is not complete: {found_bytes} of "
                    f"{file.size_bytes} bytes"
                )

        self._store.for_each(copy, files)
        return missing[0] if missing else None

    def _clean_up(self, transaction: TransactionId, manifest: Manifest) -> bool:
        """Delete what is no longer needed; what stays is deleted before the proof is."""
        try:
            self._delete_data(manifest)
            # The last: until now it lists what is left.
            self._store.delete(self._at(self._paths.staged, transaction))
        except (SinkError, ConfigError) as error:
            _logger.warning(
                "transaction %s is committed, and not cleaned up: %s", transaction, error
            )
            return False
        return True


def publication(store: Store, paths: SinkPaths) -> Publication:
    """Return how `store` publishes."""
    match store:
        case RenamingStore():
            return ByRename(store, paths)
        case CopyingStore():
            return ByCopy(store, paths)
        case _:
            raise TypeError(f"{type(store).__name__} neither renames nor copies")
