"""Tests event time: columns that hold times, and settings that mean something."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from onceflow import WatermarkStrategy
from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.plan.event_time import FARTHEST_MS, record_time_ms, times_ms


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


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_the_latest_time_is_rounded_as_each_time_is(unit: str) -> None:
    """Also before 1970: otherwise a record of the same time would be late for its own watermark."""
    ticks = [-1, -999, -1_000, -1_500, -1_000_000, -1_500_001, 0, 1, 1_999]
    for tick in ticks:
        times = pa.array([tick, None, tick - 5_000_000], pa.timestamp(unit))
        latest = WatermarkStrategy("ts").latest_ms(pa.record_batch([times], names=["ts"]))
        assert latest == times_ms(times.slice(0, 1), "ts")[0]


@pytest.mark.parametrize("tick", [2**63 // 1000 + 1, -(2**63) // 1000 - 1, 2**63 - 1])
def test_seconds_beyond_64_bits_of_milliseconds_are_refused(tick: int) -> None:
    """They would wrap around to another time."""
    times = pa.array([5, tick], pa.timestamp("s"))
    with pytest.raises(BadStateValue, match="'ts' is .* too far from 1970") as refused:
        times_ms(times, "ts")
    assert refused.value.row == 1
    assert times_ms(times.slice(0, 1), "ts").tolist() == [5_000]


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.timestamp("ms"), pa.timestamp("s", "UTC")], ids=str
)
@pytest.mark.parametrize("sign", [1, -1])
def test_times_whose_windows_would_leave_64_bits_are_refused(kind: pa.DataType, sign: int) -> None:
    """Event time itself only comes as far as a record may be: a filter may leave these out."""
    factor = 1_000 if kind == pa.timestamp("s", "UTC") else 1
    farthest = FARTHEST_MS // factor
    assert times_ms(pa.array([sign * farthest], kind), "ts").tolist() == [sign * farthest * factor]
    for tick in (sign * (farthest + 1), 2**63 - 1 if sign > 0 else -(2**63)):
        times = pa.array([0, tick], kind)
        with pytest.raises(BadStateValue, match="'ts' is .* too far from 1970") as refused:
            times_ms(times, "ts")
        assert refused.value.row == 1
        rows = pa.record_batch([times.slice(1)], names=["ts"])
        assert WatermarkStrategy("ts").latest_ms(rows) == sign * FARTHEST_MS
    with pytest.raises(ValueError, match="'at' is .* too far from 1970"):
        record_time_ms({"at": sign * (FARTHEST_MS + 1)}, "at", "is in no window")


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
