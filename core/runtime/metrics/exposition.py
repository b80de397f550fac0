"""The output of metrics for Prometheus: its text format, or OpenMetrics if the client asks for it.

`prometheus-client` writes both formats. It is an optional dependency and imported only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onceflow.core.imports import require_package
from onceflow.core.runtime.metrics.metric_catalog import (
    CATALOG,
    JOB_LABEL,
    Family,
    HistogramValue,
    Metric,
    MetricType,
    Value,
)

_POSITIONS: Mapping[str, int] = {metric.name: index for index, metric in enumerate(CATALOG)}


@dataclass(frozen=True, slots=True)
class Measured:
    """The metrics of one job or one query, with the labels that each of its samples gets."""

    families: Sequence[Family]
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of_job(cls, job: str, families: Sequence[Family]) -> Measured:
        """Return the metrics of job `job`."""
        return cls(families, {JOB_LABEL: job})


@dataclass(frozen=True, slots=True)
class Exposition:
    """The answer to a scrape."""

    body: bytes
    content_type: str


def expose(measured: Iterable[Measured], accept: str) -> Exposition:
    """Return `measured` in the format that the header `accept` prefers.

    Raises:
        MissingExtra: `prometheus-client` is not installed.
    """
    require_package("prometheus_client")
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tuple(measured)))
    encode: Callable[[Any], bytes]
    content_type: str
    encode, content_type = choose_encoder(accept)
    return Exposition(encode(registry), content_type)


class _Collector:
    """A collector that prometheus-client calls for the samples of one scrape."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        self._measured = measured

    def collect(self) -> Iterator[Any]:
        """Yield each metric once, with the samples of every job, in the catalog's order."""
        by_metric: dict[str, list[tuple[Measured, Family]]] = {}
        for measured in self._measured:
            for family in measured.families:
                by_metric.setdefault(family.metric.name, []).append((measured, family))
        last = len(_POSITIONS)
        for name in sorted(by_metric, key=lambda name: (_POSITIONS.get(name, last), name)):
            parts = by_metric[name]
            if any(family.samples for _, family in parts):
                yield _to_library(parts[0][1].metric, parts)


def _to_library(metric: Metric, parts: Sequence[tuple[Measured, Family]]) -> Any:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    library = {
        MetricType.COUNTER: CounterMetricFamily,
        MetricType.GAUGE: GaugeMetricFamily,
        MetricType.HISTOGRAM: HistogramMetricFamily,
    }[metric.type]
    common = tuple(dict.fromkeys(name for measured, _ in parts for name in measured.labels))
    written: Any = library(metric.name, metric.help, labels=(*common, *metric.labels))
    for measured, family in parts:
        values = tuple(measured.labels.get(name, "") for name in common)
        for labels, value in family.samples:
            _add(written, (*values, *labels), value)
    return written


def _add(written: Any, labels: tuple[str, ...], value: Value) -> None:
    if isinstance(value, HistogramValue):
        cumulated, count = list[tuple[str, int]](), 0
        for bound, inside in zip((*value.bounds, "+Inf"), value.counts, strict=True):
            count += inside
            cumulated.append((str(bound), count))
        written.add_metric(labels, cumulated, value.total)
    else:
        written.add_metric(labels, value)
