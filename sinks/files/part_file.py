"""One file that a writer is filling, under a name that no reader looks at."""

from __future__ import annotations

import io
from typing import IO, Any, cast

import pyarrow as pa
from typing_extensions import override

from onceflow.sinks.files.formats import FileEncoder, FileFormat
from onceflow.sinks.files.store import Store

ROW_GROUP_ROWS = 1_000_000
ROW_GROUP_BYTES = 64 * 1024 * 1024
"""Of rows in memory; what is encoded at once is what a reader must decode at once."""


class _Outlet(io.RawIOBase):
    """Where an encoder writes: into the file, or nowhere once the file is dropped.

    An encoder that is given up still writes its end, at the latest when it is collected.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file: IO[bytes] | None = file

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        if self.file is None:
            return len(data)
        return self.file.write(data)

    @override
    def tell(self) -> int:
        return 0 if self.file is None else self.file.tell()


class PartFile:
    """Buffers rows up to a row group, encodes them, writes them. Used by one thread."""

    def __init__(
        self, store: Store, path: str, directory: str, schema: pa.Schema, form: FileFormat
    ) -> None:
        """Create the file.

        Raises:
            SinkError: It cannot be created now.
        """
        self.path = path
        self.directory = directory
        self.rows = 0
        self.size_bytes = 0
        """What is written; all of it once the file is finished."""
        self.buffered_bytes = 0
        self._store = store
        self._schema = schema
        self._buffered: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self._outlet = _Outlet(store.create(path))
        try:
            self._encoder: FileEncoder = form.encoder(cast("IO[bytes]", self._outlet), schema)
        except BaseException:
            self.drop()
            raise

    def add(self, rows: pa.RecordBatch) -> None:
        """Take `rows`; encode what has come when it makes a row group."""
        self._buffered.append(rows)
        self._buffered_rows += rows.num_rows
        self.buffered_bytes += rows.nbytes
        self.rows += rows.num_rows
        if self._buffered_rows >= ROW_GROUP_ROWS or self.buffered_bytes >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Encode what is buffered."""
        if self._buffered:
            with self._store.named("write", self.path):
                self._encoder.write(pa.Table.from_batches(self._buffered, schema=self._schema))
            self._buffered.clear()
            self._buffered_rows = 0
            self.buffered_bytes = 0
            self.size_bytes = self._outlet.tell()

    def end(self) -> None:
        """Encode the rest; `finish` is all that is left to do."""
        self.flush()
        with self._store.named("write", self.path):
            self._encoder.end()

    def finish(self) -> None:
        """Make what was written durable. Any thread; nothing may be added after it."""
        file, self._outlet.file = self._outlet.file, None
        if file is not None:
            try:
                self.size_bytes = self._store.finish(file, self.path)
            except BaseException:
                self._store.drop(file, self.path)
                raise

    def drop(self) -> None:
        """Close and delete the file, finished or not. Never raises; safe to call twice."""
        file, self._outlet.file = self._outlet.file, None
        if file is not None:
            self._store.drop(file, self.path)
        else:
            self._store.delete_quietly(self.path)
