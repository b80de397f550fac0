"""The checkpoint storage of a job, for the runtime: decision log, state files, staged rows."""

from __future__ import annotations

import contextlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from onceflow.core import errors
from onceflow.core.argument_types import check_fields
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, StateHandle
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.spi.staging import StagingArea
from onceflow.core.storage.filesystems.filesystem import (
    AlreadyExists,
    Created,
    CreatesAtomically,
    StorageRefused,
)
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE, LocalFileSystem, Modes
from onceflow.core.storage.layout import JobPaths, StateNames, is_job_name, safe_name
from onceflow.core.storage.log.decision_log import DecisionLog, log_id
from onceflow.core.storage.log.driver_files import AddressFiles, LastRunFile
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory, copy_into
from onceflow.core.storage.snapshots.state_files import (
    FileStateReader,
    FileStateWriter,
    discard,
    sweep,
)
from onceflow.core.storage.staging.staged_rows import FileStagingArea, InputFiles

_log = logging.getLogger("onceflow.storage")
_logged: set[str] = set()
"""The warnings on unreadable directories that this process has logged already."""
INLINE_THRESHOLD_BYTES = 20_000
INLINE_THRESHOLD_BYTES_MAX = 1_000_000
"""The upper limit of the threshold: each log record holds the inline state of all subtasks, so much
larger state would make appends slow."""


class HoldsStaged(Protocol):
    """A savepoint or checkpoint to start from, with copies of staged rows."""

    def staging(self, sink_id: str) -> FileStagingArea:
        """Return the staging area with the rows that `sink_id` had staged."""
        ...


@dataclass(frozen=True, slots=True)
class Probe:
    """A file that shows whether another process sees the same storage."""

    path: str
    token: str


