"""The options of the formats that read and write state: checkpoint locations and states.

All of them are declared here, because no class of pipelines has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from onceflow.connectors.spark.options.files import CHECKPOINT, LATEST
from onceflow.connectors.spark.options.option_table import OptionTable
from onceflow.core.errors import ConfigError
from onceflow.core.spi.options import COUNT, NAMES, ValueKind, choice, option, option_of
from onceflow.core.state.api.descriptors import AggregateOp
from onceflow.core.state.readers.bootstrap import StateOfTable, UnkeyedStateOfTable
from onceflow.core.state.readers.state_columns import ValueForm
from onceflow.core.state.snapshots.state_meta import StateKind
from onceflow.core.state.states.operator_state import Mode
from onceflow.core.storage import (
    CheckpointStorage,
    ObjectStorage,
    checkpoint_storage,
    stored_checkpoints,
)
from onceflow.core.storage.described_storage import savepoint_directory
from onceflow.core.storage.layout import JobPaths
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory

_WITHOUT_KEY: Mapping[str, Mode] = {
    "operator-list": "split",
    "union": "union",
    "broadcast": "broadcast",
}
StateKindName = Literal["keyed", "operator-list", "union", "broadcast", "raw-keyed"]
_KINDS_READ = choice("keyed", "operator-list", "union", "broadcast", "raw-keyed")


def _parse_kind(text: str) -> object:
    # This is the only list that a read can mean: lists with a key are `keyed`.
    return _KINDS_READ.parse("operator-list" if text.strip().lower() == "list" else text)


def _parse_aggregates(text: str) -> dict[str, str]:
    pairs = dict(pair.strip().split("=") for pair in text.split(","))
    if not set(pairs.values()) <= {"sum", "count", "min", "max"}:
        raise ValueError
    return pairs


@dataclass(frozen=True, slots=True)
class JobLocation:
    """A checkpoint storage, and perhaps one of its jobs. Pickles to tasks; contains no secret."""

    storage: CheckpointStorage
    job: str | None = None


def storage_of(path: str, storage_options: Mapping[str, object] | None) -> CheckpointStorage:
    """Return the checkpoint storage at `path`. For a bucket, `storage_options` are its client's.

    Raises:
        ConfigError: `path` is not a storage, or options are given for a directory.
    """
    storage = checkpoint_storage(path)
    if not storage_options:
        return storage
    if not isinstance(storage, ObjectStorage):
        raise ConfigError(
            f"storage.* options need the URL of a bucket, but path={path!r} is not one: remove"
            f" {', '.join(f'storage.{name}' for name in storage_options)}, or correct path"
        )
    options = {name: str(value) for name, value in storage_options.items()}
    endpoint = options.pop("endpoint", None)
    return ObjectStorage(path, endpoint=endpoint, options=options)


_PATH = "The job's checkpoint storage: a directory or a bucket's URL"


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointsRead:
    """The checkpoints to read."""

    path: str = field(metadata=option(_PATH, spark="path", aliases=("storage",)))
    job: str | None = field(
        default=None,
        metadata=option("The job's name. Default: all jobs of the storage", spark="job"),
    )
    storage_options: Mapping[str, object] | None = field(
        default=None,
        metadata=option(
            "For a bucket: the options of `ObjectStorage`, and `storage.endpoint`",
            spark="storage.*",
        ),
    )

    def __post_init__(self) -> None:
        _ = self.location

    @property
    def location(self) -> JobLocation:
        """The storage, and perhaps one of its jobs."""
        return JobLocation(storage_of(self.path, self.storage_options), self.job)


@dataclass(frozen=True, kw_only=True, repr=False)
class StateRead(CheckpointsRead):
    """The options of a read of one state."""

    path: str = field(
        metadata=option(f"{_PATH}; or a savepoint's directory", spark="path", aliases=("storage",))
    )
    job: str | None = field(
        default=None,
        metadata=option("The job's name. Needed if the storage has several jobs", spark="job"),
    )
    checkpoint_or_latest: int | str = field(
        default=LATEST,
        metadata=option(
            "The number of a checkpoint that the storage holds, or `latest`",
            CHECKPOINT,
            spark="checkpoint",
            aliases=("batchId",),
        ),
    )
    uid: str = field(metadata=option("The operator's uid", spark="uid", aliases=("operatorUid",)))
    state: str | None = field(
        default=None,
        metadata=option(
            "The state's name. Needed if the operator has several states",
            spark="state",
            aliases=("stateName", "stateVarName"),
        ),
    )
    kind: StateKindName | None = field(
        default=None,
        metadata=option(
            "Kind of the state. With a key: `keyed`. Without a key: `operator-list` (or `list`),"
            " `union`, `broadcast` or `raw-keyed`. Needed if states of several kinds have the same"
            " name",
            replace(_KINDS_READ, parse=_parse_kind),
            spark="stateType",
        ),
    )
    form: ValueForm = field(
        default="typed",
        metadata=option(
            "`typed`: values have the type that the snapshot names; values of your own types are"
            " JSON. `json`: all values are JSON. `binary`: values are the stored bytes",
            choice("typed", "json", "binary"),
            spark="valueFormat",
        ),
    )

    @property
    def checkpoint(self) -> int | None:
        """The number of the checkpoint; None: the last one."""
        return None if self.checkpoint_or_latest == LATEST else int(self.checkpoint_or_latest)

    def find(self) -> stored_checkpoints.StoredCheckpoint:
        """Return the checkpoint or savepoint that the options name.

        Raises:
            ConfigError: It does not exist. The message names the existing ones.
            CheckpointCorrupt: The log or the savepoint's metadata is damaged.
        """
        storage = self.location.storage
        if not savepoint_directory(storage, self.path).is_there():
            return stored_checkpoints.checkpoint_at(
                stored_checkpoints.open_job(storage, self.location.job), self.checkpoint
            )
        if self.checkpoint is not None:
            raise ConfigError(
                f"{self.path} is a savepoint, which holds one checkpoint: leave checkpoint= out"
            )
        savepoint = stored_checkpoints.savepoint_at(storage, self.path)
        if self.location.job not in (None, savepoint.job):
            raise ConfigError(
                f"{savepoint} is of job {savepoint.job!r}, and job={self.location.job!r} was given:"
                " leave job= out"
            )
        return savepoint


@dataclass(frozen=True, kw_only=True, repr=False)
class SavepointWrite:
    """The state that a DataFrame becomes, and its savepoint. Pickles to tasks; has no secret."""

    path: str = field(
        metadata=option(
            "The savepoint's directory: new, or made by another DataFrame", spark="path"
        )
    )
    job: str = field(metadata=option("The name of the job that is to start from it", spark="job"))
    uid: str = field(metadata=option("The operator's uid", spark="uid", aliases=("operatorUid",)))
    state: str = field(
        default="",
        metadata=option(
            "The state's name, as in its descriptor; `running` for those of `running`",
            spark="state",
            aliases=("stateName",),
        ),
    )
    state_type: str = field(
        default="value",
        metadata=option(
            "Kind of the state. With a key: `value`, `list`, `map` or `running`. Without a key:"
            " `operator-list`, `union` or `broadcast`",
            choice("value", "list", "map", "running", *_WITHOUT_KEY),
            spark="stateType",
        ),
    )
    key: tuple[str, ...] = field(
        default=("key",),
        metadata=option("The columns of the key, as in `key_by`", NAMES, spark="key"),
    )
    value: str = field(
        default="value",
        metadata=option(
            "Column of the value. For a list state it is an array; for a state without a key, one"
            " element",
            spark="value",
        ),
    )
    map_key: str = field(
        default="map_key",
        metadata=option("Column of the map's key, for a map or broadcast state", spark="mapKey"),
    )
    value_type: str | None = field(
        default=None,
        metadata=option(
            "Python type of the stored value, if it is not that of the column: `int`, `list[int]`,"
            " `any`, or for a struct the name of a dataclass",
            spark="valueType",
        ),
    )
    map_key_type: str | None = field(
        default=None, metadata=option("As valueType, for the map's key", spark="mapKeyType")
    )
    aggregates: Mapping[str, AggregateOp] | None = field(
        default=None,
        metadata=option(
            "For `running`: the aggregate of each column, as in `balance=sum,n=count`",
            ValueKind("column=sum|count|min|max, with commas between them", _parse_aggregates),
            spark="aggregates",
        ),
    )
    max_parallelism: int = field(
        default=128,
        metadata=option(
            "Number of key groups; the job keeps it for ever", COUNT, spark="maxParallelism"
        ),
    )
    storage_options: Mapping[str, object] | None = field(
        default=None, metadata=option_of(CheckpointsRead, "storage_options")
    )

    def __post_init__(self) -> None:
        runs = self.state_type == "running"
        if runs != (self.aggregates is not None):
            raise ConfigError("stateType=running goes with aggregates=, and no other type does")
        if not runs and not self.state:
            raise ConfigError("format onceflow-savepoint needs option 'state': the state's name")
        _ = self.table, self.storage
        JobPaths(self.job)

    @property
    def storage(self) -> CheckpointStorage:
        """The storage that holds the savepoint."""
        return storage_of(self.path, self.storage_options)

    @property
    def table(self) -> StateOfTable | UnkeyedStateOfTable:
        """The state that the rows become."""
        if self.state_type in _WITHOUT_KEY:
            return UnkeyedStateOfTable(
                name=self.state,
                mode=_WITHOUT_KEY[self.state_type],
                value=self.value,
                map_key=self.map_key if self.state_type == "broadcast" else "",
                value_type=self.value_type,
                map_key_type=self.map_key_type,
            )
        runs = self.state_type == "running"
        return StateOfTable(
            name=self.state or "running",
            kind="accumulators" if runs else cast("StateKind", self.state_type),
            key=self.key,
            value=self.value,
            map_key=self.map_key if self.state_type == "map" else "",
            value_type=self.value_type,
            map_key_type=self.map_key_type,
            aggregates=self.aggregates,
        )

    def directory(self) -> SavepointDirectory:
        """Return the savepoint's directory, which may not exist yet."""
        return savepoint_directory(self.storage, self.path)


CHECKPOINTS_READ = OptionTable(
    format="onceflow-checkpoints", direction="read", description=CheckpointsRead
)
STATE_READ = OptionTable(format="onceflow-state", direction="read", description=StateRead)
SAVEPOINT_WRITE = OptionTable(
    format="onceflow-savepoint", direction="write", description=SavepointWrite
)
