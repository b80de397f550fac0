"""The publication of a transaction's files, and the proof that they were published.

    on a file system with rename     staged → publishing → committed, or staged → aborting
    on an object store               staged → staged and committed → committed

Each word is a directory that contains the transaction's manifest: a JSON file that gives each
finished file its public name. Every step may be repeated, by any number of processes at once. After
a crash between two steps, the next call continues. Whether a public file exists is never the proof:
published files belong to their readers, who may move or delete them.
"""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec
from typing_extensions import override

from onceflow.core.decoding import UnsafeName, json_decoder, resolve_stored_name
from onceflow.core.errors import ConfigError, SettingsRefused, SinkError, StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
    Lost,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.filesystems.file_location import FileLocation, Publish
from onceflow.core.storage.filesystems.local import Advice, LocalFileSystem
from onceflow.sinks.files.layout import HIDDEN, SinkPaths, create_file, name_of


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a transaction."""

    staged: str
    """The path where it was written and stays until it is published; relative to the sink's url."""
    path: str
    """The path where readers find it; relative to the sink's url."""
    rows: int
    size_bytes: int


class TransactionManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of one transaction; contains no secret."""

    transaction: str
    staged_at: datetime
    """The time of staging, by the clock of the machine that staged it."""
    files: tuple[ManifestFile, ...]
    version: Literal[1] = 1

    def encode(self) -> bytes:
        """Return the bytes of the manifest's file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def decode(cls, data: bytes, transaction: TransactionId, location: str) -> TransactionManifest:
        """Return the manifest of `transaction` that is stored at `location`.

        Raises:
            SinkError: The data are damaged, or of another transaction.
        """
        try:
            manifest = json_decoder(cls).decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SinkError(
                f"{location} is damaged: {error}. Restore it from a copy; transaction "
                f"{transaction} cannot be committed without it"
            ) from error
        if manifest.transaction != str(transaction):
            raise SinkError(
                f"{location} is damaged: it is of transaction {manifest.transaction}, and its name "
                f"says {transaction}"
            )
        return manifest


_logger = logging.getLogger("onceflow.sinks.files")


_ADVICE = Advice(
    remedies={
        errno.EFBIG: "over the largest file allowed here: raise the limit (ulimit -f), or lower"
        " roll_bytes",
        errno.ENAMETOOLONG: "choose a shorter directory or shorter partition values",
        errno.EXDEV: "a partition directory is a mount of its own: files can only be moved within"
        " one file system, so put `_onceflow` and all partitions on the same",
        errno.EMFILE: "raise the limit of open files (ulimit -n), or partition by fewer values",
    }
)

FAILURES = (SinkError, ConfigError, StorageError)
"""The errors of a call into the file system, after which another process may still succeed."""


def open_files(location: FileLocation) -> filesystem.StreamedFiles:
    """Return the file system at `location`; it connects when it is first used."""
    return location.open(_ADVICE)


@contextmanager
def sink_errors() -> Generator[None]:
    """Translate storage errors in the block into the sink's errors.

    Raises:
        SettingsRefused: The file system refuses, and will refuse again until a person acts.
        SinkError: The call failed, and may succeed later.
    """
    try:
        yield
    except filesystem.StorageRefused as error:
        raise SettingsRefused(str(error)) from error
    except StorageError as error:
        raise SinkError(str(error)) from error


class PublicationBegun(SinkError):
    """Raised if a publication stopped half way: some of its files may be visible."""