class JobStorage:
    """The checkpoint storage of one job. Any thread; each process must open its own.

    Opening creates no files, so a slot that cannot see the driver's storage does not create another
    storage by accident.
    """

    def __init__(
        self,
        fs: CreatesAtomically,
        job: str,
        inline_threshold_bytes: int,
        private: CreatesAtomically | None = None,
    ) -> None:
        self._fs = fs
        self._private = private or fs
        """The same files; only their owner may read what is written through this object."""
        self._paths = JobPaths(job)
        self._inline_threshold_bytes = inline_threshold_bytes

    def __str__(self) -> str:
        return self._fs.location(self._paths.job)

    @property
    def job(self) -> str:
        """The job's name."""
        return self._paths.job

    @property
    def log(self) -> DecisionLog:
        """The job's decision log."""
        return DecisionLog.open(self._fs, self._paths)

    @property
    def log_id(self) -> str:
        """The decision log's identity. Created, by the driver, if the job is new.

        Raises:
            CheckpointCorrupt: The identity is missing or damaged, although the log has records.
        """
        return log_id(self._fs, self._paths)

    def writer(
        self, attempt: AttemptId, checkpoint: CheckpointId, uid: str, subtask: int
    ) -> FileStateWriter:
        """Return the writer of the durable state of one operator's subtask and checkpoint."""
        names = StateNames(attempt, checkpoint, uid, subtask)
        return FileStateWriter(self._fs, self._paths, names, self._inline_threshold_bytes)

    def savepoint_writer(
        self, directory: SavepointDirectory, uid: str, subtask: int
    ) -> FileStateWriter:
        """Return the writer of the same state into the directory of a savepoint."""
        return directory.subtask_writer(uid, subtask, self._inline_threshold_bytes)

    def reader(self) -> FileStateReader:
        """Return the reader of all state that handles of this job reference."""
        return FileStateReader(self._fs, self._paths)

    def with_state_of(
        self, completed: CompletedCheckpoint, source: FileStateReader
    ) -> CompletedCheckpoint:
        """Return `completed` with its state copied from `source` into this job's storage, durably.

        Raises:
            StorageError: Not all files were copied. The next attempt's `sweep` deletes the copies.
            CheckpointCorrupt: A state file is gone, or its bytes are not those that were written.
        """
        return copy_into(self._fs, self._paths, completed, source)

    @property
    def driver_address(self) -> AddressFiles:
        """The files with the running driver's address and token."""
        return AddressFiles(self._fs, self._private, self._paths)

    @property
    def last_run(self) -> LastRunFile:
        """The file with the state of the job's last driver: running, or how it ended."""
        return LastRunFile(self._private, self._paths)

    @property
    def savepoints(self) -> str:
        """The default location of savepoints."""
        return self._fs.location(self._paths.savepoints)

    def savepoint_names(self) -> tuple[str, ...]:
        """Return the names of the files and directories in `savepoints`."""
        return tuple(self._fs.list(self._paths.savepoints))

    def staging(self, sink_id: str) -> StagingArea:
        """Return the staging area of sink `sink_id`."""
        return self.open_staged_files(sink_id)

    def open_staged_files(self, sink_id: str) -> FileStagingArea:
        """Return the staging area of `sink_id` as files, which can be copied to other storage."""
        return FileStagingArea(self._fs, self._paths.staging_directory(sink_id), sink_id)

    def copy_staged(
        self,
        directory: SavepointDirectory,
        sinks: Iterable[str],
        is_wanted: Callable[[TransactionId], bool],
    ) -> tuple[TransactionId, ...]:
        """Copy the wanted staged transactions of `sinks` into a savepoint. Return their ids.

        Raises:
            StateCorrupt: The bytes of a file are not those that were sealed.
            StorageError: Not all files are durable in the savepoint.
        """
        return tuple(
            transaction
            for sink_id in sinks
            for transaction in self.open_staged_files(sink_id).copy_to(
                directory.staging(sink_id), is_wanted
            )
        )

    def import_staged(
        self, directory: HoldsStaged, savepoint: Savepoint, sinks: Collection[str]
    ) -> None:
        """Copy the staged rows and proofs of `sinks` from a savepoint into this job's storage.

        Idempotent. After a crash, the copied files belong to no decision.

        Raises:
            CheckpointCorrupt: A staged transaction that the savepoint names is gone.
            StateCorrupt: The bytes of a file are not those that were sealed.
            StorageError: Not all files are durable here.
        """
        for sink_id in sorted(sinks):
            source = directory.staging(sink_id)
            named = {
                transaction for transaction in savepoint.staged if transaction.sink_id == sink_id
            }
            if missing := sorted(named - set(source.transactions())):
                raise errors.CheckpointCorrupt(
                    f"the savepoint {directory} names {len(missing)} staged transactions whose"
                    f" files are gone, the first {missing[0]}: restore the savepoint's directory"
                    " from a copy"
                )
            if source.transactions():
                self.open_staged_files(sink_id).import_from(source)

    def inputs(self, uid: str) -> InputFiles:
        """Return the directory into which Spark writes the input of source `uid`."""
        return InputFiles(self._fs, self._paths.inputs(uid))

    def list_staged_sinks(self, known: Iterable[str]) -> tuple[str, ...]:
        """Return the sink ids under which rows are or were staged.

        A directory name with a digest does not contain the sink id, so the names of `known` sinks
        are compared with it. A directory with a digest that matches no known sink is left out.
        """
        names = set(self._fs.list(self._paths.staged_sinks))
        readable = {
            sink_id for name in names if (sink_id := self._paths.parse_staged_sink_id(name))
        }
        # A digest cannot be turned back into an id, so it is computed from each known id.
        compared = {sink_id for sink_id in known if safe_name(sink_id) in names}
        return tuple(sorted(readable | compared))

    def jobs(self) -> tuple[str, ...]:
        """Return the names of all jobs in the same storage that have a decision log.

        If the directory of another job cannot be read, logs a warning and leaves that job out.

        Raises:
            StorageError: The root or this job's own directory cannot be read.
        """
        return tuple(name for name in self._fs.list("") if self._has_log(name))

    def _has_log(self, name: str) -> bool:
        if not is_job_name(name):
            return False
        paths = JobPaths(name)
        try:
            return any(map(paths.is_of_log, self._fs.list(paths.log)))
        except errors.StorageError as error:
            if name == self._paths.job:
                raise
            # Warn once a process: the web page and the commands list the jobs repeatedly.
            if str(error) not in _logged:
                _logged.add(str(error))
                _log.warning("a directory is not listed among the jobs in storage: %s", error)
            return False

    def others(self) -> dict[str, LogView]:
        """Return the views of the decision logs of the other jobs in the same storage, by job.

        A log that cannot be read is left out.
        """
        views: dict[str, LogView] = {}
        for name in self.jobs():
            if name == self._paths.job:
                continue
            with contextlib.suppress(
                errors.ConfigError,
                errors.CheckpointError,
                errors.StateIncompatible,
                errors.StorageError,
            ):
                views[name] = DecisionLog.open(self._fs, JobPaths(name)).read()
        return views

    def discard(self, handles: Iterable[StateHandle]) -> None:
        """Delete the files of `handles`, which no checkpoint references now or later. Idempotent.

        Raises:
            StorageError: Some files still exist. The next attempt's `sweep` deletes them.
        """
        discard(self._fs, self._paths, handles)

    def sweep(
        self, view: LogView, attempt: AttemptId, *, spared: frozenset[str] = frozenset()
    ) -> tuple[str, ...]:
        """Delete the files that dead attempts and dead checkpoints left (I9). Return their paths.

        Runs on the driver when `attempt` begins; `view` is the log as claimed. May run while slots
        of `attempt` or of a newer attempt write. If it runs later in the attempt, `spared` must
        hold the paths that the checkpoints retained at the attempt's start reference.

        Raises:
            StorageError: Some files still exist, although each deletion was tried.
        """
        return sweep(self._fs, self._paths, view, attempt, spared=spared)

    def check_creates(self) -> None:
        """Raise ConfigError unless a second creation fails, and a listing shows what was created.

        A store may ignore the condition under which an object is to be created. Then two drivers
        could both own one job.

        Raises:
            ConfigError: This storage cannot hold a decision log.
            StorageError: Storage cannot be written or read here.
        """
        path = self._paths.probe(AttemptId(0), secrets.token_hex(16))
        first, second = b"the first", b"the second"
        try:
            # The same bytes again, then others: a store that ignores the condition would keep the
            # last ones.
            outcomes = [self._fs.create_if_absent(path, data) for data in (first, first, second)]
            standing = self._fs.read(path)
            is_listed = path.rpartition("/")[2] in self._fs.list(self._paths.probes)
        finally:
            self._fs.delete_quietly(path)
            with contextlib.suppress(errors.StorageError):
                # Only if the directory is empty: another driver may be probing now.
                self._fs.delete_directory_if_empty(self._paths.probes)
        # AlreadyExists with our bytes is fine: the store's client may have repeated the first
        # creation.
        created = outcomes[0] in (Created(), AlreadyExists(first))
        if not created or outcomes[1:] != [AlreadyExists(first)] * 2 or standing != first:
            raise errors.ConfigError(
                f"{self._fs.location('')} does not support create-if-absent: an existing object"
                " was created a second time, so two drivers could own the job. The store needs"
                " conditional writes (S3: If-None-Match, which Amazon S3, MinIO, Ceph from"
                " Squid, R2 have); update the store, or use another"
            )
        if not is_listed:
            raise errors.ConfigError(
                f"{self._fs.location('')} does not list a file that was just written, so a driver"
                " could miss the last decision. Checkpoint storage needs list-after-write:"
                " update the store, or use another"
            )

    def probe_write(self, attempt: AttemptId) -> Probe:
        """Write a file that the slots of `attempt` read back; checks that storage is writable.

        The file stays until a newer attempt sweeps, because slots may read it at any time.

        Raises:
            StorageError: Storage cannot be written here.
        """
        token = secrets.token_hex(16)
        path = self._paths.probe(attempt, token)
        self._fs.write(path, (token.encode(),))
        return Probe(path, token)

    def probe_read(self, path: str) -> str:
        """Return the token of the probe at `path`, or an empty text if the file does not exist.

        Raises:
            SettingsRefused: This process's user may not read it.
            StorageError: Storage cannot be read here for another reason.
        """
        try:
            data = self._fs.read(path)
        except StorageRefused as error:
            raise errors.SettingsRefused(str(error)) from error
        return "" if data is None else data.decode("ascii", "replace")


