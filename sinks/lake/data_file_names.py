"""The names of the data files of a lake sink: they contain their owner and are unique.

    onceflow-<sink id>-<attempt>-<checkpoint>-<subtask>-<token>-<number>.parquet

`<checkpoint>` is the checkpoint that the writer expects next when it begins the file. `<token>` is
random, 32 hex digits, one per writer.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import WriterContext
from onceflow.core.stored_names import UnsafeName, resolve_stored_name


class DataFileNames:
    """The names of the files of one writer, or of one version that the driver makes."""

    def __init__(self, sink_id: str, attempt: int, checkpoint: int, *, subtask: int) -> None:
        """Begin with files of `checkpoint`."""
        self._prefix = f"onceflow-{sink_id}-{attempt}"
        self._suffix = f"{subtask}-{uuid.uuid4().hex}"
        self._checkpoint = checkpoint
        self._number = 0

    @classmethod
    def of_writer(cls, context: WriterContext) -> DataFileNames:
        """Return the names of a writer's files, from its first checkpoint on."""
        first = context.first_checkpoint
        return cls(context.sink_id, context.attempt, first, subtask=context.subtask)

    def next(self) -> str:
        """Return a unique name."""
        number, self._number = self._number, self._number + 1
        return f"{self._prefix}-{self._checkpoint}-{self._suffix}-{number}.parquet"

    def advance_past(self, checkpoint: CheckpointId) -> None:
        """Name files from now on for the checkpoint after `checkpoint`."""
        self._checkpoint = checkpoint + 1


def check_own_path(path: str, sink_id: str, directory: Path | None = None) -> None:
    """Raise SinkError unless `path`, below the table's directory, is a data file of the sink id.

    A staged description is read from checkpoint storage, so it must not add or delete other files.

    Raises:
        SinkError: The path is no such file, or a link leads from `directory` to it.
    """
    try:
        resolve_stored_name(path, directory)
    except UnsafeName as error:
        raise SinkError(f"a staged description is damaged: {error}") from error
    if not compile_own_name(sink_id).fullmatch(to_name(path)):
        raise SinkError(
            f"a staged description is damaged: {path!r} is no data file of sink id {sink_id!r}"
        )


def to_name(path: str) -> str:
    """Return the last part of `path`, with slashes."""
    return path.rpartition("/")[2]


def compile_own_name(sink_id: str) -> re.Pattern[str]:
    """Return the pattern of full names of the sink id's files; group 1 is the attempt.

    A table may let names begin with a hash in binary digits, which spreads them over a bucket.
    """
    own = rf"onceflow-{re.escape(sink_id)}-(\d+)-\d+-\d+-[0-9a-f]{{32}}-\d+\.parquet"
    return re.compile(rf"(?:[01]+-)?{own}")
