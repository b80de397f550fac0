"""`onceflow-savepoint`: a DataFrame becomes state that is not kept by key; or keyed state.

Such state is small: every subtask has it in memory. Tasks write files that nothing names. The
commit reads them, and what the savepoint has of the kind, and names one file with all of it: a copy
of what is broadcast must be whole. A run that is killed leaves files without a name, and maybe
`_changing`; the file that had less before it stays without a name, for a job may start from it now.
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
from onceflow.core.state.operator_state import Saved, find_mode, read_saved, write_saved
from onceflow.core.state.snapshots.bootstrap import (
    StateOfTable,
    UnkeyedEncoder,
    UnkeyedStateOfTable,
    make_unkeyed_encoder,
)


class UnkeyedStateWriter(Shipped, DataSourceArrowWriter):
    """What Spark asks for. Pickles with the plan."""

    def __init__(
        self, write: SavepointWrite, table: UnkeyedStateOfTable, schema: pa.Schema
    ) -> None:
        """Plan it; runs where Spark plans.

        Raises:
            ConfigError: The columns make no such state.
            SavepointRefused: The savepoint that is there takes no more, or has this state already.
            StateIncompatible: It has another max parallelism.
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
            BadStateValue: A value is null, or not of its type.
            StorageError: The file cannot be written.
        """
        encoder = self._encoder()
        elements = [one for batch in iterator for one in encoder.elements(batch)]
        writer = self._write.directory().state_writer(
            f"{self._unique}-{uuid.uuid4().hex[:12]}", self._write.uid
        )
        return FilesMessage((write_saved(writer, encoder.mode, [encoder.of(elements)]),))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Name all of it in the savepoint's metadata. Runs beside the driver.

        Raises:
            BadStateValue: A key of what is broadcast comes twice; names it.
            SavepointRefused: Another program has changed the savepoint, or does now.
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
        """Delete what tasks have written. Runs beside the driver."""
        del messages
        self._write.directory().delete_state(self._unique)

    def _encoder(self) -> UnkeyedEncoder:
        return make_unkeyed_encoder(self._table, self._schema)

    def _read_held(self, known: Savepoint | None) -> list[Saved]:
        """Return the states of the kind that the savepoint has already."""
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
    """Return the writer of a DataFrame. Raises what the two do."""
    if overwrite:
        raise ConfigError(
            "mode('overwrite') would delete a savepoint from which a job may start right now: write"
            " to a new directory with mode('append'), or delete the old one first"
        )
    write, columns = SAVEPOINT_WRITE.make(options), arrow_schema(schema)
    match write.table:
        case StateOfTable() as table:
            return KeyedStateWriter(write, table, columns)
        case UnkeyedStateOfTable() as table:
            return UnkeyedStateWriter(write, table, columns)
