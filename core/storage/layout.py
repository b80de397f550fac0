"""Every name that a job has in checkpoint storage. Nobody else puts a path together.

    <root>/<job>/meta.json                                          identity of the log
    <root>/<job>/log/<sequence, 12 digits>.json                     one record of the decision log
    <root>/<job>/log/pruned                                         records have been deleted, ever
    <root>/<job>/chk-<n>/a<attempt>/<uid>@<subtask>@<name>          state of one checkpoint
    <root>/<job>/shared/a<attempt>@<uid>@<subtask>@<unique>@<name>  state of several checkpoints
    <root>/<job>/staged/<sink id>/<transaction>.arrow               see `staging`
    <root>/<job>/inputs/<uid>/<token>/part-….parquet                see `dataframe_source`
    <root>/<job>/probe/a<attempt>@<token>                           see `JobStorage.probe_write`
    <root>/<job>/savepoints/savepoint-<id>/                         see `savepoints`
    <root>/<job>/driver.json, driver.token                          see `driver_address`
    <root>/<job>/last_run.json                                      see `last_run`

A uid and a name keep their letters when those are safe everywhere, also where case is ignored;
else they get a digest, so two different ones never share a file. "@" is in neither.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.errors import CheckpointCorrupt, ConfigError
from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX, AttemptId, CheckpointId
from onceflow.core.stored_names import UnsafeName, resolve_stored_name

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
    """The names of one job, relative to the storage's root.

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
        """Exists from before the first deletion of a record, for ever."""
        return f"{self.log}/{_PRUNED}"

    def record(self, sequence: int) -> str:
        """The file of one record."""
        if not 1 <= sequence <= SEQUENCE_MAX:
            raise ValueError(f"sequence number {sequence} must be in 1-{SEQUENCE_MAX}")
        return f"{self.log}/{sequence:012}.json"

    @staticmethod
    def sequence_of(name: str) -> int | None:
        """Return the sequence number of the record in file `name`; None: it is no record."""
        match = _RECORD.fullmatch(name)
        return int(match[1]) if match else None

    @staticmethod
    def is_of_log(name: str) -> bool:
        """Return whether a file `name` in the log's directory was written by onceflow."""
        return name == _PRUNED or _RECORD.fullmatch(name) is not None

    @property
    def shared(self) -> str:
        """The directory of files that several checkpoints may name."""
        return f"{self.job}/shared"

    def checkpoint(self, checkpoint: CheckpointId) -> str:
        """The directory of one checkpoint, over all attempts that triggered it."""
        return f"{self.job}/chk-{checkpoint}"

    @staticmethod
    def checkpoint_of(name: str) -> CheckpointId | None:
        """Return the checkpoint of directory `name`; None: it is of none."""
        match = _CHECKPOINT.fullmatch(name)
        return CheckpointId(int(match[1])) if match else None

    @staticmethod
    def attempt_of(name: str) -> AttemptId | None:
        """Return the attempt of directory `name` of a checkpoint; None: it is of none."""
        match = _ATTEMPT.fullmatch(name)
        return AttemptId(int(match[1])) if match else None

    @staticmethod
    def writer_of(name: str) -> AttemptId | None:
        """Return the attempt that wrote the shared file or the probe `name`; None: nobody knows."""
        match = _WRITTEN_BY.fullmatch(name)
        return AttemptId(int(match[1])) if match else None

    @property
    def staged_sinks(self) -> str:
        """The directory of what all sinks have staged."""
        return f"{self.job}/staged"

    def staging_directory(self, sink_id: str) -> str:
        """The directory of what one sink has staged."""
        return f"{self.staged_sinks}/{safe_name(sink_id)}"

    @staticmethod
    def parse_staged_sink_id(name: str) -> str | None:
        """Return the sink id that staged in directory `name`; None: the name does not tell."""
        return name if _SAFE.fullmatch(name) and len(name) <= SINK_ID_LENGTH_MAX else None

    def inputs(self, uid: str) -> str:
        """The directory of what was written for one source to read."""
        return f"{self.job}/inputs/{safe_name(uid)}"

    @property
    def probes(self) -> str:
        """The directory of files that show whether storage is shared."""
        return f"{self.job}/probe"

    def probe(self, attempt: AttemptId, token: str) -> str:
        """The file that holds `token` of an attempt."""
        return f"{self.probes}/a{attempt}@{token}"

    @property
    def driver(self) -> str:
        """The file that says where the running driver can be asked."""
        return f"{self.job}/driver.json"

    @property
    def driver_token(self) -> str:
        """The file of the token that it asks for."""
        return f"{self.job}/driver.token"

    @property
    def last_run(self) -> str:
        """The file that says how the job's last driver runs, or has ended."""
        return f"{self.job}/last_run.json"

    @property
    def savepoints(self) -> str:
        """The directory of savepoints for which the user has named no other."""
        return f"{self.job}/savepoints"

    @property
    def owner(self) -> str:
        """Whose files these are, for messages."""
        return f"job {self.job}"

    @property
    def records(self) -> str:
        """What names these files, and holds small state itself, for messages."""
        return f"the decision log of job {self.job}"

    def in_job(self, path: str) -> str:
        """Return the path of what a state handle calls `path`.

        Raises:
            CheckpointCorrupt: It leads out of the job's directory.
        """
        return f"{self.job}/{_inside(path, self.owner)}"


