"""The interface between the job driver and the cluster that runs its slots.

`spark` runs slots in a barrier stage, `spark_connect` in a barrier query, and `local_processes` as
processes of this machine. Slots, their messages and their channels are the same in all three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from onceflow.core.errors import OnceflowError
from onceflow.core.runtime.slot.context import AttemptPlan


class RunningSlots(Protocol):
    """The slots of one attempt, from their start to the end of the last one."""

    def kill(self) -> None:
        """Kill every slot that is left; returns at once."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of all slots; return True if they ended within `timeout_s`."""
        ...


class Cluster(Protocol):
    """A cluster that can run the slots of a job.

    Used in the driver's process, by its own thread.
    """

    @property
    def is_local(self) -> bool:
        """True if driver and slots are known to share this machine."""
        ...

    @property
    def driver_host(self) -> str:
        """The address at which slots reach the driver."""
        ...

    def check(self, parallelism: int) -> None:
        """Check, as far as possible now, that `parallelism` slots can run side by side.

        Raises:
            ConfigError: They cannot; names the setting that prevents it.
        """
        ...

    def check_alive(self) -> None:
        """Raise SparkStopped if the cluster is gone, so that no attempt can follow.

        Raises:
            SparkStopped: The cluster is gone.
        """
        ...

    def await_slots(self, parallelism: int, timeout_s: float) -> None:
        """Wait until `parallelism` slots are free.

        Raises:
            ConfigError: Too few slots were free for `timeout_s`.
        """
        ...

    def start(self, plan: AttemptPlan, ended: Callable[[OnceflowError], None]) -> RunningSlots:
        """Start slots 0 … `plan.parallelism` - 1; returns before they run.

        `ended` is called once, on another thread, with the reason: when all slots have returned, or
        as soon as a slot has died.
        """
        ...

    def take_signals(self) -> None:
        """Make SIGINT and SIGTERM act on this process only. Idempotent."""
        ...
