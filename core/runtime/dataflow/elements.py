"""What travels in a channel: batches of rows, and between them barriers and the end of input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.protocol.alignment import Barrier

Hashes: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows, and on a keyed edge the 64-bit hash of each row's key, so that it is computed once."""

    rows: pa.RecordBatch
    hashes: Hashes | None = None


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """No more rows come on this channel.

    Barriers still do: a finished source stays in checkpoints.
    """


Element: TypeAlias = Batch | Barrier | EndOfStream


@dataclass(frozen=True, slots=True)
class Received:
    """An element and the channel on which it came."""

    channel: int
    element: Element


Mail: TypeAlias = Any
"""What other threads post to a subtask's own thread."""