class Publication(ABC):
    """The transactions of one sink id in one file system."""

    def __init__(self, fs: filesystem.StreamedFiles, paths: SinkPaths) -> None:
        self._fs = fs
        self._paths = paths

    def stage(self, transaction: TransactionId, manifest: TransactionManifest) -> None:
        """Make `transaction` committable by any process.

        Its files are already finished and durable.

        Raises:
            SinkError: The transaction's name is taken.
            StorageError: The manifest could not be written.
        """
        path = self._at(self._paths.staged, transaction)
        if not create_file(self._fs, path, manifest.encode()):
            raise SinkError(
                f"files are staged under {transaction} already ({self._fs.location(path)}):"
                " attempt or checkpoint numbers were used twice. Check whether the decision log"
                " was deleted"
            )

    @abstractmethod
    def commit(self, transaction: TransactionId) -> CommitOutcome:
        """Publish all files of `transaction` and write the proof.

        Raises:
            PublicationBegun: The file system failed, and some files may be visible.
            StorageError: The file system failed before any file was visible.
        """

    @abstractmethod
    def abort(self, transaction: TransactionId) -> AbortOutcome:
        """Delete all files of `transaction`, unless its commit has begun or is complete.

        Raises:
            StorageError: The file system failed; some files may be deleted.
        """

    @abstractmethod
    def in_doubt(self) -> Sequence[TransactionId]:
        """Return the staged transactions that are neither committed nor aborted, oldest first."""

    def list_proven(self) -> Sequence[TransactionId]:
        """Return every transaction whose proof of commit exists, oldest first."""
        return self._paths.transactions(self._fs.list(self._paths.committed))

    def forget(self, transaction: TransactionId) -> bool:
        """Delete the proof of a transaction that no process asks for any more.

        Return True if deleted.

        The proof stays while files of the transaction are still staged, because it says what they
        are.
        """
        self._fs.delete(self._at(self._paths.committed, transaction))
        return True

    def find_stage_time(self, transaction: TransactionId) -> datetime | None:
        """Return the time at which a transaction in doubt was staged, or None for others."""
        for directory in (self._paths.staged, self._paths.publishing, self._paths.aborting):
            manifest = self._manifest(directory, transaction)
            if manifest is not None:
                return None if self._has_proof(transaction) else manifest.staged_at
        return None

    def files_in_doubt(self) -> frozenset[str]:
        """Return the paths of the data files that transactions in doubt need."""
        names: set[str] = set()
        for directory in (self._paths.staged, self._paths.publishing, self._paths.aborting):
            for transaction in self._paths.transactions(self._fs.list(directory)):
                manifest = self._manifest(directory, transaction)
                names.update(file.staged for file in (manifest.files if manifest else ()))
        return frozenset(names)

    def _at(self, directory: str, transaction: TransactionId) -> str:
        return f"{directory}/{name_of(transaction)}"

    def _manifest(self, directory: str, transaction: TransactionId) -> TransactionManifest | None:
        path = self._at(directory, transaction)
        data = self._fs.read(path)
        if data is None:
            return None
        location = self._fs.location(path)
        manifest = TransactionManifest.decode(data, transaction, location)
        try:
            for file in manifest.files:
                self._check_names(file, transaction)
        except UnsafeName as error:
            raise SinkError(
                f"{location} is damaged: {error}, and no writer of {transaction} has written it."
                " Restore the manifest from a copy; nothing of the transaction was published or"
                " deleted"
            ) from error
        return manifest

    def _check_names(self, file: ManifestFile, transaction: TransactionId) -> None:
        """Raise UnsafeName unless a writer of `transaction` may have given `file` its names."""
        root = self._fs.location("") if isinstance(self._fs, LocalFileSystem) else None
        for name in (file.staged, file.path):
            resolve_stored_name(name, root)
        directory, _, part = file.path.rpartition("/")
        if (
            file.staged.rpartition("/")[0] != self._paths.open
            or directory.partition("/")[0] == HIDDEN
            or self._paths.transaction_of_part(part) != transaction
        ):
            raise UnsafeName(f"the file {file.staged!r} may not become {file.path!r}")

    def _has_proof(self, transaction: TransactionId) -> bool:
        return self._fs.size(self._at(self._paths.committed, transaction)) is not None

    def _is_whole(self, file: ManifestFile) -> bool:
        return self._fs.size(file.staged) == file.size_bytes

    def _missing(self, manifest: TransactionManifest) -> ManifestFile | None:
        """Return a file that differs from what was staged, or None."""
        files = {file.staged: file for file in manifest.files}
        missing: list[ManifestFile] = []

        def look(staged: str) -> None:
            if not self._is_whole(files[staged]):
                missing.append(files[staged])

        self._fs.for_each(look, files)
        return missing[0] if missing else None

    def _delete_data(self, manifest: TransactionManifest) -> None:
        self._fs.for_each(self._fs.delete, [file.staged for file in manifest.files])

    def _make_lost(self, transaction: TransactionId, missing: ManifestFile | None = None) -> Lost:
        what = f"transaction {transaction} is not staged any more"
        if missing is not None:
            what = (
                f"file {self._fs.location(missing.staged)} of {missing.rows} rows is gone or "
                f"no longer {missing.size_bytes} bytes long"
            )
        return Lost(
            f"{what}, and there is no proof that it was committed"
            f" ({self._fs.location(self._at(self._paths.committed, transaction))}): it was"
            " deleted, the directory was set back to an older copy, or the sink was given"
            " another directory"
        )


