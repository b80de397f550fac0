"""Metrics of one operator's function in one subtask; see `core.api.function_metrics`.

The subtask's thread counts, and the heartbeat thread reads. A read returns a value that existed at
some time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from onceflow.core.errors import ConfigError
from onceflow.core.plan import function_metrics
from onceflow.core.plan.function_metrics import METRICS_MAX
from onceflow.core.protocol.messages import FunctionMetric


class RunningCounter:
    """A counter of a function; see `FunctionCounter`."""

    kind = "counter"

    def __init__(self) -> None:
        self._value = 0.0

    def add(self, amount: float = 1) -> None:
        """Add `amount`."""
        if not amount >= 0:
            raise ValueError(f"a counter cannot add {amount!r}: it only rises; use a gauge")
        self._value += amount

    def describe(self, uid: str, name: str) -> FunctionMetric:
        """Return the current value."""
        return FunctionMetric(uid, name, self.kind, self._value)


class RunningGauge:
    """A gauge of a function; see `FunctionGauge`."""

    kind = "gauge"

    def __init__(self) -> None:
        self._value = 0.0

    def set(self, value: float) -> None:
        """Replace the value."""
        self._value = float(value)

    def describe(self, uid: str, name: str) -> FunctionMetric:
        """Return the current value."""
        return FunctionMetric(uid, name, self.kind, self._value)


class RunningHistogram:
    """A histogram of a function; see `FunctionHistogram`."""

    kind = "histogram"

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count `value` in its bucket."""
        if math.isnan(value):
            raise ValueError("a histogram cannot count NaN, which belongs to no bucket")
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def describe(self, uid: str, name: str) -> FunctionMetric:
        """Return the current value."""
        counts = tuple(self._counts)
        return FunctionMetric(uid, name, self.kind, self._total, self.bounds, counts)


RunningMetric: TypeAlias = RunningCounter | RunningGauge | RunningHistogram
M = TypeVar("M", RunningCounter, RunningGauge, RunningHistogram)


class FunctionMetrics:
    """The metrics that one function has opened. The function's context has them as `metrics`."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self._metrics: dict[str, RunningMetric] = {}

    def counter(self, name: str) -> RunningCounter:
        """Return the counter `name`."""
        return self._open(name, RunningCounter, RunningCounter)

    def gauge(self, name: str) -> RunningGauge:
        """Return the gauge `name`."""
        return self._open(name, RunningGauge, RunningGauge)

    def histogram(
        self, name: str, buckets: Sequence[float] = function_metrics.DEFAULT_BUCKETS
    ) -> RunningHistogram:
        """Return the histogram `name`."""
        bounds = tuple(float(bound) for bound in buckets)
        function_metrics.check_buckets(name, bounds)
        histogram = self._open(name, RunningHistogram, lambda: RunningHistogram(bounds))
        if histogram.bounds != bounds:
            raise ConfigError(
                f"operator {self._uid!r} creates histogram {name!r} with buckets {bounds} and"
                f" {histogram.bounds}; give each histogram its own name"
            )
        return histogram

    def describe(self) -> tuple[FunctionMetric, ...]:
        """Return the current value of every metric. Any thread."""
        return tuple(metric.describe(self._uid, name) for name, metric in [*self._metrics.items()])

    def _open(self, name: str, kind: type[M], make: Callable[[], M]) -> M:
        function_metrics.check_metric_name(name)
        known = self._metrics.get(name)
        if known is None:
            if len(self._metrics) >= METRICS_MAX:
                raise ConfigError(
                    f"operator {self._uid!r} creates metric {name!r}, but already has"
                    f" {METRICS_MAX} metrics, the limit. Do not make the names of metrics from"
                    " records"
                )
            made = make()
            self._metrics[name] = made
            return made
        if not isinstance(known, kind):
            raise ConfigError(
                f"operator {self._uid!r} creates metric {name!r} as a {known.kind} and as a"
                f" {kind.kind}; give each metric its own name"
            )
        return known
