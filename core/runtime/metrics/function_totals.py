"""The metrics of users' functions, summed over the attempts of one driver.

In a whole job, a metric has the kind and the buckets of the operator that reported it first. A
metric of another operator with that name but another kind or other buckets is left out, and logged
once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.messages import FunctionMetric
from onceflow.core.runtime.metrics.metric_catalog import (
    PREFIX,
    Family,
    Histogram,
    HistogramValue,
    Metric,
    MetricType,
    Value,
)

LABELS = ("operator", "subtask")
_KINDS = {kind.value: kind for kind in MetricType}

_log = logging.getLogger("onceflow.metrics")


@dataclass(slots=True)
class _Total:
    """A metric of one operator in one subtask, over all attempts."""

    value: float = 0.0
    counts: list[int] = field(default_factory=list[int])

    def add(self, before: FunctionMetric | None, now: FunctionMetric) -> None:
        if now.kind == MetricType.GAUGE.value:
            self.value = now.value
            return
        self.value += now.value - (before.value if before else 0.0)
        earlier = before.counts if before else (0,) * len(now.counts)
        self.counts = self.counts or [0] * len(now.counts)
        for index, (count, known) in enumerate(zip(now.counts, earlier, strict=True)):
            self.counts[index] += count - known


@dataclass(slots=True)
class _Shape:
    metric: Metric
    totals: dict[tuple[str, SubtaskRef], _Total] = field(
        default_factory=dict[tuple[str, SubtaskRef], _Total]
    )


class FunctionTotals:
    """Sums up function metrics. `JobMetrics` owns it and serializes the calls."""

    def __init__(self) -> None:
        self._shapes: dict[str, _Shape] = {}
        self._last: dict[tuple[str, str, SubtaskRef], FunctionMetric] = {}
        self._refused: set[tuple[str, str]] = set()

    def begin_attempt(self) -> None:
        """Treat further reports as counted from zero."""
        self._last.clear()
        for shape in self._shapes.values():
            if shape.metric.type is MetricType.GAUGE:
                shape.totals.clear()

    def add(self, subtask: SubtaskRef, reported: tuple[FunctionMetric, ...]) -> None:
        """Add the difference between these metrics of `subtask` and its last report."""
        for now in reported:
            shape = self._shapes.get(now.name)
            if shape is None:
                shape = self._shapes[now.name] = _Shape(_to_metric(now))
            if (shape.metric.type.value, shape.metric.buckets) != (now.kind, now.bounds):
                self._refuse(now, shape.metric)
                continue
            total = shape.totals.setdefault((now.operator, subtask), _Total())
            total.add(self._last.get((now.operator, now.name, subtask)), now)
            self._last[now.operator, now.name, subtask] = now

    def collect(self, label: Callable[[SubtaskRef], str]) -> Iterator[Family]:
        """Yield each metric; `label` returns "" if subtasks have no series of their own."""
        for _, shape in sorted(self._shapes.items()):
            sums: dict[tuple[str, ...], _Total] = {}
            for (operator, subtask), total in shape.totals.items():
                summed = sums.setdefault((operator, label(subtask)), _Total())
                summed.value += total.value
                pairs = zip(summed.counts or [0] * len(total.counts), total.counts, strict=True)
                summed.counts = [known + count for known, count in pairs]
            yield Family(
                shape.metric,
                tuple((labels, _to_value(shape.metric, amount)) for labels, amount in sums.items()),
            )

    def _refuse(self, now: FunctionMetric, known: Metric) -> None:
        if (now.operator, now.name) not in self._refused:
            self._refused.add((now.operator, now.name))
            _log.warning(
                "metric %r of operator %r is a %s, but another operator has a %s of that name"
                " with other buckets or of another kind: only the other metric is shown; give"
                " each metric its own name",
                now.name,
                now.operator,
                now.kind,
                known.type.value,
            )


def _to_metric(now: FunctionMetric) -> Metric:
    kind = _KINDS[now.kind]
    suffix = "_total" if kind is MetricType.COUNTER else ""
    unit = next((unit for unit in ("seconds", "bytes") if now.name.endswith(f"_{unit}")), "")
    meaning = f"{now.name} of the job's own functions."
    return Metric(f"{PREFIX}user_{now.name}{suffix}", kind, unit, meaning, LABELS, now.bounds)


def _to_value(metric: Metric, total: _Total) -> Value:
    if metric.type is not MetricType.HISTOGRAM:
        return total.value
    histogram = Histogram(metric.buckets)
    histogram.add(total.counts, total.value)
    value: HistogramValue = histogram.value()
    return value