class ByRename(Publication):
    """The publication by rename: each file appears at once; the manifest's moves are the journal.

    Before the first rename every file is checked, and the manifest moves from staged to publishing.
    From then on, a file that is missing from its staged path has been renamed. An abort moves the
    manifest from staged to aborting. So of a concurrent commit and abort only one proceeds.
    """

    def __init__(self, fs: filesystem.Renames, paths: SinkPaths) -> None:
        super().__init__(fs, paths)
        self._renaming = fs

    @override
    def commit(self, transaction: TransactionId) -> CommitOutcome:
        """Commit in four steps: 1. check files, 2. move manifest, 3. rename, 4. write the proof."""
        paths = self._paths
        # Read in the order in which a manifest moves, so that a manifest that moves meanwhile is
        # found later.
        manifest = self._manifest(paths.staged, transaction)
        if manifest is not None:
            # 1.
            missing = self._missing(manifest)
            if missing is not None and self._manifest(paths.staged, transaction) is not None:
                return self._make_lost(transaction, missing)
            # 2. Does nothing if another committer was faster.
            self._move(transaction, paths.staged, paths.publishing)
        manifest = self._manifest(paths.publishing, transaction)
        if manifest is None:
            return (
                AlreadyCommitted() if self._has_proof(transaction) else self._make_lost(transaction)
            )
        try:
            # 3.
            self._publish(manifest)
            # 4.
            moved = self._move(transaction, paths.publishing, paths.committed)
        except FAILURES as error:
            raise PublicationBegun(str(error)) from error
        return Committed() if moved else AlreadyCommitted()

    @override
    def abort(self, transaction: TransactionId) -> AbortOutcome:
        paths = self._paths
        self._move(transaction, paths.staged, paths.aborting)
        manifest = self._manifest(paths.aborting, transaction)
        if manifest is not None:
            self._delete_data(manifest)
            self._fs.delete(self._at(paths.aborting, transaction))
            return Aborted()
        if self._manifest(paths.publishing, transaction) is not None:
            # Some of its files are visible: a publication that has begun can only be completed.
            self.commit(transaction)
            return AlreadyCommitted()
        return AlreadyCommitted() if self._has_proof(transaction) else Aborted()

    @override
    def in_doubt(self) -> Sequence[TransactionId]:
        paths = self._paths
        manifests = {
            name
            for directory in (paths.staged, paths.publishing, paths.aborting)
            for name in self._fs.list(directory)
        }
        return paths.transactions(manifests)

    def _publish(self, manifest: TransactionManifest) -> None:
        for file in manifest.files:
            self._renaming.rename(file.staged, file.path)
        for directory in sorted({file.path.rpartition("/")[0] for file in manifest.files}):
            self._fs.make_names_durable(directory)

    def _move(self, transaction: TransactionId, source: str, target: str) -> bool:
        """Move the manifest; return False if it was not in `source` any more."""
        moved = self._renaming.rename(self._at(source, transaction), self._at(target, transaction))
        if moved or self._fs.size(self._at(target, transaction)) is not None:
            # Also if another process moved it, because that process may have died before this step.
            self._fs.make_names_durable(target)
        return moved


