"""The names of all files and directories of a job in checkpoint storage. All paths are built here.

    <root>/<job>/meta.json                                          identity of the log
    <root>/<job>/log/<sequence, 12 digits>.json                     one record of the decision log
    <root>/<job>/log/pruned                                         exists once a record was deleted
    <root>/<job>/chk-<n>/a<attempt>/<uid>@<subtask>@<name>          state of one checkpoint
    <root>/<job>/shared/a<attempt>@<uid>@<subtask>@<unique>@<name>  state of several checkpoints
    <root>/<job>/staged/<sink id>/<transaction>.arrow               see `staging`
    <root>/<job>/inputs/<uid>/<token>/part-….parquet                see `dataframe_source`
    <root>/<job>/probe/a<attempt>@<token>                           see `JobStorage.probe_write`
    <root>/<job>/savepoints/savepoint-<id>/                         see `savepoints`
    <root>/<job>/driver.json, driver.token                          see `driver_files`
    <root>/<job>/last_run.json                                      see `driver_files`

A uid or a name is used unchanged if its letters are safe on every file system, including those that
ignore case. Otherwise a digest is appended, so that two different uids or names never share a file.
Neither contains "@".
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.decoding import UnsafeName, resolve_stored_name
from onceflow.core.errors import CheckpointCorrupt, ConfigError
from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX, AttemptId, CheckpointId

JOB_NAME_LENGTH_MAX = 128
NAME_LENGTH_MAX = 64
"""The length of one part of a file name: uid, name and numbers stay below the usual 255 bytes."""
SEQUENCE_MAX = 10**12 - 1

_JOB = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_SAFE = re.compile(r"[a-z0-9_-][a-z0-9_.-]*")
_PRUNED = "pruned"
_RECORD = re.compile(r"(\d{12})\.json")
_CHECKPOINT = re.compile(r"chk-(\d+)")
_ATTEMPT = re.compile(r"a(\d+)")
_WRITTEN_BY = re.compile(r"a(\d+)@.+")


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The names of one job's files, relative to the storage's root.

    Raises:
        ConfigError: `job` cannot be the name of a directory everywhere.
    """

    job: str

    def __post_init__(self) -> None:
        if not is_job_name(self.job):
            raise ConfigError(
                f"job name {self.job!r} must be 1-{JOB_NAME_LENGTH_MAX} letters, digits, '_', '-'"
                " and '.', and not begin with '.': it names a directory of checkpoint storage"
            )

    @property
    def meta(self) -> str:
        """The file that holds the log's identity."""
        return f"{self.job}/meta.json"

    @property
    def log(self) -> str:
        """The directory of the decision log."""
        return f"{self.job}/log"

    @property
    def pruned(self) -> str:
        """The file that is created before the first record is deleted. It is never removed."""
        return f"{self.log}/{_PRUNED}"

    def record(self, sequence: int) -> str:
        """Return the file of record `sequence`."""
        if not 1 <= sequence <= SEQUENCE_MAX:
            raise ValueError(f"sequence number {sequence} must be in 1-{SEQUENCE_MAX}")
        return f"{self.log}/{sequence:012}.json"

    @staticmethod
    def sequence_of(name: str) -> int | None:
        """Return the sequence number of the record in file `name`, or None if it is no record."""
        match = _RECORD.fullmatch(name)
        return int(match[1]) if match else None

    @staticmethod
    def is_of_log(name: str) -> bool:
        """Return True if the file `name` in the log's directory was written by onceflow."""
        return name == _PRUNED or _RECORD.fullmatch(name) is not None

    @property
    def shared(self) -> str:
        """The directory of files that several checkpoints may reference."""
        return f"{self.job}/shared"

    def checkpoint(self, checkpoint: CheckpointId) -> str:
        """Return the directory of one checkpoint, which all attempts that triggered it share."""
        return f"{self.job}/chk-{checkpoint}"

    @staticmethod
    def checkpoint_of(name: str) -> CheckpointId | None:
        """Return the checkpoint of directory `name`, or None if it has none."""
        match = _CHECKPOINT.fullmatch(name)
        return CheckpointId(int(match[1])) if match else None

    @staticmethod
    def attempt_of(name: str) -> AttemptId | None:
        """Return the attempt of a checkpoint's directory `name`, or None if it has none."""
        match = _ATTEMPT.fullmatch(name)
        return AttemptId(int(match[1])) if match else None

    @staticmethod
    def writer_of(name: str) -> AttemptId | None:
        """Return the attempt that wrote shared file or probe `name`, or None if `name` has none."""
        match = _WRITTEN_BY.fullmatch(name)
        return AttemptId(int(match[1])) if match else None

    @property
    def staged_sinks(self) -> str:
        """The directory of the staged rows of all sinks."""
        return f"{self.job}/staged"

    def staging_directory(self, sink_id: str) -> str:
        """Return the directory of the staged rows of one sink."""
        return f"{self.staged_sinks}/{safe_name(sink_id)}"

    @staticmethod
    def parse_staged_sink_id(name: str) -> str | None:
        """Return the sink id of staging directory `name`, or None if the name lacks it."""
        return name if _SAFE.fullmatch(name) and len(name) <= SINK_ID_LENGTH_MAX else None

    def inputs(self, uid: str) -> str:
        """Return the directory of the files that were written for one source to read."""
        return f"{self.job}/inputs/{safe_name(uid)}"

    @property
    def probes(self) -> str:
        """The directory of the files that show whether storage is shared."""
        return f"{self.job}/probe"

    def probe(self, attempt: AttemptId, token: str) -> str:
        """Return the file that holds `token` of an attempt."""
        return f"{self.probes}/a{attempt}@{token}"

    @property
    def driver(self) -> str:
        """The file that holds the address of the running driver."""
        return f"{self.job}/driver.json"

    @property
    def driver_token(self) -> str:
        """The file of the token that the driver demands from clients."""
        return f"{self.job}/driver.token"

    @property
    def last_run(self) -> str:
        """The file that holds the state of the job's last driver: running, or how it ended."""
        return f"{self.job}/last_run.json"

    @property
    def savepoints(self) -> str:
        """The default directory of savepoints."""
        return f"{self.job}/savepoints"

    @property
    def owner(self) -> str:
        """The owner of these files, for messages."""
        return f"job {self.job}"

    @property
    def records(self) -> str:
        """The file that references state files and holds inline state, for messages."""
        return f"the decision log of job {self.job}"

    def in_job(self, path: str) -> str:
        """Return the path, below the storage's root, of `path` in a state handle.

        Raises:
            CheckpointCorrupt: `path` leads out of the job's directory.
        """
        return f"{self.job}/{_inside(path, self.owner)}"


