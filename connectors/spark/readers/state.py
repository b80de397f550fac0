"""The format `onceflow-state`: the state of one operator in a checkpoint or savepoint, as rows.

A task reads one file of the canonical form, or one subtask's RocksDB. The snapshot describes its
columns, so the program that wrote it is not needed. Each row has the types of its keys. If the user
gives no schema, planning reads rows until it finds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import fit, spark_schema
from onceflow.connectors.spark.options.state import STATE_READ, StateKindName, StateRead
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot, StateHandle
from onceflow.core.state.api.context import StateReader as HandleReader
from onceflow.core.state.readers.operator_columns import OperatorState, operator_states
from onceflow.core.state.readers.state_columns import columns_of, json_of
from onceflow.core.state.readers.stored import StatePiece, list_pieces, read_metas_by_name
from onceflow.core.state.snapshots.state_meta import StateMeta
from onceflow.core.state.states.operator_state import Mode, find_mode, read_saved
from onceflow.core.storage import CheckpointStorage
from onceflow.core.storage.described_storage import savepoint_directory
from onceflow.core.storage.stored_checkpoints import StoredCheckpoint, nearest

_SPLITS = "splits"


@dataclass(frozen=True, slots=True)
class Origin:
    """The job or savepoint whose files a task reads."""

    job: str
    savepoint: str | None
    """The savepoint's directory; None if the files are in the job's own storage."""

    def reader(self, storage: CheckpointStorage) -> HandleReader:
        """Return a reader of the files. Runs in a task."""
        if self.savepoint is None:
            return storage.open(self.job).reader()
        return savepoint_directory(storage, self.savepoint).reader()


@dataclass(frozen=True, slots=True)
class KeyedTask:
    """A task that reads the rows of a keyed state in one piece."""

    origin: Origin
    piece: StatePiece
    meta: StateMeta
    sample: bytes | None


@dataclass(frozen=True, slots=True)
class OperatorTask:
    """A task that reads one subtask's part of a state without keys."""

    origin: Origin
    subtask: int
    handle: StateHandle
    state: OperatorState


@dataclass(frozen=True, slots=True)
class ListTask:
    """A task with the elements of an engine's list for an operator, of one subtask."""

    origin: Origin
    subtask: int
    elements: tuple[bytes, ...]


Task = KeyedTask | OperatorTask | ListTask | None

_KINDS: Mapping[Mode, StateKindName] = {
    "split": "operator-list",
    "union": "union",
    "broadcast": "broadcast",
    "raw-keyed": "raw-keyed",
}


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The state that the options name."""

    stored: StoredCheckpoint
    parts: Sequence[tuple[int, OperatorSnapshot]]
    name: str
    what: StateMeta | OperatorState | None
    """The state's description; None for a list that the engine keeps."""
    pieces: Sequence[StatePiece] = ()

    @property
    def origin(self) -> Origin:
        """The job or savepoint with the state's files."""
        return Origin(self.stored.job, self.stored.name if self.stored.savepoint else None)

    def sample(self, meta: StateMeta) -> bytes | None:
        """Return the row key of any row, which shows the key's type.

        Returns None if there is no row, or the type is not needed.
        """
        if meta.kind == "accumulators":
            return None
        for piece in self.pieces:
            for rows in piece.rows(self.name, self.stored.reader):
                return bytes(rows.keys[0].as_py())
        return None


def find_state(read: StateRead) -> _Chosen:
    """Return the state that `read` names.

    Raises:
        ConfigError: There is no such checkpoint, operator or state. The message names the most
            similar ones.
        CheckpointCorrupt: A file is damaged or missing. The message names it.
    """
    stored = read.find()
    parts = stored.completed.operator(read.uid)
    if not parts:
        uids = {o.uid for s in stored.completed.snapshots for o in s.operators}
        raise ConfigError(f"{stored} has no operator {read.uid!r}: {nearest(read.uid, uids)}")
    pieces = list_pieces(parts, stored.completed.max_parallelism)
    there: dict[tuple[StateKindName, str], StateMeta | OperatorState | None] = {
        ("operator-list", name): None
        for name in sorted({n for _, part in parts for n in part.lists})
    }
    for name, meta in read_metas_by_name(pieces, stored.reader).items():
        there["keyed", name] = meta
    for state in operator_states(parts, stored.reader):
        there[_KINDS[state.mode], state.name] = state
    kinds: list[tuple[StateKindName, str]] = [
        (kind, name)
        for kind, name in there
        if read.state in (None, name) and read.kind in (None, kind)
    ]
    label = f"operator {read.uid!r} in {stored}"
    if not kinds:
        what = f"state {read.state!r}" if read.state else "state"
        what = f"{read.kind} {what}" if read.kind else what
        names = [name for _, name in there]
        raise ConfigError(f"{label} has no {what}: {nearest(read.state or '', names)}")
    if len(kinds) > 1:
        names = [f"{name} ({kind})" for kind, name in kinds]
        raise ConfigError(
            f"{label} has several states: {', '.join(names)}. Choose one by state= or stateType="
        )
    (state_key,) = kinds
    return _Chosen(stored, parts, state_key[1], there[state_key], pieces)


