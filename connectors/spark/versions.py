"""The Spark versions that introduced its interfaces, and the errors where one is missing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import pyspark

from onceflow.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface of Spark that formats use."""

    since: tuple[int, int]
    what: str
    without: str
    """The behavior of a format on a Spark that lacks the interface."""


class SparkInterface(Enum):
    """The interfaces that not every Spark has. The documentation's table is generated from it."""

    FORMATS = Interface(
        (4, 0), "Python data sources that read and write streams", "refused; use `Pipeline`"
    )
    ARROW_STREAM_WRITER = Interface(
        (4, 1), "Arrow batches in streaming writers", "the same, by the interface of batch writers"
    )
    PUSHED_FILTERS = Interface(
        (4, 1), "filters pushed down into `read`", "Spark filters after reading"
    )
    READ_LIMITS = Interface(
        (4, 2),
        "read limits, so `maxOffsetsPerTrigger` and `Trigger.AvailableNow` in several batches",
        "`onceflow-postgres-changes`, and an option that limits a batch, is refused; AvailableNow"
        " is one batch",
    )


def spark_version() -> tuple[int, int]:
    """Return the first two numbers of this process's pyspark."""
    numbers = re.match(r"(\d+)\.(\d+)", pyspark.__version__)
    assert numbers is not None, pyspark.__version__
    return int(numbers[1]), int(numbers[2])


def has(interface: SparkInterface) -> bool:
    """Return True if this process's pyspark has the interface."""
    return spark_version() >= interface.value.since


def require(interface: SparkInterface, needed_by: str) -> None:
    """Raise ConfigError if this process's pyspark lacks the interface that `needed_by` needs.

    Raises:
        ConfigError: pyspark lacks it. The message names both versions.
    """
    if not has(interface):
        major, minor = interface.value.since
        raise ConfigError(
            f"{needed_by} needs {interface.value.what}, which Spark has since {major}.{minor};"
            f" this is pyspark {pyspark.__version__}: install pyspark>={major}.{minor}"
        )
