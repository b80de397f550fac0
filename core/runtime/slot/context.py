"""The objects that all parts of a slot share, and facts about its process and machine."""

from __future__ import annotations

import platform
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import cloudpickle
import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.local_files import ScratchDirectory
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.messages import Acked, PartFailed, SinkCommitted
from onceflow.core.runtime.dataflow.subtask import SubtaskReport
from onceflow.core.runtime.transport.credentials import Credentials, TlsIdentity
from onceflow.core.settings import pipeline_settings
from onceflow.core.storage import CheckpointStorage, JobStorage
from onceflow.core.traces import Trace
from onceflow.core.version import VERSION

SlotMail: TypeAlias = SubtaskReport | Acked | SinkCommitted
"""The messages from the parts of a slot to its control."""


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """The driver's decisions for one attempt, the same for every slot.

    Spark carries the plan to slots and stores it on executors' disks. So it must contain no secret
    that outlives the attempt.
    """

    job: str
    attempt: AttemptId
    parallelism: int
    max_parallelism: int
    delivery: pipeline_settings.Delivery
    settings: pipeline_settings.RuntimeSettings
    allow_non_restored_state: bool
    driver_address: str
    token: str = field(repr=False)
    tls: TlsIdentity | pipeline_settings.TlsFiles | None
    storage: CheckpointStorage
    storage_token_path: str
    log_id: str
    loopback: bool
    """True if all slots are on the driver's machine."""
    logging: pipeline_settings.Logging = field(default_factory=pipeline_settings.Logging)


@dataclass(frozen=True, slots=True)
class SlotContext:
    """The objects that every part of a slot receives; they live as long as the slot."""

    plan: AttemptPlan
    slot: int
    credentials: Credentials
    storage: JobStorage
    scratch: ScratchDirectory
    post: Callable[[SlotMail], None]
    """Sends a message to the slot's control without waiting. Any thread."""
    beside: Callable[[Callable[[], None]], object]
    """Runs a function later on a thread where it may wait. It may never run if the slot ends."""
    closing: threading.Event
    """Set when the slot has begun to shut down."""

    @property
    def trace(self) -> Trace:
        """The trace of the attempt in this slot."""
        return Trace(str(self.storage.log), self.plan.attempt, self.slot)

    def fail(self, error: BaseException) -> None:
        """End the attempt because of `error`. Any thread."""
        self.post(PartFailed(error))


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
    """Return the resident memory of this process in bytes; the peak if only that is known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - hot, tiny
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024
