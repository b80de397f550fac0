"""The metrics of user functions, which the driver publishes together with the job's metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from onceflow.core.errors import ConfigError

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
NAME_LENGTH_MAX = 64
METRICS_MAX = 50
"""The limit for one operator. Every heartbeat carries all metrics, and each metric is one series
for each subtask."""
BUCKETS_MAX = 50

DEFAULT_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""The default upper bounds, in seconds, for durations from milliseconds to minutes."""


class FunctionCounter(Protocol):
    """A sum that only rises. Records that are processed again after a restart are counted again."""

    def add(self, amount: float = 1) -> None:
        """Add `amount`, which is 0 or more. Called by the function's own thread."""
        ...


class FunctionGauge(Protocol):
    """A current value."""

    def set(self, value: float) -> None:
        """Replace the value. Called by the function's own thread."""
        ...


class FunctionHistogram(Protocol):
    """Values sorted into buckets."""

    def observe(self, value: float) -> None:
        """Count `value`. Called by the function's own thread."""
        ...


class MetricsAccess(Protocol):
    """Gives a function its metrics by name. Call it in `open`. Equal names give the same metric.

    A name is lower case with underscores and ends in its unit, if it has one (`wait_seconds`).
    Prometheus shows the metric as `onceflow_user_<name>`, and adds `_total` for a counter.
    """

    def counter(self, name: str) -> FunctionCounter:
        """Return the counter `name`.

        Raises:
            ConfigError: A metric of another kind has this name, the name is invalid, or the
                operator has too many metrics.
        """
        ...

    def gauge(self, name: str) -> FunctionGauge:
        """Return the gauge `name`.

        Raises:
            ConfigError: As in `counter`.
        """
        ...

    def histogram(self, name: str, buckets: Sequence[float] = DEFAULT_BUCKETS) -> FunctionHistogram:
        """Return the histogram `name`. `buckets` are its upper bounds in rising order.

        Raises:
            ConfigError: As in `counter`, or the bounds do not rise.
        """
        ...


def check_metric_name(name: str) -> None:
    """Raise ConfigError if `name` cannot be used unchanged after our prefix in Prometheus."""
    if not NAME.fullmatch(name) or len(name) > NAME_LENGTH_MAX or name.endswith("_total"):
        raise ConfigError(
            f"metric {name!r}: use up to {NAME_LENGTH_MAX} lower case letters, digits and single"
            " underscores, a letter first, and no _total at the end, which a counter is given"
        )


def check_buckets(name: str, buckets: Sequence[float]) -> None:
    """Raise ConfigError if `buckets` are not rising upper bounds."""
    rises = all(lower < upper for lower, upper in pairwise(buckets))
    if not rises or not 1 <= len(buckets) <= BUCKETS_MAX or buckets[-1] == float("inf"):
        raise ConfigError(
            f"histogram {name!r}: buckets={tuple(buckets)} must be 1 to {BUCKETS_MAX} upper bounds"
            " that rise; infinity is added"
        )
