"""Functions of many windows of two streams at once, whose records they get as Arrow batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.api.functions import OperatorAccess, Record, StateAccess
from onceflow.core.api.window_functions import CoGroupFunction, TimeWindow
from onceflow.core.state.keys.key_columns import Ints


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The records that the windows of a batch have of one stream, sorted by window.

    Those of window w are the rows `firsts[w]` to `firsts[w] + counts[w] - 1`, in the order in which
    they came.
    """

    rows: pa.RecordBatch
    windows: Ints
    """The number of each row's window."""
    firsts: Ints
    """The first row of each window."""
    counts: Ints
    """How many rows each window has; 0 where it has none of this stream."""

    def spread(self, per_window: pa.Array | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return for each row the value of its window."""
        spread: npt.NDArray[Any] = np.repeat(np.asarray(per_window), self.counts)
        return spread


@dataclass(frozen=True, slots=True)
class CoGroupBatch:
    """Windows of keys of two streams, numbered from 0.

    No two of them have one key and one start. Those that are due together are sorted by their
    start, and those that come again with late records are in the order of these.
    """

    keys: pa.RecordBatch
    """The key columns, named as in the left stream, with a row for each window."""
    starts_ms: Ints
    """When each window begins, in milliseconds since 1970."""
    ends_ms: Ints
    """When it ends (exclusive)."""
    left: WindowRows
    right: WindowRows

    @property
    def window_count(self) -> int:
        """How many windows there are."""
        return len(self.starts_ms)


class CoGroupBatchFunction(ABC):
    """A function of all records of two streams in many windows, given as Arrow batches.

    Pickled to the slots, as a `KeyedFunction` is. Which windows are in one call is chance: what it
    returns for a window must not depend on that.
    """

    @abstractmethod
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema of the batches that `process` returns. Runs on the driver."""

    def open(self, state: OperatorAccess) -> None:  # noqa: B027 - optional hook
        """Take hold of side outputs, metrics and states without a key; it has none of keys.

        Called once, after restore, before the first batch.
        """

    @abstractmethod
    def process(self, windows: CoGroupBatch) -> pa.RecordBatch | None:
        """Return the records that follow from windows, in any number, or None for none of them.

        Each window is in one call when it is due, and in another for each record that comes within
        the allowed lateness. Raising ends the attempt; the windows are processed again after the
        restart.
        """

    def snapshot_state(self, checkpoint: int) -> None:  # noqa: B027 - optional hook
        """Bring states up to date; `checkpoint` takes them as they are.

        As in `ProcessFunction`.
        """

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took. Not called when the process is killed."""


class WindowBatches(CoGroupFunction):
    """Stands for a function of batches where windows of two streams have a function."""

    def __init__(self, function: CoGroupBatchFunction) -> None:
        self.function = function

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return that of the function."""
        return self.function.output_schema(left, right)

    def open(self, state: StateAccess) -> None:
        """Open the function."""
        self.function.open(state.operator)

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Record:
        """Refuse: the runtime calls the function itself."""
        raise NotImplementedError

    def snapshot_state(self, checkpoint: int) -> None:
        """Have the function do it."""
        self.function.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the function."""
        self.function.close()
