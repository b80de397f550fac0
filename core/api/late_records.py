"""Records that come after event time has passed them: put aside, or left out and counted."""

from __future__ import annotations

import logging
from typing import Protocol, cast

import pyarrow as pa

from onceflow.core.api.functions import OutputTag, Record, SideOutput, StateAccess
from onceflow.core.errors import ConfigError

_log = logging.getLogger("onceflow.runtime")


def check_late(tag: OutputTag | None, schema: pa.Schema, parameter: str) -> None:
    """Raise ConfigError unless `tag`, the value of `parameter`, has the columns of `schema`."""
    if tag is not None and tag.schema != schema:
        raise ConfigError(
            f"{parameter}={tag.name!r}: late records are as they came, with columns {schema}, and"
            f" the tag says {tag.schema}"
        )


class CountsRejected(Protocol):
    """What the engine's own access to state has besides: it counts what is left out."""

    def count_rejected(self, records: int) -> None:
        """Add to the operator's `rejected`."""
        ...


class LateRecords:
    """Takes the late records of one input of a function. Used by the function's thread."""

    def __init__(self, whose: str, why: str, tag: OutputTag | None) -> None:
        """`whose` and `why` are for the log; without `tag` the records are left out."""
        self._whose = whose
        self._why = why
        self._tag = tag

    def open(self, state: StateAccess) -> None:
        """Take hold of the side output, if there is one."""
        self._output: SideOutput | None = None
        if self._tag is not None:
            self._output = state.side_output(self._tag)
        self._rejected = cast("CountsRejected", state)
        self._count = 0

    def take(self, record: Record, watermark: int) -> None:
        """Put one more record aside, or leave it out."""
        if self._output is not None:
            self._output.emit(record)
        else:
            self._leave_out(1, record, watermark)

    def take_rows(self, rows: pa.RecordBatch, watermark: int) -> None:
        """Put more records aside, or leave them out."""
        if self._output is not None:
            for record in rows.to_pylist():
                self._output.emit(record)
        else:
            self._leave_out(len(rows), rows.slice(0, 1).to_pylist()[0], watermark)

    def _leave_out(self, records: int, one: Record, watermark: int) -> None:
        before = self._count
        self._count += records
        self._rejected.count_rejected(records)
        # At 1, 10, 100 …: a stream of late records must not fill the disk with log lines.
        if not before or len(str(before)) < len(str(self._count)):
            _log.warning(
                "%s leaves out late records, %d so far: event time is at %d ms, and %s; one of"
                " them: %.300r",
                self._whose,
                self._count,
                watermark,
                self._why,
                one,
            )
