"""Names of the data files of a lake sink: whose they are, and that no other file has the same.

    onceflow-<sink id>-<attempt>-<checkpoint>-<subtask>-<token>-<number>.parquet

`<checkpoint>` is the one that the writer expects next when it begins the file. `<token>` is random,
32 hex digits, one a writer.
"""

from __future__ import annotations

import re
import uuid

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import WriterContext


class DataFileNames:
    """Names the files of one writer."""

    def __init__(self, context: WriterContext) -> None:
        """Begin with the first checkpoint of the writer."""
        self._prefix = f"onceflow-{context.sink_id}-{context.attempt}"
        self._suffix = f"{context.subtask}-{uuid.uuid4().hex}"
        self._checkpoint = context.first_checkpoint
        self._number = 0

    def next(self) -> str:
        """Return a name that no other file has."""
        number, self._number = self._number, self._number + 1
        return f"{self._prefix}-{self._checkpoint}-{self._suffix}-{number}.parquet"

    def advance_past(self, checkpoint: CheckpointId) -> None:
        """Name files from now on for the checkpoint after `checkpoint`."""
        self._checkpoint = CheckpointId(checkpoint + 1)


def to_name(path: str) -> str:
    """Return the last part of `path`, with slashes."""
    return path.rpartition("/")[2]


def compile_own_name(sink_id: str) -> re.Pattern[str]:
    """Return what the names of the sink id's files match as a whole; group 1 is the attempt.

    A table may have names begin with a hash, in binary digits, that spreads them over a bucket.
    """
    own = rf"onceflow-{re.escape(sink_id)}-(\d+)-\d+-\d+-[0-9a-f]{{32}}-\d+\.parquet"
    return re.compile(rf"(?:[01]+-)?{own}")
