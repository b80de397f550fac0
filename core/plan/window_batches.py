"""Functions that process many windows of two streams at once, as Arrow batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.plan.functions import OperatorAccess, Record, StateAccess
from onceflow.core.plan.window_functions import CoGroupFunction, TimeWindow
from onceflow.core.state.keys.key_columns import Ints


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The records of one stream in the windows of a batch, sorted by window.

    Window w has the rows `firsts[w]` to `firsts[w] + counts[w] - 1`, in arrival order.
    """

    rows: pa.RecordBatch
    windows: Ints
    """The number of each row's window."""
    firsts: Ints
    """The first row of each window."""
    counts: Ints
    """The number of rows in each window; 0 if the window has no rows of this stream."""

    def spread(self, per_window: pa.Array | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array with, for each row, its window's element of `per_window`."""
        spread: npt.NDArray[Any] = np.repeat(np.asarray(per_window), self.counts)
        return spread


@dataclass(frozen=True, slots=True)
class CoGroupBatch:
    """A batch of windows of two streams, numbered from 0.

    Each combination of key and start appears once. Windows that are due together are sorted by
    start. Windows that are emitted again are in the order of their late records.
    """

    keys: pa.RecordBatch
    """The key columns, named as in the left stream, with a row for each window."""
    starts_ms: Ints
    """The start of each window, in milliseconds since 1970."""
    ends_ms: Ints
    """The end of each window (exclusive), in milliseconds since 1970."""
    left: WindowRows
    right: WindowRows

    @property
    def window_count(self) -> int:
        """The number of windows."""
        return len(self.starts_ms)


class CoGroupBatchFunction(ABC):
    """A function of two streams that gets all records of many windows as Arrow batches.

    Pickled to the slots, like a `KeyedFunction`. The grouping of windows into calls is arbitrary.
    The result for a window must not depend on the other windows in the call.
    """

    @abstractmethod
    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema of the batches that `process` returns. Runs on the driver."""

    def open(self, state: OperatorAccess) -> None:  # noqa: B027 - optional hook
        """Open side outputs, metrics and operator states. Keyed states are not available.

        Called once, after restore, before the first batch.
        """

    @abstractmethod
    def process(self, windows: CoGroupBatch) -> pa.RecordBatch | None:
        """Return the output records of `windows`, or None for no output.

        Each window is passed once when it is due, and again for each late record within the allowed
        lateness. An exception ends the attempt, and the windows are processed again after the
        restart.
        """

    def snapshot_state(self, checkpoint: int) -> None:  # noqa: B027 - optional hook
        """Update the states. `checkpoint` stores them as they are when this returns.

        As in `ProcessFunction`.
        """

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what `open` took. Not called when the process is killed."""


class WindowBatches(CoGroupFunction):
    """An adapter that carries a `CoGroupBatchFunction` where a `CoGroupFunction` is expected."""

    def __init__(self, function: CoGroupBatchFunction) -> None:
        self.function = function

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the output schema of the function."""
        return self.function.output_schema(left, right)

    def open(self, state: StateAccess) -> None:
        """Open the function."""
        self.function.open(state.operator)

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> list[Record]:
        """Raise NotImplementedError: the runtime calls the batch function directly."""
        raise NotImplementedError

    def snapshot_state(self, checkpoint: int) -> None:
        """Call the function's `snapshot_state`."""
        self.function.snapshot_state(checkpoint)

    def close(self) -> None:
        """Close the function."""
        self.function.close()


class _ChosenLeft(CoGroupBatchFunction):
    """Emits the left records of windows that have right records, or of those that have none."""

    def __init__(self, *, with_partner: bool) -> None:
        self._with_partner = with_partner

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema of the left records."""
        return left

    def process(self, windows: CoGroupBatch) -> pa.RecordBatch:
        """Return the left records of the chosen windows."""
        chosen = (windows.right.counts > 0) == self._with_partner
        return windows.left.rows.filter(pa.array(windows.left.spread(chosen)))


class ChosenLeft(WindowBatches):
    """The function of a semi-join or an anti-join, for windows in batches and for single ones."""

    def __init__(self, *, with_partner: bool) -> None:
        super().__init__(_ChosenLeft(with_partner=with_partner))
        self._with_partner = with_partner

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> list[Record]:
        """Return the left records if the window is a chosen one."""
        return left if bool(right) == self._with_partner else []
