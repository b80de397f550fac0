"""Where event time is: columns that hold times, and settings that mean something."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from onceflow import WatermarkStrategy
from onceflow.core.errors import ConfigError


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.timestamp("ms"), pa.timestamp("ns", "UTC"), pa.timestamp("s")], ids=str
)
def test_the_latest_time_of_a_batch_is_in_milliseconds(kind: pa.DataType) -> None:
    times: list[Any] = [1_000, 9_000, None, 3_000]
    if kind != pa.int64():
        zone = timezone.utc if kind.tz else None
        times = [
            None
            if t is None
            else datetime.fromtimestamp(t / 1000, timezone.utc).replace(tzinfo=zone)
            for t in times
        ]
    rows = pa.record_batch([pa.array(times, kind)], names=["ts"])
    strategy = WatermarkStrategy("ts")
    strategy.check(rows.schema)
    assert strategy.latest_ms(rows) == 9_000
    assert strategy.latest_ms(rows.slice(2, 1)) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_out_of_orderness": "soon"}, "max_out_of_orderness='soon'"),
        ({"idle_after": 0}, "idle_after=0"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        WatermarkStrategy("ts", **options)


@pytest.mark.parametrize("column", ["name", "when"])
def test_a_column_that_is_not_there_or_holds_no_times_is_refused_by_name(column: str) -> None:
    with pytest.raises(ConfigError, match=column):
        WatermarkStrategy(column).check(pa.schema([("name", pa.string())]))
