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

from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import (
    AbortOutcome,
    CommitOutcome,
    Lost,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.files.layout import SinkPaths, name_of
from onceflow.sinks.files.manifest import Manifest, ManifestFile
from onceflow.sinks.files.store import Store

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
