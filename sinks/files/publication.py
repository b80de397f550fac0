"""How a transaction's files become visible, and how it is known afterwards that they did.

    on a file system with rename     staged → publishing → committed, or staged → aborting
    on an object store               staged → staged and committed → committed

Each word is a directory in which the transaction's manifest lies: a JSON file that says which
finished file gets which public name. Every step may be repeated, by any number of processes at
once, and a crash between any two leaves a state from which the next call goes on. Whether a public
file is (still) there is never asked: what is published belongs to its readers, who may move or
delete it.
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

from onceflow.core.errors import ConfigError, SettingsRefused, SinkError, StorageError
from onceflow.core.msgspec_decoders import json_decoder
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committed,
    Lost,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.storage.filesystems.file_location import FileLocation, Publish
from onceflow.core.storage.filesystems.filesystem import (
    Copies,
    Renames,
    StorageRefused,
    StreamedFiles,
)
from onceflow.core.storage.filesystems.local import Advice, LocalFileSystem
from onceflow.core.stored_names import UnsafeName, resolve_stored_name
from onceflow.sinks.files.layout import HIDDEN, SinkPaths, create_file, name_of


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    staged: str
    """Where it was written, and is until it is published; relative to the sink's url."""
    path: str
    """What readers find it under; relative to the sink's url."""
    rows: int
    size_bytes: int


class TransactionManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One transaction; holds no secret."""

    transaction: str
    staged_at: datetime
    """When it was staged, by the clock of the machine that did."""
    files: tuple[ManifestFile, ...]
    version: Literal[1] = 1

    def encode(self) -> bytes:
        """Return the manifest as it is written."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def decode(cls, data: bytes, transaction: TransactionId, location: str) -> TransactionManifest:
        """Return the manifest of `transaction`, which `location` holds.

        Raises:
            SinkError: It is not what was written.
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
"""What a call into the file system may end with; another process may succeed with the same."""


def open_files(location: FileLocation) -> StreamedFiles:
    """Return the file system at `location`; it connects when it is first used."""
    return location.open(_ADVICE)


@contextmanager
def sink_errors() -> Generator[None]:
    """Say what fails in the block as the sink's callers know it.

    Raises:
        SettingsRefused: The file system refuses, and will again unless somebody acts.
        SinkError: It failed, and may work later.
    """
    try:
        yield
    except StorageRefused as error:
        raise SettingsRefused(str(error)) from error
    except StorageError as error:
        raise SinkError(str(error)) from error


class PublicationBegun(SinkError):
    """Raised when a publication stopped half way: some of its files may be visible."""


class Publication(ABC):
    """The transactions of one sink id in one file system."""

    def __init__(self, fs: StreamedFiles, paths: SinkPaths) -> None:
        self._fs = fs
        self._paths = paths

    def stage(self, transaction: TransactionId, manifest: TransactionManifest) -> None:
        """Make `transaction` committable by any process; its files are finished and durable.

        Raises:
            SinkError: Its name is taken.
            StorageError: It is not.
        """
        path = self._at(self._paths.staged, transaction)
        if not create_file(self._fs, path, manifest.encode()):
            raise SinkError(
                f"files are staged under {transaction} already ({self._fs.location(path)}): "
                "attempt or checkpoint numbers were used twice; is the decision log gone?"
            )

    @abstractmethod
    def commit(self, transaction: TransactionId) -> CommitOutcome:
        """Publish all files of `transaction` and leave the proof.

        Raises:
            PublicationBegun: The file system failed, and some files may be visible.
            StorageError: It failed before any was.
        """

    @abstractmethod
    def abort(self, transaction: TransactionId) -> AbortOutcome:
        """Delete all files of `transaction`, unless it is committed or has begun to be.

        Raises:
            StorageError: The file system failed; some may be deleted.
        """

    @abstractmethod
    def in_doubt(self) -> Sequence[TransactionId]:
        """Return what is staged and neither committed nor aborted, oldest first."""

    def proven(self) -> Sequence[TransactionId]:
        """Return every transaction whose proof of commit is there, oldest first."""
        return self._paths.transactions(self._fs.list(self._paths.committed))

    def forget(self, transaction: TransactionId) -> bool:
        """Delete the proof of a transaction that nobody asks for any more; return whether it is.

        It stays while something of the transaction is still staged: it says what that is.
        """
        self._fs.delete(self._at(self._paths.committed, transaction))
        return True

    def find_stage_time(self, transaction: TransactionId) -> datetime | None:
        """Return the time at which a transaction in doubt was staged, else None."""
        for directory in (self._paths.staged, self._paths.publishing, self._paths.aborting):
            manifest = self._manifest(directory, transaction)
            if manifest is not None:
                return None if self._has_proof(transaction) else manifest.staged_at
        return None

    def files_in_doubt(self) -> frozenset[str]:
        """Return the data files, by path, that transactions in doubt need."""
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
        """Return a file that is not what was staged."""
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
            f"{what}, and nothing proves that it was committed "
            f"({self._fs.location(self._at(self._paths.committed, transaction))}): somebody "
            "deleted it, went back to an older copy of the directory, or gave the sink another one"
        )


class ByRename(Publication):
    """One step a file, which readers see as a whole; the manifest's own moves are the journal.

    Before the first rename every file is looked at, and the manifest moves from staged to
    publishing. From then on a file that is not where it was staged has been renamed. An abort moves
    it from staged to aborting, so of a commit and an abort at one moment only one goes on.
    """

    def __init__(self, fs: Renames, paths: SinkPaths) -> None:
        super().__init__(fs, paths)
        self._renaming = fs

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
                return self._make_lost(transaction, missing)
            # 2. Nothing happens when another committer was faster.
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
            # Some of its files are seen: what was begun can only be finished.
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
        """Move the manifest; return False when it was not in `source` any more."""
        moved = self._renaming.rename(self._at(source, transaction), self._at(target, transaction))
        if moved or self._fs.size(self._at(target, transaction)) is not None:
            # Also when another process moved it, which may have died before this.
            self._fs.make_names_durable(target)
        return moved


class ByCopy(Publication):
    """One copy a file, whole or not at all; what was staged stays until the proof is written.

    Copies have names and bytes that the transaction determines, so a repeated one changes nothing,
    except that it brings back what a reader deleted before the proof was there: readers that
    delete take only what `list_committed_files` lists. Commit and abort of one transaction at one
    moment are not kept apart; the engine, which decides one or the other, never calls both.
    """

    def __init__(self, fs: Copies, paths: SinkPaths) -> None:
        super().__init__(fs, paths)
        self._copying = fs

    @override
    def commit(self, transaction: TransactionId) -> CommitOutcome:
        """Steps: 1. look for proof and files, 2. copy, 3. leave the proof, 4. clean up.

        Who is overtaken leaves a proof that another one has pruned; the next pruning takes it.
        """
        # 1. The manifest first: it goes only after the proof has come.
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
                # Only what has its proof is cleaned up: another committer has overtaken this one.
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
            # Some of its files are seen: what was begun can only be finished.
            self.commit(transaction)
            return AlreadyCommitted()
        self._delete_data(manifest)
        # The last: until now it lists what is left.
        self._fs.delete(self._at(self._paths.staged, transaction))
        return Aborted()

    @override
    def in_doubt(self) -> Sequence[TransactionId]:
        # Staged first: what is committed between the two looks is then in both.
        staged = self._paths.transactions(self._fs.list(self._paths.staged))
        proven = set(self.proven())
        return [transaction for transaction in staged if transaction not in proven]

    @override
    def forget(self, transaction: TransactionId) -> bool:
        # Whoever wrote the proof may have died before it cleaned up.
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
        # Another committer may have finished, and cleaned up, since the last look.
        if self._has_proof(transaction):
            return AlreadyCommitted()
        return self._make_lost(transaction, missing)

    def _copy_files(self, manifest: TransactionManifest) -> ManifestFile | None:
        """Copy every file; return one that was not there."""
        files = {file.staged: file for file in manifest.files}
        missing: list[ManifestFile] = []

        def copy(staged: str) -> None:
            file = files[staged]
            if not self._copying.copy(staged, file.path):
                missing.append(file)
                return
            # Azure answers when a copy has begun.
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
        """Delete what is no longer needed; what stays is deleted before the proof is."""
        try:
            self._delete_data(manifest)
            # The last: until now it lists what is left.
            self._fs.delete(self._at(self._paths.staged, transaction))
        except FAILURES as error:
            _logger.warning(
                "transaction %s is committed, and not cleaned up: %s", transaction, error
            )
            return False
        return True


def publication(fs: StreamedFiles, paths: SinkPaths) -> Publication:
    """Return how `fs` publishes."""
    match fs:
        case Renames():
            return ByRename(fs, paths)
        case Copies():
            return ByCopy(fs, paths)
        case _:
            raise TypeError(f"{type(fs).__name__} neither renames nor copies")


@dataclass(frozen=True, slots=True)
class PublishedFiles:
    """Files that one sink id has published, each with its transaction, as of one look."""

    of_transactions: Sequence[tuple[TransactionId, str]]
    """Wholly published transactions with their paths below the url, in the order of checkpoints."""
    whole_before: CheckpointId
    """Every checkpoint before this one is published by all subtasks."""

    def paths(self) -> list[str]:
        """Return the files of wholly published transactions."""
        return [path for _, path in self.of_transactions]

    def paths_of_whole_checkpoints(self) -> list[str]:
        """Return the files of checkpoints that all subtasks have published: a consistent cut.

        Behind `paths` by as many checkpoints as the job retains.
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

    For readers who want transactions or checkpoints as a whole, and not file by file: a listing of
    the directory may meet a transaction half published. The proofs that committers leave tell which
    are whole: one is written after the last file has its name. Proofs are deleted once no restore
    can ask for them, and what is older than that is whole too, in all subtasks.

    Files that readers have deleted are not in it. Runs anywhere, beside the running job.

    Raises:
        ConfigError: The url is wrong, or may not be listed.
        SinkError: It cannot be listed now.
    """
    fs = open_files(FileLocation.parse(url, publish=publish, options=storage_options or {}))
    paths = SinkPaths(sink_id)
    with sink_errors():
        # In this order: a proof that is not seen any more has left its mark before it went, and
        # files that are seen with a proof were all there before the proof was.
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
    proofs.sort(key=lambda one: (one[0].checkpoint, one[0].subtask, one[1]))
    return PublishedFiles(proofs, whole_before)
