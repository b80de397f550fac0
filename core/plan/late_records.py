"""The handling of late records: they go to a side output, or are dropped and counted."""

from __future__ import annotations

import logging
from typing import Protocol, cast

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.plan.functions import OutputTag, Record, SideOutput, StateAccess

_log = logging.getLogger("onceflow.runtime")


def check_late(tag: OutputTag | None, schema: pa.Schema, parameter: str) -> None:
    """Raise ConfigError if `tag`, the value of `parameter`, has other columns than `schema`."""
    if tag is not None and tag.schema != schema:
        raise ConfigError(
            f"{parameter}={tag.name!r}: late records keep their columns {schema}, but the tag has"
            f" the columns {tag.schema}"
        )


class CountsRejected(Protocol):
    """The method that the engine's StateAccess has in addition: it counts dropped records."""

    def count_rejected(self, records: int) -> None:
        """Add `records` to the operator's `rejected` count."""
        ...


class LateRecords:
    """The handler for late records of one input. Used only on the function's thread."""

    def __init__(self, whose: str, why: str, tag: OutputTag | None) -> None:
        """`whose` and `why` appear in the log. If `tag` is None, the records are dropped."""
        self._whose = whose
        self._why = why
        self._tag = tag

    def open(self, state: StateAccess) -> None:
        """Open the side output if there is a tag."""
        self._output: SideOutput | None = None
        if self._tag is not None:
            self._output = state.side_output(self._tag)
        self._rejected = cast("CountsRejected", state)
        self._count = 0

    def take(self, record: Record, watermark: int) -> None:
        """Emit a late record to the side output, or drop and count it."""
        if self._output is not None:
            self._output.emit(record)
        else:
            self._leave_out(1, record, watermark)

    def take_rows(self, rows: pa.RecordBatch, watermark: int) -> None:
        """Emit late records to the side output, or drop and count them."""
        if self._output is not None:
            for record in rows.to_pylist():
                self._output.emit(record)
        else:
            self._leave_out(len(rows), rows.slice(0, 1).to_pylist()[0], watermark)

    def _leave_out(self, records: int, record: Record, watermark: int) -> None:
        before = self._count
        self._count += records
        self._rejected.count_rejected(records)
        # Log at 1, 10, 100 … records, so that many late records do not fill the disk with log
        # lines.
        if not before or len(str(before)) < len(str(self._count)):
            _log.warning(
                "%s has dropped late records, %d so far: event time is at %d ms, and %s; one of"
                " them: %.300r",
                self._whose,
                self._count,
                watermark,
                self._why,
                record,
            )
