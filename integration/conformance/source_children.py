"""The functions of sources that the kit's processes run. Each takes a link first."""

from __future__ import annotations

import time
from collections.abc import Sequence

from onceflow.core.protocol.ids import AttemptId
from onceflow.core.runtime.cluster.process_host import Link
from onceflow.core.spi import EndOfInput, PolledRows, ReaderContext, Source, Split
from onceflow.integration.conformance.source_harness import POLL_S, QUIET_S, SOURCE_UID, count_rows


def read_rows(
    link: Link, source: Source, splits: Sequence[Split], count: int, timeout_s: float
) -> list[PolledRows]:
    """Return the batches of a new reader: `count` rows, and what follows at once or to the end."""
    del link
    context = ReaderContext("conformance", SOURCE_UID, 0, 1, AttemptId(2))
    reader = source.reader(splits, context)
    batches: list[PolledRows] = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        result = reader.poll(POLL_S)
        if isinstance(result, EndOfInput):
            break
        if result is not None:
            batches.append(result)
            if sum(map(count_rows, batches)) >= count and not source.bounded:
                deadline = min(deadline, time.monotonic() + QUIET_S)
    reader.close()
    return batches
