"""Spark as a cluster: one barrier stage hosts an attempt's slots.

Measured on Spark 4.3: a barrier stage gang-schedules long tasks; Spark does not retry a failed one;
`allGather` costs about a second, so addresses travel over the control stream instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from py4j.protocol import Py4JError
from pyspark import BarrierTaskContext, InheritableThread, SparkContext, java_gateway
from pyspark.sql import SparkSession

from onceflow.core import errors
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.slot.program import MODULES_ON_EXECUTORS
from onceflow.core.runtime.slot.slot import run_slot_on_spark

_log = logging.getLogger("onceflow.runtime.cluster")

_CONFIG_ERROR = re.compile(
    r"^onceflow\.core\.errors\.(?:ConfigError|(SettingsRefused)): (.*)$", re.MULTILINE
)
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


class SparkCluster:
    """The executors of a Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext

    @property
    def is_local(self) -> bool:
        """True if driver and executors are known to share this machine."""
        return is_local(self._context)

    @property
    def driver_host(self) -> str:
        """The address at which executors reach the driver."""
        if self.is_local:
            return "127.0.0.1"
        return str(self._context.getConf().get("spark.driver.host", socket.gethostname()))

    def check(self, parallelism: int) -> None:
        """Check that this session can run `parallelism` slots at the same time.

        Raises:
            ConfigError: Spark would take slots away, run them twice, or has too few.
        """
        context = self._context
        conf = context.getConf()

        def is_enabled(setting: str) -> bool:
            return str(conf.get(setting, "false")).lower() == "true"

        if is_enabled("spark.dynamicAllocation.enabled"):
            raise errors.ConfigError(
                "spark.dynamicAllocation.enabled=true would remove executors from a running job;"
                " start the session with spark.dynamicAllocation.enabled=false"
            )
        if is_enabled("spark.speculation"):
            raise errors.ConfigError(
                "spark.speculation=true would run a slot a second time; start the session with"
                " spark.speculation=false"
            )
        slots = free_slots(context)
        # Otherwise executors register over time, and `await_slots` waits for them.
        if not str(context.master).startswith("local-") and self.is_local and slots < parallelism:
            raise errors.ConfigError(
                f"parallelism={parallelism} needs {parallelism} task slots at once, but master"
                f" {context.master!r} has {slots}; use local[{parallelism}] or a lower"
                " parallelism"
            )
        use_own_interpreter(context)

    def check_alive(self) -> None:
        """Raise SparkStopped if the session is gone.

        Raises:
            SparkStopped: `stop` was called, or the JVM has ended.
        """
        _check_alive(self._context)

    def await_slots(self, parallelism: int, timeout_s: float) -> None:
        """Wait until the session has `parallelism` slots; executors may still be (re)starting.

        Submitting earlier would take longer: Spark checks again only every 15 s, for 10 minutes.

        Raises:
            SettingsRefused: There were too few slots for `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (slots := free_slots(self._context)) < parallelism:
            if time.monotonic() > deadline:
                raise errors.SettingsRefused(
                    f"parallelism={parallelism} needs {parallelism} task slots at once, but"
                    f" {self._context.master!r} has had only {slots} for {timeout_s:.0f} s. Add"
                    " executors or cores, or lower the parallelism. If a standalone master was"
                    " restarted without recovery, it no longer knows this session: stop the job,"
                    " and start it in a new session"
                )
            self.check_alive()
            time.sleep(0.05)

    def start(self, plan: AttemptPlan, ended: Callable[[errors.OnceflowError], None]) -> SparkStage:
        """Submit the barrier stage; `ended` is called once, when it has ended."""
        return SparkStage(self._context, plan, ended)

    def take_signals(self) -> None:
        """Make the JVM ignore SIGINT and forward SIGTERM to this process. Idempotent."""
        take_signals_from_jvm()


class SparkStage:
    """A barrier stage that runs the slots.

    Ends with the last slot, or when Spark gives up on a slot.
    """

    def __init__(
        self,
        context: SparkContext,
        plan: AttemptPlan,
        ended: Callable[[errors.OnceflowError], None],
    ) -> None:
        self._context = context
        self._plan = plan
        self._group = f"onceflow-{plan.job}-{plan.attempt}"
        self._ended = ended
        # Spark's job group belongs to a JVM thread, and only this class pairs that with our thread.
        thread: Any = InheritableThread(target=self._run, name=f"stage {self._group}")
        thread.daemon = True
        thread.start()
        self._thread = thread

    def kill(self) -> None:
        """Make Spark kill the tasks and their Python processes. If Spark is gone, they end, too."""
        with contextlib.suppress(Py4JError, AttributeError, OSError):
            self._context.cancelJobGroup(self._group)

    def join(self, timeout_s: float) -> bool:
        """Wait for the stage to end; return True if it ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        plan = self._plan
        error: BaseException | None = None
        try:
            self._context.setJobGroup(
                self._group, f"onceflow job {plan.job}, attempt {plan.attempt}", True
            )
            numbers = self._context.parallelize(range(plan.parallelism), plan.parallelism)
            numbers.barrier().mapPartitions(_slot_body(self._plan)).collect()
        except BaseException as caught:
            error = caught
        self._ended(stage_error(error))


