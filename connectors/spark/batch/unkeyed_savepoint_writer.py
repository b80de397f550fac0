"""The writer `onceflow-savepoint` of state without keys, and the choice between both writers.

Such state is small, because every subtask holds it in memory. Tasks write files that no metadata
names yet. The commit reads them and the savepoint's state of the same kind, and names one file with
all of it: a copy of broadcast state must be complete. A killed run leaves files without a name, and
perhaps `_changing`. The file with the earlier state is kept without a name, because a job may be
starting from it now.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import arrow_schema
from onceflow.connectors.spark.batch.savepoint_writer import (
    FilesMessage,
    KeyedStateWriter,
    already_there,
    find_savepoint,
)
from onceflow.connectors.spark.options.state import SAVEPOINT_WRITE, SavepointWrite
from onceflow.connectors.spark.packages import Shipped
from onceflow.core.errors import ConfigError, StorageError
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.savepoints.bootstrap import NewState, check_addition, with_state
from onceflow.core.protocol.savepoints.savepoint import Savepoint
from onceflow.core.state.readers import bootstrap
from onceflow.core.state.states.operator_state import Saved, find_mode, read_saved, write_saved


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
            "mode('overwrite') would delete a savepoint from which a job may start right now: write"
            " to a new directory with mode('append'), or delete the old one first"
        )
    write, columns = SAVEPOINT_WRITE.make(options), arrow_schema(schema)
    match write.table:
        case bootstrap.StateOfTable() as table:
            return KeyedStateWriter(write, table, columns)
        case bootstrap.UnkeyedStateOfTable() as table:
            return UnkeyedStateWriter(write, table, columns)
