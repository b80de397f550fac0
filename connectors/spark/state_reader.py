"""`onceflow-state`: the state of one operator as of a checkpoint or savepoint, as rows.

A task reads one file of the canonical form, or one subtask's RocksDB. The columns are told by the
snapshot itself, so the program that wrote it is not needed. Keys say their types row by row:
without a schema of the user's, planning reads rows until it finds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import fitted, spark_schema
from onceflow.connectors.spark.state_options import STATE_READ, StateKindName, StateRead
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.snapshots import OperatorSnapshot, StateHandle
from onceflow.core.state.canonical import StateMeta
from onceflow.core.state.context import StateReader as HandleReader
from onceflow.core.state.state_columns import StateColumns, columns_of, json_of
from onceflow.core.state.stored import StatePiece, metas_by_name, pieces_of
from onceflow.core.storage import CheckpointStorage
from onceflow.core.storage.descriptions import savepoint_directory
from onceflow.core.storage.stored_checkpoints import StoredCheckpoint, nearest

_SPLITS = "splits"


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose files a task reads."""

    job: str
    savepoint: str | None
    """Its directory; None: the job's own storage."""

    def reader(self, storage: CheckpointStorage) -> HandleReader:
        """Return what reads them. Task."""
        if self.savepoint is None:
            return storage.open(self.job).reader()
        return savepoint_directory(storage, self.savepoint).reader()


@dataclass(frozen=True, slots=True)
class KeyedTask:
    """The rows of a keyed state in one piece."""

    origin: Origin
    piece: StatePiece
    meta: StateMeta
    sample: bytes | None


@dataclass(frozen=True, slots=True)
class ListTask:
    """The elements of an operator's list state, or its raw bytes, of one subtask."""

    origin: Origin
    subtask: int
    elements: tuple[bytes | StateHandle, ...]


Task = KeyedTask | ListTask | None


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The state that is meant."""

    stored: StoredCheckpoint
    parts: Sequence[tuple[int, OperatorSnapshot]]
    kind: StateKindName
    name: str
    pieces: Sequence[StatePiece] = ()
    meta: StateMeta | None = None

    @property
    def origin(self) -> Origin:
        """Whose files it is in."""
        return Origin(self.stored.job, self.stored.name if self.stored.savepoint else None)

    def columns(self, read: StateRead) -> StateColumns:
        """Return the columns of a keyed state; looks for a row, whose key says its type."""
        assert self.meta is not None
        return columns_of(self.meta, self.sample(), read.form)

    def sample(self) -> bytes | None:
        """Return the row key of any row; None: there is none, or it need not be known."""
        if self.meta is None or self.meta.kind == "accumulators":
            return None
        for piece in self.pieces:
            for rows in piece.rows(self.name, self.stored.reader):
                return bytes(rows.keys[0].as_py())
        return None


def chosen(read: StateRead) -> _Chosen:
    """Return the state that `read` means.

    Raises:
        ConfigError: No such checkpoint, operator or state; names those that come nearest.
        CheckpointCorrupt: A file is damaged or missing; names it.
    """
    stored = read.found()
    parts = stored.completed.operator(read.uid)
    if not parts:
        uids = {o.uid for s in stored.completed.snapshots for o in s.operators}
        raise ConfigError(f"{stored} holds no operator {read.uid!r}: {nearest(read.uid, uids)}")
    pieces = pieces_of(parts, stored.completed.max_parallelism)
    metas = metas_by_name(pieces, stored.reader)
    lists = {name for _, part in parts for name in part.lists}
    raws = {"raw"} if any(part.raw for _, part in parts) else set[str]()
    by_kind: dict[StateKindName, set[str]] = {"keyed": set(metas), "list": lists, "raw": raws}
    there: list[tuple[StateKindName, str]] = [
        (kind, name) for kind, names in by_kind.items() for name in sorted(names)
    ]
    found: list[tuple[StateKindName, str]] = [
        (kind, name)
        for kind, name in there
        if read.state in (None, name) and read.kind in (None, kind)
    ]
    label = f"operator {read.uid!r} in {stored}"
    if not found:
        what = f"state {read.state!r}" if read.state else "state"
        what = f"{read.kind} {what}" if read.kind else what
        names = [name for _, name in there]
        raise ConfigError(f"{label} holds no {what}: {nearest(read.state or '', names)}")
    if len(found) > 1:
        names = [f"{name} ({kind})" for kind, name in found]
        raise ConfigError(f"{label} holds {', '.join(names)}: say which by state= or stateType=")
    ((kind, name),) = found
    if kind != "keyed":
        return _Chosen(stored, parts, kind, name)
    return _Chosen(stored, parts, kind, name, pieces, metas[name])


def state_schema(options: Mapping[str, str]) -> StructType:
    """Return the columns of the state that `options` mean. Driver."""
    read = STATE_READ.made(options)
    return spark_schema(_arrow_columns(chosen(read), read))


class StateFrameReader(DataSourceReader):
    """One state of one operator, as of one checkpoint."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """Describe it; asks nothing yet."""
        self._read = STATE_READ.made(options)
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return a task for each file or database. Driver, once a plan.

        Raises:
            ConfigError: As `chosen`.
            CheckpointCorrupt: As `chosen`.
        """
        found = chosen(self._read)
        tasks: list[Task] = []
        if found.meta is None:
            tasks += [_list_task(found, subtask, part) for subtask, part in found.parts]
        else:
            sample = found.sample()
            tasks += [KeyedTask(found.origin, piece, found.meta, sample) for piece in found.pieces]
        # Spark takes no source without tasks.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task. Task.

        Raises:
            CheckpointCorrupt: A file is damaged or missing; names it.
            StateIncompatible: A value does not fit its column.
        """
        task: Task = partition.value
        if task is None:
            return
        reader = task.origin.reader(self._read.place.storage)
        if isinstance(task, KeyedTask):
            columns = columns_of(task.meta, task.sample, self._read.form)
            rows = task.piece.rows(task.meta.name, reader)
            yield from fitted(map(columns.batch, rows), self._schema)
        else:
            yield from fitted([_list_batch(task, reader, self._read)], self._schema)


def _arrow_columns(found: _Chosen, read: StateRead) -> pa.Schema:
    if found.meta is not None:
        return found.columns(read).schema
    return _list_columns(_is_json(found.name, read))


def _is_json(name: str, read: StateRead) -> bool:
    return read.form == "json" or (read.form == "typed" and name == _SPLITS)


def _list_columns(as_json: bool) -> pa.Schema:
    value = pa.string() if as_json else pa.binary()
    return pa.schema([("subtask", pa.int32()), ("element", pa.int32()), ("value", value)])


def _list_task(found: _Chosen, subtask: int, part: OperatorSnapshot) -> ListTask:
    if found.kind == "raw":
        return ListTask(found.origin, subtask, part.raw)
    return ListTask(found.origin, subtask, part.lists.get(found.name, ()))


def _list_batch(task: ListTask, reader: HandleReader, read: StateRead) -> pa.RecordBatch:
    data = [reader.read(one) if isinstance(one, StateHandle) else one for one in task.elements]
    schema = _list_columns(_is_json(read.state or _SPLITS, read))
    as_json = schema.field("value").type == pa.string()
    return pa.record_batch(
        [
            pa.array([task.subtask] * len(data), pa.int32()),
            pa.array(range(len(data)), pa.int32()),
            pa.array([json_of(one) for one in data] if as_json else data, schema.types[2]),
        ],
        schema=schema,
    )