def _slot_body(plan: AttemptPlan) -> Callable[[Iterable[int]], Iterator[str]]:
    def body(numbers: Iterable[int]) -> Iterator[str]:
        del numbers
        yield run_slot_on_spark(plan, BarrierTaskContext.get().partitionId())

    return body


def stage_error(error: BaseException | None) -> errors.OnceflowError:
    """Return the reason why Spark's stage ended before the job did."""
    if error is None:
        return errors.SlotLost("every slot returned before the job was done")
    text = str(error)
    if refusal := _CONFIG_ERROR.search(text):
        return (errors.SettingsRefused if refusal[1] else errors.ConfigError)(refusal[2])
    if missing := _MISSING_MODULE.search(text):
        return errors.ConfigError(
            f"the executors do not have the module {missing[1]!r}: {MODULES_ON_EXECUTORS}"
        )
    # Match the number and the words: the error's text differs between Spark's versions.
    if "SPARK-24819" in text or ("barrier execution mode" in text and "slots" in text):
        return errors.SettingsRefused(
            "Spark has too few free task slots for the pipeline's parallelism: " + text[:400]
        )
    return errors.SlotLost(f"Spark ended the slots: {text[:2000]}")


def free_slots(context: SparkContext) -> int:
    """Return the number of tasks that the session can run at once, as registered now.

    Raises:
        SparkStopped: The session is gone.
    """
    try:
        # There is no public way from Python.
        scala = cast("Any", context)._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return int(scala.maxNumConcurrentTasks(profile))
    except (Py4JError, AttributeError, OSError):
        _check_alive(context)
        raise


def _check_alive(context: SparkContext) -> None:
    """Raise SparkStopped if the session of `context` was stopped or its JVM has ended."""
    try:
        if cast("Any", context)._jsc is not None and not cast("Any", context)._jsc.sc().isStopped():
            return
        how = "its session was stopped"
    except (Py4JError, OSError) as error:
        how = f"its JVM does not answer ({type(error).__name__})"
    raise errors.SparkStopped(
        f"the connection to Spark is lost: {how}. Start the job again in a new session: it"
        " continues from its last checkpoint, exactly once. To stop a job before Spark stops,"
        " call job.stop()"
    )


def is_local(context: SparkContext) -> bool:
    """Return True if driver and executors are known to share this machine."""
    return str(context.master).startswith("local")


def use_own_interpreter(context: SparkContext) -> None:
    """Make Python workers run this interpreter, unless the user has chosen one.

    Otherwise Spark runs the first `python3` on the PATH. In a virtual environment that is often
    another interpreter, without our packages.
    """
    chosen = os.environ.get("PYSPARK_PYTHON") or context.getConf().get("spark.pyspark.python", None)
    if not chosen and is_local(context):
        context.pythonExec = sys.executable


class _HandedOn:
    """The handler of SIGTERM in the JVM, in place of its own handler, which would stop Spark."""

    gateway: Any = None
    """The gateway to that JVM."""

    class Java:
        implements = ("sun.misc.SignalHandler",)

    def handle(self, received: object) -> None:
        del received
        os.kill(os.getpid(), signal.SIGTERM)


def take_signals_from_jvm() -> None:
    """Make the JVM that this process has started, if any, leave signals to it. Idempotent."""
    spark, gateways = cast("Any", SparkContext), cast("Any", java_gateway)
    gateway, jvm = spark._gateway, spark._jvm
    if gateway is None or _HandedOn.gateway is gateway:
        return
    _HandedOn.gateway = gateway
    try:
        gateways.ensure_callback_server_started(gateway)
        handle, named = jvm.sun.misc.Signal.handle, jvm.sun.misc.Signal
        handle(named("INT"), jvm.sun.misc.SignalHandler.SIG_IGN)
        handle(named("TERM"), _HandedOn())
    except (Py4JError, AttributeError, OSError) as error:
        # The JVM was started with -Xrs, or is gone. SIGTERM then ends it, and the job with it.
        _log.info("the signal handlers of the JVM could not be replaced: %s", error)