class ByCopy(Publication):
    """The publication by copy: each file appears at once.

    Staged files stay until the proof is written.

    The transaction determines the names and bytes of copies, so a repeated copy changes nothing,
    with one exception: it restores a file that a reader deleted before the proof was written. So
    readers may delete only files that `list_committed_files` lists. A concurrent commit and abort
    of one transaction are not excluded here; the engine decides for one of the two, and never calls
    both.
    """

    def __init__(self, fs: filesystem.Copies, paths: SinkPaths) -> None:
        super().__init__(fs, paths)
        self._copying = fs

    @override
    def commit(self, transaction: TransactionId) -> CommitOutcome:
        """Commit in steps: 1. look for proof and files, 2. copy, 3. write the proof, 4. clean up.

        A delayed committer may write a proof that another process has pruned. The next pruning
        deletes it.
        """
        # 1. The manifest first: it is deleted only after the proof exists.
        manifest = self._manifest(self._paths.staged, transaction)
        if self._has_proof(transaction):
            return self._clean_up_committed(transaction, manifest)
        if manifest is None:
            return self._make_lost(transaction)
        missing = self._missing(manifest)
        if missing is not None:
            return self._judge_missing(transaction, missing)
        try:
            # 2.
            missing = self._copy_files(manifest)
            if missing is not None:
                return self._judge_missing(transaction, missing)
            # 3.
            self._fs.write(self._at(self._paths.committed, transaction), (manifest.encode(),))
            if self._manifest(self._paths.staged, transaction) is None:
                # Only transactions with a proof are cleaned up, so another committer has committed
                # this one.
                return AlreadyCommitted()
        except FAILURES as error:
            raise PublicationBegun(str(error)) from error
        # 4.
        self._clean_up(transaction, manifest)
        return Committed()

    @override
    def abort(self, transaction: TransactionId) -> AbortOutcome:
        manifest = self._manifest(self._paths.staged, transaction)
        if self._has_proof(transaction):
            return self._clean_up_committed(transaction, manifest)
        if manifest is None:
            return Aborted()
        if any(self._fs.size(file.path) is not None for file in manifest.files):
            # Some of its files are visible: a publication that has begun can only be completed.
            self.commit(transaction)
            return AlreadyCommitted()
        self._delete_data(manifest)
        # The manifest is deleted last, because it lists the files that are left.
        self._fs.delete(self._at(self._paths.staged, transaction))
        return Aborted()

    @override
    def in_doubt(self) -> Sequence[TransactionId]:
        # Staged first: a transaction that is committed between the two reads is then in both lists.
        staged = self._paths.transactions(self._fs.list(self._paths.staged))
        proven = set(self.list_proven())
        return [transaction for transaction in staged if transaction not in proven]

    @override
    def forget(self, transaction: TransactionId) -> bool:
        # The process that wrote the proof may have died before it cleaned up.
        manifest = self._manifest(self._paths.staged, transaction)
        if manifest is not None and not self._clean_up(transaction, manifest):
            return False
        return super().forget(transaction)

    def _clean_up_committed(
        self, transaction: TransactionId, manifest: TransactionManifest | None
    ) -> AlreadyCommitted:
        if manifest is not None:
            self._clean_up(transaction, manifest)
        return AlreadyCommitted()

    def _judge_missing(
        self, transaction: TransactionId, missing: ManifestFile
    ) -> AlreadyCommitted | Lost:
        # Another committer may have committed and cleaned up since the last check.
        if self._has_proof(transaction):
            return AlreadyCommitted()
        return self._make_lost(transaction, missing)

    def _copy_files(self, manifest: TransactionManifest) -> ManifestFile | None:
        """Copy every file; return a file that did not exist, or None."""
        files = {file.staged: file for file in manifest.files}
        missing: list[ManifestFile] = []

        def copy(staged: str) -> None:
            file = files[staged]
            if not self._copying.copy(staged, file.path):
                missing.append(file)
                return
            # Azure replies as soon as a copy has begun.
            found_bytes = self._fs.size(file.path)
            if found_bytes != file.size_bytes:
                raise SinkError(
                    f"the copy of {self._fs.location(staged)} to "
                    f"{self._fs.location(file.path)} is not complete: {found_bytes} of "
                    f"{file.size_bytes} bytes"
                )

        self._fs.for_each(copy, files)
        return missing[0] if missing else None

    def _clean_up(self, transaction: TransactionId, manifest: TransactionManifest) -> bool:
        """Delete the staged files; remaining ones are deleted before the proof is."""
        try:
            self._delete_data(manifest)
            # The manifest is deleted last, because it lists the files that are left.
            self._fs.delete(self._at(self._paths.staged, transaction))
        except FAILURES as error:
            _logger.warning(
                "transaction %s is committed, but its staged files could not be deleted: %s",
                transaction,
                error,
            )
            return False
        return True