class CheckpointStorage(ABC):
    """The location of checkpoints.

    It is pickled by value and holds no open resource and no secret.
    """

    @abstractmethod
    def open(self, job: str) -> JobStorage:
        """Return the storage of job `job` in this process. Reads and writes nothing yet.

        Raises:
            ConfigError: `job` cannot be a job's name.
        """

    def open_savepoint(self, location: str) -> SavepointDirectory:
        """Return the savepoint in directory `location`, on any file system. Reads nothing yet.

        Raises:
            ConfigError: This storage cannot reach `location`.
        """
        return SavepointDirectory(LocalFileSystem(_to_directory(location), Modes(0o600, 0o700)))


@check_fields
@dataclass(frozen=True, slots=True)
class FileSystemStorage(CheckpointStorage):
    """Checkpoint storage in a directory that the driver and all executors see under one path.

    `root` is a path or a `file:` URL. It is made absolute in the process that creates this object
    (the driver).

    Raises:
        ConfigError: `root` is something else, or a number is out of range.
    """

    root: str
    inline_threshold_bytes: int = INLINE_THRESHOLD_BYTES
    """State smaller than this is kept in the decision log's record, and not in a file."""
    file_mode: int = 0o600
    directory_mode: int = 0o700
    """The modes of new files and directories, whatever the umask. If executors run as another user
    than the driver, set 0o660 and 0o2770, and put both users into one group."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", _to_directory(self.root))
        check_inline_threshold(self.inline_threshold_bytes)
        if self.file_mode & 0o600 != 0o600 or not 0 <= self.file_mode <= 0o777:
            raise errors.ConfigError(
                f"file_mode={self.file_mode:#o} must let the owner read and write: 0o600, 0o660, …"
            )
        if self.directory_mode & 0o700 != 0o700 or not 0 <= self.directory_mode <= 0o7777:
            raise errors.ConfigError(
                f"directory_mode={self.directory_mode:#o} must give the owner all rights:"
                " 0o700, 0o2770"
            )

    def open(self, job: str) -> JobStorage:
        """Return the storage of job `job` in this process. Reads and writes nothing yet."""
        modes = Modes(self.file_mode, self.directory_mode)
        files = LocalFileSystem(self.root, modes, advice=CHECKPOINT_STORAGE)
        private = LocalFileSystem(self.root, Modes(0o600, self.directory_mode))
        return JobStorage(files, job, self.inline_threshold_bytes, private)

    def open_savepoint(self, location: str) -> SavepointDirectory:
        """Return the savepoint in directory `location`: a path, or a `file:` URL."""
        modes = Modes(self.file_mode, self.directory_mode)
        return SavepointDirectory(LocalFileSystem(_to_directory(location), modes))


def check_inline_threshold(threshold_bytes: int) -> None:
    """Raise ConfigError if inline state of that size would make the log's records too large."""
    if not 0 <= threshold_bytes <= INLINE_THRESHOLD_BYTES_MAX:
        raise errors.ConfigError(
            f"inline_threshold_bytes={threshold_bytes} must be in 0-{INLINE_THRESHOLD_BYTES_MAX}"
        )


def _to_directory(root: str) -> str:
    scheme, separator, _ = root.partition("://")
    if root.startswith("file:"):
        host, path = _split_file_url(root)
        if host not in {"", "localhost"}:
            raise errors.ConfigError(
                f"checkpoint storage {root!r} names the host {host!r}: write file:///path"
            )
        root = unquote(path)
    elif separator and "/" not in scheme:
        # The rest of the URL may hold a password.
        raise errors.ConfigError(
            f"checkpoint storage {scheme}://... is not supported: use a path or file:///path of a"
            " directory that the driver and every executor share, a bucket (s3://, gs://, az://,"
            " abfs://), or HDFS by its NameNode's HTTP port: webhdfs://namenode:9870/path"
        )
    if not root or "\0" in root:
        raise errors.ConfigError(
            f"checkpoint storage {root!r} names no directory: give a path or file:///path"
        )
    return str(Path(root).expanduser().absolute())


def _split_file_url(url: str) -> tuple[str, str]:
    address = url.removeprefix("file:")
    if not address.startswith("//"):
        return "", address
    host, slash, path = address[2:].partition("/")
    return host, slash + path
