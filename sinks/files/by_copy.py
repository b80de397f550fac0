"""Publishes by copying: object stores."""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
from onceflow.sinks.files.layout import SinkPaths
from onceflow.sinks.files.manifest import Manifest, ManifestFile
from onceflow.sinks.files.publication import Publication, PublicationBegun
from onceflow.sinks.files.store import CopyingStore

_logger = logging.getLogger("onceflow.sinks.files")


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
        """Steps: 1. look for proof and files, 2. copy, 3. leave the proof, 4. clean up.

        Who is overtaken leaves a proof that another one has pruned; the next pruning takes it.
        """
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
            if self._manifest(self._paths.staged, transaction) is None:
                # Only what has its proof is cleaned up: another committer has overtaken this one.
                return AlreadyCommitted()
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
