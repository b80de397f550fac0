"""Metrics of users' functions: what they may be called, and how they add up."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.unit.runtime.test_job_metrics import Measuring, begin, fail, find, read

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.messages import Heartbeat, SubtaskMetrics
from onceflow.core.runtime.dataflow.function_metrics import FunctionMetrics
from onceflow.core.runtime.events.job_events import JobStarted, SlotReported
from onceflow.core.runtime.messages import decode_message, encode_message
from onceflow.core.runtime.metrics.exposition import expose
from onceflow.core.runtime.metrics.job_metrics import SeriesLimits


def report(metrics: FunctionMetrics, slot: int = 0) -> SlotReported:
    """Return what the driver publishes of a heartbeat that has gone over the wire."""
    subtask = SubtaskMetrics(SubtaskRef("work", slot), functions=metrics.describe())
    heartbeat = decode_message(encode_message(Heartbeat(slot, (subtask,))))
    assert isinstance(heartbeat, Heartbeat)
    return SlotReported(slot, heartbeat.subtasks)


def test_counters_and_histograms_go_on_over_attempts_and_gauges_are_as_of_now() -> None:
    job = Measuring()
    job.take(JobStarted(), *begin(1))
    first = FunctionMetrics("check")
    first.counter("refused").add()
    first.counter("refused").add(2.5)
    first.gauge("depth").set(9)
    for value in (0.5, 1, 1.5, 99):
        first.histogram("wait_seconds", (1, 10)).observe(value)
    job.take(report(first), report(first), *fail(), *begin(2))
    labels = {"operator": "check", "subtask": "0"}
    assert job.value("user_depth", **labels) is None, "its subtask is gone"
    second = FunctionMetrics("check")
    second.counter("refused").add(1)
    second.gauge("depth").set(-4)
    second.histogram("wait_seconds", (1, 10)).observe(2)
    job.take(report(second))
    assert job.value("user_refused_total", **labels) == 4.5
    assert job.value("user_depth", **labels) == -4
    bounds = ("1.0", "10.0", "+Inf")
    found = [job.value("user_wait_seconds_bucket", le=bound, **labels) for bound in bounds]
    assert found == [2, 4, 5]
    assert job.value("user_wait_seconds_sum", **labels) == 104.0


def test_above_the_limit_functions_of_all_subtasks_are_summed_up() -> None:
    job = Measuring(limits=SeriesLimits(subtasks_max=1))
    job.take(JobStarted(), *begin(1, slots=2))
    for slot in range(2):
        metrics = FunctionMetrics("check")
        metrics.counter("refused").add(3)
        metrics.histogram("size_bytes", (10,)).observe(5)
        job.take(report(metrics, slot))
    assert job.value("user_refused_total", operator="check") == 6
    assert job.value("user_size_bytes_bucket", operator="check", le="10.0") == 2


def test_one_name_is_one_kind_in_a_job(caplog: pytest.LogCaptureFixture) -> None:
    job = Measuring()
    job.take(JobStarted(), *begin(1, slots=1))
    one, other = FunctionMetrics("one"), FunctionMetrics("other")
    one.counter("seen").add(1)
    other.gauge("seen").set(5)
    job.take(report(one), report(other), report(other))
    assert job.value("user_seen_total", operator="one", subtask="0") == 1
    found = read(expose([job.measure()], "").body)
    assert find(found, "user_seen", job_name="ledger", operator="other", subtask="0") is None
    assert len(caplog.records) == 1
    assert "'other'" in caplog.text


@pytest.mark.parametrize(
    "name", ["", "Refused", "1st", "a__b", "a_", "re-fused", "x_total", "a" * 65, 'a"b', "a\nb"]
)
def test_a_name_that_prometheus_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="lower case letters"):
        FunctionMetrics("check").counter(name)


def test_a_name_is_one_metric_and_names_are_bounded() -> None:
    metrics = FunctionMetrics("check")
    assert metrics.counter("refused") is metrics.counter("refused")
    with pytest.raises(ConfigError, match="as a counter and as a gauge"):
        metrics.gauge("refused")
    metrics.histogram("wait", (1, 2))
    with pytest.raises(ConfigError, match="buckets"):
        metrics.histogram("wait", (1, 3))
    with pytest.raises(ConfigError, match="the limit"):
        for number in range(100):
            metrics.counter(f"customer{number}")


@pytest.mark.parametrize("buckets", [(), (2, 1), (1, 1), (1, math.inf), (math.nan, 1), range(60)])
def test_buckets_that_do_not_rise_are_refused(buckets: Any) -> None:
    with pytest.raises(ConfigError, match="upper bounds"):
        FunctionMetrics("check").histogram("wait", buckets)


def test_what_no_metric_can_hold_is_refused() -> None:
    metrics = FunctionMetrics("check")
    for amount in (-1, math.nan):
        with pytest.raises(ValueError, match="only rises"):
            metrics.counter("refused").add(amount)
    with pytest.raises(ValueError, match="NaN"):
        metrics.histogram("wait", (1,)).observe(math.nan)
    assert [metric.value for metric in metrics.describe()] == [0, 0]
