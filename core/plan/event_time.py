"""The event time of records: its column, the allowed out-of-orderness, and late records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.logged_counts import gains_digit
from onceflow.core.plan.functions import OutputTag, Record, SideOutput, StateAccess
from onceflow.core.protocol.watermarks import WatermarkRule
from onceflow.core.setting_values import seconds_of
from onceflow.core.spi.bad_rows import quote_row
from onceflow.core.state.keys.key_groups import nanoseconds_of


@check_fields
@dataclass(frozen=True, slots=True)
class WatermarkStrategy:
    """A column of a source as event time: `WatermarkStrategy("ts", max_out_of_orderness="5 s")`.

    `column` holds timestamps, or whole milliseconds since 1970. A record with a null has no event
    time. In each split a record may be up to `max_out_of_orderness` older than a record before it.
    If a split has no records for `idle_after`, the watermark no longer waits for it. If
    `idle_after` is None, the watermark waits without limit.
    """

    column: str
    max_out_of_orderness: float | str = 0
    idle_after: float | str | None = None

    def __post_init__(self) -> None:
        seconds_of(self.max_out_of_orderness, setting="max_out_of_orderness")
        if self.idle_after_s == 0:
            raise ConfigError(
                f"idle_after={self.idle_after!r} must be more than 0; omit it if splits never"
                " count as idle"
            )

    @property
    def delay_ms(self) -> int:
        """The time by which a record may be older than a record before it, in milliseconds."""
        return round(seconds_of(self.max_out_of_orderness, setting="max_out_of_orderness") * 1000)

    @property
    def idle_after_s(self) -> float | None:
        """The time without records after which a split is idle, in seconds, or None for never."""
        return (
            None if self.idle_after is None else seconds_of(self.idle_after, setting="idle_after")
        )

    @property
    def rule(self) -> WatermarkRule:
        """The settings of the splits' watermarks."""
        return WatermarkRule(self.delay_ms, self.idle_after_s)

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError if `schema` lacks the column or the column cannot hold event times."""
        if self.column not in schema.names:
            raise ConfigError(
                f"WatermarkStrategy({self.column!r}): no such column; there are"
                f" {', '.join(schema.names)}"
            )
        check_time_type(schema.field(self.column).type, f"WatermarkStrategy({self.column!r})")

    def latest_ms(self, rows: pa.RecordBatch) -> int | None:
        """Return the latest event time of `rows`, up to `FARTHEST_MS`, or None if all are null."""
        latest = pc.max(rows.column(self.column))
        if not latest.is_valid:
            return None
        # Round as operators do. Otherwise a record could be late for its own watermark. Limit to
        # the range that operators accept: a filter after the source may drop a record beyond it.
        return min(max(_round_to_ms(latest), -FARTHEST_MS), FARTHEST_MS)


def _round_to_ms(time: pa.Scalar) -> int:
    """Return an event time in milliseconds since 1970, rounded down. Its range is not limited."""
    if not pa.types.is_timestamp(time.type):
        return int(time.as_py())
    return int(time.cast(pa.int64()).as_py()) * 1_000 // _A_SECOND[time.type.unit]


def check_time_type(kind: pa.DataType, label: str) -> None:
    """Raise ConfigError if a column of this type cannot hold event times."""
    if not (pa.types.is_int64(kind) or pa.types.is_timestamp(kind)):
        raise ConfigError(
            f"{label}: the column is {kind}; event time is a timestamp, or int64 milliseconds since"
            " 1970"
        )


def event_time_column(
    time: str | None,
    known: Collection[str],
    schema: pa.Schema,
    *,
    verb: str = "window",
    parameter: str = "time",
) -> str:
    """Return the event-time column: `time` if given, or else the sources' only column in `known`.

    `verb` and `parameter` name the user's call and its argument for `time` in errors.

    Raises:
        ConfigError: No source has watermarks, the sources have several columns, or `schema` lacks
            the column.
    """
    if not known:
        raise ConfigError(
            f"{verb}(…) in event time: its sources need watermarks, or event time never comes:"
            " pipeline.read(…, watermarks=WatermarkStrategy(…))"
        )
    if time is None and len(known) > 1:
        raise ConfigError(
            f"the sources have event time in {', '.join(sorted(known))}: say by"
            f" {verb}(…, {parameter}=…) which column it goes by"
        )
    column = time or next(iter(known))
    label = f"{verb}({parameter}={column!r})"
    if column not in schema.names:
        raise ConfigError(f"{label}: no such column; there are {', '.join(schema.names)}")
    check_time_type(schema.field(column).type, label)
    return column


def record_time_ms(record: Mapping[str, Any], column: str, consequence: str) -> int:
    """Return a record's event time in milliseconds since 1970, rounded down.

    Raises:
        ValueError: The event time is null or too far from 1970. If null, the message has
            `consequence`.
    """
    at = record[column]
    if at is None:
        raise ValueError(
            f"{column!r} is null: a record without an event time {consequence}; give it one, or"
            " filter it"
        )
    at_ms = nanoseconds_of(at) // 1_000_000 if isinstance(at, datetime) else int(at)
    if abs(at_ms) > FARTHEST_MS:
        raise ValueError(
            f"{column!r} is {at_ms} ms since 1970, which is too far from 1970 for an event time:"
            " give it another one, or filter it"
        )
    return at_ms


FARTHEST_MS = 1 << 62
"""The greatest distance of an event time from 1970, about 146 million years. It leaves room in 64
bits for the starts, ends and expiry times of windows."""
_A_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def times_ms(
    column: pa.Array, name: str, consequence: str = "is in no window"
) -> npt.NDArray[np.int64]:
    """Return event times as milliseconds since 1970, rounded down.

    Raises:
        BadStateValue: An event time is null or too far from 1970. The error has the number of the
            row. If null, its message has `consequence`.
    """
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise BadStateValue(
            f"{name!r} is null: a record without an event time {consequence}; give it one, or"
            " filter it",
            row=row,
        )
    is_instant = pa.types.is_timestamp(column.type)
    times: npt.NDArray[np.int64] = (column.view(pa.int64()) if is_instant else column).to_numpy()
    unit = column.type.unit if is_instant else "ms"
    a_second = _A_SECOND[unit]
    if a_second > 1_000:
        return times // (a_second // 1_000)
    factor = 1_000 // a_second
    # Compare before multiplying: a product that overflows 64 bits would be a wrong time.
    farthest = FARTHEST_MS // factor
    far = (times < -farthest) | (times > farthest)
    if far.any():
        row = int(np.flatnonzero(far)[0])
        raise BadStateValue(
            f"{name!r} is {int(times[row])} {unit} since 1970, which is too far from 1970 for an"
            " event time: give it another one, or filter it",
            row=row,
        )
    return times if factor == 1 else times * factor


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
            self._leave_out(1, lambda: repr(record), watermark)

    def take_rows(self, rows: pa.RecordBatch, watermark: int) -> None:
        """Emit late records to the side output, or drop and count them."""
        if self._output is not None:
            for record in rows.to_pylist():
                self._output.emit(record)
        else:
            self._leave_out(len(rows), lambda: quote_row(rows, 0), watermark)

    def _leave_out(self, records: int, describe_first: Callable[[], str], watermark: int) -> None:
        before = self._count
        self._count += records
        self._rejected.count_rejected(records)
        if gains_digit(before, self._count):
            _log.warning(
                "%s has dropped late records, %d so far: event time is at %d ms, and %s; one of"
                " them: %.300s",
                self._whose,
                self._count,
                watermark,
                self._why,
                describe_first(),
            )
