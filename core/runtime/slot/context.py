"""What lives in the process of one slot, and what it says of the process and of its machine."""

from __future__ import annotations

import platform
import resource
import socket
from dataclasses import dataclass

import cloudpickle
import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.config import Delivery, RuntimeSettings
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.version import VERSION


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What is the same for every slot of an attempt, and no secret. Spark carries it."""

    job: str
    attempt: AttemptId
    parallelism: int
    max_parallelism: int
    delivery: Delivery
    settings: RuntimeSettings
    allow_non_restored_state: bool = False


def versions() -> dict[str, str]:
    """Return the versions that driver and executors must share."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "onceflow": VERSION,
        "pyarrow": pa.__version__,
        "numpy": np.__version__,
        "msgspec": msgspec.__version__,
        "cloudpickle": cloudpickle.__version__,
    }


def rss_bytes() -> int:
    """Return how much memory this process has resident; its most so far where only that is told."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - hot, tiny
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def own_address() -> str:
    """Return the address under which the other slots reach this one."""
    return socket.gethostbyname(socket.gethostname())
