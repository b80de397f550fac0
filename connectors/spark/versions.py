"""Which of Spark's interfaces came when, and what is said where one is missing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import pyspark

from onceflow.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Interface:
    """Something of Spark's that formats use."""

    since: tuple[int, int]
    what: str
    without: str
    """What a format does on a Spark that lacks it."""


class SparkInterface(Enum):
    """What not every Spark has; the documents' table is made of it."""

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
        "an option that limits a batch is refused; AvailableNow is one batch",
    )


def spark_version() -> tuple[int, int]:
    """Return the first two numbers of this process's pyspark."""
    numbers = re.match(r"(\d+)\.(\d+)", pyspark.__version__)
    assert numbers is not None, pyspark.__version__
    return int(numbers[1]), int(numbers[2])


def has(interface: SparkInterface) -> bool:
    """Return whether this process's pyspark has it."""
    return spark_version() >= interface.value.since


def require(interface: SparkInterface, needed_by: str) -> None:
    """Raise ConfigError unless this process's pyspark has what `needed_by` needs.

    Raises:
        ConfigError: It has not; names both versions.
    """
    if not has(interface):
        major, minor = interface.value.since
        raise ConfigError(
            f"{needed_by} needs {interface.value.what}, which came with Spark {major}.{minor};"
            f" this is pyspark {pyspark.__version__}: install pyspark>={major}.{minor}"
        )
