"""Options of the formats that read and write state: where checkpoints are, and what of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from onceflow.connectors.spark.options.tables import (
    COUNT,
    NAMES,
    OptionTable,
    SparkKind,
    SparkOption,
    choice,
)
from onceflow.core.errors import ConfigError
from onceflow.core.state.api.descriptors import AggregateOp
from onceflow.core.state.operator_state import Mode
from onceflow.core.state.snapshots.bootstrap import StateOfTable, UnkeyedStateOfTable
from onceflow.core.state.snapshots.canonical import StateKind
from onceflow.core.state.snapshots.state_columns import ValueForm
from onceflow.core.storage import CheckpointStorage, ObjectStorage, checkpoint_storage
from onceflow.core.storage.descriptions import savepoint_directory
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.core.storage.snapshots.stored_checkpoints import (
    StoredCheckpoint,
    checkpoint_at,
    open_job,
    savepoint_at,
)

LATEST = "latest"
_WITHOUT_KEY: Mapping[str, Mode] = {
    "operator-list": "split",
    "union": "union",
    "broadcast": "broadcast",
}
StateKindName = Literal["keyed", "list", "union", "broadcast", "raw-keyed"]


@dataclass(frozen=True, slots=True)
class JobLocation:
    """A checkpoint storage, and maybe which job of it. Pickles to tasks; holds no secret."""

    storage: CheckpointStorage
    job: str | None = None


@dataclass(frozen=True, slots=True)
class StateRead:
    """Which state is read."""

    path: str
    location: JobLocation
    uid: str
    state: str | None
    kind: StateKindName | None
    checkpoint: int | None
    """None: the last one."""
    form: ValueForm

    def find(self) -> StoredCheckpoint:
        """Return the checkpoint or savepoint that is meant.

        Raises:
            ConfigError: There is none such; names those that are there.
            CheckpointCorrupt: The log or the savepoint's metadata is damaged.
        """
        storage = self.location.storage
        if not savepoint_directory(storage, self.path).is_there():
            return checkpoint_at(open_job(storage, self.location.job), self.checkpoint)
        if self.checkpoint is not None:
            raise ConfigError(
                f"{self.path} is a savepoint, which holds one checkpoint: leave checkpoint= out"
            )
        savepoint = savepoint_at(storage, self.path)
        if self.location.job not in (None, savepoint.job):
            raise ConfigError(
                f"{savepoint} is no savepoint of job {self.location.job!r}: leave job= out"
            )
        return savepoint


@dataclass(frozen=True, slots=True)
class SavepointWrite:
    """What a DataFrame becomes, and where. Pickles to tasks; holds no secret."""

    path: str
    storage: CheckpointStorage
    job: str
    uid: str
    max_parallelism: int
    table: StateOfTable | UnkeyedStateOfTable

    def directory(self) -> SavepointDirectory:
        """Return the savepoint, made or not."""
        return savepoint_directory(self.storage, self.path)


def storage_of(path: str, storage_options: Mapping[str, object] | None) -> CheckpointStorage:
    """Return the checkpoint storage at `path`, a bucket's with its client's options.

    Raises:
        ConfigError: It is none; or options are given for a directory.
    """
    storage = checkpoint_storage(path)
    if not storage_options:
        return storage
    if not isinstance(storage, ObjectStorage):
        raise ConfigError(f"storage.* options are for a bucket, and path={path!r} is none")
    options = {name: str(value) for name, value in storage_options.items()}
    endpoint = options.pop("endpoint", None)
    return ObjectStorage(path, endpoint=endpoint, options=options)


def _find_location(
    path: str, *, job: str | None = None, storage_options: Mapping[str, object] | None = None
) -> JobLocation:
    return JobLocation(storage_of(path, storage_options), job)


def _state_read(
    path: str,
    uid: str,
    *,
    job: str | None = None,
    checkpoint: int | str = LATEST,
    state: str | None = None,
    state_type: str | None = None,
    value_format: str = "typed",
    storage_options: Mapping[str, object] | None = None,
) -> StateRead:
    return StateRead(
        path=path,
        location=_find_location(path, job=job, storage_options=storage_options),
        uid=uid,
        state=state,
        kind=cast("StateKindName | None", state_type),
        checkpoint=None if checkpoint == LATEST else int(checkpoint),
        form=cast("ValueForm", value_format),
    )


def _savepoint_write(
    path: str,
    job: str,
    uid: str,
    *,
    key: tuple[str, ...] = ("key",),
    value: str = "value",
    state: str = "",
    state_type: str = "value",
    map_key: str = "map_key",
    value_type: str | None = None,
    map_key_type: str | None = None,
    aggregates: Mapping[str, AggregateOp] | None = None,
    max_parallelism: int = 128,
    storage_options: Mapping[str, object] | None = None,
) -> SavepointWrite:
    runs = state_type == "running"
    if runs != (aggregates is not None):
        raise ConfigError("stateType=running goes with aggregates=, and no other type does")
    if not runs and not state:
        raise ConfigError("format onceflow-savepoint needs option 'state': the state's name")
    table: StateOfTable | UnkeyedStateOfTable
    if state_type in _WITHOUT_KEY:
        table = UnkeyedStateOfTable(
            name=state,
            mode=_WITHOUT_KEY[state_type],
            value=value,
            map_key=map_key if state_type == "broadcast" else "",
            value_type=value_type,
            map_key_type=map_key_type,
        )
    else:
        table = StateOfTable(
            name=state or "running",
            kind="accumulators" if runs else cast("StateKind", state_type),
            key=key,
            value=value,
            map_key=map_key if state_type == "map" else "",
            value_type=value_type,
            map_key_type=map_key_type,
            aggregates=aggregates,
        )
    storage = storage_of(path, storage_options)
    JobPaths(job)
    return SavepointWrite(path, storage, job, uid, max_parallelism, table)


def _aggregates(text: str) -> dict[str, str]:
    pairs = dict(one.strip().split("=") for one in text.split(","))
    if not set(pairs.values()) <= {"sum", "count", "min", "max"}:
        raise ValueError
    return pairs


def _checkpoint(text: str) -> int | str:
    return LATEST if text.strip().lower() == LATEST else int(text)


_JOB = SparkOption("job", "job", "The job's name; needed where the storage holds several")
_PATH_SAYS = "The job's checkpoint storage: a directory or a bucket's URL"

CHECKPOINTS_READ = OptionTable(
    format="onceflow-checkpoints",
    direction="read",
    target=cast("Callable[..., JobLocation]", _find_location),
    options=(
        SparkOption("path", "path", _PATH_SAYS, aliases=("storage",)),
        SparkOption("job", "job", "The job's name; all jobs of the storage unless given"),
    ),
    clients={"storage.": "storage_options"},
)

STATE_READ = OptionTable(
    format="onceflow-state",
    direction="read",
    target=_state_read,
    options=(
        SparkOption(
            "path", "path", f"{_PATH_SAYS}; or a savepoint's directory", aliases=("storage",)
        ),
        _JOB,
        SparkOption(
            "checkpoint",
            "checkpoint",
            "The number of a checkpoint that the storage holds, or `latest`",
            SparkKind("the number of a checkpoint, or latest", _checkpoint),
            aliases=("batchId",),
        ),
        SparkOption("uid", "uid", "The operator's uid", aliases=("operatorUid",)),
        SparkOption(
            "state",
            "state",
            "The state's name; needed where the operator has several",
            aliases=("stateName", "stateVarName"),
        ),
        SparkOption(
            "stateType",
            "state_type",
            "`keyed`, or of the states without a key `list`, `union`, `broadcast` and `raw-keyed`;"
            " needed where one name is several of them",
            choice("keyed", "list", "union", "broadcast", "raw-keyed"),
        ),
        SparkOption(
            "valueFormat",
            "value_format",
            "`typed`: in the type that the snapshot names, JSON for types of your own; `json`: the"
            " JSON of every value; `binary`: the bytes that are stored",
            choice("typed", "json", "binary"),
        ),
    ),
    clients={"storage.": "storage_options"},
)

SAVEPOINT_WRITE = OptionTable(
    format="onceflow-savepoint",
    direction="write",
    target=_savepoint_write,
    options=(
        SparkOption("path", "path", "The savepoint's directory: new, or made by another DataFrame"),
        SparkOption("job", "job", "The name of the job that is to start from it"),
        SparkOption("uid", "uid", "The operator's uid", aliases=("operatorUid",)),
        SparkOption(
            "state",
            "state",
            "The state's name, as in its descriptor; `running` for those of `running`",
            aliases=("stateName",),
        ),
        SparkOption(
            "stateType",
            "state_type",
            "What the state is: of each key `value`, `list`, `map` or `running`; without a key"
            " `operator-list`, `union` or `broadcast`",
            choice("value", "list", "map", "running", *_WITHOUT_KEY),
        ),
        SparkOption("key", "key", "The columns of the key, as in `key_by`", NAMES),
        SparkOption(
            "value",
            "value",
            "The column of the value; of a list state an array, of one without a key an element",
        ),
        SparkOption(
            "mapKey", "map_key", "Of a map or broadcast state: the column of the map's key"
        ),
        SparkOption(
            "valueType",
            "value_type",
            "The type's name where the column's own is another: `int`, `list[int]`, the name of a"
            " dataclass for a struct, `any`",
        ),
        SparkOption("mapKeyType", "map_key_type", "The same of the map's key"),
        SparkOption(
            "aggregates",
            "aggregates",
            "Of `running`: the aggregate of each column, `balance=sum,n=count`",
            SparkKind("column=sum|count|min|max, with commas between them", _aggregates),
        ),
        SparkOption(
            "maxParallelism",
            "max_parallelism",
            "The number of key groups, which the job keeps for ever",
            COUNT,
        ),
    ),
    clients={"storage.": "storage_options"},
)
