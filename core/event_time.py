"""Where a record's event time is, and how much later than others it may come."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.durations import seconds_of
from onceflow.core.errors import ConfigError


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
            raise ConfigError("idle_after=0 must be more than 0; None: a split is never idle")

    @property
    def delay_ms(self) -> int:
        """By how much a record may be older than one before it."""
        return round(seconds_of(self.max_out_of_orderness, setting="max_out_of_orderness") * 1000)

    @property
    def idle_after_s(self) -> float | None:
        """Without records for so long, a split is idle."""
        return (
            None if self.idle_after is None else seconds_of(self.idle_after, setting="idle_after")
        )

    def check(self, schema: pa.Schema) -> None:
        """Return when the column is there and holds times.

        Raises:
            ConfigError: It is not, or does not.
        """
        if self.column not in schema.names:
            raise ConfigError(
                f"WatermarkStrategy({self.column!r}): no such column; there are"
                f" {', '.join(schema.names)}"
            )
        kind = schema.field(self.column).type
        if not (pa.types.is_int64(kind) or pa.types.is_timestamp(kind)):
            raise ConfigError(
                f"WatermarkStrategy({self.column!r}): the column is {kind}; event time is a"
                " timestamp, or int64 milliseconds since 1970"
            )

    def latest_ms(self, rows: pa.RecordBatch) -> int | None:
        """Return the latest event time of `rows`; None when all are null."""
        latest = pc.max(rows.column(self.column))
        if pa.types.is_timestamp(latest.type):
            latest = latest.cast(pa.timestamp("ms", latest.type.tz), safe=False).cast(pa.int64())
        found: int | None = latest.as_py()
        return found
