"""Spark Connect as a cluster: one barrier query hosts an attempt's slots.

The job's driver runs in the client's process, and Spark's own driver on the server. A client has no
SparkContext: slots run inside `mapInArrow(…, barrier=True)`, which gang-schedules its tasks like a
barrier stage. Measured on Spark 4.3: a killed task fails the query within a second, `interruptTag`
ends it, and the server does not report its number of free task slots.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.errors import PySparkException

from onceflow.core.errors import ConfigError, OnceflowError, SparkStopped
from onceflow.core.runtime.cluster.spark import stage_error, take_signals_from_jvm
from onceflow.core.runtime.slot.context import AttemptPlan
from onceflow.core.runtime.slot.slot import run_slot_on_spark
from onceflow.core.runtime.transport.addresses import find_route_source

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

_LOOPBACK = re.compile(r"localhost|::1|127\..*")
_SESSION_GONE = re.compile(
    r"SESSION_CHANGED|SESSION_CLOSED|SESSION_NOT_FOUND|NO_ACTIVE_SESSION|SESSION_EXPIRED"
)
"""The error conditions by which a server says that it no longer knows the client's session."""


class SparkConnectCluster:
    """The executors behind a session of Spark Connect. Used in the driver's process."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._server = str(spark.client.host)
        # Read only once: later attempts must not wait for a server that is away.
        self._is_local = bool(_LOOPBACK.fullmatch(self._server)) and self._setting(
            "spark.master", ""
        ).startswith("local")

    @property
    def is_local(self) -> bool:
        """True if client, server and executors are known to share this machine."""
        return self._is_local

    @property
    def driver_host(self) -> str:
        """This machine's source address on the route to the server.

        Executors are assumed to be there.
        """
        if self.is_local:
            return "127.0.0.1"
        return find_route_source(self._server) or socket.gethostname()

    def check(self, parallelism: int) -> None:
        """Raise ConfigError if the server would take slots away or run them twice.

        The number of free task slots is unknown: an attempt waits for its slots until
        `start_timeout_s`.
        """
        del parallelism
        for setting, harm in (
            ("spark.dynamicAllocation.enabled", "remove executors from a running job"),
            ("spark.speculation", "run a slot twice"),
        ):
            if self._setting(setting, "false").lower() == "true":
                raise ConfigError(
                    f"{setting}=true on the Spark Connect server {self._server} would {harm};"
                    f" start the server with {setting}=false"
                )

    def check_alive(self) -> None:
        """Raise SparkStopped if the session was stopped on this side.

        The server is not asked, because it may be away and come back. If the server later reports
        that the session is gone, the attempt fails with that reason.
        """
        if self._spark.is_stopped:
            raise _session_is_gone("its session was stopped")

    def await_slots(self, parallelism: int, timeout_s: float) -> None:
        """Return at once: the server starts the slots when it has enough, or never."""

    def start(self, plan: AttemptPlan, ended: Callable[[OnceflowError], None]) -> BarrierQuery:
        """Submit the barrier query; `ended` is called once, when it has ended."""
        return BarrierQuery(self._spark, plan, ended)

    def take_signals(self) -> None:
        """Make a server that this process has started leave SIGINT and SIGTERM to this process."""
        take_signals_from_jvm()

    def _setting(self, name: str, default: str) -> str:
        try:
            return str(self._spark.conf.get(name, default))
        except PySparkException as error:
            if _SESSION_GONE.search(str(error)):
                raise _session_is_gone(str(error).partition("\n")[0]) from error
            # A managed server may hide settings.
            return default


class BarrierQuery:
    """A barrier query that runs the slots.

    Ends with the last slot, or when Spark gives up on a slot.
    """

    def __init__(
        self, spark: SparkSession, plan: AttemptPlan, ended: Callable[[OnceflowError], None]
    ) -> None:
        self._spark = spark
        self._plan = plan
        self._tag = f"onceflow-{plan.job}-{plan.attempt}"
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name=f"query {self._tag}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Make the server kill the tasks and their Python processes.

        Returns at once. Slots that the server does not kill end when they notice that the driver is
        gone.
        """
        threading.Thread(target=self._interrupt, name=f"kill {self._tag}", daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the query to end; return True if it ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _interrupt(self) -> None:
        # If the server is away, the client retries for minutes.
        with contextlib.suppress(Exception):
            self._spark.interruptTag(self._tag)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            # Tags belong to a thread, and this thread runs only one query.
            self._spark.addTag(self._tag)
            numbers = self._spark.range(0, self._plan.parallelism, 1, self._plan.parallelism)
            numbers.mapInArrow(_slot_body(self._plan), "ended string", barrier=True).collect()
        except BaseException as caught:
            error = caught
        self._ended(_query_error(error))


def _slot_body(plan: AttemptPlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def body(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        context: Any = BarrierTaskContext.get()
        yield pa.RecordBatch.from_pydict(
            {"ended": [run_slot_on_spark(plan, context.partitionId())]}
        )

    return body


def _query_error(error: BaseException | None) -> OnceflowError:
    """Return the reason why the query ended before the job did."""
    if error is not None and _SESSION_GONE.search(str(error)):
        return _session_is_gone(str(error).partition("\n")[0])
    return stage_error(error)


def _session_is_gone(how: str) -> SparkStopped:
    return SparkStopped(
        f"the connection to Spark Connect is lost: {how.rstrip('.')}. Start the job again in a"
        " new session: it continues from its last checkpoint, exactly once. To stop a job before"
        " its session ends, call job.stop()"
    )