def state_schema(options: Mapping[str, str]) -> StructType:
    """Return the columns of the state that `options` name. Runs on the driver."""
    read = STATE_READ.make(options)
    return spark_schema(_arrow_columns(find_state(read), read))


class StateFrameReader(DataSourceReader):
    """A reader of one state of one operator, in one checkpoint."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Parse the options. Sends no request yet."""
        self._read = STATE_READ.make(options)
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each file or database. Runs on the driver, once for each plan.

        Raises:
            ConfigError: See `chosen`.
            CheckpointCorrupt: See `chosen`.
        """
        chosen_state = find_state(self._read)
        # Spark accepts no source without tasks.
        return [InputPartition(task) for task in _tasks(chosen_state)] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task. Runs in a task.

        Raises:
            CheckpointCorrupt: A file is damaged or missing. The message names it.
            StateIncompatible: A value does not fit its column.
        """
        task: Task = partition.value
        if task is None:
            return
        reader = task.origin.reader(self._read.location.storage)
        match task:
            case KeyedTask():
                columns = columns_of(task.meta, task.sample, self._read.form)
                rows = task.piece.rows(task.meta.name, reader)
                yield from fit(map(columns.batch, rows), self._schema)
            case OperatorTask():
                yield from fit(_operator_batches(task, reader, self._read), self._schema)
            case ListTask():
                yield from fit([_list_batch(task, self._read)], self._schema)


def _arrow_columns(chosen_state: _Chosen, read: StateRead) -> pa.Schema:
    match chosen_state.what:
        case StateMeta() as meta:
            return columns_of(meta, chosen_state.sample(meta), read.form).schema
        case OperatorState() as state:
            return state.schema(read.form)
        case None:
            return _list_columns(_is_json(chosen_state.name, read))


def _tasks(chosen_state: _Chosen) -> Sequence[Task]:
    origin = chosen_state.origin
    match chosen_state.what:
        case StateMeta() as meta:
            sample = chosen_state.sample(meta)
            return [KeyedTask(origin, piece, meta, sample) for piece in chosen_state.pieces]
        case OperatorState() as state:
            tasks = [
                OperatorTask(origin, subtask, handle, state)
                for subtask, part in chosen_state.parts
                for handle in part.raw
                if find_mode(handle) == state.mode
            ]
            # Broadcast state is the same in all subtasks.
            return tasks[:1] if state.mode == "broadcast" else tasks
        case None:
            lists = [
                (subtask, part.lists.get(chosen_state.name, ()))
                for subtask, part in chosen_state.parts
            ]
            return [ListTask(origin, subtask, elements) for subtask, elements in lists]


def _operator_batches(
    task: OperatorTask, reader: HandleReader, read: StateRead
) -> Iterator[pa.RecordBatch]:
    label = f"{read.uid}[{task.subtask}]: {task.handle.name}"
    for saved in read_saved(reader.read(task.handle), label):
        if saved.name == task.state.name:
            yield task.state.batch(saved, task.subtask, read.form)


def _is_json(name: str, read: StateRead) -> bool:
    return read.form == "json" or (read.form == "typed" and name == _SPLITS)


def _list_columns(as_json: bool) -> pa.Schema:
    value = pa.string() if as_json else pa.binary()
    return pa.schema([("subtask", pa.int32()), ("element", pa.int32()), ("value", value)])


def _list_batch(task: ListTask, read: StateRead) -> pa.RecordBatch:
    data = task.elements
    schema = _list_columns(_is_json(read.state or _SPLITS, read))
    as_json = schema.field("value").type == pa.string()
    return pa.record_batch(
        [
            pa.array([task.subtask] * len(data), pa.int32()),
            pa.array(range(len(data)), pa.int32()),
            pa.array([json_of(element) for element in data] if as_json else data, schema.types[2]),
        ],
        schema=schema,
    )