def publication(fs: filesystem.StreamedFiles, paths: SinkPaths) -> Publication:
    """Return the kind of publication that `fs` supports."""
    match fs:
        case filesystem.Renames():
            return ByRename(fs, paths)
        case filesystem.Copies():
            return ByCopy(fs, paths)
        case _:
            raise TypeError(f"{type(fs).__name__} neither renames nor copies")


@dataclass(frozen=True, slots=True)
class PublishedFiles:
    """The files that one sink id has published, with their transactions, at one moment."""

    of_transactions: Sequence[tuple[TransactionId, str]]
    """Pairs of a wholly published transaction and a path below the url, in checkpoint order."""
    whole_before: CheckpointId
    """The first checkpoint that may be incomplete. All subtasks have published those before it."""

    def paths(self) -> list[str]:
        """Return the files of wholly published transactions."""
        return [path for _, path in self.of_transactions]

    def paths_of_whole_checkpoints(self) -> list[str]:
        """Return the files of checkpoints that all subtasks have published: a consistent cut.

        It lags behind `paths` by the number of checkpoints that the job retains.
        """
        return [
            path
            for transaction, path in self.of_transactions
            if transaction.checkpoint < self.whole_before
        ]


def list_committed_files(
    url: str,
    sink_id: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    publish: Publish = "auto",
) -> PublishedFiles:
    """Return the files below `url` that belong to wholly published transactions of `sink_id`.

    For readers that need whole transactions or checkpoints, not single files: a listing of the
    directory may contain half-published transactions. The proofs that committers write tell which
    ones are whole: a proof is written after the last file has its name. Proofs are deleted once no
    restore can need them, and all older checkpoints are whole too, in all subtasks.

    Files that readers have deleted are not listed. Runs in any process, also while the job runs.

    Raises:
        ConfigError: The url is wrong, or may not be listed.
        SinkError: It cannot be listed now.
    """
    fs = open_files(FileLocation.parse(url, publish=publish, options=storage_options or {}))
    paths = SinkPaths(sink_id)
    with sink_errors():
        # In this order: a proof that is not seen any more wrote its mark before it was deleted.
        # Files that are seen with a proof were all visible before the proof was written.
        proven = set(paths.transactions(fs.list(paths.committed)))
        marks = [int(mark) for mark in fs.list(paths.pruned) if mark.isdigit()]
        visible = fs.visible_files()
    whole_before = CheckpointId(max(marks, default=0))
    proofs: list[tuple[TransactionId, str]] = []
    for path in visible:
        transaction = paths.transaction_of_part(path.rpartition("/")[2])
        if transaction is not None and (
            transaction in proven or transaction.checkpoint < whole_before
        ):
            proofs.append((transaction, path))
    proofs.sort(key=lambda proof: (proof[0].checkpoint, proof[0].subtask, proof[1]))
    return PublishedFiles(proofs, whole_before)
