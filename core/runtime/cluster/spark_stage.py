"""The one barrier stage that hosts an attempt's slots, and the checks before it is submitted.

Measured on Spark 4.3: a barrier stage gang-schedules long tasks; Spark does not retry a failed one;
`allGather` costs about a second, so addresses travel over the control stream instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from py4j.protocol import Py4JError
from pyspark import BarrierTaskContext, InheritableThread, SparkContext
from pyspark.sql import SparkSession

from onceflow.core.errors import ConfigError, SparkStopped
from onceflow.core.runtime.slot.slot import SlotTask


def check_cluster(spark: SparkSession, parallelism: int) -> None:
    """Return when `parallelism` slots can run side by side on this session.

    Raises:
        ConfigError: Spark would take slots away, run them twice, or has too few.
    """
    context = spark.sparkContext
    conf = context.getConf()

    def enabled(setting: str) -> bool:
        return str(conf.get(setting, "false")).lower() == "true"

    if enabled("spark.dynamicAllocation.enabled"):
        raise ConfigError(
            "spark.dynamicAllocation.enabled=true would take slots away from a running job; start"
            " the session with spark.dynamicAllocation.enabled=false"
        )
    if enabled("spark.speculation"):
        raise ConfigError(
            "spark.speculation=true would run a slot twice; start the session with"
            " spark.speculation=false"
        )
    slots = free_slots(context)
    # Elsewhere executors register in their own time; `await_slots` waits for them.
    if not str(context.master).startswith("local-") and is_local(context) and slots < parallelism:
        raise ConfigError(
            f"parallelism={parallelism} needs {parallelism} task slots at once, and master"
            f" {context.master!r} has {slots}; use local[{parallelism}] or a lower parallelism"
        )


def free_slots(context: SparkContext) -> int:
    """Return how many tasks the session can run at once, as registered now.

    Raises:
        SparkStopped: There is no session any more.
    """
    try:
        # There is no public way from Python.
        scala = cast("Any", context)._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return int(scala.maxNumConcurrentTasks(profile))
    except (Py4JError, AttributeError, OSError):
        require_spark(context)
        raise


def require_spark(context: SparkContext) -> None:
    """Return while the session of `context` is there.

    Raises:
        SparkStopped: `stop` was called, or its JVM has ended.
    """
    try:
        if cast("Any", context)._jsc is not None and not cast("Any", context)._jsc.sc().isStopped():
            return
        how = "its session was stopped"
    except (Py4JError, OSError) as error:
        how = f"its JVM does not answer ({type(error).__name__})"
    raise SparkStopped(
        f"Spark is gone: {how}. Start the job again in a new session: it goes on from its last"
        " checkpoint, exactly once. To end a job before Spark, call job.stop()"
    )


def await_slots(context: SparkContext, parallelism: int, timeout_s: float) -> None:
    """Return when the session has `parallelism` slots; executors may still be (re)starting.

    Submitting earlier would cost more: Spark looks again only every 15 s, for 10 minutes.

    Raises:
        ConfigError: There were too few for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (slots := free_slots(context)) < parallelism:
        if time.monotonic() > deadline:
            raise ConfigError(
                f"parallelism={parallelism} needs {parallelism} task slots at once, and"
                f" {context.master!r} has had {slots} for {timeout_s:.0f} s; add executors"
                " or cores, or lower the parallelism"
            )
        require_spark(context)
        time.sleep(0.05)


def is_local(context: SparkContext) -> bool:
    """Whether driver and executors share this machine for sure."""
    return str(context.master).startswith("local")


def use_own_interpreter(context: SparkContext) -> None:
    """Let Python workers run this interpreter, unless the user has chosen one.

    Without it Spark runs the first `python3` on the PATH, which in a virtual environment is often
    another one, without our packages.
    """
    chosen = os.environ.get("PYSPARK_PYTHON") or context.getConf().get("spark.pyspark.python", None)
    if not chosen and is_local(context):
        context.pythonExec = sys.executable


class SparkStage:
    """Runs the slots; ends when all of them have, or when Spark gives up on one."""

    def __init__(
        self,
        context: SparkContext,
        task: SlotTask,
        group: str,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._context = context
        self._task = task
        self._group = group
        self._ended = ended
        self._thread: Any = InheritableThread(target=self._run, name=f"stage {group}")
        self._thread.daemon = True

    def submit(self) -> None:
        """Ask Spark for the slots; `ended` is called once, on another thread."""
        self._thread.start()

    def kill(self) -> None:
        """Have Spark kill the tasks and their Python processes; without Spark they leave anyway."""
        with contextlib.suppress(Py4JError, AttributeError, OSError):
            self._context.cancelJobGroup(self._group)

    def join(self, timeout_s: float) -> bool:
        """Wait for the stage to end; return whether it did. At once if it was never submitted."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        plan = self._task.plan
        error: BaseException | None = None
        try:
            self._context.setJobGroup(
                self._group, f"onceflow job {plan.job}, attempt {plan.attempt}", True
            )
            numbers = self._context.parallelize(range(plan.parallelism), plan.parallelism)
            numbers.barrier().mapPartitions(_slot_body(self._task)).collect()
        except BaseException as caught:
            error = caught
        self._ended(error)


def _slot_body(task: SlotTask) -> Callable[[Iterable[int]], Iterator[str]]:
    def body(numbers: Iterable[int]) -> Iterator[str]:
        del numbers
        yield task.run(BarrierTaskContext.get().partitionId())

    return body