@dataclass(frozen=True, slots=True)
class SavepointPaths:
    """The names in a savepoint, relative to its own directory."""

    metadata: str = "_metadata"
    mark: str = "_writing"
    lock: str = "_changing"
    state_directory: str = "state"
    staged_sinks: str = "staged"
    owner: str = "savepoint"
    records: str = "the metadata of the savepoint"

    def state(self, name: str) -> str:
        """Return the file of one piece of state."""
        return f"{self.state_directory}/{name}"

    def probe(self, unique: str) -> str:
        """Return the file that a slot writes and deletes, to see whether it can write here."""
        return self.state(f"probe@{unique}")

    def staging_directory(self, sink_id: str) -> str:
        """Return the directory of the rows that one sink had staged."""
        return f"{self.staged_sinks}/{safe_name(sink_id)}"

    def in_job(self, path: str) -> str:
        """Return the path, below the savepoint's directory, of `path` in a state handle.

        Raises:
            CheckpointCorrupt: `path` leads out of the savepoint.
        """
        return _inside(path, self.owner)


StatePaths: TypeAlias = JobPaths | SavepointPaths


def _inside(path: str, owner: str) -> str:
    # Someone may have edited the file that a handle comes from. A path that leads out of the
    # directory must not make a sweep delete other files.
    try:
        return resolve_stored_name(path)
    except UnsafeName as error:
        raise CheckpointCorrupt(
            f"{owner}: a state handle is invalid: {error}; the file that contains it was not"
            " written by onceflow"
        ) from error


@dataclass(frozen=True, slots=True)
class StateNames:
    """The file names of one subtask's state of one checkpoint, relative to the job's directory."""

    attempt: AttemptId
    checkpoint: CheckpointId
    uid: str
    subtask: int

    def private(self, name: str) -> str:
        """Return the file of state that belongs to this checkpoint alone."""
        return (
            f"chk-{self.checkpoint}/a{self.attempt}/"
            f"{safe_name(self.uid)}@{self.subtask}@{safe_name(name)}"
        )

    def shareable(self, name: str, unique: str) -> str:
        """Return the file of state that later checkpoints may reference. `unique` must be new."""
        owner = f"{safe_name(self.uid)}@{self.subtask}"
        return f"shared/a{self.attempt}@{owner}@{unique}@{safe_name(name)}"


@dataclass(frozen=True, slots=True)
class SavepointStateNames:
    """The file names of one subtask's state in a savepoint, relative to its directory.

    Each name has four parts. The driver's copies have three, so no two files share a name.
    """

    uid: str
    subtask: int

    def private(self, name: str) -> str:
        """Return the file of one piece of state."""
        return SavepointPaths().state(
            f"{safe_name(self.uid)}@{self.subtask}@slot@{safe_name(name)}"
        )

    def shareable(self, name: str, unique: str) -> str:
        """Return the same as `private`: a savepoint shares no files."""
        del unique
        return self.private(name)


def is_job_name(name: str) -> bool:
    """Return True if a job can have `name`, which becomes a directory of checkpoint storage."""
    return _JOB.fullmatch(name) is not None and len(name) <= JOB_NAME_LENGTH_MAX


def safe_name(text: str) -> str:
    """Return `text` if it is a safe file name, otherwise its readable start and a digest."""
    if _SAFE.fullmatch(text) and len(text) <= NAME_LENGTH_MAX:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    # Lower case: on some file systems, two names that differ only in case are one file.
    readable = re.sub(r"[^a-z0-9_-]", "_", text.lower())[: NAME_LENGTH_MAX - 17]
    return f"{readable}+{digest}"
