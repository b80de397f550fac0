"""The writers `onceflow-savepoint`: they add a DataFrame to a savepoint, as state of an operator.

State by key:

The DataFrame becomes keyed state of one operator, as a whole or not at all. Tasks write state files
that no metadata names yet. The commit looks for repeated keys, which no single task can notice.
Then it names all files at once in the savepoint's metadata. It creates the metadata of a new
savepoint, and replaces the metadata of an existing one. A killed run leaves files without a name,
and perhaps `_changing`, which blocks other writers until it is deleted.

State without keys:

Such state is small, because every subtask holds it in memory. Tasks write files that no metadata
names yet. The commit reads them and the savepoint's state of the same kind, and names one file with
all of it: a copy of broadcast state must be complete. A killed run leaves files without a name, and
perhaps `_changing`. The file with the earlier state is kept without a name, because a job may be
starting from it now.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.options.state import SAVEPOINT_WRITE, SavepointWrite
from onceflow.connectors.spark.packages import Shipped
from onceflow.core.errors import BadStateValue, ConfigError, SavepointRefused, StorageError
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.savepoints.bootstrap import NewState, check_addition, with_state
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.state.api.context import StateContext
from onceflow.core.state.keys.key_codec import decode_key
from onceflow.core.state.readers import bootstrap
from onceflow.core.state.readers.stored import list_pieces, read_metas_by_name
from onceflow.core.state.snapshots import canonical
from onceflow.core.state.states.operator_state import Saved, find_mode, read_saved, write_saved
from onceflow.core.state.stores.entries import split_map_row_key
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory, SavepointStateWriter


@dataclass(frozen=True)
class FilesMessage(WriterCommitMessage):
    """The files that one task has written."""

    handles: tuple[StateHandle, ...]


class KeyedStateWriter(Shipped, DataSourceArrowWriter):
    """The writer that Spark calls. Pickles with the plan."""

    def __init__(
        self, write: SavepointWrite, table: bootstrap.StateOfTable, schema: pa.Schema
    ) -> None:
        """Check the write. Runs where Spark plans.

        Raises:
            ConfigError: The columns do not fit such state.
            SavepointRefused: The existing savepoint cannot be extended, or already has this state.
            StateIncompatible: The existing savepoint has another max parallelism.
        """
        self._write = write
        self._table = table
        self._schema = schema
        self._unique = uuid.uuid4().hex[:12]
        # Check here, so that a mistake costs no task. `commit` checks again, because another
        # program may have written meanwhile.
        _check(write, find_savepoint(write.directory()), self._encoder())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        """Write the rows of one task into files of their key groups. Runs on an executor.

        Raises:
            BadStateValue: A key or value is null, or has another type.
            StorageError: A file cannot be written.
        """
        writer = self._write.directory().state_writer(
            f"{self._unique}-{uuid.uuid4().hex[:12]}", self._write.uid
        )
        return FilesMessage(tuple(_write_parts(self._encoder(), writer, self._context(), iterator)))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Name all files in the savepoint's metadata. Runs in a process next to the driver.

        Raises:
            BadStateValue: A key is repeated. The message names it.
            SavepointRefused: Another program has changed the savepoint, or is changing it now.
        """
        handles = tuple(h for m in messages if isinstance(m, FilesMessage) for h in m.handles)
        directory, encoder = self._write.directory(), self._encoder()
        self._refuse_repeated_keys(directory, handles)
        with directory.changing() as replace_with:
            known = find_savepoint(directory)
            _check(self._write, known, encoder)
            new = NewState(self._write.job, self._write.uid, self._write.max_parallelism, handles)
            now_ms = int(time.time() * 1000)
            replace_with(with_state(known, new, drawn_id=uuid.uuid4().hex[:12], now_ms=now_ms))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the files that tasks have written. Runs in a process next to the driver."""
        del messages
        self._write.directory().delete_state(self._unique)

    def _encoder(self) -> bootstrap.StateEncoder:
        return bootstrap.make_encoder(self._table, self._schema, self._write.max_parallelism)

    def _context(self) -> StateContext:
        count = self._write.max_parallelism
        return StateContext(self._write.uid, 0, range(count), count, Path())

    def _refuse_repeated_keys(
        self, directory: SavepointDirectory, handles: Iterable[StateHandle]
    ) -> None:
        by_groups = defaultdict[int, list[StateHandle]](list)
        for handle in handles:
            # All tasks cut files by the same buckets of key groups, so a repeated key is in two
            # files of one bucket.
            by_groups[handle.key_group_first].append(handle)
        reader = directory.reader()
        for files in by_groups.values():
            states = canonical.read_canonical(reader, files, self._context())
            twice = bootstrap.find_repeated_key(rows.keys for _, rows in states)
            if twice is not None:
                key = _describe_key(twice, self._table)
                raise BadStateValue(
                    f"{key} occurs more than once in the DataFrame, but state"
                    f" {self._table.name!r} has one row for each key: group by the key first"
                )


def find_savepoint(directory: SavepointDirectory) -> Savepoint | None:
    """Return the existing savepoint, or None."""
    return directory.read() if directory.is_there() else None


def _check(write: SavepointWrite, known: Savepoint | None, encoder: bootstrap.StateEncoder) -> None:
    check_addition(known, write.job, write.max_parallelism)
    if known is None:
        return
    parts = known.completed.operator(write.uid)
    pieces = list_pieces(parts, known.completed.max_parallelism)
    metas = read_metas_by_name(pieces, write.directory().reader())
    if encoder.meta.name in metas:
        raise already_there(write, encoder.meta.name)


def already_there(write: SavepointWrite, state: str) -> SavepointRefused:
    """Return the error for a savepoint that already has the state."""
    return SavepointRefused(
        f"{write.directory()} already has state {state!r} of operator {write.uid!r}: write to"
        " another directory"
    )


def _write_parts(
    encoder: bootstrap.StateEncoder,
    writer: SavepointStateWriter,
    context: StateContext,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[StateHandle]:
    """Write parts, each of one bucket, and yield their handles."""
    buckets = bootstrap.buckets_of(encoder.max_parallelism)
    waiting = defaultdict[int, list[canonical.StateRows]](list)
    size_bytes = 0

    def flush() -> Iterator[StateHandle]:
        for bucket, chunks in sorted(waiting.items()):
            part = replace(context, key_groups=buckets[bucket])
            yield from canonical.write_canonical(writer, part, [(encoder.meta, chunks)])
        waiting.clear()

    for batch in batches:
        rows = encoder.rows(batch)
        for bucket, inside in bootstrap.split_by_bucket(rows, buckets):
            waiting[bucket].append(inside)
        size_bytes += rows.keys.nbytes + rows.values.nbytes
        if size_bytes > canonical.PART_BYTES:
            yield from flush()
            size_bytes = 0
    yield from flush()


def _describe_key(row_key: bytes, table: bootstrap.StateOfTable) -> str:
    match table.kind:
        case "map":
            key, map_key = split_map_row_key(row_key)
            return f"key {key!r} with map key {map_key!r}"
        case "value" | "list":
            return f"key {decode_key(row_key)!r}"
        case _:
            return f"key {row_key!r}"


class UnkeyedStateWriter(Shipped, DataSourceArrowWriter):
    """The writer that Spark calls. Pickles with the plan."""

    def __init__(
        self, write: SavepointWrite, table: bootstrap.UnkeyedStateOfTable, schema: pa.Schema
    ) -> None:
        """Check the write. Runs where Spark plans.

        Raises:
            ConfigError: The columns do not fit such state.
            SavepointRefused: The existing savepoint cannot be extended, or already has this state.
            StateIncompatible: The existing savepoint has another max parallelism.
        """
        self._write = write
        self._table = table
        self._schema = schema
        self._unique = uuid.uuid4().hex[:12]
        self._encoder()
        self._read_held(find_savepoint(write.directory()))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        """Write the elements of one task into a file. Runs on an executor.

        Raises:
            BadStateValue: A value is null, or has another type.
            StorageError: The file cannot be written.
        """
        encoder = self._encoder()
        elements = [element for batch in iterator for element in encoder.elements(batch)]
        writer = self._write.directory().state_writer(
            f"{self._unique}-{uuid.uuid4().hex[:12]}", self._write.uid
        )
        return FilesMessage((write_saved(writer, encoder.mode, [encoder.of(elements)]),))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Name one file with all elements in the savepoint's metadata.

        Runs in a process next to the driver.

        Raises:
            BadStateValue: A key of broadcast state is repeated. The message names it.
            SavepointRefused: Another program has changed the savepoint, or is changing it now.
        """
        handles = [h for m in messages if isinstance(m, FilesMessage) for h in m.handles]
        directory, encoder, write = self._write.directory(), self._encoder(), self._write
        parts = [saved for handle in handles for saved in self._read(handle)]
        added = encoder.of(element for saved in parts for element in saved.elements)
        with directory.changing() as replace_with:
            known = find_savepoint(directory)
            writer = directory.state_writer(uuid.uuid4().hex[:12], write.uid)
            merged = write_saved(writer, encoder.mode, [*self._read_held(known), added])
            new = NewState(write.job, write.uid, write.max_parallelism, raw=(merged,))
            now_ms = int(time.time() * 1000)
            replace_with(with_state(known, new, drawn_id=uuid.uuid4().hex[:12], now_ms=now_ms))
        with suppress(StorageError):
            directory.delete_state(self._unique)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the files that tasks have written. Runs in a process next to the driver."""
        del messages
        self._write.directory().delete_state(self._unique)

    def _encoder(self) -> bootstrap.UnkeyedEncoder:
        return bootstrap.make_unkeyed_encoder(self._table, self._schema)

    def _read_held(self, known: Savepoint | None) -> list[Saved]:
        """Return the savepoint's states of the same kind."""
        check_addition(known, self._write.job, self._write.max_parallelism)
        parts = () if known is None else known.completed.operator(self._write.uid)
        for _, part in parts:
            for handle in part.raw:
                if find_mode(handle) == self._table.mode:
                    states = self._read(handle)
                    if any(state.name == self._table.name for state in states):
                        raise already_there(self._write, self._table.name)
                    return states
        return []

    def _read(self, handle: StateHandle) -> list[Saved]:
        directory = self._write.directory()
        return read_saved(directory.reader().read(handle), f"{directory}: {handle.path}")


def savepoint_writer(
    options: Mapping[str, str], schema: StructType, *, overwrite: bool
) -> KeyedStateWriter | UnkeyedStateWriter:
    """Return the writer of a DataFrame. Raises the errors of the two writers."""
    if overwrite:
        raise ConfigError(
            "mode('overwrite') would delete a savepoint from which a job may be starting: write"
            " to a new directory with mode('append'), or delete the old one first"
        )
    write, columns = SAVEPOINT_WRITE.make(options), arrow_schema(schema)
    match write.table:
        case bootstrap.StateOfTable() as table:
            return KeyedStateWriter(write, table, columns)
        case bootstrap.UnkeyedStateOfTable() as table:
            return UnkeyedStateWriter(write, table, columns)
