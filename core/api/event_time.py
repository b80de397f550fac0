"""Where a record's event time is, and how much later than others it may come."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.setting_values import seconds_of
from onceflow.core.state.keys.key_groups import nanoseconds_of


@dataclass(frozen=True, slots=True)
class WatermarkStrategy:
    """Event time by a column of a source: `WatermarkStrategy("ts", max_out_of_orderness="5 s")`.

    `column` holds timestamps, or whole milliseconds since 1970; a null has no event time. In each
    split a record may be older by `max_out_of_orderness` than one before it. A split without
    records for `idle_after` does not hold up the others; None: it does, for ever.
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
        """How much older a record may be than one before it."""
        return round(seconds_of(self.max_out_of_orderness, setting="max_out_of_orderness") * 1000)

    @property
    def idle_after_s(self) -> float | None:
        """A split without records for so long is idle."""
        return (
            None if self.idle_after is None else seconds_of(self.idle_after, setting="idle_after")
        )

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError unless `schema` has the column, and it holds times."""
        if self.column not in schema.names:
            raise ConfigError(
                f"WatermarkStrategy({self.column!r}): no such column; there are"
                f" {', '.join(schema.names)}"
            )
        check_time_type(schema.field(self.column).type, f"WatermarkStrategy({self.column!r})")

    def latest_ms(self, rows: pa.RecordBatch) -> int | None:
        """Return the latest event time of `rows`, `FARTHEST_MS` at most; None when all are null."""
        latest = pc.max(rows.column(self.column))
        if not latest.is_valid:
            return None
        # As operators round them: otherwise a record could be late for a watermark of its own.
        # Within what they take: a filter behind the source may leave such a record out.
        return min(max(_round_to_ms(latest), -FARTHEST_MS), FARTHEST_MS)


def _round_to_ms(time: pa.Scalar) -> int:
    """Return an event time of any distance from 1970 in milliseconds, rounded down."""
    if not pa.types.is_timestamp(time.type):
        return int(time.as_py())
    return int(time.cast(pa.int64()).as_py()) * 1_000 // _A_SECOND[time.type.unit]


def check_time_type(kind: pa.DataType, label: str) -> None:
    """Raise ConfigError unless a column of this type can hold event times."""
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
    """Return the column of `schema` that `verb` goes by: `time`, or that of the sources, `known`.

    `parameter` is the one of `verb` that `time` was given for.

    Raises:
        ConfigError: No source has watermarks, they have several columns, or it is not there.
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
        ValueError: It is null, which has this consequence, or too far from 1970.
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
"""Event times may be so far from 1970, about 146 million years. Where windows begin and end, and
until when they are kept, is then within 64 bits, too."""
_A_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def times_ms(
    column: pa.Array, name: str, consequence: str = "is in no window"
) -> npt.NDArray[np.int64]:
    """Return event times as milliseconds since 1970, rounded down.

    Raises:
        BadStateValue: One is null, which has this consequence, or too far from 1970; says in which
            row.
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
    # Compared before they are multiplied: what leaves 64 bits would be another time.
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