@dataclass(frozen=True, slots=True)
class SavepointPaths:
    """The names in a savepoint, relative to its own directory."""

    metadata: str = "_metadata"
    lock: str = "_changing"
    state_directory: str = "state"
    staged_sinks: str = "staged"
    owner: str = "savepoint"
    records: str = "the metadata of the savepoint"

    def state(self, name: str) -> str:
        """The file of one piece of state."""
        return f"{self.state_directory}/{name}"

    def staging_directory(self, sink_id: str) -> str:
        """The directory of what one sink had staged."""
        return f"{self.staged_sinks}/{safe_name(sink_id)}"

    def in_job(self, path: str) -> str:
        """Return the path of what a state handle calls `path`.

        Raises:
            CheckpointCorrupt: It leads out of the savepoint.
        """
        return _inside(path, self.owner)


StatePaths: TypeAlias = JobPaths | SavepointPaths


def _inside(path: str, owner: str) -> str:
    # A handle comes from a file that somebody may have edited: it must not make a sweep delete
    # elsewhere.
    try:
        return resolve_stored_name(path)
    except UnsafeName as error:
        raise CheckpointCorrupt(
            f"{owner}: of a state handle, {error}; what names it was not written by onceflow"
        ) from error


@dataclass(frozen=True, slots=True)
class StateNames:
    """The names, relative to the job's directory, of one subtask's state of one checkpoint."""

    attempt: AttemptId
    checkpoint: CheckpointId
    uid: str
    subtask: int

    def private(self, name: str) -> str:
        """The file of state that goes with this checkpoint."""
        return (
            f"chk-{self.checkpoint}/a{self.attempt}/"
            f"{safe_name(self.uid)}@{self.subtask}@{safe_name(name)}"
        )

    def shareable(self, name: str, unique: str) -> str:
        """The file of state that later checkpoints may name, too; `unique` never was in use."""
        owner = f"{safe_name(self.uid)}@{self.subtask}"
        return f"shared/a{self.attempt}@{owner}@{unique}@{safe_name(name)}"


def is_job_name(name: str) -> bool:
    """Return whether a job can have `name`, which is then a directory of checkpoint storage."""
    return _JOB.fullmatch(name) is not None and len(name) <= JOB_NAME_LENGTH_MAX


def safe_name(text: str) -> str:
    """Return `text`, or as much of it as fits into a file name and a digest of the whole."""
    if _SAFE.fullmatch(text) and len(text) <= NAME_LENGTH_MAX:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    # Lower case, for on some file systems two names that differ in case alone are one file.
    readable = re.sub(r"[^a-z0-9_-]", "_", text.lower())[: NAME_LENGTH_MAX - 17]
    return f"{readable}+{digest}"
